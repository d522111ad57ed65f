"""The numbers of one batch under each mode, against plain loops; the docs' tables are the code's."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from verl_ba.aggregation import ALL_MODES
from verl_ba.metrics import (
    APPLIED_RESIDUAL,
    METRICS,
    REWARD_ERRORS,
    SIGN_METRICS,
    balance_metrics,
    metrics_markdown,
    weights,
)
from verl_ba.metrics.__main__ import example_markdown

DOCS = Path(__file__).parents[2] / "docs"


def random_batch(seed, rows=96, group_size=8, sessions=False):
    rng = np.random.default_rng(seed)
    group = [f"g{i // group_size}" for i in range(rows)]
    session = [str(i % group_size // 2) for i in range(rows)] if sessions else None
    sign = rng.integers(-1, 2, rows)
    advantage = sign * rng.uniform(0.1, 2, rows)
    if sessions:  # the rows of a session have one advantage
        sign, advantage = np.repeat(sign[::2], 2), np.repeat(advantage[::2], 2)
    length = rng.integers(1, 60, rows) * (rng.random(rows) > 0.1)
    length[0] = 0
    order = rng.permutation(rows)
    pick = lambda values: None if values is None else [values[i] for i in order]  # noqa: E731
    return pick(length.tolist()), pick(group), pick(sign.tolist()), pick(advantage.tolist()), pick(session)


def naive(length, group, sign, advantage, session, mode, active):
    """The metrics by their definitions: dictionaries and loops, one response after the other."""
    responses = {}
    for i in range(len(length)):
        key = (group[i], i if session is None else session[i])
        r = responses.setdefault(key, {"T": 0, "group": group[i], "sign": None})
        r["T"] += length[i]
        if r["sign"] is None or r["empty"]:
            r.update(sign=sign[i], A=abs(advantage[i]) if sign[i] else 0.0, empty=length[i] == 0)
    rs = [r for r in responses.values() if r["T"] > 0]

    def weight(r, mode):
        same = {
            "balanced": lambda o: (o["group"], o["sign"]) == (r["group"], r["sign"]),
            "group-mean-token-mean": lambda o: o["group"] == r["group"],
            "seq-mean-token-mean": lambda o: o is r,
            "token-mean": lambda o: True,
        }[mode]
        pool = [o["T"] for o in rs if same(o)]
        return r["T"] * len(pool) / sum(pool)

    w = {m: [weight(r, m) for r in rs] for m in (mode, active)}
    A, s, T = [r["A"] for r in rs], [r["sign"] for r in rs], [r["T"] for r in rs]
    total = sum(a * x for a, x in zip(A, w[mode], strict=True))
    negative = sum(a * x for a, x, sg in zip(A, w[mode], s, strict=True) if sg < 0)
    fair = sum(a for a, sg in zip(A, s, strict=True) if sg < 0) / sum(A)
    q1, q3 = np.quantile(T, 0.25), np.quantile(T, 0.75)
    per_token = lambda chosen: sum(w[mode][i] for i in chosen) / sum(T[i] for i in chosen)  # noqa: E731
    long = per_token([i for i, t in enumerate(T) if t >= q3])
    short = per_token([i for i, t in enumerate(T) if t <= q1])
    reference = sum(a * x for a, x in zip(A, w[active], strict=True))
    moved = sum(a * abs(x - y) for a, x, y in zip(A, w[mode], w[active], strict=True)) / 2
    cells = {}
    for r in rs:
        cells.setdefault((r["group"], r["sign"]), []).append(r["T"])
    squares = sum((t / np.mean(c) - 1) ** 2 for c in cells.values() for t in c)
    mixed = [g for g in {r["group"] for r in rs} if (g, 1) in cells and (g, -1) in cells]
    means = {sg: sum(np.mean(cells[g, sg]) for g in mixed) for sg in (1, -1)}
    in_mixed = [c for (g, sg), c in cells.items() if g in mixed and sg]
    return {
        "responses": len(rs),
        "empty_responses": len(responses) - len(rs),
        "response_share/zero": s.count(0) / len(rs),
        "length/positive": np.mean([t for t, sg in zip(T, s, strict=True) if sg > 0]),
        "length_gap/tokens": (means[-1] - means[1]) / len(mixed),
        "length_gap/ratio": means[-1] / means[1],
        "length_variation": math.sqrt(squares / sum(len(c) - 1 for c in cells.values())),
        "groups": len({r["group"] for r in rs}),
        "groups_mixed": len(mixed) / len({r["group"] for r in rs}),
        "lone_responses": sum(len(c) == 1 for c in in_mixed) / sum(map(len, in_mixed)),
        f"{mode}/gradient_share_negative": negative / total,
        f"{mode}/gradient_share_positive": 1 - negative / total,
        f"{mode}/tilt": negative / total - fair,
        f"{mode}/long_to_short": long / short,
        f"{mode}/moved": moved / reference,
        f"{mode}/weight_max": max(w[mode]),
        f"{mode}/weight_min": min(w[mode]),
    }


@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_every_number_is_that_of_a_plain_loop(mode, sessions):
    batch = random_batch(7, sessions=sessions)
    got = balance_metrics(*batch, active_mode="seq-mean-token-mean")
    for name, value in naive(*batch, mode, "seq-mean-token-mean").items():
        assert got[f"balance/{name}"] == pytest.approx(value, abs=1e-12), name


def test_ten_tokens_against_a_thousand():
    group = ["p"] * 4
    got = balance_metrics([10, 1000, 1000, 1000], group, [1, 1, -1, -1], active_mode="balanced")
    assert got["balance/token-mean/gradient_share_negative"] == pytest.approx(2000 / 3010)
    assert got["balance/group-mean-token-mean/tilt"] == pytest.approx(2000 / 3010 - 0.5)
    assert got["balance/balanced/tilt"] == got["balance/seq-mean-token-mean/tilt"] == 0
    assert got["balance/balanced/weight_min"] == pytest.approx(10 / 505)
    assert got["balance/balanced/weight_max"] == pytest.approx(1000 / 505)


def test_the_table_lists_every_metric_and_no_other():
    batch = random_batch(1)
    assert len({m.name for m in METRICS}) == len(METRICS)
    names = {m.name for m in METRICS if m not in (APPLIED_RESIDUAL, REWARD_ERRORS, *SIGN_METRICS)}
    listed = {n.replace("<mode>", mode) for n in names for mode in ("active", *ALL_MODES)}
    got = balance_metrics(*batch, active_mode="balanced")
    assert set(got) == {f"balance/{name}" for name in listed}
    assert all(isinstance(v, float) for v in got.values())
    json.dumps(got, allow_nan=False)


def test_active_repeats_the_active_mode_from_which_nothing_moves():
    for mode in ALL_MODES:
        got = balance_metrics(*random_batch(3), active_mode=mode)
        active = {k.removeprefix("balance/active/"): v for k, v in got.items() if k.startswith("balance/active/")}
        assert active.pop("weight_residual") < 1e-12
        assert active == {k: got[f"balance/{mode}/{k}"] for k in active}
        assert active["moved"] == 0
        assert any(got[f"balance/{other}/moved"] > 0.01 for other in ALL_MODES)


def test_the_residual_sees_a_weight_that_is_applied_twice(monkeypatch):
    real = weights.pool_mean_length
    monkeypatch.setattr(weights, "pool_mean_length", lambda *a: real(*a) ** 2)
    assert balance_metrics(*random_batch(3), active_mode="balanced")["balance/active/weight_residual"] > 0.1


def test_equal_lengths_leave_nothing_to_choose():
    _, group, sign, advantage, _ = random_batch(5)
    got = balance_metrics([40] * len(group), group, sign, advantage, active_mode="token-mean")
    for mode in ALL_MODES:
        assert got[f"balance/{mode}/moved"] == pytest.approx(0, abs=1e-12)
        assert got[f"balance/{mode}/tilt"] == pytest.approx(0, abs=1e-12)
        assert got[f"balance/{mode}/long_to_short"] == pytest.approx(1)


def test_numbers_that_do_not_exist_are_absent():
    one_sign = balance_metrics([3, 4], ["a", "a"], [0, 0], active_mode="balanced")
    assert "balance/length_gap/tokens" not in one_sign
    assert "balance/balanced/tilt" not in one_sign
    assert one_sign["balance/groups_without_variance"] == 1
    empty = balance_metrics([0, 0], ["a", "b"], [0, 0], active_mode="balanced")
    assert empty["balance/empty_responses"] == 2
    assert "balance/balanced/weight_max" not in empty
    assert balance_metrics([], [], [], active_mode="balanced")["balance/responses"] == 0


def test_a_group_of_equal_fractional_rewards_has_no_variance():
    # eight rewards of 0.7 get the advantage 0.056 each in verl's float32
    got = balance_metrics([5] * 8, ["a"] * 8, [1] * 8, [0.056] * 8, active_mode="balanced")
    assert got["balance/groups_without_variance"] == 1
    got = balance_metrics([5] * 8, ["a"] * 8, [1] * 8, [0.056] * 7 + [0.1], active_mode="balanced")
    assert got["balance/groups_without_variance"] == 0


def test_the_advantage_of_an_empty_row_does_not_decide_a_sessions_sign():
    batch = ([0, 9, 4], ["a"] * 3, [-1, 1, -1], [-5.0, 1.0, -1.0], ["s", "s", "t"])
    got = balance_metrics(*batch, active_mode="balanced")
    assert got["balance/length/positive"] == 9
    assert got["balance/balanced/gradient_share_negative"] == 0.5


def test_advantages_of_another_length_are_named():
    with pytest.raises(ValueError, match=r"advantage_B: expected one entry per response, 2; got shape \[3\]"):
        balance_metrics([1, 2], ["a", "a"], [1, -1], [1.0, -1.0, 0.0], active_mode="balanced")
    with pytest.raises(ValueError, match="mode: expected one of"):
        balance_metrics([1, 2], ["a", "a"], [1, -1], active_mode="token-sum")


def test_an_update_of_16384_responses_takes_at_most_50_ms():
    length, group, sign, advantage, _ = random_batch(2, rows=16_384, group_size=16)
    tensors = torch.tensor(length), group, torch.tensor(sign), torch.tensor(advantage)
    threads, seconds = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(5):
            start = time.thread_time()  # what it costs, however busy the machine is
            balance_metrics(*tensors, active_mode="balanced")
            seconds.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    assert min(seconds) < 0.05


def test_the_docs_hold_the_tables_that_the_code_prints():
    text = (DOCS / "which-aggregation.md").read_text()
    assert example_markdown() in text, "run: python -m verl_ba.metrics"
    assert metrics_markdown() in (DOCS / "metrics.md").read_text(), "run: python -m verl_ba.metrics"
    for name in ("analyze-overview.png", "analyze-lengths.png", "compare-curves.png"):
        assert f"(figures/{name})" in text
        assert (DOCS / "figures" / name).read_bytes().startswith(b"\x89PNG")
