"""What `balanced` costs against verl's token-mean, and the pool lengths of a million responses. One thread.

Both sides run verl's policy loss (clipped, dual clip) and its `agg_loss`, forward and backward, on the same tensors; runs
alternate, so a drifting machine slows both alike, and the ratio is taken pair by pair.
"""

import statistics
import time
import uuid

import torch
import typer
from rich.console import Console
from rich.table import Table

from verl_ba.aggregation import ALL_MODES, pool_mean_length


def paired(responses: int, tokens: int, pairs: int) -> dict[str, list[float]]:
    """Seconds of the policy loss under each mode, alternating."""
    import verl  # noqa: F401  loads the plugin
    from verl.trainer.ppo import core_algos
    from verl.workers.config import FSDPActorConfig

    torch.manual_seed(0)
    length = torch.randint(tokens // 8, tokens + 1, (responses,))
    mask = torch.arange(tokens)[None] < length[:, None]
    advantage = torch.randn(responses, 1).expand(-1, tokens).contiguous()
    log_prob = -torch.rand(responses, tokens)
    old = log_prob + 0.1 * torch.randn_like(log_prob)
    group = torch.arange(responses) // 8
    column = pool_mean_length("balanced", length, group, advantage[:, 0].sign().long())
    loss = core_algos.get_policy_loss_fn("vanilla")
    info = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": responses}

    def once(mode: str) -> float:
        config = FSDPActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode)
        config.global_batch_info.update(info, **({"pool_mean_length": column} if mode == "balanced" else {}))
        leaf = log_prob.clone().requires_grad_()
        start = time.perf_counter()
        value, _ = loss(old, leaf, advantage, mask, mode, config, None)
        value.backward()
        return time.perf_counter() - start

    seconds: dict[str, list[float]] = {"token-mean": [], "balanced": []}
    for i in range(pairs + 10):
        order = list(seconds) if i % 2 else list(reversed(seconds))
        for mode in order:
            spent = once(mode)
            if i >= 10:  # the first runs warm up
                seconds[mode].append(spent)
    return seconds


def lengths(responses: int, mode: str) -> float:
    """Seconds for the pool lengths of responses with string ids, in groups of 8 that are scattered."""
    names = [str(uuid.uuid4()) for _ in range(responses // 8)] * 8
    order = torch.randperm(responses).tolist()
    group = [names[i] for i in order]
    length, sign = torch.randint(1, 8192, (responses,)), torch.randint(-1, 2, (responses,))
    start = time.perf_counter()
    pool_mean_length(mode, length, group, sign)
    return time.perf_counter() - start


def main(responses: int = 16, tokens: int = 8192, pairs: int = 300, many: int = 10**6) -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    console = Console(width=100)
    seconds = paired(responses, tokens, pairs)
    ratio = [b / t for b, t in zip(seconds["balanced"], seconds["token-mean"], strict=True)]
    table = Table("mode", "median [ms]", title=f"policy loss + aggregation, forward + backward, {responses} × {tokens}")
    for mode, values in seconds.items():
        table.add_row(mode, f"{1e3 * statistics.median(values):.3f}")
    console.print(table)
    console.print(f"balanced / token-mean, median of {pairs} pairs: {statistics.median(ratio):.3f}")
    table = Table("mode", "best of 3 [s]", title=f"pool lengths of {many:,} responses with string ids")
    for mode in ALL_MODES:
        table.add_row(mode, f"{min(lengths(many, mode) for _ in range(3)):.2f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
