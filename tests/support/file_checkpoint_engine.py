"""A checkpoint engine of verl for tests on one machine: the trainer's weights reach separate rollout servers in a file.

verl's own engines (nccl, nixl, mooncake, …) need an accelerator or its network card, and its trainers with a rollout pool of
their own refuse the one that does not ('naive'). verl loads this through `checkpoint_engine.custom_backend_module`.
"""

import asyncio
import os
from pathlib import Path

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

PATIENCE = 120.0  # seconds


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master
        self.transfers = 0

    def _path(self) -> Path:
        return Path(os.environ["WEIGHTS_DIR"]) / f"{self.transfers}.pt"

    def prepare(self) -> dict:
        self.transfers += 1
        return {"transfer": self.transfers}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        assert len({m["transfer"] for m in metadata}) == 1, f"not in step: {metadata}"
        return (
            {"rank": list(range(actor_wg_world_size))},
            {"rank": list(range(actor_wg_world_size, actor_wg_world_size + rollout_world_size))},
        )

    def init_process_group(self, rank: int) -> None:
        pass

    def finalize(self) -> None:
        if self.is_master:  # every server has read it: `update_weights` has returned everywhere
            self._path().unlink()

    async def send_weights(self, weights, global_steps=None) -> None:
        whole = {name: weight.detach().clone() for name, weight in weights}  # a collective: every rank walks through
        if self.is_master:
            torch.save(whole, temporary := self._path().with_suffix(".part"))
            temporary.rename(self._path())

    async def receive_weights(self, global_steps=None):
        for _ in range(int(PATIENCE / 0.05)):
            if self._path().exists():
                break
            await asyncio.sleep(0.05)
        for name, weight in torch.load(self._path()).items():
            yield name, weight
