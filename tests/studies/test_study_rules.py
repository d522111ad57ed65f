"""The rules of the studies: margins, limits, and the strength chosen from variances."""

import pytest
import torch

from studies.rules import RULES, Batch, effects, fit, partial_pooling, pooling_strength
from verl_ba.aggregation import pool_mean_length


def batch(seed: int, groups: int = 12, size: int = 8, cell_spread: float = 0.0) -> Batch:
    """Log-normal lengths; negatives longer, groups differ, a few responses empty and a few groups without variance."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.arange(groups).repeat_interleave(size)
    sign = torch.where(torch.rand(groups * size, generator=generator) < 0.4, 1, -1)
    sign[group == 0] = 0
    noise = torch.randn(groups * size, generator=generator, dtype=torch.float64) * 0.5
    cell = torch.randn(groups * 3, generator=generator, dtype=torch.float64)[group * 3 + sign + 1] * cell_spread
    length = (torch.exp(4 + (group * 1.0).sin() - 0.4 * sign + noise + cell)).round().clamp(min=1)
    length[5], length[-1] = 0, 0
    order = torch.randperm(len(group), generator=generator)  # no group is contiguous, as in verl
    return Batch(length[order], group[order], sign[order])


@pytest.mark.parametrize("seed", range(5))
def test_raking_gives_every_group_and_every_sign_its_number_of_responses(seed):
    b = batch(seed)
    weight = torch.where(b.length > 0, b.length / fit("doubly-balanced", b, {}), 0.0)
    for label in (b.group, b.sign + 1):
        torch.testing.assert_close(
            torch.bincount(label, weights=weight), torch.bincount(label, weights=b.filled), rtol=1e-9, atol=0
        )


@pytest.mark.parametrize(
    "name", [n for n in RULES if n not in ("leave-one-out", "constant", "delta-l-1", "delta-l-.75")]
)
def test_the_weights_sum_to_the_number_of_responses(name):
    for seed in range(5):
        b = batch(seed)
        weight = b.length[b.length > 0] / fit(name, b, {})[b.length > 0]
        assert weight.sum().item() == pytest.approx(b.filled.sum().item(), rel=1e-9)


def test_partial_pooling_is_balanced_at_zero_and_doubly_balanced_at_infinity():
    b = batch(0)
    own = pool_mean_length("balanced", b.length, b.group, b.sign)
    both = fit("doubly-balanced", b, {})
    filled = b.length > 0
    torch.testing.assert_close(partial_pooling(0)(b, {})[filled], own[filled], rtol=1e-12, atol=0)
    torch.testing.assert_close(partial_pooling(float("inf"))(b, {})[filled], both[filled], rtol=1e-12, atol=0)
    torch.testing.assert_close(partial_pooling(1e12)(b, {})[filled], both[filled], rtol=1e-9, atol=0)


def test_a_row_wise_twin_of_partial_pooling_agrees():
    b = batch(3)
    a, effect = effects(b)
    rows = list(zip(b.length.tolist(), b.group.tolist(), b.sign.tolist(), strict=True))
    mean = []
    for i, (length, group, sign) in enumerate(rows):
        cell = [t for t, g, s in rows if (g, s) == (group, sign) and t > 0]
        mean.append((sum(cell) + 4 * float(a[i] * effect[i])) / (len(cell) + 4) if length else 0.0)
    scale = sum(r[0] / m for r, m in zip(rows, mean, strict=True) if m) / sum(r[0] > 0 for r in rows)
    torch.testing.assert_close(
        fit("pooled-4", b, {}), torch.tensor(mean, dtype=torch.float64) * scale, rtol=1e-12, atol=0
    )


def test_the_strength_is_large_where_cells_do_not_differ_and_near_the_variances_ratio_where_they_do():
    alike = [pooling_strength(b := batch(s, groups=200), fit("doubly-balanced", b, {})) for s in range(8)]
    differ = [
        pooling_strength(b := batch(s, groups=200, cell_spread=0.5), fit("doubly-balanced", b, {})) for s in range(8)
    ]
    assert sorted(alike)[3] > 15
    assert 0.4 < sorted(differ)[3] < 2.5  # both spreads are .5: m = 1


def test_leave_one_out_never_reads_its_own_length():
    b = batch(1)
    before = fit("leave-one-out", b, {})
    i = int((b.length > 0).nonzero()[3])
    longer = b.length.clone()
    longer[i] *= 5
    after = fit("leave-one-out", Batch(longer, b.group, b.sign), {})
    assert after[i] == before[i]
    assert (after != before).any()


def test_the_averaged_effect_remembers_and_a_constant_divisor_stays():
    state: dict[str, float] = {}
    fit("doubly-averaged", batch(0), state)
    first = state["log_ratio"]
    fit("doubly-averaged", batch(1), state)
    assert state["log_ratio"] != first
    assert abs(state["log_ratio"] - first) < 0.2
    fit("doubly-averaged", batch(1), alone := {})
    assert state["log_ratio"] == pytest.approx(0.9 * first + 0.1 * alone["log_ratio"], rel=1e-12)
    state = {}
    assert set(fit("constant", batch(0), state).tolist()) == set(fit("constant", batch(1), state).tolist())
