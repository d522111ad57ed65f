"""The mathematics: worked cases, properties, equality with an independent reference, negative controls."""

import json
import math
import random
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import reference
from verl_ba.aggregation import ALL_MODES, MODES, SIGNS, aggregate, pool_mean_length, pool_mean_length_by_sign
from verl_ba.loss_agg import (
    LOSS_AGG_REGISTRY,
    count_by_sign,
    mean_length_of_rows,
    register_loss_agg,
    token_mean_length,
)

CASES = json.loads((Path(__file__).parents[1] / "support" / "cases.json").read_text())
TIGHT = 1e-12


def case_columns(case):
    rows = case["responses"]
    return (
        [row["length"] for row in rows],
        [row["group"] for row in rows],
        [reference.sign_of(row["advantage"]) for row in rows],
        [row["loss"] for row in rows],
    )


def padded(lengths, losses):
    """Token losses, constant over a response, and their mask; garbage at masked positions."""
    width = max(lengths)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    loss = torch.tensor(losses, dtype=torch.float64)[:, None].expand(-1, width).clone()
    loss[~mask] = math.nan
    return loss, mask


# ---- worked cases


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_case_has_its_exact_loss(case, mode):
    lengths, groups, signs, losses = case_columns(case)
    loss, mask = padded(lengths, losses)
    value = aggregate(loss, mask, pool_mean_length(mode, lengths, groups, signs), len(lengths))
    assert value.item() == pytest.approx(float(Fraction(case["loss"][mode])), abs=1e-15, rel=TIGHT)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_case_has_its_exact_weights(case):
    lengths, groups, signs, losses = case_columns(case)
    loss, mask = padded(lengths, losses)
    for mode, expected in case["weights"].items():
        loss = loss.detach().requires_grad_()
        mean_length = pool_mean_length(mode, lengths, groups, signs)
        assert (1 / mean_length).tolist() == pytest.approx([float(Fraction(w)) for w in expected], rel=TIGHT)
        aggregate(loss, mask, mean_length, len(lengths)).backward()
        weight = loss.grad * len(lengths)  # what a valid token's loss is multiplied by, times B
        for row, length, w in zip(weight, lengths, expected, strict=True):
            assert row[:length].tolist() == pytest.approx([float(Fraction(w))] * length, rel=TIGHT)
            assert not row[length:].any()


# ---- properties, on random batches with empties, zeros, odd masks and garbage at masked positions


@st.composite
def batches(draw, groups_of_one_size=False, empties=True):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    if groups_of_one_size:
        sizes = [draw(st.integers(2, 6))] * len(sizes)
    names = [f"prompt-{i}" for i, size in enumerate(sizes) for _ in range(size)]
    rows, width = len(names), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(rows, width, generator=generator) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    if not empties:
        mask[:, 0] = True
    token_loss = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e308], dtype=torch.float64)
    token_loss = torch.where(mask, token_loss, garbage[torch.randint(0, 4, mask.shape, generator=generator)])
    signs = torch.randint(-1, 2, (rows,), generator=generator).tolist()
    order = torch.randperm(rows, generator=generator).tolist()
    return token_loss[order], mask[order], [names[i] for i in order], [signs[i] for i in order]


def loss_and_gradient(function, token_loss):
    leaf = token_loss.clone().requires_grad_()
    value = function(leaf)
    if not value.requires_grad:  # the reference met no valid token
        return value, torch.zeros_like(leaf)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def assert_equal(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=TIGHT, atol=1e-14)


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from(ALL_MODES))
def test_value_and_gradient_equal_the_literal_reference(batch, mode):
    token_loss, mask, groups, signs = batch
    mean_length = pool_mean_length(mode, mask.sum(-1), groups, signs)
    got = loss_and_gradient(lambda x: aggregate(x, mask, mean_length, len(groups)), token_loss)
    expected = loss_and_gradient(lambda x: reference.loss(mode, x, mask.tolist(), groups, signs), token_loss)
    assert_equal(got, expected)


@settings(max_examples=80, deadline=None)
@given(batches(groups_of_one_size=True, empties=False))
def test_balanced_is_the_papers_formula(batch):
    token_loss, mask, groups, signs = batch
    mean_length = pool_mean_length("balanced", mask.sum(-1), groups, signs)
    got = loss_and_gradient(lambda x: aggregate(x, mask, mean_length, len(groups)), token_loss)
    expected = loss_and_gradient(lambda x: reference.paper_balanced(x, mask.tolist(), groups, signs), token_loss)
    assert_equal(got, expected)


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from(ALL_MODES), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_split_adds_up_to_the_same_loss_and_gradient(batch, mode, ranks, micro_batches, rng):
    token_loss, mask, groups, signs = batch
    rows = len(groups)
    mean_length = pool_mean_length(mode, mask.sum(-1), groups, signs)
    whole = loss_and_gradient(lambda x: aggregate(x, mask, mean_length, rows), token_loss)

    order = list(range(rows))
    rng.shuffle(order)

    def split(x):
        total = 0.0
        for rank in range(ranks):
            share = order[rank::ranks]
            for start in range(micro_batches):
                part = share[start::micro_batches]
                if part:  # ranks average their gradients, hence the division
                    total = total + aggregate(x[part], mask[part], mean_length[part], rows, dp_size=ranks) / ranks
        return total

    assert_equal(loss_and_gradient(split, token_loss), whole)


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from(ALL_MODES))
def test_sum_rule_and_empty_responses(batch, mode):
    _, mask, groups, signs = batch
    length = mask.sum(-1)
    mean_length = pool_mean_length(mode, length, groups, signs)
    filled = length > 0
    assert ((mean_length > 0) == filled).all()
    assert (length[filled] / mean_length[filled]).sum().item() == pytest.approx(int(filled.sum()), rel=TIGHT)


@settings(max_examples=100, deadline=None)
@given(batches(), st.sampled_from(ALL_MODES), st.randoms(use_true_random=False))
def test_order_and_kind_of_labels_do_not_matter(batch, mode, rng):
    _, mask, groups, signs = batch
    length = mask.sum(-1)
    mean_length = pool_mean_length(mode, length, groups, signs)
    order = list(range(len(groups)))
    rng.shuffle(order)
    shuffled = pool_mean_length(mode, length[order], [groups[i] for i in order], [signs[i] for i in order])
    assert torch.equal(shuffled, mean_length[order])  # to the bit
    numbers = torch.tensor([sorted(set(groups)).index(g) * 1000 - 7 for g in groups])
    assert torch.equal(pool_mean_length(mode, length, numbers, torch.tensor(signs)), mean_length)


def test_known_agreements_between_modes():
    equal_in_cells = {"length_B": [4, 4, 6, 6, 3, 3], "group_B": "aaaabb", "sign_B": [1, 1, -1, -1, 1, 1]}
    assert torch.equal(
        pool_mean_length("balanced", **equal_in_cells), pool_mean_length("seq-mean-token-mean", **equal_in_cells)
    )
    equal_means = {"length_B": [2, 6, 3, 5], "group_B": "aaaa", "sign_B": [1, 1, -1, -1]}
    one_sign = {"length_B": [2, 7, 9], "group_B": "aaa", "sign_B": [1, 1, 1]}
    for same in (equal_means, one_sign):
        assert torch.equal(pool_mean_length("balanced", **same), pool_mean_length("group-mean-token-mean", **same))


@pytest.mark.parametrize("k", range(1, 8))
def test_on_policy_loss_of_binary_rewards_is_zero_in_every_group(k):
    """Ratio 1, GRPO advantages: each response's tokens have loss -A, and Σ A = 0 in the group."""
    rng = random.Random(k)
    rewards = torch.tensor([1.0] * k + [0.0] * (8 - k), dtype=torch.float64)
    advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    lengths = [rng.randint(1, 50) for _ in range(8)]
    loss, mask = padded(lengths, (-advantage).tolist())
    signs = advantage.sign().long()
    value = {m: aggregate(loss, mask, pool_mean_length(m, lengths, ["p"] * 8, signs), 8).item() for m in ALL_MODES}
    assert abs(value["balanced"]) < 1e-15
    assert abs(value["seq-mean-token-mean"]) < 1e-15
    assert abs(value["token-mean"]) > 1e-3


@settings(max_examples=60, deadline=None)
@given(batches(empties=False), st.integers(0, 2**31))
def test_advantages_divided_by_the_mean_length_under_token_sums_give_the_same_policy_loss(batch, seed):
    """An independent oracle: the clipped loss is homogeneous in the advantage."""
    _, mask, groups, signs = batch
    generator = torch.Generator().manual_seed(seed)
    advantage = torch.tensor(signs)[:, None] * torch.rand(len(signs), 1, dtype=torch.float64, generator=generator)
    log_ratio = 0.3 * torch.randn(mask.shape, dtype=torch.float64, generator=generator)

    def clipped(a, log_ratio):
        ratio = log_ratio.exp()
        return torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))

    mean_length = pool_mean_length("balanced", mask.sum(-1), groups, signs)
    got = loss_and_gradient(lambda x: aggregate(clipped(advantage, x), mask, mean_length, len(groups)), log_ratio)
    expected = loss_and_gradient(
        lambda x: (clipped(advantage / mean_length[:, None], x) * mask).sum() / len(groups), log_ratio
    )
    assert_equal(got, expected)


# ---- sessions: several rows of one rollout are one response


def test_rows_of_a_session_count_as_one_response():
    # Session s of group a has rows of 2 and 4 tokens: a response of 6. The other positive response has 10.
    length, group, sign, session = [2, 4, 10, 5], "aaaa", [1, 1, 1, -1], ["s", "s", "t", "u"]
    mean_length = pool_mean_length("balanced", length, group, sign, session)
    scale = 3 / 4  # sessions per row, so that the sum rule holds over rows
    assert mean_length.tolist() == pytest.approx([8 * scale, 8 * scale, 8 * scale, 5 * scale], rel=TIGHT)
    assert sum(n / m for n, m in zip(length, mean_length.tolist(), strict=True)) == pytest.approx(4, rel=TIGHT)


@settings(max_examples=100, deadline=None)
@given(batches(), st.sampled_from(ALL_MODES), st.data())
def test_sum_rule_over_rows_with_sessions_and_single_row_sessions_change_nothing(batch, mode, data):
    _, mask, groups, signs = batch
    length = mask.sum(-1)
    alone = [f"s{i}" for i in range(len(groups))]
    assert torch.equal(
        pool_mean_length(mode, length, groups, signs, alone), pool_mean_length(mode, length, groups, signs)
    )
    # The same session number in two groups is two sessions.
    session = [data.draw(st.integers(0, 1)) for _ in groups]
    first = {}
    signs = [first.setdefault((g, s), sign) for g, s, sign in zip(groups, session, signs, strict=True)]
    mean_length = pool_mean_length(mode, length, groups, signs, session)
    filled = length > 0
    assert (length[filled] / mean_length[filled]).sum().item() == pytest.approx(int(filled.sum()), rel=TIGHT)


# ---- the token-level form: advantages that change sign within a response


def test_token_level_form_worked_by_hand():
    # Group a: tokens + + − −, then + − −, then + +; group b: 0 −.
    advantage = torch.tensor([[1, 1, -1, -1], [1, -1, -1, 9], [1, 1, 9, 9], [0, -1, 9, 9]], dtype=torch.float64)
    mask = advantage < 9
    counts = count_by_sign(mask, advantage)
    assert counts.tolist() == [[2, 0, 2], [2, 0, 1], [0, 0, 2], [1, 1, 0]]
    mean_length = pool_mean_length_by_sign("balanced", counts, "aaab")
    positive = 5 / (2 / 4 + 1 / 3 + 2 / 2)  # five tokens, over responses counted by their shares
    negative = 4 / (2 / 4 + 2 / 3)
    expected = [[negative, 0, positive], [negative, 0, positive], [0, 0, positive], [2, 2, 0]]
    for got, row in zip(mean_length.tolist(), expected, strict=True):
        assert got == pytest.approx(row, rel=TIGHT)
    assert (counts / mean_length.clamp(min=1e-9)).sum().item() == pytest.approx(4, rel=TIGHT)
    per_token = token_mean_length(mean_length, advantage, torch.zeros(len(advantage)))
    assert per_token[1, :3].tolist() == pytest.approx([positive, negative, negative], rel=TIGHT)
    assert per_token[3, :2].tolist() == pytest.approx([2, 2], rel=TIGHT)
    # Without signs a response is a response: three of nine tokens, one of two.
    by_group = pool_mean_length_by_sign("group-mean-token-mean", counts, "aaab")
    assert by_group.tolist() == [[3, 0, 3], [3, 0, 3], [0, 0, 3], [2, 2, 0]]


def test_token_level_form_of_a_session():
    # Session s of group a has rows of + + and − − − −, a response of six tokens; the other response is − −.
    counts = torch.tensor([[0, 0, 2], [4, 0, 0], [2, 0, 0]])
    mean_length = pool_mean_length_by_sign("balanced", counts, "aaa", "sst")
    scale = 2 / 3  # sessions per row
    positive, negative = 2 / (2 / 6), 6 / (4 / 6 + 2 / 2)
    expected = [[0, 0, positive], [negative, 0, 0], [negative, 0, 0]]
    for got, row in zip(mean_length.tolist(), expected, strict=True):
        assert got == pytest.approx([scale * x for x in row], rel=TIGHT)


@settings(max_examples=100, deadline=None)
@given(batches(), st.sampled_from(ALL_MODES), st.integers(0, 2**31), st.booleans())
def test_token_level_sum_rule_and_literal_reference(batch, mode, seed, with_sessions):
    token_loss, mask, groups, _ = batch
    generator = torch.Generator().manual_seed(seed)
    advantage = torch.randint(-1, 2, mask.shape, generator=generator).double()
    session = torch.randint(0, 3, (len(groups),), generator=generator).tolist() if with_sessions else None
    counts = count_by_sign(mask, advantage)
    mean_length = pool_mean_length_by_sign(mode, counts, groups, session)
    assert ((mean_length > 0) == (counts > 0)).all()
    share = torch.where(counts > 0, counts / mean_length, 0.0)
    assert share.sum().item() == pytest.approx(int(mask.any(1).sum()), rel=TIGHT, abs=TIGHT)

    got = loss_and_gradient(
        lambda x: aggregate(
            x, mask, token_mean_length(mean_length, advantage, torch.zeros(len(advantage))), len(groups)
        ),
        token_loss,
    )
    weights = reference.token_weights(mode, advantage.tolist(), mask.tolist(), groups, session)
    weights = torch.tensor(weights, dtype=torch.float64)
    expected = (weights * token_loss.where(mask, 0)).sum() / len(groups)
    assert_equal(got, (expected, weights / len(groups)))


@settings(max_examples=100, deadline=None)
@given(batches(), st.sampled_from(ALL_MODES))
def test_token_level_form_of_one_sign_per_response_is_the_response_form_to_the_bit(batch, mode):
    token_loss, mask, groups, signs = batch
    advantage = torch.tensor(signs)[:, None].expand(mask.shape)
    by_sign = pool_mean_length_by_sign(mode, count_by_sign(mask, advantage), groups)
    mean_length = pool_mean_length(mode, mask.sum(-1), groups, signs)
    assert torch.equal(by_sign.amax(1), mean_length)
    got = loss_and_gradient(
        lambda x: aggregate(x, mask, token_mean_length(by_sign, advantage, torch.zeros(len(advantage))), len(groups)),
        token_loss,
    )
    assert_equal(got, loss_and_gradient(lambda x: aggregate(x, mask, mean_length, len(groups)), token_loss))


def test_rows_of_one_session_may_differ_in_sign():
    mean_length = pool_mean_length("balanced", [2, 4], "aa", [1, -1], "ss")
    assert mean_length.tolist() == pytest.approx(
        [6 / 2, 6 / 2], rel=TIGHT
    )  # 2/(2/6) and 4/(4/6), one session per two rows


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_counting_names_an_advantage_that_is_not_finite(bad):
    advantage = torch.tensor([[1.0, bad]])
    assert count_by_sign(torch.tensor([[1, 0]]), advantage).tolist() == [[0, 0, 1]]
    with pytest.raises(ValueError, match="advantages: nan or inf at a valid token"):
        count_by_sign(torch.tensor([[1, 1]]), advantage)


def test_nested_rows_are_counted_as_padded_ones():
    """Rows of length 0 among them, masked positions, both signs; and a fault in a nested row is named, too."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 0, 7, 1, 0]
    advantage = [torch.randint(-1, 2, (n,), generator=generator).double() for n in lengths]
    mask = [torch.randint(0, 2, (n,), generator=generator) for n in lengths]
    padded = [torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (mask, advantage)]
    nested = [torch.nested.as_nested_tensor(rows, layout=torch.jagged) for rows in (mask, advantage)]
    assert torch.equal(count_by_sign(*nested), count_by_sign(*padded))
    nested[1].values()[nested[0].values().nonzero()[0]] = math.nan
    with pytest.raises(ValueError, match="advantages: nan or inf"):
        count_by_sign(*nested)


# ---- negative controls: what peers got wrong must be seen


@pytest.mark.parametrize(("size", "wrong"), [(1, 0.2), (2, 0.1111), (4, 0.0292)])
def test_counting_signs_per_micro_batch_gives_the_published_wrong_loss(size, wrong):
    case = next(c for c in CASES if c["name"] == "eight-lengths")
    lengths, groups, signs, losses = case_columns(case)
    loss, mask = padded(lengths, losses)
    value = 0.0
    for start in range(0, 8, size):
        part = slice(start, start + size)
        local = pool_mean_length("balanced", lengths[part], groups[part], signs[part])
        value += aggregate(loss[part], mask[part], local, size).item()
    assert value == pytest.approx(wrong, abs=5e-5)
    assert abs(value - 7 / 480) > 1e-2


def test_groups_by_position_are_another_loss():
    case = next(c for c in CASES if c["name"] == "two-groups-interleaved")
    lengths, groups, signs, losses = case_columns(case)
    loss, mask = padded(lengths, losses)
    by_position = [i // 4 for i in range(8)]
    wrong = aggregate(loss, mask, pool_mean_length("balanced", lengths, by_position, signs), 8)
    assert abs(wrong.item() - 1 / 840) > 1e-3
    right = aggregate(loss, mask, pool_mean_length("balanced", lengths, groups, signs), 8)
    assert right.item() == pytest.approx(1 / 840, rel=1e-9)


# ---- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "ballanced"}, "ballanced.*|mode: expected one of balanced"),
        ({"length_B": [1, 2]}, r"one entry per response.*'length_B': 2.*'group_B': 3"),
        ({"length_B": [1, -2, 3]}, "counts of tokens, expected >= 0; got -2"),
        ({"sign_B": [1, 2, 0]}, r"expected -1, 0 or 1; got \[0, 1, 2\]"),
        ({"group_B": torch.zeros(3)}, "1-d integer tensor"),
        ({"length_B": torch.ones(3, 1)}, "one dimension"),
    ],
)
def test_bad_arguments_of_pool_mean_length_are_named(change, message):
    arguments = {"mode": "balanced", "length_B": [1, 2, 3], "group_B": "aab", "sign_B": [1, -1, 0]}
    with pytest.raises(ValueError, match=message):
        pool_mean_length(**{**arguments, **change})


def test_bad_arguments_of_aggregate_are_named():
    loss, mask, mean_length = torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)
    with pytest.raises(ValueError, match=r"mean_length \[B\] or \[B, T\].*\[3\]"):
        aggregate(loss, mask, torch.ones(3), 2)
    with pytest.raises(ValueError, match=r"got \[2, 3\], \[2, 3\], \[2, 1\]"):
        aggregate(loss, mask, torch.ones(2, 1), 2)
    with pytest.raises(ValueError, match="token_loss"):
        aggregate(loss, torch.ones(2, 1), mean_length, 2)
    with pytest.raises(ValueError, match=r"num_responses.*got 0"):
        aggregate(loss, mask, mean_length, 0)


def test_bad_counts_are_named():
    with pytest.raises(ValueError, match=r"count_BS: expected \[B, 3\].*got \[2, 2\]"):
        pool_mean_length_by_sign("balanced", torch.ones(2, 2), "ab")
    with pytest.raises(ValueError, match="mode: expected one of balanced"):
        pool_mean_length_by_sign("token-sum", torch.ones(2, len(SIGNS)), "ab")


def test_an_empty_batch_and_one_without_valid_tokens():
    assert pool_mean_length("balanced", [], [], []).shape == (0,)
    for mode in ALL_MODES:
        assert pool_mean_length(mode, [0, 0], ["a", "b"], [0, 0]).tolist() == [0, 0]
    value = aggregate(torch.full((2, 3), math.nan), torch.zeros(2, 3), torch.zeros(2), 2)
    assert value.item() == 0


def test_float32_losses_keep_their_type_and_their_precision():
    torch.manual_seed(0)
    lengths = torch.randint(1, 500, (64,))
    groups, signs = torch.arange(64) // 8, torch.randint(-1, 2, (64,))
    mask = torch.arange(500)[None] < lengths[:, None]
    loss = torch.randn(64, 500)
    mean_length = pool_mean_length("balanced", lengths, groups, signs)
    value = aggregate(loss, mask, mean_length, 64)
    assert value.dtype == torch.float32
    exact = aggregate(loss.double(), mask, mean_length, 64)
    plain = (loss * mask).sum() / mask.sum()
    plain_error = abs(plain.double() - (loss.double() * mask).sum() / mask.sum())
    assert abs(value.double() - exact) <= plain_error + 1e-6 * abs(exact)


def test_modes_are_ours_only():
    assert MODES == ("balanced", "group-mean-token-mean")


@pytest.mark.parametrize(
    "wrong",
    [lambda count, group: count[:, 0], lambda count, group: count * 0, lambda count, group: count / 0],
    ids=["shape", "zero", "infinite"],
)
def test_a_mode_of_ones_own_that_returns_no_lengths_is_named(wrong):
    count = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 3.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"lambda.*: expected a positive, finite length \[tokens\]"):
        mean_length_of_rows(wrong, count, torch.tensor([0, 0]))


@pytest.mark.parametrize("name", ["token-mean", "balanced"])
def test_a_mode_of_ones_own_needs_a_name_of_its_own(name):
    with pytest.raises(ValueError, match=rf"register_loss_agg\('{name}'\): this mode is .*already"):
        register_loss_agg(name)(lambda count, group: count)
    assert "balanced_mean_length" in str(LOSS_AGG_REGISTRY["balanced"])
