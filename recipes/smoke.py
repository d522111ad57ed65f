"""Two real steps of every recipe under every arm on the CPU, through launch.sh and its configs: `make recipes-smoke`.

Models are tiny and untrained, data are small files in the sources' formats; `cluster=smoke` replaces what needs a GPU.
Then one run is resumed from its checkpoint, and the checkpoint is evaluated.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from recipes.cpu_site import prefork
from recipes.runs import HERE, Run, RunFailed, call, launch, run_folder
from verl_ba.paper.data.sources import SOURCES
from verl_ba.tools.analysis.modes import ARM_MODES as ARMS
from verl_ba.tools.analysis.modes import in_full

PAPER = ("qwen2.5_math_7b_dapo17k", "qwen2.5_math_7b_polaris", "qwen3_1.7b_dapo17k", "qwen3_1.7b_polaris")
BENCHMARKS = ("math500", "aime24", "aime25", "olympiadbench", "minerva", "livecodebench")
RECIPES = dict.fromkeys(PAPER, BENCHMARKS) | {
    "qwen2.5_math_7b_dapo17k_verl": ("math_dapo",),
    "qwen2.5_0.5b_gsm8k": ("openai/gsm8k",),
    "qwen2.5_math_1.5b_math": ("math500",),
}
"""Recipe -> the `data_source`s that its validation reports."""
SMALL_AIME = {"aime24": 3, "aime25": 3}
QWEN2 = ("Qwen2.5-Math-7B", "Qwen2.5-Math-1.5B", "Qwen2.5-0.5B-Instruct")
ATTACHED = ("balanced", "group-mean-token-mean")
"""Modes of this package; verl has the others itself."""
TIMEOUT = 900  # seconds of a run
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def make_models(folder: Path, texts: list[str]) -> None:
    """An untrained Qwen2 and an untrained Qwen3 under the names that the recipes ask for."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from recipes.demo.prepare import make_tokenizer

    tokenizer = make_tokenizer(texts, vocabulary=400)
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    for name, model_class, config in (
        *((name, Qwen2ForCausalLM, Qwen2Config(**shape)) for name in QWEN2),
        ("Qwen3-1.7B", Qwen3ForCausalLM, Qwen3Config(**shape, head_dim=32, tie_word_embeddings=True)),
    ):
        torch.manual_seed(0)
        model_class(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def make_data(folder: Path) -> list[str]:
    """Small files in the sources' formats through the real builder; their questions."""
    import pyarrow.parquet

    from recipes.small_data import write_small_sources

    write_small_sources(folder / "sources")
    command = [sys.executable, "-m", "verl_ba", "data", "all", "--unverified"]
    subprocess.run([*command, "--from", folder / "sources", "--out", folder], check=True)
    for name in ("dapo17k", "aime24"):  # verl's own DAPO setting reads them as they are published
        source = SOURCES[name]
        shutil.copy(folder / "sources" / source.repository / source.file, folder)
    tables = [pyarrow.parquet.read_table(file) for file in sorted(folder.glob("*.parquet"))]
    return [message["content"] for table in tables for prompt in table["prompt"].to_pylist() for message in prompt]


@dataclass
class Outcome:
    """One run: what went wrong, if anything, and the numbers that show that it trained."""

    name: str
    seconds: float
    faults: list[str]
    steps: list[dict[str, float]]

    @property
    def row(self) -> list[str]:
        last = self.steps[-1] if self.steps else {}

        def number(key: str, form: str) -> str:
            return format(last[key], form) if key in last else "–"

        return [
            self.name,
            str(len(self.steps)),
            number("actor/pg_loss", ".1e"),
            number("actor/grad_norm", ".2e"),
            number("response_length/mean", ".1f"),
            f"{self.seconds:.0f}",
            "; ".join(self.faults) or "ok",
        ]


def environment(results: Path) -> dict[str, str]:
    """Of a recipe's script: where the small models and data are."""
    return {"DATA_DIR": str(results / "data"), "MODEL_DIR": str(results / "models")}


def train(recipe: str, arm: str, results: Path, steps: int, *overrides: str) -> Outcome:
    """Run one combination, and look whether it did what it says."""
    start = time.monotonic()
    log = results / "logs" / f"{recipe}-{arm}.log"
    steps_done, found = [], []
    try:
        run = launch(
            recipe,
            arm,
            ["cluster=smoke", *overrides],
            results=results,
            log=log,
            environment=environment(results),
            timeout=TIMEOUT,
        )
        steps_done = run.steps()
        found = faults(run, arm, steps, RECIPES[recipe])
    except RunFailed:
        errors = [line for line in log.read_text(errors="replace").splitlines() if "rror" in line][-1:]
        found = [f"failed, see {log}: {' '.join(errors)[:200]}"]
    return Outcome(f"{recipe} {arm}", time.monotonic() - start, found, steps_done)


def faults(run: Run, arm: str, steps: int, benchmarks: Sequence[str]) -> list[str]:
    """What a run that ended did not do."""
    done, found = run.steps(), []
    if len(done) != steps:
        found.append(f"{len(done)} of {steps} steps")
    if not all("actor/pg_loss" in s and s.get("actor/grad_norm", 0) > 0 for s in done):  # only finite numbers are read
        found.append("a loss or gradient that is 0 or not finite")
    logged = {key for step in run.logged().values() for key in step}
    found += [f"no validation of {b}" for b in benchmarks if not any(k.startswith(f"val-core/{b}/") for k in logged)]
    config = run.manifest["starts"][-1]["config"]
    if config["actor_rollout_ref"]["actor"]["loss_agg_mode"] != in_full(arm):
        found.append("another mode in the manifest")
    attached = f"loss_agg_mode={in_full(arm)}; verl_ba" in run.output
    if attached != (in_full(arm) in ATTACHED):
        found.append("the workers' line on what is attached is missing or too much")
    return found


def resume(recipe: str, arm: str, results: Path) -> Outcome:
    """The same run once more, one step longer and with another logger: it must go on from its checkpoint."""
    more = "trainer.save_freq=2", "trainer.total_training_steps=3", "trainer.logger=[console,file,tensorboard]"
    outcome = train(recipe, arm, results, 3, *more)
    outcome.name = f"resume {outcome.name}"
    log = (results / "logs" / f"{recipe}-{arm}.log").read_text(errors="replace")
    if "global_step_2" not in log:
        outcome.faults.append("did not load global_step_2")
    folder = run_folder(recipe, arm, [], results)
    if f"{folder}: config.trainer.total_training_steps was 2, is 3" not in log:
        outcome.faults.append("did not say what changed since the first start")
    if not list((folder / "metrics" / "2-tensorboard").glob("events.*")):
        outcome.faults.append("wrote no tensorboard events")
    return outcome


def evaluate(recipe: str, arm: str, results: Path) -> Outcome:
    """The table from the checkpoint that the run wrote."""
    start = time.monotonic()
    folder, log = run_folder(recipe, arm, [], results), results / "logs" / "evaluate.log"
    checkpoint = folder / "checkpoints" / "global_step_2"
    small = [f"evaluation.responses.{name}={count}" for name, count in SMALL_AIME.items()]
    script = [str(HERE / "evaluate.sh"), str(checkpoint), *small]
    status = call(script, log, environment(results) | {"RESULTS_DIR": str(results)}, TIMEOUT)
    report = folder / "evaluation" / "global_step_2" / "evaluation.json"
    found = [f"exit status {status}, see {log}"] if status != 0 else []
    if status == 0:
        benchmarks = json.loads(report.read_text())["benchmarks"]
        if {name: b["responses"] for name, b in benchmarks.items()} != dict.fromkeys(BENCHMARKS, 4) | SMALL_AIME:
            found.append(f"other benchmarks or counts than asked for: {report}")
    return Outcome(f"evaluate {recipe} {arm}", time.monotonic() - start, found, [])


def main(
    results: Annotated[Path, typer.Option(help="where everything goes; emptied first")] = Path("results/smoke"),
    only: Annotated[str, typer.Option(help="run combinations that contain this text")] = "",
) -> None:
    """Two steps of each recipe and arm on the CPU, a resumed run, and an evaluation."""
    begin = time.monotonic()
    results = results.resolve()
    shutil.rmtree(results, ignore_errors=True)
    make_models(results / "models", make_data(results / "data"))
    chosen = [(r, a) for r in RECIPES for a in ARMS if only in f"{r} {a}"]
    if not chosen:
        raise typer.BadParameter(f"no combination contains {only!r}; recipes: {tuple(RECIPES)}, arms: {tuple(ARMS)}")
    first = chosen[0]
    jobs = [partial(train, *first, results, 2, "trainer.save_freq=2")]
    jobs += [partial(train, *combination, results, 2) for combination in chosen[1:]]
    jobs.append(partial(resume, *first, results))
    if first[0] in PAPER:  # the others have no table of benchmarks
        jobs.append(partial(evaluate, *first, results))
    outcomes: list[Outcome] = []
    columns = TextColumn("recipes"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with prefork.serve() as server, Progress(*columns, console=Console(stderr=True, highlight=False)) as progress:
        # The runs' processes fork from one that has imported the libraries.
        os.environ[prefork.VARIABLE] = server.listening()
        for job in progress.track(jobs):
            outcomes.append(job())
            progress.console.print("  ".join(outcomes[-1].row))
    table = Table(
        "run", "steps", "pg_loss", "grad_norm", "length", "s", "", title="recipes on the CPU, last step of each"
    )
    for outcome in outcomes:
        table.add_row(*outcome.row)
    console.print(table)
    failed = sum(bool(outcome.faults) for outcome in outcomes)
    console.print(f"{len(outcomes) - failed} of {len(outcomes)} ok, {(time.monotonic() - begin) / 60:.1f} min")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
