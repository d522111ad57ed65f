"""Attention for packed rows on the CPU: what flash-attn's kernel for sequences of different lengths does, in plain torch.

verl packs the sequences of a micro-batch into one row (`use_remove_padding`, its default). That needs no flash-attn: with
`attn_implementation=sdpa`, transformers makes a block-diagonal mask from the positions. Ulysses does: verl's exchange of
tokens for heads is in the function that transformers' flash attention calls, and nowhere else. So
`attn_implementation=packed` goes that way, and the kernel at its end is the one below.
"""

from typing import Any

import torch

NAME = "packed"
"""The value of `attn_implementation`."""


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    query_length: int,
    is_causal: bool = True,
    dropout: float = 0.0,
    position_ids: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """Causal attention of each sequence to itself, in place of transformers' `_flash_attention_forward`.

    Args:
        query, key, value: [1, N, heads, width]; N tokens of several sequences, one behind the other.
        position_ids: [1, N]; a sequence begins where it is 0.

    Raises:
        NotImplementedError: something is asked for that a packed micro-batch of verl does not need.
    """
    unknown = {
        "attention_mask": attention_mask,
        "dropout": dropout,
        "sliding_window": sliding_window,
        "softcap": softcap,
    }
    asked = [name for name, given in unknown.items() if given is not None and given != 0.0]
    if asked or position_ids is None or len(query) != 1:
        raise NotImplementedError(
            f"attn_implementation={NAME} takes packed sequences (use_remove_padding=True): one row, with position_ids and "
            f"without {', '.join(asked) or 'padding'}; got {len(query)} rows, position_ids: {position_ids is not None}"
        )
    starts = (position_ids.flatten() == 0).nonzero().flatten().tolist()
    sizes = [end - start for start, end in zip(starts, [*starts[1:], query.shape[1]], strict=True)]
    parts = zip(*(x.transpose(1, 2).split(sizes, dim=2) for x in (query, key, value)), strict=True)
    attended = [
        torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=softmax_scale, enable_gqa=True
        )
        for q, k, v in parts
    ]
    return torch.cat(attended, dim=2).transpose(1, 2)


def install(monkey_patch: Any) -> None:
    """Register the name with transformers, and give verl's exchange the kernel.

    Args:
        monkey_patch: the module `verl.models.transformers.monkey_patch`.
    """
    from transformers import AttentionInterface
    from transformers.integrations import flash_attention

    monkey_patch._flash_attention_forward = packed_attention
    AttentionInterface.register(NAME, flash_attention.flash_attention_forward)
