"""A character-level decoder of some 45,000 parameters, and its sampler with a key-value cache.

Prompts are padded with spaces, which the model sees as any other character, so every row's response starts at
the same position and no attention mask is needed beyond causality.

Shape suffixes: B rows, P prompt positions, T response positions, V characters, L layers, H heads, D head width.
"""

from dataclasses import dataclass
from string import ascii_lowercase, digits

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHARACTERS = f" \n{digits}{ascii_lowercase}ABCDEFGHIJ=.~<>"
"""The vocabulary of every task. A space pads a prompt, a newline ends a response."""
PAD, END = 0, 1
_INDEX = {character: i for i, character in enumerate(CHARACTERS)}


def encode(text: str) -> list[int]:
    return [_INDEX[character] for character in text]


def decode(ids: list[int]) -> str:
    return "".join(CHARACTERS[i] for i in ids)


@dataclass(frozen=True)
class Shape:
    width: int = 40
    layers: int = 2
    heads: int = 2
    head_bias: bool = True


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))

    def forward(self, x: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """x [B, N, width]; with a cache [B, P+T, 2, H, D] the new keys and values are written at `start`."""
        rows, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(rows, length, 3, self.heads, -1)
        keys_values = qkv[:, :, 1:]
        if cache is not None:
            cache[:, start : start + length] = keys_values
            keys_values = cache[:, : start + length]
        q, k, v = (part.transpose(1, 2) for part in (qkv[:, :, 0], keys_values[:, :, 0], keys_values[:, :, 1]))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.relu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, positions: int, shape: Shape | None = None) -> None:
        """`positions`: of the longest prompt and response together."""
        super().__init__()
        self.shape = shape or Shape()
        self.character = nn.Embedding(len(CHARACTERS), self.shape.width)
        self.position = nn.Embedding(positions, self.shape.width)
        self.blocks = nn.ModuleList(Block(self.shape) for _ in range(self.shape.layers))
        self.norm = nn.LayerNorm(self.shape.width)
        self.head = nn.Linear(self.shape.width, len(CHARACTERS), bias=self.shape.head_bias)
        for table in (self.character, self.position):
            nn.init.normal_(table.weight, std=0.1)

    def hidden(self, ids: Tensor, caches: Tensor | None = None, start: int = 0) -> Tensor:
        x = self.character(ids) + self.position.weight[start : start + ids.shape[1]]
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i], start)
        return self.norm(x)

    def log_probs(self, prompt_BP: Tensor, response_BT: Tensor) -> Tensor:
        """Log-probability of every response character given what stands before it: [B, T]."""
        ids = torch.cat([prompt_BP, response_BT[:, :-1]], dim=1)
        logits = self.head(self.hidden(ids)[:, prompt_BP.shape[1] - 1 :])
        return -F.cross_entropy(logits.flatten(0, 1), response_BT.flatten(), reduction="none").view(response_BT.shape)


@dataclass(frozen=True)
class Rollout:
    """Sampled responses.

    Attributes:
        response_BT: characters up to and including the newline; PAD after it.
        mask_BT: bool, valid positions.
        log_prob_BT: of each character, 0 at masked positions.
        entropy: mean over valid positions of the distributions sampled from [nats].
    """

    response_BT: Tensor
    mask_BT: Tensor
    log_prob_BT: Tensor
    entropy: float

    def texts(self) -> list[str]:
        """Without the newline; a response that has none was cut."""
        lengths = self.mask_BT.sum(1).tolist()
        return [decode(row[:n]).removesuffix("\n") for row, n in zip(self.response_BT.tolist(), lengths, strict=True)]

    @property
    def cut_B(self) -> Tensor:
        """bool: the response reached the length limit without a newline."""
        return ~(self.response_BT == END).any(1)


@torch.no_grad()
def sample(model: Model, prompt_BP: Tensor, noise_BT: Tensor) -> Rollout:
    """Sample at temperature 1 by inverting the cumulative distribution at `noise_BT`, uniform numbers that fix the outcome.

    Two models that see the same noise differ only where their distributions do. Rows that have ended leave the batch
    whenever they are a quarter of it.
    """
    (rows, width), limit = prompt_BP.shape, noise_BT.shape[1]
    shape, like = model.shape, model.head.weight
    response_BT = torch.full((rows, limit), PAD)
    logits_BTV = like.new_zeros(rows, limit, len(CHARACTERS))
    cache_size = shape.layers, rows, width + limit, 2, shape.heads, shape.width // shape.heads
    caches, noise = like.new_empty(cache_size), noise_BT.T.contiguous()
    active: Tensor | slice = slice(None)  # rows in the batch
    alive = torch.ones(rows, dtype=torch.bool)  # those of them that have not ended
    ids, start = prompt_BP, 0
    for t in range(limit):
        logits = model.head(model.hidden(ids, caches, start)[:, -1])
        drawn = (logits.softmax(1).cumsum(1) < noise[t, :, None]).sum(1).clamp_(max=len(CHARACTERS) - 1)
        response_BT[active, t] = torch.where(alive, drawn, PAD)
        logits_BTV[active, t] = logits
        alive = alive & (drawn != END)
        left = int(alive.sum())
        if left == 0:
            break
        if left <= 0.75 * len(alive):
            active = torch.arange(rows)[active][alive]
            drawn, caches, noise, alive = drawn[alive], caches[:, alive], noise[:, alive], alive[alive]
        ids, start = drawn[:, None], width + t
    ended_BT = (response_BT == END).cumsum(1)
    mask_BT = (ended_BT - (response_BT == END).long()) == 0
    longest = int(mask_BT.sum(1).max())
    response_BT, mask_BT = response_BT[:, :longest], mask_BT[:, :longest]
    log_p_BTV = logits_BTV[:, :longest].log_softmax(2)
    log_prob_BT = torch.where(mask_BT, log_p_BTV.gather(2, response_BT[..., None])[..., 0], 0.0)
    entropy_BT = torch.where(mask_BT, -(log_p_BTV.exp() * log_p_BTV).sum(2), 0.0)
    return Rollout(response_BT, mask_BT, log_prob_BT, float(entropy_BT.sum() / mask_BT.sum()))
