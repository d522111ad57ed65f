"""What `balanced` costs against verl's token-mean: in the loss, and in a whole update. One thread.

The loss: both sides run verl's policy loss (clipped, dual clip) and its `agg_loss`, forward and backward, on the same
tensors; runs alternate, so a drifting machine slows both alike, and the ratio is taken pair by pair.

The update: what the mode adds to it is `batch_mean_length` once and the difference of the losses in every micro-batch. Both
are measured and divided by the time of the forward and backward passes of the demo's model, the smallest there is: under
any larger model the share is smaller.

The metrics under `balance/`: what is computed once per update from its gathered rows, the gathering (which our modes need
anyway), and what the split by sign adds to the losses of all micro-batches.
"""

import functools
import os
import socket
import statistics
import time
import types
import uuid
from collections.abc import Callable

import torch
import typer
from rich.console import Console
from rich.table import Table

from verl_ba.aggregation import ALL_MODES, pool_mean_length, pool_mean_length_by_sign
from verl_ba.loss_agg import ROUNDING, count_by_sign, largest_advantage, number, token_mean_length

FORMS = ("response", "token")
GROUP = 8
MICRO_BATCH = 16


def advantages(responses: int, tokens: int, form: str) -> torch.Tensor:
    return torch.randn(responses, 1).expand(-1, tokens) if form == "response" else torch.randn(responses, tokens)


def paired(responses: int, tokens: int, pairs: int, form: str) -> dict[str, list[float]]:
    """Seconds of the policy loss under each mode, alternating; the token-level form looks its weights up each time."""
    import verl  # noqa: F401  loads the plugin
    from verl.trainer.ppo import core_algos
    from verl.workers.config import FSDPActorConfig

    torch.manual_seed(0)
    length = torch.randint(tokens // 8, tokens + 1, (responses,))
    mask = torch.arange(tokens)[None] < length[:, None]
    advantage = advantages(responses, tokens, form).contiguous()
    log_prob = -torch.rand(responses, tokens)
    old = log_prob + 0.1 * torch.randn_like(log_prob)
    group = torch.arange(responses) // GROUP
    floor = ROUNDING * largest_advantage(mask, advantage)
    by_sign = pool_mean_length_by_sign("balanced", count_by_sign(mask, advantage), group)
    loss = core_algos.get_policy_loss_fn("vanilla")
    info = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": responses}

    def once(mode: str) -> float:
        config = FSDPActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode)
        config.global_batch_info.update(info)
        leaf = log_prob.clone().requires_grad_()
        start = time.perf_counter()
        if mode == "balanced":
            column = by_sign.amax(1) if form == "response" else token_mean_length(by_sign, advantage, floor)
            config.global_batch_info["pool_mean_length"] = column
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
    """Seconds for the pool lengths of responses with string ids, in scattered groups."""
    names = [str(uuid.uuid4()) for _ in range(responses // GROUP)] * GROUP
    order = torch.randperm(responses).tolist()
    group = [names[i] for i in order]
    length, sign = torch.randint(1, 8192, (responses,)), torch.randint(-1, 2, (responses,))
    start = time.perf_counter()
    pool_mean_length(mode, length, group, sign)
    return time.perf_counter() - start


def batch(responses: int, tokens: int, form: str, rank: int, ranks: int):
    """One rank's share of an update as verl's v1 trainer hands it over: nested, groups scattered over the ranks."""
    from tensordict import NonTensorStack, TensorDict

    generator = torch.Generator().manual_seed(rank)
    rows = responses // ranks
    length = torch.randint(tokens // 8, tokens + 1, (rows,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), length.cumsum(0)])
    nested = functools.partial(torch.nested.nested_tensor_from_jagged, offsets=offsets)
    total = int(offsets[-1])
    advantage = torch.randn(rows).repeat_interleave(length) if form == "response" else torch.randn(total)
    data = TensorDict(
        {"response_mask": nested(torch.ones(total, dtype=torch.long)), "advantages": nested(advantage)}, batch_size=rows
    )
    # uids as long as verl's; group g has its rows on every rank
    data["uid"] = NonTensorStack(*[str(uuid.UUID(int=i * ranks // GROUP)) for i in range(rows)])  # pyright: ignore[reportAbstractUsage]  # tensordict builds it
    return data


def best_of(repeats: int, call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Seconds of the fastest call; `before` each is not counted."""
    seconds = []
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def update_lengths(responses: int, tokens: int, form: str, rank: int = 0, ranks: int = 1) -> float:
    """Seconds of gathering the rows and taking their pool lengths on this rank, best of 5."""
    from verl_ba.loss_agg import column, gather

    data = batch(responses, tokens, form, rank, ranks)
    together = torch.distributed.barrier if ranks > 1 else lambda: None
    return best_of(5, lambda: column("balanced", gather(data)), together)


def metrics_once(responses: int, sessions: bool) -> float:
    """Milliseconds of the metrics of whole groups of an update, from rows that are gathered already; best of 5."""
    from verl_ba.loss_agg import Update
    from verl_ba.metrics.record import update_metrics

    uid = [str(uuid.uuid4()) for _ in range(responses // GROUP)] * GROUP
    order = torch.randperm(responses).tolist()
    sign, length = torch.randint(-1, 2, (responses,)), torch.randint(1, 8192, (responses,))
    count = torch.zeros(responses, 3, dtype=torch.long).scatter_(1, sign[:, None] + 1, length[:, None])
    size = torch.rand(responses, dtype=torch.float64)
    session = torch.arange(responses) if sessions else None
    group = number("uid", [uid[i] for i in order])
    update = Update(group, session, count, size, ROUNDING * size, slice(0, responses))
    return 1e3 * best_of(5, lambda: update_metrics(update, "balanced"))


def gathering(responses: int, tokens: int) -> float:
    """Milliseconds to count and collect the rows of an update in one process, best of 5."""
    from verl_ba.loss_agg import gather

    data = batch(responses, tokens, "response", 0, 1)
    return 1e3 * best_of(5, lambda: gather(data))


def by_sign(responses: int, tokens: int) -> float:
    """Milliseconds that the split by sign adds to the losses of an update of `responses`, median of 50 micro-batches."""
    from verl_ba.metrics import record

    length = torch.randint(tokens // 8, tokens + 1, (MICRO_BATCH,))
    mask, loss = torch.arange(tokens)[None] < length[:, None], torch.randn(MICRO_BATCH, tokens)
    arguments = {
        "advantages": advantages(MICRO_BATCH, tokens, "response").contiguous(),
        "loss_agg_mode": "balanced",
        "log_prob": torch.randn(MICRO_BATCH, tokens),
        "old_log_prob": torch.randn(MICRO_BATCH, tokens),
        "config": types.SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28),
    }
    weight = 1 / length
    like = Sum(value=0.0)
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        run = record.Training("balanced", ranks=1)
        with record.training(run), record.record(entropy=False) as recorded:  # noqa: SIM117
            with record.policy_loss("vanilla", (), arguments):
                record.see(loss, mask, lambda matrix: (torch.where(mask, matrix, 0.0).sum(1) * weight).sum())
        assert recorded is not None
        recorded.metrics(like)
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds) * responses / MICRO_BATCH


class Sum:
    """In the place of verl's class for a metric."""

    def __init__(self, value: float, aggregation: str = "sum") -> None:
        self.value, self.aggregation = value, aggregation


def rank_main(rank: int, port: int, responses: int, tokens: int, form: str, seconds) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    seconds[rank] = update_lengths(responses, tokens, form, rank, 2)
    torch.distributed.destroy_process_group()


def two_ranks(responses: int, tokens: int, form: str) -> float:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    seconds = torch.zeros(2, dtype=torch.float64).share_memory_()
    torch.multiprocessing.spawn(  # pyright: ignore[reportPrivateImportUsage]  # documented by torch
        rank_main, (port, responses, tokens, form, seconds), nprocs=2
    )
    return float(seconds.max())


def passes(tokens: int, repeats: int = 3) -> float:
    """Seconds of forward and backward of a micro-batch through a model of the demo's size, best of `repeats`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    size: dict = {"hidden_size": 96, "intermediate_size": 288, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=64, num_hidden_layers=2, head_dim=32, tie_word_embeddings=True, **size)
    )
    ids = torch.randint(0, 64, (MICRO_BATCH, tokens // 2))  # the mean length is a little more than half the longest
    return best_of(repeats, lambda: model(input_ids=ids, labels=ids).loss.backward())


def main(
    responses: int = 16,
    tokens: int = 8192,
    pairs: int = 300,
    many: int = 10**6,
    update: int = 16_384,
    update_tokens: int = 1024,
) -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    console = Console(width=100)
    table = Table(
        "advantages per", "token-mean", "balanced", "balanced / token-mean",
        title=f"policy loss + aggregation, forward + backward, {responses} × {tokens}: median \\[ms], {pairs} pairs",
    )  # fmt: skip
    for form in FORMS:
        table.add_row(form, *loss_row(paired(responses, tokens, pairs, form)))
    console.print(table)

    table = Table("mode", "best of 3 \\[s]", title=f"pool lengths of {many:,} responses with string ids")
    for mode in ALL_MODES:
        table.add_row(mode, f"{min(lengths(many, mode) for _ in range(3)):.2f}")
    console.print(table)

    micro_batches = update // MICRO_BATCH
    model = micro_batches * passes(update_tokens)
    table = Table(
        "advantages per", "pool lengths, one process", "pool lengths, two ranks", "losses", "passes", "share",
        title=f"what balanced adds to an update of {update:,} responses of up to {update_tokens} tokens \\[s]",
    )  # fmt: skip
    for form in FORMS:
        seconds = paired(MICRO_BATCH, update_tokens, pairs, form)
        more = statistics.median(b - t for b, t in zip(seconds["balanced"], seconds["token-mean"], strict=True))
        one, two = update_lengths(update, update_tokens, form), two_ranks(update, update_tokens, form)
        share = (max(one, two) + micro_batches * more) / model
        numbers = (one, two, micro_batches * more)
        table.add_row(form, *(f"{n:.3f}" for n in numbers), f"{model:.0f}", f"{share:.3%}")
    console.print(table)

    table = Table(
        "once per update", "with sessions", "gathering (one process)", "by sign, all losses", "by sign / passes",
        title=f"metrics under balance/ of an update of {update:,} responses of up to {update_tokens} tokens \\[ms]",
    )  # fmt: skip
    once, sessions = metrics_once(update, False), metrics_once(update, True)
    signs = by_sign(update, update_tokens)
    numbers = (once, sessions, gathering(update, update_tokens), signs)
    table.add_row(*(f"{n:.0f}" for n in numbers), f"{signs / 1e3 / model:.2%}")
    console.print(table)


def loss_row(seconds: dict[str, list[float]]) -> list[str]:
    ratio = [b / t for b, t in zip(seconds["balanced"], seconds["token-mean"], strict=True)]
    return [f"{1e3 * statistics.median(values):.3f}" for values in seconds.values()] + [
        f"{statistics.median(ratio):.3f}"
    ]


if __name__ == "__main__":
    typer.run(main)
