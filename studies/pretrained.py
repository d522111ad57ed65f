"""Responses of a pretrained model to reasoning-gym tasks, as JSONL of prompt, response and score: `verl-ba gradients` and
`analyze` read them.

    python -m studies.pretrained MODEL OUT.jsonl --prompts 64 --responses 8

MODEL is a Hugging Face folder, or a GGUF file, which is read into float32 and written beside OUT as such a folder.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 12},
}
"""reasoning-gym's tasks with their settings: easy enough that a small model is sometimes right."""

TOGETHER = 8
"""Prompts that are sampled from together."""

ASK = "Think briefly, then end with the answer as one number."


def load(model: Path, out: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(model, tokenizer)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if model.suffix == ".gguf":
        folder = out.with_name(model.stem.lower())
        if not (folder / "config.json").exists():
            read: Any = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=dtype)
            read.save_pretrained(folder)
            AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(folder)
        model = folder
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    return network.eval(), AutoTokenizer.from_pretrained(model)


def entries(number: int, seed: int) -> list[tuple[str, dict]]:
    """(task, reasoning-gym entry), the tasks in turn."""
    import reasoning_gym

    each = -(-number // len(TASKS))
    sets = {
        name: list(reasoning_gym.create_dataset(name, seed=seed, size=each, **more)) for name, more in TASKS.items()
    }
    return [(name, sets[name][i]) for i in range(each) for name in TASKS][:number]


def score(task: str, entry: dict, response: str) -> float:
    """1 if the last number of the response is the answer."""
    import reasoning_gym

    numbers = re.findall(r"-?\d+", response.replace(",", ""))
    score_answer: Any = reasoning_gym.get_score_answer_fn(task)
    return float(bool(numbers) and score_answer(numbers[-1], entry) == 1.0)


def main(
    model: Annotated[Path, typer.Argument(help="a Hugging Face folder, or a GGUF file")],
    out: Annotated[Path, typer.Argument(help="the JSONL file to write; prompts that are in it are kept")],
    prompts: int = 64,
    responses: int = 8,
    tokens: Annotated[int, typer.Option(help="longest response [tokens]")] = 64,
    seed: int = 0,
) -> None:
    """Sample at temperature 1; resumes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    network, tokenizer = load(model, out)
    done = len(out.read_text().splitlines()) // responses if out.exists() else 0
    torch.manual_seed(seed + done)
    tokenizer.padding_side, tokenizer.pad_token, end = "left", tokenizer.eos_token, tokenizer.eos_token_id
    left = entries(prompts, seed)[done:]
    for start in track(range(0, len(left), TOGETHER), description="sampling"):
        chosen = left[start : start + TOGETHER]
        chats = [[{"role": "user", "content": f"{entry['question']}\n{ASK}"}] for _, entry in chosen]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(texts, return_tensors="pt", add_special_tokens=False, padding=True)
        sampled = network.generate(
            **ids,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            num_return_sequences=responses,
            pad_token_id=end,
        )[:, ids["input_ids"].shape[1] :].tolist()
        with out.open("a") as file:
            for number, row in enumerate(sampled):
                (task, entry), text = chosen[number // responses], texts[number // responses]
                row = row[: row.index(end) + 1] if end in row else row
                answer = tokenizer.decode(row, skip_special_tokens=True)
                line = {"prompt": text, "response": answer, "response_length": len(row), "task": task}
                file.write(json.dumps(line | {"score": score(task, entry, answer)}) + "\n")


if __name__ == "__main__":
    typer.run(main)
