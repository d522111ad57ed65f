"""The small random model: the configured architecture, with few and narrow layers."""

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 64
HEAD = 8
"""Width of an attention head."""
DEFAULT = "~/models/deepseek-llm-7b-chat"
"""verl's own default of `actor_rollout_ref.model.path`: no model was chosen."""


class ModelError(ValueError):
    """The architecture cannot be read or made small. The message is complete."""


def small_config(path: str, ranks: int, layers: int, trust_remote_code: bool = False) -> Any:
    """The transformers configuration of a model, made small.

    Args:
        path: of the model, as `actor_rollout_ref.model.path` has it; Qwen3 if it is verl's default.
        ranks: number of heads is a multiple of it, so that heads can be split over any number of ranks that divides it.
        layers: number of layers.

    Raises:
        ModelError: there is no configuration at the path, or it is not of a decoder as we can shrink it.
    """
    from transformers import AutoConfig, Qwen3Config

    if path == DEFAULT:
        config: Any = Qwen3Config(tie_word_embeddings=False)
    else:
        try:
            config = AutoConfig.from_pretrained(Path(path).expanduser().as_posix(), trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"actor_rollout_ref.model.path={path}: expected a folder with config.json, or a model's name on the hub; "
                f"got: {error}"
            ) from error
    written = config.to_dict()
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if absent := [name for name in needed if name not in written]:
        raise ModelError(
            f"actor_rollout_ref.model.path={path}, of type {config.model_type}: its configuration has no "
            f"{', '.join(absent)} at the top, as a text decoder has, so it cannot be made small. Give a small model of your "
            "own with --model FOLDER"
        )
    heads = ranks * -(-4 // ranks)
    grouped = written.get("num_key_value_heads") not in (None, written["num_attention_heads"])
    small = {
        "hidden_size": heads * HEAD,
        "intermediate_size": 2 * heads * HEAD,
        "moe_intermediate_size": heads * HEAD,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if grouped and heads % 2 == 0 else heads,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_window_layers": layers,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    written |= {name: value for name, value in small.items() if name in written}
    written.pop("layer_types", None)  # one for each layer; made anew
    return type(config).from_dict(written)


def make(config: Any, folder: Path) -> None:
    """Write a random model and a tokenizer, whose words are never read, into a folder.

    Raises:
        ModelError: transformers cannot build it.
    """
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    try:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # whatever a model's code raises
        raise ModelError(
            f"a small model of type {config.model_type} cannot be built: {type(error).__name__}: {error}. Give a small model "
            "of your own with --model FOLDER"
        ) from error
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w0").save_pretrained(folder)
