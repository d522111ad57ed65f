"""`verl-ba compare`: files of verl's own loggers, damaged runs, and the numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from typer.testing import CliRunner

from verl_ba.tools.analysis import paper
from verl_ba.tools.analysis.comparison import WINDOW, compare
from verl_ba.tools.analysis.runs import Run, RunError, read_runs, read_steps, start_files
from verl_ba.tools.cli import app

SCORE, VALIDATION = "critic/score/mean", "val-core/openai/gsm8k/acc/mean@4"


def file_log(folder, name, scores, **more):
    """A run in the form of verl's file logger."""
    path = folder / f"{name}.jsonl"
    lines = [{"step": i, "data": {SCORE: s, **{k: v[i - 1] for k, v in more.items()}}} for i, s in enumerate(scores, 1)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run_of(arm, seed, series):
    series = {key: {i: float(v) for i, v in enumerate(values, 1)} for key, values in series.items()}
    return Run(f"{arm}-seed{seed}", Path(f"{arm}-seed{seed}.jsonl"), arm, seed, None, series)


# --------------------------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------------------------


def test_a_file_of_verls_file_logger_is_read(tmp_path, monkeypatch):
    from verl.utils.tracking import FileLogger

    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    logger = FileLogger("project", "token-seed3")
    for step in (1, 2):
        logger.log({SCORE: np.float32(step / 2), "actor/entropy": float("nan")}, step)
    logger.log({VALIDATION: 0.25}, 2)
    logger.finish()
    (run,) = read_runs([tmp_path / "project"])
    assert (run.name, run.arm, run.seed, run.mode) == ("token-seed3", "token", 3, "group-mean-token-mean")
    assert run.series == {SCORE: {1: 0.5, 2: 1.0}, VALIDATION: {2: 0.25}}  # nan is no value


@pytest.mark.parametrize(
    ("seconds", "starts", "overlaps"),
    [
        ([100, 100], ["10:00:00", "10:05:00"], False),  # killed after two steps, resumed
        ([100, 100], ["10:00:00", "10:03:20"], False),  # at once
        ([100, 100], ["10:00:00", "10:03:18"], True),
        ([100, None], ["10:00:00", "10:01:00"], True),  # a step without its time took at least none
        ([100, 100], ["10:00:00", "10:00:00"], True),  # two at once
        ([100, 100], None, False),  # no manifest: nothing is known
    ],
)
def test_starts_that_overlap_are_refused(tmp_path, seconds, starts, overlaps):
    run = tmp_path / "balanced-seed1"
    (run / "metrics").mkdir(parents=True)
    log = {"timing_s/step": seconds}
    file_log(run / "metrics", "1", [0.1, 0.2], **log)
    file_log(run / "metrics", "2", [0.3, 0.4], **log)
    if starts:
        manifest = {"starts": [{"started": f"2026-12-01T{time}+00:00"} for time in starts]}
        (run / "manifest.json").write_text(json.dumps(manifest))
    if overlaps:
        with pytest.raises(RunError, match=r"starts 1 and 2 overlap\. 1\.jsonl holds \d+ s of steps"):
            read_runs([run])
    else:
        assert len(read_runs([run])) == 1


def test_the_mode_comes_from_the_runs_configuration(tmp_path):
    path = file_log(tmp_path, "ours-seed2", [0.1])
    config = tmp_path / "ours-seed2" / ".hydra" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("actor_rollout_ref: {actor: {loss_agg_mode: balanced}}\n")
    for where in (path, tmp_path):
        (run,) = read_runs([where])
        assert (run.arm, run.seed, run.mode) == ("ours", 2, "balanced")


# what it is | steps and scores of each start | what is left | why
STARTS = [
    ("one start", [{1: 0.1, 2: 0.2}], {1: 0.1, 2: 0.2}, "all of it"),
    ("it went on where it stopped", [{1: 0.1, 2: 0.2}, {3: 0.3}], {1: 0.1, 2: 0.2, 3: 0.3}, "nothing was abandoned"),
    ("it repeated steps", [{1: 0.1, 2: 0.2, 3: 0.3}, {3: 0.5, 4: 0.4}], {1: 0.1, 2: 0.2, 3: 0.5, 4: 0.4},
     "from a checkpoint"),
    ("it is not yet as far", [{20: 0.5, 21: 0.6, 60: 0.9}, {21: 0.2, 40: 0.1}], {20: 0.5, 21: 0.2, 40: 0.1},
     "60 is of the branch that was abandoned"),
    ("three starts", [{1: 0.1, 2: 0.2, 3: 0.3}, {2: 0.4, 3: 0.5}, {3: 0.6}], {1: 0.1, 2: 0.4, 3: 0.6}, "each discards"),
    ("the third goes back further", [{1: 0.1, 5: 0.2}, {4: 0.3}, {2: 0.4}], {1: 0.1, 2: 0.4}, "4 was abandoned, too"),
    ("from the beginning", [{1: 0.1, 2: 0.2}, {1: 0.3}], {1: 0.3}, "without a checkpoint"),
    ("a start that wrote nothing", [{1: 0.1, 2: 0.2}, {}], {1: 0.1, 2: 0.2}, "it has no first step"),
]  # fmt: skip


def write_starts(folder, starts):
    (folder / "metrics").mkdir(parents=True)
    for number, steps in enumerate(starts, 1):
        lines = [{"step": step, "data": {SCORE: value}} for step, value in steps.items()]
        (folder / "metrics" / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(("starts", "left"), [case[1:3] for case in STARTS], ids=[case[0] for case in STARTS])
def test_a_later_start_discards_every_step_from_its_first_one_on(tmp_path, starts, left):
    """As recipes/launch.sh makes it, a metrics file for each start; and the same lines in one file."""
    folder = write_starts(tmp_path / "token-seed2", starts)
    one = tmp_path / "one" / "token-seed2.jsonl"
    one.parent.mkdir()
    one.write_text("".join(file.read_text() for file in start_files(folder)))
    for where in (tmp_path, folder, one):
        (run,) = read_runs([where])
        assert (run.arm, run.seed, run.mode) == ("token", 2, "group-mean-token-mean")
        assert run.series[SCORE] == left
        assert where == one or bool(run.notes) == (sum(map(len, starts)) > len(left))
    assert {step: metrics[SCORE] for step, metrics in read_steps(folder).items()} == left


def test_starts_are_in_the_order_of_their_numbers(tmp_path):
    folder = write_starts(tmp_path / "token-seed2", [{i: i / 100} for i in range(1, 12)])
    assert read_runs([folder])[0].last_step == 11


def test_the_validation_of_the_checkpoint_leaves_what_was_trained_before_it(tmp_path):
    folder = write_starts(tmp_path / "token-seed2", [{20: 0.5, 21: 0.6}])
    lines = [{"step": 20, "data": {VALIDATION: 0.7}}, {"step": 21, "data": {SCORE: 0.3}}]
    (folder / "metrics" / "2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = read_runs([folder])
    assert run.series == {SCORE: {20: 0.5, 21: 0.3}, VALIDATION: {20: 0.7}}
    assert "steps 21 to 21 is left out" in run.notes[0]


def test_tensorboard_files_of_several_starts(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for number, steps in enumerate(({1: 0.25, 2: 0.5, 3: 0.75}, {2: 0.125})):
        writer = SummaryWriter(tmp_path / "balanced-seed1", filename_suffix=f".{number}")
        for step, value in steps.items():
            writer.add_scalar(SCORE, value, step)
            writer.add_scalar("actor/entropy", value, step)
        writer.close()
        for path in (tmp_path / "balanced-seed1").glob(f"*.{number}"):
            path.rename(path.with_name(f"events.out.tfevents.{number}"))
    (run,) = read_runs([tmp_path / "balanced-seed1"])
    assert run.series[SCORE] == run.series["actor/entropy"] == {1: 0.25, 2: 0.125}


def test_a_tensorboard_folder_is_read(tmp_path, monkeypatch):
    from verl.utils.tracking import _TensorboardAdapter

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "sequence-seed1"))
    adapter = _TensorboardAdapter("project", "sequence-seed1")
    for step in range(1, 1201):  # more than tensorboard's own reader keeps unasked
        adapter.log({SCORE: step / 1200}, step)
    adapter.finish()
    (run,) = read_runs([tmp_path])
    assert (run.arm, run.seed, run.mode) == ("sequence", 1, "seq-mean-token-mean")
    assert len(run.series[SCORE]) == 1200
    assert run.series[SCORE][600] == pytest.approx(0.5)


WANDB_RUN = f"""
import wandb
config = {{"actor_rollout_ref": {{"actor": {{"loss_agg_mode": "balanced"}}}}, "seed": 5}}
wandb.init(project="p", name="mine", config=config)
for step in range(1, 4):
    wandb.log({{"{SCORE}": step / 4, "long": "x" * 40_000}}, step=step)
wandb.finish()
"""


def test_an_offline_wandb_folder_is_read_a_cut_one_up_to_there_and_a_damaged_one_is_an_error(tmp_path):
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", WANDB_RUN], env=environment, check=True, timeout=300, capture_output=True)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (run,) = read_runs([folder])
    assert (run.name, run.arm, run.seed, run.mode) == ("mine", "mine", 5, "balanced")
    assert run.series[SCORE] == {1: 0.25, 2: 0.5, 3: 0.75}  # records of 40,000 bytes cross the blocks of 32 KiB
    (file,) = folder.glob("*.wandb")
    file.write_bytes(file.read_bytes()[:100_000])
    (run,) = read_runs([folder])
    assert run.series[SCORE] in ({1: 0.25}, {1: 0.25, 2: 0.5})
    assert f"{file.name} is cut at byte" in run.notes[0]
    file.write_bytes(file.read_bytes()[:20_000] + b"\xff" * 30_000)
    with pytest.raises(RunError, match=rf"{file.name}: damaged at byte \d+ of 50000"):
        read_runs([folder])
    file.write_bytes(b"nothing")
    with pytest.raises(RunError, match="not a wandb file"):
        read_runs([folder])


def test_the_padding_at_the_end_of_a_wandb_block_is_skipped(tmp_path):
    from verl_ba.tools.analysis import runs

    first = b"a" * (runs._BLOCK - 3 - runs._HEADER - runs._PIECE.size)  # leaves 3 bytes: no room for another header
    pieces = [runs._PIECE.pack(0, len(data), runs._WHOLE) + data for data in (first, b"second")]
    path = tmp_path / "run.wandb"
    path.write_bytes(b":W&B" + bytes(3) + pieces[0] + bytes(3) + pieces[1])
    assert list(runs._wandb_records(path, [])) == [first, b"second"]


def test_missing_and_cut_runs_are_named(tmp_path):
    with pytest.raises(RunError, match=r"nowhere: no such run"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(RunError, match=r"no run in it. Expected a run's folder \(metrics/1.jsonl\)"):
        read_runs([tmp_path])
    (tmp_path / "empty-seed1.jsonl").touch()
    with pytest.raises(RunError, match=r"empty-seed1.jsonl: no metrics in it"):
        read_runs([tmp_path / "empty-seed1.jsonl"])
    path = file_log(tmp_path, "cut-seed1", [0.1, 0.2])
    whole = path.read_text()
    path.write_text(whole[:-9])
    (run,) = read_runs([path])
    assert run.series == {SCORE: {1: 0.1}}
    (note,) = run.notes
    assert "cut-seed1.jsonl:2 is cut" in note
    assert compare([run]).notes[0] == note
    path.write_text(whole.strip())  # the line is whole
    assert read_runs([path])[0].series == {SCORE: {1: 0.1, 2: 0.2}}
    path.write_text(whole[:-9] + whole)  # not the last line: which step it was cannot be told
    with pytest.raises(RunError, match=r"cut-seed1.jsonl:2: expected a line .* damaged"):
        read_runs([path])
    path.write_text('{"input": "a rollout dump"}\n')
    with pytest.raises(RunError, match=r"cut-seed1.jsonl:1: expected a line"):
        read_runs([path])
    (tmp_path / "gone-seed1" / ".hydra").mkdir(parents=True)
    with pytest.raises(RunError, match=r"gone-seed1: a run's folder without metrics/1.jsonl"):
        read_runs([tmp_path / "gone-seed1"])


def test_runs_that_cannot_be_told_apart_are_an_error(tmp_path):
    one, two = file_log(tmp_path, "balanced-seed1", [0.1]), file_log(tmp_path, "token-seed1", [0.2])
    runs = read_runs([one], [("other", two)])
    assert [(run.arm, run.seed) for run in runs] == [("balanced", 1), ("other", 1)]
    with pytest.raises(RunError, match=r"both arm 'balanced' with the same seed, 1"):
        read_runs([one, one])
    with pytest.raises(RunError, match=r"both arm 'x' with no seed in either name"):
        read_runs([], [("x", file_log(tmp_path, "a", [0.1])), ("x", file_log(tmp_path, "b", [0.1]))])
    with pytest.raises(RunError, match=r"arm 'x' has two modes: .* ran balanced, .* ran group-mean-token-mean"):
        read_runs([], [("x", one), ("x", file_log(tmp_path, "token-seed2", [0.2]))])


# --------------------------------------------------------------------------------------------------------------------
# Numbers
# --------------------------------------------------------------------------------------------------------------------


def three_seeds(seed=0):
    """Two arms of three seeds, two benchmarks: `a` is above `b` by .1 on the first, by the seed's noise on the second."""
    rng = np.random.default_rng(seed)
    runs = []
    for s in (1, 2, 3):
        level = 0.3 * s
        for arm, plus in (("a", 0.1), ("b", 0.0)):
            series = {
                "val-core/one/acc/mean@4": [level, level + 0.2 + plus, level + 0.1 + plus],
                "val-core/two/acc/mean@4": list(rng.uniform(0.4, 0.6, 3)),
                "val-core/two/acc/best@4/mean": [1, 1, 1],
                SCORE: [0.1, 0.2, 0.3],
            }
            runs.append(run_of(arm, s, series))
    return runs


def test_last_step_peak_and_drop_of_every_benchmark():
    result = compare(three_seeds(), resamples=200)
    assert result.benchmarks == ["val-core/one/acc/mean@4", "val-core/two/acc/mean@4"]
    assert not result.smoothed
    a = result.arms[0]
    assert a.scores["last"][:, 0] == pytest.approx([0.5, 0.8, 1.1])
    mean, one, two = (e.value for e in a.estimates["last"])
    assert one == pytest.approx(0.8)
    assert mean == pytest.approx((one + two) / 2)
    assert a.estimates["peak"][1].value == pytest.approx(0.9)
    drop = a.estimates["drop"][1]
    assert (drop.value, drop.low, drop.high) == pytest.approx((0.1, 0.1, 0.1))


def test_differences_are_paired_by_seed():
    (pair,) = compare(three_seeds(), resamples=200).pairs
    assert (pair.a, pair.b, pair.seeds) == ("a", "b", [1, 2, 3])
    one = pair.difference[1]
    # unpaired, the seeds' levels (.3, .6, .9) would make this interval wide
    assert (one.value, one.low, one.high) == pytest.approx((0.1, 0.1, 0.1))
    two = np.array([np.subtract(*[arm.scores["last"][s, 1] for arm in compare(three_seeds()).arms]) for s in range(3)])
    assert pair.probability.value == pytest.approx((1 + (two > 0).mean()) / 2)
    assert pair.probability.low <= pair.probability.value <= pair.probability.high


def test_intervals_repeat_with_the_seed_and_change_with_another():
    runs = [run_of("a", s, {VALIDATION: [s / 10]}) for s in range(10)]
    bounds = [compare(runs, resamples=100, seed=s).arms[0].estimates["last"][0].low for s in (0, 0, 1)]
    assert bounds[0] == bounds[1] != bounds[2]


def test_the_interval_of_one_benchmark_is_scipys():
    values = np.random.default_rng(2).normal(0.5, 0.1, 8)
    result = compare([run_of("a", s, {VALIDATION: [v]}) for s, v in enumerate(values)], resamples=9000)
    expected = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=9000, rng=np.random.default_rng(3)
    ).confidence_interval
    got, curve = result.arms[0].estimates["last"][0], result.curves[VALIDATION]["a"]
    for low, high in ((got.low, got.high), (curve.low[0], curve.high[0])):
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.004)


def test_benchmarks_draw_their_seeds_separately():
    values = np.random.default_rng(5).normal(0.5, 0.1, 8)
    series = [{f"val-core/{name}/acc/mean@1": [v] for name in "abcd"} for v in values]
    four = compare([run_of("a", s, x) for s, x in enumerate(series)], resamples=4000).arms[0].estimates["last"]
    mean, one = four[0], four[1]
    assert mean.value == pytest.approx(one.value)
    assert (mean.high - mean.low) / (one.high - one.low) == pytest.approx(0.5, abs=0.05)  # 1/√4 of one benchmark's


def test_one_seed_gives_no_interval_and_says_so():
    runs = [run for run in three_seeds() if run.seed == 1]
    result = compare(runs)
    assert np.isnan(result.arms[0].estimates["last"][0].low)
    assert np.isnan(result.pairs[0].probability.value)
    assert np.isnan(result.curves[SCORE]["a"].low).all()
    assert any("One seed gives no interval: a, b" in note for note in result.notes)
    assert any("Few seeds: a (3), b (3)" in note for note in compare(three_seeds(), resamples=20).notes)


def test_only_common_seeds_are_compared_and_the_notes_say_so():
    runs = [run for run in three_seeds() if (run.arm, run.seed) != ("b", 2)]
    result = compare(runs, resamples=20)
    assert result.pairs[0].seeds == [1, 3]
    assert "a and b are compared on the 2 seeds that both have." in result.notes
    runs = [run for run in three_seeds() if (run.arm == "a") == (run.seed == 1)]
    result = compare(runs, resamples=20)
    assert result.pairs == []
    assert "a and b have no seed in common: not compared." in result.notes


def test_without_validation_the_training_score_is_averaged_over_steps():
    scores = [0.0, 0.0, 0.9, *[0.6] * 7]
    result = compare([run_of("a", 1, {SCORE: scores})])
    assert result.smoothed
    assert result.benchmarks == [SCORE]
    assert result.arms[0].scores["last"][0, 0] == pytest.approx(0.6)
    assert result.arms[0].scores["peak"][0, 0] == pytest.approx((0.9 + 4 * 0.6) / WINDOW)
    assert result.curves[SCORE]["a"].mean[:3] == pytest.approx([0, 0, 0.3])
    assert any("no validation metric" in note for note in result.notes)


def test_the_size_of_the_loss_is_drawn_not_its_sign():
    runs = [run_of("a", s, {SCORE: [1, 1], "actor/pg_loss": [sign * 0.2] * 2}) for s, sign in ((1, 1), (2, -1))]
    curve = compare(runs, resamples=20).curves["actor/pg_loss"]["a"]
    assert curve.mean == pytest.approx([0.2, 0.2])


def test_a_run_that_ends_early_is_an_error_that_names_it():
    runs = [run_of("a", 1, {SCORE: [1, 2, 3]}), run_of("b", 1, {SCORE: [1, 2]})]
    with pytest.raises(RunError, match=r"b-seed1.jsonl ends at step 2; a-seed1.jsonl goes on to step 3.*--until 2"):
        compare(runs)
    assert compare(runs, until=2).last_step == 2
    with pytest.raises(RunError, match=r"a-seed1.jsonl: nothing up to step 0"):
        compare(runs, until=0)


def test_a_run_without_a_benchmark_or_a_step_of_it_is_named():
    both = {SCORE: [1, 2], VALIDATION: [1, 2]}
    with pytest.raises(RunError, match=r"b-seed1.jsonl: 'val-core/.*' is missing at 2 of 2 steps \(1, 2\)"):
        compare([run_of("a", 1, both), run_of("b", 1, {SCORE: [1, 2]})])
    hole = run_of("b", 1, both)
    del hole.series[VALIDATION][1]
    with pytest.raises(RunError, match=r"missing at 1 of 2 steps \(1\)"):
        compare([run_of("a", 1, both), hole])
    with pytest.raises(RunError, match="there is nothing to compare"):
        compare([run_of("a", 1, {"x": [1]})])


# --------------------------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_compare_prints_and_writes_its_report(tmp_path):
    for arm in ("balanced", "token"):
        for seed in (1, 2):
            file_log(tmp_path, f"{arm}-seed{seed}", [0.1, 0.2 * seed], **{VALIDATION: [0.3, 0.4]})
    result = run(tmp_path, "--out", tmp_path / "out", "--resamples", 50)
    assert result.exit_code == 0, result.output
    for text in ("balanced − token", "0.400 [0.400,", "Few seeds"):
        assert text in result.output
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"compare.html", "compare.md", "compare.json", "curves.png", "differences.png"}
    numbers = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [arm["seeds"] for arm in numbers["arms"]] == [[1, 2], [1, 2]]
    text = (tmp_path / "out" / "compare.md").read_text()
    assert "| openai/gsm8k mean@4 | token | 2 | 0.400 [0.400, 0.400] | 0.400" in text
    assert "loss_agg_mode: balanced balanced, token group-mean-token-mean." in text
    assert paper.CAVEAT in text
    assert "| Qwen3-1.7B / DAPO-17k | 0.4481 | 0.4360 | 0.4695 |" in text


def test_compare_says_what_to_do_about_bad_arguments(tmp_path):
    for arguments, message in (
        ([], "no run given. Example: verl-ba compare"),
        (["--arm", "balanced"], "--arm balanced: expected NAME=PATH"),
        ([tmp_path / "x"], "no such run"),
    ):
        result = run(*arguments)
        assert result.exit_code == 1
        assert message in result.output
