"""Lengths of responses whose dump holds only text."""

from collections.abc import Callable
from pathlib import Path


def token_counter(path: Path, max_response_length: int | None = None) -> Callable[[list[str]], list[int]]:
    """Count the tokens of texts as the run counted them [tokens].

    verl's dump leaves special tokens out, the end token among them, which the response mask counts: so one more, up to
    the longest response. Text that a model wrote in an unusual split into tokens, tool output (masked in training) and
    other special tokens make a difference that the text does not show.

    Args:
        path: a folder with a Hugging Face tokenizer that has a fast version.
        max_response_length: the run's `data.max_response_length`: a longer response was cut and has no end token.

    Raises:
        ValueError: there is no such folder, or no fast tokenizer in it.
    """
    if not path.is_dir():
        raise ValueError(f"--tokenizer {path}: expected a folder with a tokenizer (the run's model); no such folder")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--tokenizer {path}: no tokenizer could be loaded: {error}") from None
    if not tokenizer.is_fast:
        raise ValueError(
            f"--tokenizer {path}: expected a tokenizer with a fast version; got {type(tokenizer).__name__}"
        )

    def count(texts: list[str]) -> list[int]:
        ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        lengths = [len(row) + 1 for row in ids]
        return lengths if max_response_length is None else [min(n, max_response_length) for n in lengths]

    return count
