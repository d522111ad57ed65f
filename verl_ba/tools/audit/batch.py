"""The synthetic mini-batch, and how it is split."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import NonTensorStack, TensorDict
from tensordict.tensorclass import NonTensorData
from verl.protocol import DataProto
from verl.trainer.ppo import rollout_corr_helper
from verl.utils import tensordict_utils as tu

from verl_ba.support import ESTIMATORS

GROUPS, SIZE, WIDTH, PROMPT = 4, 3, 9, 2
ROWS = GROUPS * SIZE


@dataclass(frozen=True)
class Split:
    """Rows dealt to `ranks` data-parallel ranks, each of which takes `micro` rows at a time."""

    ranks: int
    micro: int

    def parts(self) -> Iterator[tuple[int, list[int]]]:
        """(rank, rows) of every micro-batch."""
        for rank in range(self.ranks):
            rows = list(range(rank, ROWS, self.ranks))
            for start in range(0, len(rows), self.micro):
                yield rank, rows[start : start + self.micro]


WHOLE = Split(1, ROWS)
SPLITS = (WHOLE, Split(1, 2), Split(1, 1), Split(2, ROWS), Split(2, 2), Split(2, 1))
MICRO_PAIRS = ((WHOLE, Split(1, 2)), (WHOLE, Split(1, 1)), (Split(2, ROWS), Split(2, 2)), (Split(2, ROWS), Split(2, 1)))
RANK_PAIRS = ((Split(1, 2), Split(2, 2)), (Split(1, 1), Split(2, 1)))


@dataclass
class Batch:
    """A mini-batch that is the whole update: groups scattered over it, responses of 1 to 9 tokens, one of them empty.

    Some responses have holes in their mask, as tool output makes them. Behind the mask stand advantages and
    log-probabilities like any others, so whatever reads them is seen.

    Attributes:
        length: tokens of each response, masked ones included.
        mask: the final response mask; `counted`: the mask whose tokens the engine counts as `batch_num_tokens`.
        suspect: rows in which the rollout engine's log-probabilities are far off; only with rollout correction.
        nested: the layout of the v1 trainer, else padded.
    """

    uid: list[str]
    length: torch.Tensor
    advantage: torch.Tensor
    mask: torch.Tensor
    counted: torch.Tensor
    policy: torch.Tensor  # log-probabilities before the update
    moved: torch.Tensor  # and after some mini-batches
    old: torch.Tensor  # what the trainer takes for `policy`
    reference: torch.Tensor
    suspect: torch.Tensor
    nested: bool
    importance: torch.Tensor | None = None
    values: torch.Tensor = field(init=False)
    returns: torch.Tensor = field(init=False)
    built: dict[tuple[int, ...], TensorDict] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.values = self.policy / 4
        self.returns = self.values + self.advantage

    def with_others_behind_the_mask(self) -> "Batch":
        """The same batch with other numbers where the mask is 0: no loss may tell the two apart."""
        hidden = self.mask == 0
        names = ("advantage", "policy", "moved", "old", "reference")
        return replace(
            self, **{name: torch.where(hidden, 0.5 - getattr(self, name), getattr(self, name)) for name in names}
        )

    def micro_batch(self, rows: list[int]) -> TensorDict:
        """These rows as verl's trainers hand them to a loss. A shallow copy: building one takes longer than a loss."""
        if tuple(rows) not in self.built:
            self.built[tuple(rows)] = self._build(rows)
        return self.built[tuple(rows)].copy()

    def _build(self, rows: list[int]) -> TensorDict:
        spans = self.spans(rows)
        columns = {
            "response_mask": self.mask,
            "loss_mask": self.counted,
            "advantages": self.advantage,
            "old_log_probs": self.old,
            "ref_log_prob": self.reference,
            "responses": self.mask,
            "values": self.values,
            "returns": self.returns,
        }
        if self.importance is not None:
            columns["rollout_is_weights"] = self.importance
        data: dict[str, Any] = {"teacher_logprobs": sequences(self.reference[..., None], rows, spans)}
        if self.nested:
            data |= {k: jagged([c[i, :span] for i, span in zip(rows, spans, strict=True)]) for k, c in columns.items()}
            data["prompts"] = jagged([torch.zeros(PROMPT) for _ in rows])
        else:
            data |= {k: column[rows] for k, column in columns.items()}
            data["prompts"] = torch.zeros(len(rows), PROMPT)
            attention = torch.arange(WIDTH)[None] < torch.tensor(spans)[:, None]
            data["attention_mask"] = torch.cat([torch.ones(len(rows), PROMPT), attention], 1).long()
        batch = TensorDict(data, batch_size=len(rows))
        batch["uid"] = NonTensorStack.from_list([NonTensorData(self.uid[i]) for i in rows])
        if not self.nested:
            tu.assign_non_tensor(batch, max_response_len=WIDTH)
        return batch

    def spans(self, rows: list[int]) -> list[int]:
        """Tokens of each row that exist, masked or not; an empty response has one."""
        return [max(1, int(self.length[i])) for i in rows]


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def sequences(column_BT: torch.Tensor, rows: list[int], spans: list[int]) -> torch.Tensor:
    """Per-token numbers where a model's output has them: position p belongs to token p + 1."""
    before, after = (column_BT.new_zeros(n, *column_BT.shape[2:]) for n in (PROMPT - 1, 1))
    values = torch.cat([x for i, span in zip(rows, spans, strict=True) for x in (before, column_BT[i, :span], after)])
    ends = torch.tensor([0, *itertools.accumulate(PROMPT + span for span in spans)])
    return torch.nested.nested_tensor_from_jagged(values, ends)


def make_batch(config: DictConfig, empty: bool = True, correct: bool = True) -> Batch:
    """The synthetic mini-batch as this configuration's trainer hands it to the update.

    `correct=False` leaves rollout correction out.
    """
    g = torch.Generator().manual_seed(3)
    length = torch.tensor([0 if empty else 2, 1, 2, 3, 3, 4, 5, 5, 6, 7, 8, 9])
    order = torch.randperm(ROWS, generator=g)
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0]).double()
    advantage = (sign * (0.4 + 2 * torch.rand(ROWS, dtype=torch.float64, generator=g)))[:, None].repeat(1, WIDTH)
    if ESTIMATORS.get(config.algorithm.adv_estimator) == "token":
        advantage *= torch.where(torch.rand(ROWS, WIDTH, generator=g) < 0.3, -1.0, 1.0)
    mask = (torch.arange(WIDTH)[None] < length[:, None]) & ~holes(length)
    old = -6 * torch.rand(ROWS, WIDTH, dtype=torch.float64, generator=g)
    noise = torch.rand(ROWS, WIDTH, dtype=torch.float64, generator=g)
    drift = torch.where(torch.arange(ROWS) % 4 < 2, 1.0, -1.0).double()  # either way under either sign
    batch = Batch(
        uid=[f"prompt-{i % GROUPS}" for i in range(ROWS)],
        length=length[order],
        advantage=advantage,
        mask=mask[order].long(),
        counted=mask[order].long(),
        policy=old,
        moved=old + 5 * (noise - 0.5) + drift[:, None],  # every clip is reached, by tokens and by whole responses
        old=old,
        reference=old - 0.1 - 0.3 * noise,
        suspect=torch.zeros(ROWS, dtype=torch.bool),
        nested=bool(config.trainer.get("use_v1", False)),
    )
    correction = config.algorithm.get("rollout_correction")
    wanted = bool(correction and (correction.get("rollout_rs") or correction.get("rollout_is")))
    if wanted:
        _correct(batch, config, correction if correct else None)
    return batch


def holes(length: torch.Tensor) -> torch.Tensor:
    """Masked tokens within responses: two in those of 5, three in those of 9; [B, T]."""
    at = torch.arange(WIDTH)[None]
    return ((length[:, None] == 5) & ((at == 1) | (at == 2))) | ((length[:, None] == 9) & (at >= 4) & (at < 7))


def _correct(batch: Batch, config: DictConfig, correction: Any) -> None:
    """What the trainer does with a rollout whose engine disagrees with the actor on a response and on a token."""
    whole, single = (batch.length.tolist().index(length) for length in (6, 8))
    batch.suspect[[whole, single]] = True
    rollout = batch.old.clone()
    rollout[whole] -= 3.0
    rollout[single, 0] -= 3.0
    if config.algorithm.rollout_correction.get("bypass_mode"):
        batch.old = rollout  # the trainer takes them as the old policy's, and leaves the rest to the loss
    elif correction is not None and config.actor_rollout_ref.rollout.get("calculate_log_probs"):
        tensors = {"old_log_probs": batch.old, "rollout_log_probs": rollout, "response_mask": batch.mask}
        proto = DataProto.from_dict(tensors=tensors)
        proto, _ = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(proto, correction)
        batch.mask = proto.batch["response_mask"].long()
        if "rollout_is_weights" in proto.batch:
            batch.importance = proto.batch["rollout_is_weights"]
        if not batch.nested:  # v1 writes back response_mask only, and its engine counts loss_mask
            batch.counted = batch.mask
