"""The responses of one update, and the batch that verl's trainers would make of them.

Shape suffixes: T response tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from tensordict.tensorclass import NonTensorData

SIZE = 4
"""Responses to one prompt."""
LONGEST_PROMPT, LONGEST_RESPONSE = 6, 18
"""[tokens]"""


@dataclass(frozen=True)
class Row:
    """One response. Floating-point numbers are float64.

    Attributes:
        uid: its prompt.
        prompt, response_T: token ids.
        mask_T: which tokens the loss counts.
        advantage_T, old_T, ref_T: advantages, and log-probabilities of the old and of the reference policy.
    """

    uid: str
    prompt: torch.Tensor
    response_T: torch.Tensor
    mask_T: torch.Tensor
    advantage_T: torch.Tensor
    old_T: torch.Tensor
    ref_T: torch.Tensor

    @property
    def ids(self) -> torch.Tensor:
        return torch.cat([self.prompt, self.response_T])


def log_probs(model: Any, ids: torch.Tensor, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of each response token under a transformers model, one sequence alone: [T], [T]."""
    everything = torch.log_softmax(model(input_ids=ids[None]).logits[0].double(), -1)[prompt - 1 : -1]
    entropy = -(everything.exp() * everything).sum(-1)
    return everything.gather(-1, ids[prompt:, None])[:, 0], entropy


def make_rows(model: Any, groups: int, by_token: bool, seed: int = 3) -> list[Row]:
    """Random responses of very different lengths, in an order that scatters each group; one of them counts no token.

    Args:
        model: gives the log-probabilities that those of the old and the reference policy lie around.
        groups: prompts, each with `SIZE` responses and rewards of 0 and 1; the first has equal rewards.
        by_token: every token has an advantage of its own, as a critic gives it; else all tokens of a response share one.
    """
    g = torch.Generator().manual_seed(seed)
    count, vocabulary = groups * SIZE, model.config.vocab_size
    reward = (torch.rand(groups, SIZE, generator=g) < 0.4).double()
    reward[0] = 1.0
    reward[1:, 0], reward[1:, 1] = 0.0, 1.0
    centred = reward - reward.mean(1, keepdim=True)
    advantage = (centred / (reward.std(1, keepdim=True) + 1e-6)).flatten()
    rows = []
    for i in range(count):
        prompt, length = (int(torch.randint(1, n + 1, (1,), generator=g)) for n in (LONGEST_PROMPT, LONGEST_RESPONSE))
        ids = torch.randint(1, vocabulary, (prompt + length,), generator=g)  # 0 pads
        noise = torch.randn(3, length, dtype=torch.float64, generator=g)
        mask = torch.rand(length, generator=g) < 0.9  # holes: tool output, rejected tokens
        mask[-1] = True
        if i == SIZE:
            mask[:] = False
        with torch.no_grad():
            log_prob, _ = log_probs(model, ids, prompt)
        rows.append(
            Row(
                uid=f"prompt-{i // SIZE}",
                prompt=ids[:prompt],
                response_T=ids[prompt:],
                mask_T=mask,
                advantage_T=(noise[0] if by_token else advantage[i].expand(length)) * mask,
                old_T=log_prob + 0.3 * noise[1],
                ref_T=log_prob + 0.2 * noise[2],
            )
        )
    return [rows[i] for i in torch.randperm(count, generator=g).tolist()]


def to_tensordict(rows: list[Row]) -> TensorDict:
    """These rows as verl's v1 trainer hands them to a worker: nested tensors, float32."""

    def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    columns = {
        "input_ids": [row.ids for row in rows],
        "position_ids": [torch.arange(len(row.ids)) for row in rows],
        "prompts": [row.prompt for row in rows],
        "responses": [row.response_T for row in rows],
        "response_mask": [row.mask_T.long() for row in rows],
        "loss_mask": [row.mask_T.long() for row in rows],
        "advantages": [row.advantage_T.float() for row in rows],
        "old_log_probs": [row.old_T.float() for row in rows],
        "ref_log_prob": [row.ref_T.float() for row in rows],
    }
    batch = TensorDict({name: nested(values) for name, values in columns.items()}, batch_size=len(rows))
    batch["uid"] = NonTensorStack.from_list([NonTensorData(row.uid) for row in rows])
    return batch
