"""Make what the demo trains on: a tiny Qwen3 with its tokenizer, warm-started on demonstrations, and verl's parquet files.

Everything is made on the spot and cached by its settings; a second call finds it there. With MODEL, a chat model of the
user's own takes the tiny one's place, and the questions are simpler.
"""

import fcntl
import hashlib
import json
import random
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from recipes.demo import chain_sum

HERE = Path(__file__).resolve().parent
END, PAD, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen's own pre-tokenizer: transformers rebuilds it for every Qwen model, so the merges must be learnt with it.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
console = Console(stderr=True)


@dataclass(frozen=True)
class Settings:
    """What the cached model depends on."""

    terms: tuple[int, int] = (2, 3)
    digits: tuple[int, int] = (1, 1)
    vocabulary: int = 400
    hidden: int = 96
    layers: int = 2
    heads: int = 4
    batch: int = 32
    lr: float = 3e-3
    seed: int = 0
    target: float = 0.33  # stop the warm start at this sampled accuracy …
    at_most_s: float = 60.0  # … or after this time
    max_new_tokens: int = 80
    files: str = field(default_factory=lambda: _digest(HERE / "chain_sum.py", HERE / "prepare.py"))

    @property
    def task(self) -> dict:
        (min_terms, max_terms), (min_digits, max_digits) = self.terms, self.digits
        return {"min_terms": min_terms, "max_terms": max_terms, "min_digits": min_digits, "max_digits": max_digits}


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def make_tokenizer(texts: list[str], vocabulary: int):
    """A byte-level BPE tokenizer learnt from the texts, as Qwen's."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen2TokenizerFast  # pyright: ignore[reportAttributeAccessIssue]  # a lazy name

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return Qwen2TokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=PAD, unk_token=None, chat_template=CHAT_TEMPLATE
    )


def make_model(settings: Settings, tokenizer):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(settings.seed)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden,
            intermediate_size=3 * settings.hidden,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads // 2,
            head_dim=32,  # the smallest that vLLM's CPU attention takes
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.1,  # about 1/sqrt(hidden): the default 0.02 suits wide models and starts this one slowly
            **ids,
        )
    )


def chat(tokenizer, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


@torch.no_grad()
def sampled_accuracy(model, tokenizer, entries: list[dict], max_new_tokens: int) -> float:
    """Share of right answers at temperature 1, as training will sample them."""
    prompts = [chat(tokenizer, entry["question"]) for entry in entries]
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    out = model.generate(
        ids,
        attention_mask=(ids != pad).long(),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=max_new_tokens,
    )
    texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    scores = [chain_sum.compute_score("", t, e["answer"]) for t, e in zip(texts, entries, strict=True)]
    return sum(scores) / len(scores)


def warm_start(settings: Settings, out: Path) -> dict:
    """Train the tiny model on demonstrations until it answers some questions, and save it. Returns what it reached."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    rng = random.Random(settings.seed)
    pool = chain_sum.questions(chain_sum.DEMONSTRATION_SEED, 10**6, **settings.task)
    sample = [pool[i] for i in range(3000)]
    tokenizer = make_tokenizer(
        [f"user\n{e['question']}\nassistant\n{chain_sum.demonstration(e, rng)}\n" for e in sample], settings.vocabulary
    )
    model = make_model(settings, tokenizer)
    judge = [pool[-i] for i in range(1, 129)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.01)
    start, accuracy, step, index = time.monotonic(), 0.0, 0, 0
    columns = TextColumn("warm start"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=settings.at_most_s)
        while accuracy < settings.target and time.monotonic() - start < settings.at_most_s:
            rows = []
            for _ in range(settings.batch):
                entry = pool[index]
                index += 1
                prompt = chat(tokenizer, entry["question"])
                answer = tokenizer.encode(chain_sum.demonstration(entry, rng) + END, add_special_tokens=False)
                rows.append((prompt + answer, [-100] * len(prompt) + answer))
            width = max(len(ids) for ids, _ in rows)
            ids = torch.tensor([i + [tokenizer.pad_token_id] * (width - len(i)) for i, _ in rows])
            labels = torch.tensor([lab + [-100] * (width - len(lab)) for _, lab in rows])
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * min(1.0, (step + 1) / 50)
            loss = model(input_ids=ids, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 50 == 0 and loss.item() < 0.4:
                accuracy = sampled_accuracy(model.eval(), tokenizer, judge, settings.max_new_tokens)
                model.train()
            progress.update(
                bar,
                completed=time.monotonic() - start,
                description=f"step {step}, loss {loss.item():.3f}, accuracy {accuracy:.2f} of {settings.target}",
            )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    reached = {
        "parameters": model.num_parameters(),
        "steps": step,
        "accuracy": accuracy,
        "seconds": round(time.monotonic() - start, 1),
    }
    (out / "warm_start.json").write_text(json.dumps({**reached, "settings": asdict(settings)}, indent=1))
    return reached


def write_parquet(path: Path, seed: int, size: int, task: dict, instruction: str = "", answer_format: str = "tags"):
    """Questions in verl's parquet columns."""
    import datasets

    datasets.disable_progress_bars()
    rows = [
        {
            "data_source": f"reasoning_gym/{chain_sum.TASK}",
            "prompt": [{"role": "user", "content": entry["question"] + instruction}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
            "extra_info": {"index": i, "answer_format": answer_format},
        }
        for i, entry in enumerate(chain_sum.questions(seed, size, **task))
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(path))


def _make(paths: dict[str, Path], model: Path | None, settings: Settings) -> None:
    if model is None:
        reached = warm_start(settings, paths["model"])
        console.print(f"warm start: {reached}", highlight=False, soft_wrap=True)
        write_parquet(paths["train"], chain_sum.TRAIN_SEED, 20_000, settings.task)
        write_parquet(paths["validation"], chain_sum.VALIDATION_SEED, 256, settings.task)
    else:
        task = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
        instruction = "\nThink step by step, then give the result as one number."
        for name, seed, size in (
            ("train", chain_sum.TRAIN_SEED, 5000),
            ("validation", chain_sum.VALIDATION_SEED, 128),
        ):
            write_parquet(paths[name], seed, size, task, instruction, "number")


def prepare(cache: Path, model: Path | None = None, settings: Settings | None = None) -> dict[str, Path]:
    """Paths of the model and of the two parquet files, made if they are not there yet."""
    settings = settings or Settings()
    if model is not None and not (model / "config.json").is_file():
        raise FileNotFoundError(
            f"MODEL={model}: expected a folder with a Hugging Face chat model (config.json, weights, tokenizer); "
            f"{'config.json is missing there' if model.is_dir() else 'no such folder'}. Pass the path of a downloaded "
            "model, or leave MODEL out for the tiny one"
        )
    key = hashlib.sha256(json.dumps([asdict(settings), model is not None]).encode()).hexdigest()[:12]
    out = cache / f"demo-{key}"
    paths = {"model": model or out / "model", "train": out / "train.parquet", "validation": out / "validation.parquet"}
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"demo-{key}.lock").open("w") as lock:  # a second call waits for what the first one makes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (out / "done").exists():
            return paths
        shutil.rmtree(out, ignore_errors=True)  # what an interrupted call left
        out.mkdir()
        _make(paths, model, settings)
        (out / "done").touch()
    return paths


def main(
    cache: Annotated[Path, typer.Option(help="where models and data are kept")] = Path(".cache"),
    model: Annotated[Path | None, typer.Option(help="a local chat model instead of the tiny one")] = None,
) -> None:
    """Make the demo's model and data; print where they are."""
    for name, path in prepare(cache, model).items():
        print(f"{name}={path.resolve()}")


if __name__ == "__main__":
    typer.run(main)
