"""`verl-ba gradients`: arguments, progress, files. Light to import."""

from pathlib import Path
from typing import Annotated, Any

import typer

from verl_ba.tools.analysis.commands import _console, _fail, _need_extra, _print_tables, _write


def gradients(
    model: Annotated[Path, typer.Argument(help="folder of a Hugging Face causal model: the checkpoint")],
    path: Annotated[Path, typer.Argument(help="its rollouts: verl's dump, or JSONL of prompt, response and score")],
    out: Annotated[Path, typer.Option(help="folder for the page, the numbers and the gradients; a run there goes on")],
    mode: Annotated[str, typer.Option(help="the current loss_agg_mode")] = "token-mean",
    prompts: Annotated[
        int, typer.Option(help="prompts of an update, of those whose responses differ in score", min=2)
    ] = 8,
    layers: Annotated[
        str, typer.Option(help="gradients of the last so many blocks, or 'all' for the whole model")
    ] = "2",
    size: Annotated[int, typer.Option(help="numbers that a gradient is projected to", min=256)] = 1 << 15,
    max_response_length: Annotated[int | None, typer.Option(help="responses as long were cut [tokens]", min=1)] = None,
    advantage: Annotated[str, typer.Option(help="grpo, grpo-no-std or rloo")] = "grpo",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
) -> None:
    """Which aggregation's gradient agrees best with itself, on a model and rollouts of your own? Resumes."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = _console()
    _need_extra()
    import torch

    from verl_ba.aggregation import ALL_MODES
    from verl_ba.tools.analysis import reports, rollouts, weighing
    from verl_ba.tools.gradients import measure, report, scores

    try:
        if mode not in ALL_MODES:
            raise ValueError(f"--mode {mode}: expected one of {', '.join(ALL_MODES)}")
        if advantage not in weighing.ADVANTAGES:
            raise ValueError(f"--advantage {advantage}: expected one of {', '.join(weighing.ADVANTAGES)}")
        if layers != "all" and not (layers.isdecimal() and int(layers) > 0):
            raise ValueError(f"--layers {layers}: expected a number of blocks, at least 1, or 'all'")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"--device {device}: torch finds no CUDA device here. Use --device cpu")
        if not model.is_dir():
            raise ValueError(f"{model}: expected the folder of a Hugging Face model; no such folder")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with console.status("loading the model"):
            network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            network.to(device).eval()
            tokenizer = AutoTokenizer.from_pretrained(model)

        def count(texts: list[str]) -> list[int]:
            return [len(r) for _, r in scores.tokenised(tokenizer, [("", t) for t in texts], max_response_length)]

        read = rollouts.read_rollouts(rollouts.find_files(path), count, keep_text=True)
        assert read.text is not None
        out.mkdir(parents=True, exist_ok=True)
        tokens = scores.tokenised(tokenizer, read.text, max_response_length)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=_console(stderr=True), transient=True) as progress:
            bar = progress.add_task("gradients", total=len(tokens))
            score_gradient = scores.score_gradients(
                network,
                tokens,
                out / "scores.npz",
                None if layers == "all" else int(layers),
                size,
                on_response=lambda done, total: progress.update(bar, completed=done, total=total),
            )
        found = measure.measure(score_gradient, read.length, read.score, read.group, mode, prompts, advantage)
    except (ValueError, OSError) as error:
        _fail(str(error))
    title = f"Which aggregation's gradient agrees with itself: {model.name}"
    _print_tables(console, title, report.table(found))
    for sentence in report.advice(found):
        console.print(f"• {sentence}", highlight=False, markup=False)
    subtitle = (
        f"{len(read.length):,} responses to {len(read.group_label):,} prompts, {found.useful} of them with different scores; "
        f"mean length {read.length.mean():.1f} tokens, mean score {read.score.mean():.3f}; gradients of "
        f"{'all parameters' if layers == 'all' else f'the last {layers} blocks'}; written by verl-ba gradients"
    )
    numbers = reports.to_json({"input": {"lines": read.lines, "problems": read.problems}, "gradients": found})
    _write(console, out, "gradients", title, subtitle, report.sections(found), numbers)
