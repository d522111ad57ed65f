"""The score gradient S_i = Σ_t ∇log π(token t of response i) of every response, of a Hugging Face causal model.

A gradient has as many numbers as the model has parameters, so it is taken of chosen blocks and projected: coordinate d is
added, with a random sign, to one of K places (a count sketch). Inner products are kept in expectation, with a standard
deviation of about |S_i|·|S_j|/√K. The same seed gives the same projection.

Temperature 1 and no filter of the distribution are assumed, as in verl's default training.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_BLOCK = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_SAVE_EVERY = 25  # responses


def chosen_parameters(model: Any, last: int | None) -> list[tuple[str, Tensor]]:
    """The parameters of the last `last` blocks; None: all of the model's. No other takes part in the gradient.

    Raises ValueError where the names of the parameters do not say which block they belong to.
    """
    named = list(model.named_parameters())
    if last is not None:
        numbers = {name: int(match[1]) for name, _ in named if (match := _BLOCK.search(name))}
        if not numbers:
            raise ValueError(
                f"--layers {last}: no parameter is named after a block (…layers.0…); got {named[0][0]}, …. Use --layers all"
            )
        first = max(numbers.values()) + 1 - last
        named = [(name, value) for name, value in named if numbers.get(name, -1) >= first]
    kept = {name for name, _ in named}
    for name, value in model.named_parameters():
        value.requires_grad_(name in kept)
    return named


class Projection:
    """A count sketch of gradients."""

    def __init__(self, parameters: Sequence[Tensor], size: int, seed: int = 0) -> None:
        self.size = size
        generator = torch.Generator().manual_seed(seed)
        self.places = []
        for value in parameters:
            place = torch.randint(size, (value.numel(),), generator=generator, dtype=torch.int32)
            sign = torch.randint(2, (value.numel(),), generator=generator, dtype=torch.int8) * 2 - 1
            self.places.append((place.to(value.device), sign.to(value.device)))

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """float32 [size]."""
        total = torch.zeros(self.size, device=gradients[0].device)
        for gradient, (place, sign) in zip(gradients, self.places, strict=True):
            total.index_add_(0, place, gradient.flatten().float() * sign)
        return total


def log_prob(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Σ_t log π(response_t | what stands before it)."""
    device = next(model.parameters()).device
    ids = torch.tensor([*prompt, *response], device=device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return -torch.nn.functional.cross_entropy(logits, ids[len(prompt) :], reduction="sum")


def tokenised(tokenizer: Any, text: Sequence[tuple[str, str]], limit: int | None) -> list[tuple[list[int], list[int]]]:
    """Tokens of prompts and responses. A response gets its end token, unless it has `limit` tokens: then it was cut."""

    def ids(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    prompts, responses = ids([p for p, _ in text]), ids([r for _, r in text])
    end = tokenizer.eos_token_id
    return [(p, [*r, end][:limit]) for p, r in zip(prompts, responses, strict=True)]


def score_gradients(
    model: Any,
    tokens: Sequence[tuple[list[int], list[int]]],
    file: Path,
    last: int | None = 2,
    size: int = 1 << 15,
    seed: int = 0,
    on_response: Callable[[int, int], object] = lambda done, total: None,
) -> np.ndarray:
    """Every response's projected score gradient: float32 [R, size]. What `file` has already is not computed again.

    Args:
        tokens: prompt and response of each.
        file: kept as .npz with the digest of the tokens and settings. Another digest is an error: delete the file.
        on_response: called with the numbers done and in all.
    """
    named = chosen_parameters(model, last)
    settings = [[name for name, _ in named], size, seed, tokens]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    found: list[np.ndarray] = []
    if file.exists():
        with np.load(file) as kept:
            if str(kept["digest"]) != digest:
                raise ValueError(
                    f"{file} has gradients of other responses or settings. Delete it, or give another --out to keep it"
                )
            found = list(kept["score"])
    parameters = [value for _, value in named]
    projection = Projection(parameters, size, seed)

    def save() -> None:
        unfinished = file.with_suffix(".part.npz")
        np.savez(unfinished, score=np.stack(found), digest=digest)
        os.replace(unfinished, file)

    on_response(len(found), len(tokens))
    for number, (prompt, response) in enumerate(tokens):
        if number < len(found):
            continue
        if not prompt or not response:
            found.append(np.zeros(size, dtype=np.float32))
        else:
            gradients = torch.autograd.grad(log_prob(model, prompt, response), parameters)
            found.append(projection(gradients).cpu().numpy())
        if len(found) % _SAVE_EVERY == 0 or len(found) == len(tokens):
            save()
        on_response(len(found), len(tokens))
    return np.stack(found)
