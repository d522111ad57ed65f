"""`python -m dev.engines [megatron]`: verl's engines on CPU ranks, layout by layout, as the table of docs/engines.md.

Each layout is a configuration of verl, and its updates go through verl's own worker (verl_ba/tools/check). The tests in
tests/engines run the same layouts. Exit status 1 if an error is beyond float32's tolerance.
"""

import os
import sys
from dataclasses import dataclass
from unittest import mock

from verl_ba import support
from verl_ba.tools.check import MODES, Case, Result, check
from verl_ba.tools.check.check import TOLERANCE

OURS = ("balanced", "group-mean-token-mean")
EVERY_MODE = tuple(Case(mode) for mode in MODES)
ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Layout:
    """Ranks, verl's overrides, and the updates that are run with them."""

    ranks: int
    overrides: tuple[str, ...]
    cases: tuple[Case, ...]

    @property
    def sequence(self) -> int:
        """Sequence-parallel ranks (Ulysses)."""
        key = f"{ACTOR}.ulysses_sequence_parallel_size="
        return max([int(text.removeprefix(key)) for text in self.overrides if text.startswith(key)], default=1)


def _fsdp(strategy: str, sequence: int = 1, packed: bool = True, *more: str) -> tuple[str, ...]:
    attention = "packed" if sequence > 1 else "sdpa"
    return (
        f"{ACTOR}.strategy={strategy}",
        f"{ACTOR}.ulysses_sequence_parallel_size={sequence}",
        f"actor_rollout_ref.model.use_remove_padding={packed}",
        f"+actor_rollout_ref.model.override_config.attn_implementation={attention}",
        *more,
    )


SPLITS = (
    Case("balanced", micro=3),
    Case("balanced", dynamic=40),
    Case("balanced", micro=3, mini_batches=2),
    Case("balanced", by_token=True, dynamic=40),
    Case("group-mean-token-mean", dynamic=40),
)
LAYOUTS = {
    "FSDP2, padded, data 2": Layout(2, _fsdp("fsdp2", packed=False), SPLITS),
    "FSDP2, packed, data 2": Layout(2, _fsdp("fsdp2"), SPLITS),
    "FSDP2, packed, Ulysses 2": Layout(2, _fsdp("fsdp2", 2), EVERY_MODE + SPLITS),
    "FSDP, packed, Ulysses 2": Layout(2, _fsdp("fsdp", 2), SPLITS),
    "FSDP2, packed, Ulysses 2, data 2": Layout(4, _fsdp("fsdp2", 2), EVERY_MODE + SPLITS),
    "FSDP2, packed, Ulysses 2, data 2, shards 2 (HSDP)": Layout(
        4, _fsdp("fsdp2", 2, True, f"{ACTOR}.fsdp_config.fsdp_size=2"), SPLITS
    ),
    "FSDP2, packed and padded to a length, Ulysses 2, data 2": Layout(
        4,
        _fsdp("fsdp2", 2, True, f"{ACTOR}.pad_to_length=True", f"{ACTOR}.fsdp_config.pad_to_length_bucket=16"),
        SPLITS,
    ),
    "FSDP2, packed, Ulysses 4": Layout(4, _fsdp("fsdp2", 4), SPLITS),
}
"""What runs in the environment of `make setup`."""


def _megatron(sizes: dict[str, int | bool], packed: bool = True) -> tuple[str, ...]:
    return (
        "model_engine=megatron",
        f"{ACTOR}.megatron.vanilla_mbridge=True",
        f"actor_rollout_ref.model.use_remove_padding={packed}",
        f"{ACTOR}.megatron.use_remove_padding={packed}",
        *(f"{ACTOR}.megatron.{name}={value}" for name, value in sizes.items()),
    )


TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP = "context_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
PLAIN = "use_distributed_optimizer"
MEGATRON = {
    "Megatron, padded, data 2": Layout(2, _megatron({PLAIN: False}, packed=False), SPLITS),
    "Megatron, packed, data 2": Layout(2, _megatron({PLAIN: False}), EVERY_MODE + SPLITS),
    "Megatron, packed, data 2, distributed optimizer": Layout(2, _megatron({}), SPLITS),
    "Megatron, packed, pipeline 2": Layout(2, _megatron({PP: 2}), SPLITS),
    "Megatron, packed, tensor 2 with sequence parallelism": Layout(2, _megatron({TP: 2}), SPLITS),
    "Megatron, packed, context 2": Layout(2, _megatron({CP: 2}), SPLITS),
    "Megatron, packed, tensor 2, pipeline 2": Layout(4, _megatron({TP: 2, PP: 2}), SPLITS),
    "Megatron, packed, data 2, pipeline 2, interleaved": Layout(4, _megatron({PP: 2, VPP: 2}), SPLITS),
    "Megatron, packed, data 2, context 2": Layout(4, _megatron({CP: 2}), EVERY_MODE + SPLITS),
}
"""What runs in the environment of `make test-megatron`."""


def run(layout: Layout) -> list[Result]:
    """The results of a layout's cases, in float32."""
    os.environ["VERL_PLATFORM"] = "cpu"
    from verl_ba.tools.audit.config import compose

    config = compose(["actor_rollout_ref.rollout.name=vllm", *layout.overrides])
    return check(config, layout.ranks, float32=True, cases=layout.cases).results


def control() -> Result:
    """`balanced` under Ulysses with an attention that goes past verl's exchange between ranks: what is refused, and why."""
    with mock.patch.object(support, "WITHOUT_ULYSSES", ()):
        right = LAYOUTS["FSDP2, packed, Ulysses 2"]
        overrides = tuple(text.replace("=packed", "=sdpa") for text in right.overrides)
        return run(Layout(2, overrides, right.cases[:1]))[0]


def main() -> int:
    print("| engine | ranks | updates | gradient | loss | logged norm | nearest other mode |\n|" + " --- |" * 7)
    worst = 0.0
    for name, layout in (MEGATRON if sys.argv[1:] == ["megatron"] else LAYOUTS).items():
        results = run(layout)
        errors = [max(getattr(r, f"{what}_error") for r in results) for what in ("gradient", "loss", "norm")]
        worst = max(worst, *errors)
        nearest = min(r.nearest for r in results)
        cells = (name, str(layout.ranks), str(len(results)), *(f"{error:.1e}" for error in errors), f"{nearest:.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)
    if sys.argv[1:] != ["megatron"]:
        print(
            f"\nThe control, Ulysses 2 with sdpa, which is refused: the gradient is off by {control().gradient_error:.2f}."
        )
    return 0 if worst < TOLERANCE["float32"] else 1


if __name__ == "__main__":
    sys.exit(main())
