"""Do the study's loop and verl's own trainer agree? The same model, task, rule and seeds in both: `make study-verl`.

The model of the miniature study is an OPT in all but names (learned positions, LayerNorm before each part, ReLU), so the
warm start goes into a Hugging Face checkpoint unchanged, and `verl.trainer.main_ppo` trains it on the CPU with Ray, FSDP and
vLLM. Two things differ from the study's shape: heads are 32 wide, the least that vLLM's CPU attention takes, and the output
layer has no bias, as OPT's.

What is compared: means over the training steps of the reward, of the lengths of right and wrong responses and of the
negatives' weight, run by run, and the differences between rules.
"""

import json
import shutil
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from recipes.runs import Run, launch
from studies.jobs import LOOP, VERL, Job, Row, StudyError, finished, processes, read_rows, run_jobs
from studies.miniature import runner, train
from studies.miniature.model import CHARACTERS, END, Model, Shape
from studies.miniature.tasks import FAMILIES, LIMIT, Cell
from studies.rules import RULES
from verl_ba.tools.analysis.estimate import Estimate
from verl_ba.tools.analysis.modes import in_full
from verl_ba.tools.table import Table

HERE = Path(__file__).resolve().parent
NAME = "in_verl"
RESULTS = HERE / "results" / f"{NAME}.jsonl"
SPECIFICATION = HERE / "miniature" / "in_verl.toml"
PAD_CHARACTER = "J"  # the label of a tenth step, which no task here has
console = Console(stderr=True)

MEASURES = {
    "reward": "critic/score/mean",
    "length_+": "balance/length/positive",
    "length_-": "balance/length/negative",
    "negative_share": "balance/active/gradient_share_negative",
}
"""As the loop names it -> as verl's log does."""


def specification() -> tuple[dict[str, Any], dict[str, Cell], train.Settings]:
    """The file's [study] table, its cells (of the confirmation's), and the settings of both kinds of run."""
    table = runner.read_toml(SPECIFICATION)["study"]
    known = runner.cells(runner.read_toml(runner.PROTOCOL)["cells"])
    table["rules"] = [in_full(rule) for rule in table["rules"]]
    shape = Shape(**table["shape"], head_bias=False)  # OPT's output layer has none
    settings = replace(train.Settings(), **table["settings"], evaluations=11, evaluation_prompts=16, shape=shape)
    return table, {name: replace(known[name], warm_starts=len(table["seeds"])) for name in table["cells"]}, settings


def as_opt(model: Model) -> Any:
    """The same function of the same characters as a Hugging Face OPTForCausalLM, float32.

    Raises ValueError for a model whose output layer has a bias: OPT's has none.
    """
    from transformers import OPTConfig, OPTForCausalLM

    if model.head.bias is not None:
        raise ValueError("expected an output layer without bias (head_bias=False); OPT has no place for one")
    shape, positions = model.shape, model.position.weight
    settings: dict[str, Any] = {"num_key_value_heads": shape.heads}  # OPT has no such setting; verl asks for it
    config = OPTConfig(
        **settings,
        vocab_size=len(CHARACTERS),
        max_position_embeddings=len(positions),
        hidden_size=shape.width,
        word_embed_proj_dim=shape.width,
        ffn_dim=4 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        activation_function="relu",
        dropout=0.0,
        tie_word_embeddings=False,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=CHARACTERS.index(PAD_CHARACTER),
    )
    blocks: list[Any] = list(model.blocks)
    modules = {"final_layer_norm": model.norm}
    for i, block in enumerate(blocks):
        names = ("self_attn_layer_norm", "final_layer_norm", "self_attn.out_proj", "fc1", "fc2")
        parts = (block.norms[0], block.norms[1], block.out, block.up, block.down)
        modules |= {f"layers.{i}.{name}": part for name, part in zip(names, parts, strict=True)}
    weights: dict[str, torch.Tensor] = {
        f"{name}.{kind}": value for name, part in modules.items() for kind, value in part.named_parameters()
    }
    for i, block in enumerate(blocks):
        for kind, value in block.qkv.named_parameters():
            for name, part in zip("qkv", value.chunk(3), strict=True):
                weights[f"layers.{i}.self_attn.{name}_proj.{kind}"] = part
    weights["embed_tokens.weight"] = model.character.weight
    unused = positions.new_zeros(2, shape.width)  # OPT's position 0 is its row 2
    weights["embed_positions.weight"] = torch.cat([unused, positions])
    weights = {f"model.decoder.{name}": value for name, value in weights.items()}
    other = OPTForCausalLM(config)
    other.load_state_dict(
        {name: value.detach().clone() for name, value in weights.items()}
        | {"lm_head.weight": model.head.weight.detach()},
        strict=True,
    )
    return other


def tokenizer() -> Any:
    """A byte-level tokenizer without merges whose ids are those of `model.encode`; the newline is the end."""
    from transformers import GPT2Tokenizer

    byte_level = {" ": "Ġ", "\n": "<|end|>"}
    vocabulary = {byte_level.get(character, character): i for i, character in enumerate(CHARACTERS)}
    return GPT2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token="<|end|>",
        bos_token="<|end|>",
        eos_token="<|end|>",
        pad_token=PAD_CHARACTER,
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )


def prepare(cell: Cell, seed: int, settings: train.Settings, folder: Path, cache: Path) -> None:
    """Write the warm start with its tokenizer, and the training prompts in verl's columns, into `folder`."""
    import datasets

    datasets.disable_progress_bars()
    model = as_opt(train.warm_start(cell, seed, settings, cache))
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    prompts, _ = train.load_entries(cell, settings, cache)
    family = FAMILIES[cell.family]
    width = family.width(cell.steps[1])
    rows = [
        {
            "data_source": cell.family,
            "prompt": [{"role": "user", "content": family.pad(family.prompt(entry), width)}],
            "ability": cell.family,
            "reward_model": {"style": "rule", "ground_truth": json.dumps(entry)},
            "extra_info": {"index": i},
        }
        for i, entry in enumerate(prompts.entries)
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "train.parquet"))


def train_in_verl(
    cell: Cell, rule: str, seed: int, lr: float, settings: train.Settings, folder: Path
) -> list[dict[str, float]]:
    """Run verl's trainer through the recipes' launcher; the metrics of its steps. A run that is whole is not run again.

    Raises RunFailed, with the log's end, if a step is missing.
    """
    width = FAMILIES[cell.family].width(cell.steps[1])
    data, setup = folder.parent / f"start-{seed % cell.warm_starts}", folder / "setup"
    as_now = f"{train.setup_digest(cell, settings)} {lr}"
    if setup.exists() and setup.read_text() == as_now and len(steps := Run(folder).steps()) == settings.steps:
        return steps
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    setup.write_text(as_now)
    batch = settings.prompts * settings.group
    overrides = {
        "seed": seed,
        "run_dir": folder,
        "actor_rollout_ref.model.path": data / "model",
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "train.parquet",
        "reward.custom_reward_function.path": HERE / "miniature" / "reward.py",
        "data.train_batch_size": settings.prompts,
        "data.max_prompt_length": width,
        "data.max_response_length": LIMIT,
        "actor_rollout_ref.rollout.n": settings.group,
        "actor_rollout_ref.rollout.max_num_seqs": batch,
        "actor_rollout_ref.actor.ppo_mini_batch_size": settings.prompts // settings.mini_batches,
        "actor_rollout_ref.actor.ppo_epochs": settings.epochs,
        "actor_rollout_ref.actor.shuffle": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": batch * (width + LIMIT),
        "actor_rollout_ref.actor.optim.lr": lr,
        "actor_rollout_ref.actor.clip_ratio_low": settings.clip_low,
        "actor_rollout_ref.actor.clip_ratio_high": settings.clip_high,
        "actor_rollout_ref.actor.grad_clip": settings.grad_norm,
        "trainer.total_training_steps": settings.steps,
        "trainer.n_gpus_per_node": 1,
        "ray_kwargs.ray_init.num_gpus": 1,
        "trainer.rollout_data_dir": "null",
    }
    arguments = [f"{key}={value}" for key, value in overrides.items()]
    mode = RULES[rule].mode
    assert mode is not None, rule  # `main` refuses the others
    run = launch("demo", mode, arguments, results=folder.parent, log=folder / "train.log", steps=settings.steps)
    return run.steps()


def tenths(series: list[float | None]) -> list[float | None]:
    """Means of the tenths of a run over the steps that have a value: [10], None where no step has one."""
    parts = ([v for v in part if v is not None] for part in np.array_split(np.array(series, dtype=object), 10))
    return [float(f"{np.mean(part):.4g}") if part else None for part in parts]


def run_in_loop(cell: Cell, rule: str, seed: int, lr: float, settings: train.Settings, cache: Path) -> Row:
    """`MEASURES` as means of the run's tenths."""
    torch.set_num_threads(1)
    curves = train.run(cell, rule, lr, seed, settings, cache)["curves"]
    return {name: curves[name] for name in MEASURES}


def run_in_verl(cell: Cell, rule: str, seed: int, lr: float, settings: train.Settings, cache: Path) -> Row:
    """The same, and the median time of a step [s]."""
    data = cache / NAME / cell.name / f"start-{seed % cell.warm_starts}"
    with train.locked(data.parents[1]):  # one at a time: transformers cannot be imported by two threads at once
        if not (data / "train.parquet").exists():
            prepare(cell, seed, settings, data, cache)
    steps = train_in_verl(cell, rule, seed, lr, settings, cache / NAME / cell.name / f"{rule}-{seed}")
    return {name: tenths([step.get(key) for step in steps]) for name, key in MEASURES.items()} | {
        "s_per_step": round(float(np.median([step["timing_s/step"] for step in steps])), 2)
    }


# --------------------------------------------------------------------------------------------------------------------
# All runs, resumable
# --------------------------------------------------------------------------------------------------------------------


def planned(table: dict[str, Any], cells: dict[str, Cell], settings: train.Settings) -> list[Job]:
    """Every run, the loop's first."""
    first = table["seeds"][0]
    seeds = {LOOP: range(first, first + table["loop_seeds"]), VERL: table["seeds"]}
    return [
        Job(NAME, cell, rule, table["lr"], seed, settings, where)
        for where, numbers in seeds.items()
        for seed in numbers
        for rule in table["rules"]
        for cell in cells.values()  # innermost: two processes make two warm starts, not one twice
    ]


def main(
    workers: Annotated[int, typer.Option(help="runs of verl at a time, some 5 GiB each")] = 1,
    cache: Annotated[Path, typer.Option(help="where warm starts, logs and checkpoints are kept")] = runner.CACHE,
) -> None:
    """Train the cells of miniature/in_verl.toml in the loop and in verl; goes on where it was stopped."""
    table, cells, settings = specification()
    if without := [rule for rule in table["rules"] if RULES[rule].mode is None]:
        raise typer.BadParameter(f"{SPECIFICATION}: verl has no mode for {', '.join(without)}")
    pools = {LOOP: lambda: processes(runner.WORKERS), VERL: lambda: ThreadPoolExecutor(workers)}  # a trainer a thread
    try:
        run_jobs(planned(table, cells, settings), work, RESULTS, pools, cache, console, commit=runner.commit())
    except StudyError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(table_markdown())


def work(job: Job, cache: Path) -> Row:
    """The numbers of one run."""
    run = run_in_loop if job.where == LOOP else run_in_verl
    return run(job.cell, job.rule, job.seed, job.lr, job.settings, cache)


# --------------------------------------------------------------------------------------------------------------------
# The comparison
# --------------------------------------------------------------------------------------------------------------------


def _mean(values: list[float | None]) -> float:
    return float(np.mean([v for v in values if v is not None]))


SUMMARIES = {
    "reward": ("reward, mean of the steps", lambda row: _mean(row["reward"])),
    "length_+": ("length of the right, last third", lambda row: _mean(row["length_+"][-3:])),
    "length_-": ("length of the wrong, last third", lambda row: _mean(row["length_-"][-3:])),
    "negative_share": ("weight of negatives, mean", lambda row: _mean(row["negative_share"])),
}


def values(rows: dict[tuple, Row], where: str, cell: str, rule: str, other: str | None, measure: str) -> np.ndarray:
    """Of every seed, of one rule, or less those of another rule with the same seed: [seeds]."""
    read = SUMMARIES[measure][1]
    by_rule = [
        {key[3]: read(row) for key, row in rows.items() if key[:3] == (where, cell, name)}
        for name in (rule, other)
        if name is not None
    ]
    seeds = sorted(set.intersection(*map(set, by_rule)))
    return np.array([by_rule[0][s] - (by_rule[1][s] if other else 0.0) for s in seeds])


def agreement(loop: np.ndarray, verl: np.ndarray) -> Estimate:
    """Mean in verl less mean in the loop, with Welch's 95% interval."""
    from scipy.stats import ttest_ind

    interval = ttest_ind(verl, loop, equal_var=False).confidence_interval(0.95)
    return Estimate(float(verl.mean() - loop.mean()), float(interval.low), float(interval.high))


def _compared() -> tuple[list[str], list[tuple[str, ...]]]:
    """Paragraphs that say what was run and how it agrees, and the rows of the table."""
    if not RESULTS.exists():
        raise FileNotFoundError(2, "not run", str(RESULTS))
    table, cells, settings = specification()
    jobs = planned(table, cells, settings)
    rows = finished(read_rows(RESULTS), jobs)
    last, *others = table["rules"][::-1]  # each rule against the last
    wanted = [(cell, (rule, None)) for cell in cells for rule in table["rules"]]
    wanted += [(cell, (rule, last)) for cell in cells for rule in others[::-1]]
    lines, signs, same = [], [], []
    for cell, (rule, other) in wanted:
        for measure, (title, _) in SUMMARIES.items():
            loop, verl = (values(rows, where, cell, rule, other, measure) for where in (LOOP, VERL))
            if len(loop) < 2 or len(verl) < 2:
                continue
            gap = agreement(loop, verl)
            same.append(gap.low <= 0 <= gap.high)
            if other and abs(loop.mean()) > 2 * loop.std(ddof=1) / len(loop) ** 0.5:
                signs.append(loop.mean() * verl.mean() > 0)
            form = "+.3f" if other else ".3f"
            name = f"{rule} − {other}" if other else rule
            lines.append((cell, name, title, *(f"{v.mean():{form}}" for v in (loop, verl)), gap.text("+.3f")))
    done, all_of = (
        {w: sum(key[0] == w for key in keys) for w in (LOOP, VERL)} for keys in (rows, [j.key for j in jobs])
    )
    text = [
        f"The cells {' and '.join(cells)} again, with heads of 32, {settings.prompts} prompts an update and {settings.steps} "
        f"updates, in the loop and through `verl.trainer.main_ppo` on the CPU: {done[LOOP]} of {all_of[LOOP]} and "
        f"{done[VERL]} of {all_of[VERL]} runs. Rewards and lengths are those of training, and differences are paired by "
        "seed. The noise of sampling is not the same in verl."
    ]
    if lines:
        text.append(
            f"The interval of verl less loop contains zero in {sum(same)} of {len(same)} rows; 95% are expected where the "
            f"two are alike. Of the {len(signs)} differences between rules that are clear of zero in the loop (two standard "
            f"errors), {sum(signs)} ha{'s' if sum(signs) == 1 else 've'} the same sign in verl."
        )
    return text, lines


def agreement_markdown() -> str:
    """What was run and how it agrees. Raises FileNotFoundError where nothing was run."""
    return "\n\n".join(textwrap.fill(paragraph, 126) for paragraph in _compared()[0])


def table_markdown() -> str:
    """The same with every number. Raises FileNotFoundError where nothing was run."""
    text, lines = _compared()
    header = ("cell", "rule", "measure", "loop", "verl", "verl − loop [Welch 95%]")
    return "\n\n".join([*text, Table(header, lines).markdown()])


if __name__ == "__main__":
    typer.run(main)
