"""What the ranks are told. Light: the process that starts them imports this, and not verl."""

import os
from dataclasses import dataclass, field
from pathlib import Path

MODES = (
    "balanced",
    "group-mean-token-mean",
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
"""What is checked: this package's modes, then verl's."""


@dataclass(frozen=True)
class Case:
    """One update.

    Attributes:
        mode: `loss_agg_mode`.
        by_token: advantages change sign within a response.
        micro: rows of a micro-batch; None leaves it to the configuration.
        dynamic: micro-batches by tokens, of this many per rank; None leaves it to the configuration.
        mini_batches: optimiser steps of the update.
    """

    mode: str
    by_token: bool = False
    micro: int | None = None
    dynamic: int | None = None
    mini_batches: int = 1


@dataclass(frozen=True)
class Job:
    """What one set of ranks does: build the worker once, then run every case.

    Attributes:
        config: verl's composed configuration, resolved, as plain containers.
        cases: the updates.
        folder: where the ranks find `rows-response.pt` and `rows-token.pt`, and leave `RANK.pt` and `RANK.log`.
        world: number of ranks.
        port: of the process group's store on this machine.
        environment: variables that are set in each rank first.
    """

    config: dict
    cases: tuple[Case, ...]
    folder: str
    world: int
    port: int
    environment: dict[str, str] = field(default_factory=dict)


def run_rank(rank: int, job: Job) -> None:
    """A process's whole life, in its own log file; what it raises, the process that started it sees."""
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",  # as under Ray: each process sees one device
        "WORLD_SIZE": str(job.world),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
    }
    os.environ.update(job.environment | own)
    with open(Path(job.folder, f"{rank}.log"), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if os.environ.get("VERL_PLATFORM") != "cpu":
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        os.environ["CUDA_VISIBLE_DEVICES"] = devices.split(",")[rank] if devices else str(rank)
    else:
        import torch

        torch.set_num_threads(1)
    from verl_ba.tools.check import worker  # imports verl

    worker.run(rank, job)
