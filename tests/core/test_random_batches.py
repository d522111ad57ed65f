"""Ten thousand random updates against the literal reference, and plausible wrong implementations that the same check sees."""

import collections
import inspect
from dataclasses import dataclass

import pytest
import verl  # noqa: F401  loads the plugin, as in any verl process

from tests.support import random_batches
from verl_ba import aggregation, hooks, loss_agg
from verl_ba.hooks import agg_loss, ppo_loss

pytestmark = pytest.mark.slow

hooks.load_seam_modules()

TOLERANCE = 1e-12


@pytest.mark.parametrize(
    ("first", "last"), [(0, 2_000), pytest.param(2_000, 10_000, marks=pytest.mark.deep)], ids=["some", "the rest"]
)
def test_ten_thousand_random_batches_equal_the_literal_reference(capsys, first, last):
    checked, worst = collections.Counter(), 0.0
    for seed in range(first, last):
        batch = random_batches.draw(seed)
        error = random_batches.mismatch(batch)
        assert error <= TOLERANCE, f"seed {seed}: {error:.1e} {batch}"
        worst = max(worst, error)
        checked[batch.mode, batch.form, batch.layout, batch.session is not None] += 1
    assert checked.total() == last - first
    assert (
        len(checked) == len(aggregation.ALL_MODES) * 2 * 2 * 2
    )  # every mode, form and layout, with and without sessions
    assert min(checked.values()) > (last - first) / 400
    with capsys.disabled():
        print(f"\n{last - first:,} random batches, largest error {worst:.1e}")


# ---- mutations


@dataclass(frozen=True)
class Mutation:
    """One wrong line in one function of the package."""

    name: str
    function: str
    old: str
    new: str


MUTATIONS = (
    Mutation(
        "signs and lengths are counted in the micro-batch",
        "loss_agg_info",
        "mean_length = data[COLUMN]",
        "mean_length = column(loss_agg_mode, gather(data))",
    ),
    Mutation(
        "signs and lengths are counted on each rank",
        "gather",
        "shares, rank = all_gather(mine, dp_group)",
        "shares, rank = [mine], 0",
    ),
    Mutation(
        "every rank takes the first rank's rows",
        "update_of",
        'start = sum(len(share["uid"]) for share in shares[:rank])',
        "start = 0",
    ),
    Mutation(
        "groups are taken by position",
        "update_of",
        'number("uid", uid)',
        'number("uid", [i // 2 for i in range(len(uid))])',
    ),
    Mutation("pools are batch-wide", "balanced_mean_length", "group[:, None] * len(SIGNS) +", "0 * group[:, None] +"),
    Mutation(
        "the data-parallel factor is lost", "aggregate", "sum() / num_responses * dp_size", "sum() / num_responses"
    ),
    Mutation(
        "the data-parallel factor comes twice",
        "aggregate",
        "sum() / num_responses * dp_size",
        "sum() / num_responses * dp_size**2",
    ),
    Mutation(
        "the micro-batch is averaged by its own size, so the sum grows with their number",
        "aggregate",
        "sum() / num_responses",
        "sum() / len(mask_BT)",
    ),
    Mutation(
        "empty responses count",
        "mean_length_of_pools",
        "share_is = count_is / count_is.sum(1, keepdim=True).clamp(min=1)",
        "share_is = torch.where(count_is.any(1, keepdim=True), count_is / count_is.sum(1, keepdim=True), 1 / 3)",
    ),
    Mutation(
        "padding rows count as rows",
        "mean_length_of_rows",
        "max(1, int(count_BS.any(1).sum()))",
        "len(count_BS)",
    ),
    Mutation(
        "masked garbage counts",
        "aggregate",
        "torch.where(mask_BT.bool(), token_loss_BT, 0.0)",
        "token_loss_BT * mask_BT",
    ),
    Mutation(
        "masked advantages count", "count_by_sign", "unpadded(mask_BT).bool(), ", "unpadded(mask_BT).bool() | True, "
    ),
    Mutation(
        "zero is merged into negative",
        "balanced_mean_length",
        "+ torch.arange(len(SIGNS))",
        "+ torch.tensor([0, 0, 2])",
    ),
    Mutation(
        "a token of advantage zero reads the negative entry",
        "token_mean_length",
        "1 + signs(advantage_BT, floor_B)",
        "2 * (advantage_BT > floor_B[:, None]).long()",
    ),
    Mutation("sessions are ignored", "update_of", 'number("session_id", session) if session', "None if session"),
    Mutation("a row is not compared with its group", "update_of", "count_BS[rounded_B] = ", "_ = "),
    Mutation("a token is not compared with its row", "count_by_sign", "floor_B = ROUNDING *", "floor_B = 0 *"),
    Mutation("a token reads by its exact sign", "token_mean_length", "floor_B))", "0 * floor_B))"),
    Mutation(
        "a session number means the same session in every group",
        "response_of_row",
        "_renumber(group_B * sessions + session_B)",
        "session_B",
    ),
    Mutation("the sum rule over the rows of sessions is lost", "mean_length_of_rows", "* scale", ""),
    Mutation(
        "a share is taken of the tokens of the sign, not of the whole response",
        "mean_length_of_pools",
        "count_is / count_is.sum(1, keepdim=True).clamp(min=1)",
        "(count_is > 0).double()",
    ),
    Mutation(
        "a response of both signs gets one number per row",
        "column",
        "(mean_length_B if one_number_per_row else mean_length_BS)",
        "mean_length_B",
    ),
    Mutation(
        "a response has the sign of its sum",
        "column",
        "mean_length_BS = mean_length_of_rows(\n        LOSS_AGG_REGISTRY[loss_agg_mode], update.count_BS,",
        "count_BS = update.count_BS\n"
        "    sign = (count_BS[:, 2] - count_BS[:, 0]).sign()\n"
        "    count_BS = torch.eye(3)[sign.long() + 1] * count_BS.sum(1, keepdim=True)\n"
        "    mean_length_BS = mean_length_of_rows(LOSS_AGG_REGISTRY[loss_agg_mode], count_BS,",
    ),
    Mutation("lengths are float32", "mean_length_of_pools", "(tokens / responses)", "(tokens / responses).float()"),
    Mutation(
        "pools average over responses weighted by length",
        "mean_length_of_pools",
        "weights=v.flatten()) for v in (count_is, share_is)",
        "weights=v.flatten()) for v in (count_is * count_is, count_is)",
    ),
)


def mutate(monkeypatch, mutation: Mutation) -> None:
    """Replace one line of a function, wherever the package names that function."""
    original = getattr(loss_agg, mutation.function)
    for name, function in list(loss_agg.LOSS_AGG_REGISTRY.items()):  # a registered one registers itself anew
        monkeypatch.setitem(loss_agg.LOSS_AGG_REGISTRY, name, function)
    source = inspect.getsource(original)
    assert source.count(mutation.old) == 1, f"{mutation.name}: the line to change is no longer in {mutation.function}"
    scope: dict = {}
    exec(compile(source.replace(mutation.old, mutation.new), f"<{mutation.name}>", "exec"), loss_agg.__dict__, scope)
    for holder in (loss_agg, aggregation, ppo_loss, agg_loss):
        if vars(holder).get(mutation.function) is original:
            monkeypatch.setattr(holder, mutation.function, scope[mutation.function])


def seed_that_sees_it(seeds: int) -> int | None:
    for seed in range(seeds):
        try:
            error = random_batches.mismatch(random_batches.draw(seed))
        except (RuntimeError, ValueError, IndexError):  # loud is caught, too
            return seed
        if not error <= TOLERANCE:
            return seed
    return None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_wrong_implementation_is_seen(mutation, monkeypatch):
    mutate(monkeypatch, mutation)
    assert seed_that_sees_it(300) is not None


def test_the_check_itself_does_not_cry_wolf(monkeypatch):
    """Recompiling a function without changing it leaves everything exact."""
    mutate(monkeypatch, Mutation("nothing", "mean_length_of_pools", "tokens / responses", "tokens / responses"))
    assert seed_that_sees_it(300) is None
