"""`verl-ba analyze`: dumps written by verl's own functions, every way a line can be wrong, and the numbers."""

import json
import math
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from typer.testing import CliRunner

from verl_ba.aggregation import ALL_MODES
from verl_ba.metrics import balance_metrics
from verl_ba.tools.analysis import rollouts, tokens, weighing
from verl_ba.tools.analysis.rollouts import NoRollouts, find_files, read_rollouts
from verl_ba.tools.cli import app


def write(path, records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def plain(prompt, score, length, **more):
    return {"prompt": prompt, "response": "…", "score": score, "length": length, **more}


def synthetic(path, groups=40, size=8, gap=1.0, variation=0.0, steps=2, seed=0):
    """Groups with both signs; negatives `gap` times as long, with log-normal variation."""
    rng = np.random.default_rng(seed)
    records = []
    for g in range(groups):
        for i in range(size):
            score = float(i < size // 2)
            length = round(400 * (gap if score == 0 else 1) * rng.lognormal(0, variation))
            records.append(plain(f"question {g}", score, max(length, 1), uid=f"q{g}", step=g % steps + 1))
    return write(path, records)


# --------------------------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------------------------


def test_a_dump_of_the_v1_trainer_groups_by_uid_and_folds_sessions(tmp_path):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    uids = ["a-1_0_0", "a-1_0_1", "a-1_1_0", "b_2_0_0", "b_2_1_0"]
    outputs, scores = ["xx", "xxx", "x", "xxxx", "xxxxx"], [0.0, 1.0, 0.0, 1.0, 0.0]
    PPOTrainer._write_generations(["p"] * 5, outputs, ["9"] * 5, scores, {"uid": uids}, str(tmp_path), 12)
    got = read_rollouts(find_files(tmp_path), lambda texts: [len(t) for t in texts])
    assert got.group_label == ["a-1", "b_2"]
    assert got.group.tolist() == [0, 0, 1, 1]
    assert got.length.tolist() == [5, 1, 4, 5]  # the two rows of a-1's session 0 are one response
    assert got.score.tolist() == [1, 0, 1, 0]  # with the last row's score
    assert got.group_step.tolist() == [12, 12]
    assert got.problems.counts == {}


def test_a_dump_of_the_legacy_trainer_groups_by_prompt_and_step(tmp_path):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    for step in (9, 10):
        extra = {"acc": [True, False, True, False], "request_id": list("wxyz")}
        inputs, outputs = ["one", "two", "one", "two"], ["x", "xx", "xxx", "xxxx"]
        RayPPOTrainer._write_generations(inputs, outputs, [None] * 4, [1.0, 0.0, 0.0, 1.0], extra, str(tmp_path), step)
    got = read_rollouts(find_files(tmp_path), lambda texts: [len(t) for t in texts])
    assert got.group.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert got.group_label == ["one", "two"] * 2
    assert got.group_step.tolist() == [9, 9, 10, 10]  # in the order of numbers, not of names
    assert got.group_place == ["9.jsonl:1", "9.jsonl:2", "10.jsonl:1", "10.jsonl:2"]


def test_the_length_that_training_used_is_taken_by_default_and_padding_rows_are_no_prompts(tmp_path):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    extra = {"uid": ["a_0_0", "a_1_0", "b_0_0", "b_1_0", "pad7_0_0"], "response_length": [3, 5, 4, 0, 0]}
    scores = [1.0, 0.0, 1.0, 0.0, 0.0]
    PPOTrainer._write_generations(["p"] * 5, ["text"] * 5, [None] * 5, scores, extra, str(tmp_path), 1)
    read = read_rollouts(find_files(tmp_path))
    assert read.length.tolist() == [3, 5, 4, 0, 0]
    assert read.problems.counts == {}
    step = weighing.weigh(read, resamples=10).steps[1]
    assert [step[name].value for name in ("groups", "groups_mixed", "groups_without_variance")] == [2, 0.5, 0.5]
    assert step["empty_responses"].value == 2


def test_plain_lines_with_chat_prompts_and_a_named_length(tmp_path):
    chat = [{"role": "user", "content": "2+2"}]
    lines = [
        {"prompt": chat, "response": "4", "reward": True, "n": 3},
        {"prompt": chat, "response": "5", "reward": 0, "n": 5},
    ]
    got = read_rollouts([write(tmp_path / "7.jsonl", lines)], length_field="n")
    assert got.length.tolist() == [3, 5]
    assert got.score.tolist() == [1, 0]
    assert got.group.tolist() == [0, 0]
    assert got.group_step.tolist() == [7]  # from the file's name


def verls(step, uid=None, score=1.0, length=4, **more):
    """A line as verl's trainers write it; without a uid the legacy trainer's."""
    line = {"input": "p", "output": "o", "gts": None, "score": score, "step": step, "response_length": length, **more}
    return line if uid is None else {**line, "uid": uid}


def group(step, prompt, *lengths):
    """One group of the legacy trainer, the first response right."""
    return [verls(step, score=float(i == 0), length=n, input=prompt) for i, n in enumerate(lengths)]


NO_SCORE, NO_LENGTH, NO_GROUP = "no score", "no length", "neither a uid nor a prompt to tell the group by"
COPY, ABANDONED = "a copy of an earlier line", "a step that a later start of the run took again, or one after it"
SEVERAL = "a prompt that its step seems to have several times, without a uid to tell the groups apart"
SHORT_STEP = "step with fewer responses than the other steps; used all the same"
SHORT_GROUP = "group with fewer responses than the other groups; used all the same"
ALONE = "group of one response: no other to compare it with; used all the same"
CUT = "the last line is cut: the run was killed while it wrote"
PLAIN = [plain("p", 1.0, 4), plain("p", 0.0, 6)]

# what it is | lines by file | lengths that are right | problems | why
ODD = [
    ("a cut last line", {"f": [*PLAIN, '{"prompt": "p", "response": "cut he|']}, [4, 6], {CUT: ["f.jsonl:3"]},
     "the lines before it are whole"),
    ("a cut line that a later start wrote on after", {"f": [*PLAIN, '{"prompt": "p", "resp{"prompt": "p"}']}, [4, 6],
     {"not JSON": ["f.jsonl:3"]}, "which of the two it was cannot be told"),
    ("a last line without its end", {"f": [*PLAIN, json.dumps(PLAIN[0]) + "|"]}, [4, 6, 4], {}, "it is whole"),
    ("the zeros of a disk that lost power", {"f": [*PLAIN, "\0\0\0|"]}, [4, 6], {CUT: ["f.jsonl:3"]}, "no line"),
    ("empty lines", {"f": [PLAIN[0], "", "  ", PLAIN[1]]}, [4, 6], {}, "nobody wrote anything there"),
    ("another kind of JSON", {"f": [*PLAIN, "[1, 2]", '"text"', "7"]}, [4, 6], {"not a JSON object": ["f.jsonl:3",
     "f.jsonl:4", "f.jsonl:5"]}, "no fields"),
    ("not UTF-8 where it is needed", {"f": [*PLAIN, b'{"\xff": 1, "uid": "\xff", "score": 1, "length": 3}']}, [4, 6],
     {"not JSON": ["f.jsonl:3"]}, "the uid is unknown"),
    ("not UTF-8 in a text that is not needed", {"f": [*PLAIN, b'{"prompt": "p", "response": "\xff", "score": 1, '
     b'"length": 3}']}, [4, 6, 3], {}, "only its length is needed"),
    ("half a surrogate pair, as Python writes it", {"f": [*PLAIN, plain("p", 1.0, 3, response="\ud83d")]}, [4, 6, 3], {},
     "only its length is needed"),
    ("all kinds of letters", {"f": [*PLAIN, plain("p", 1.0, 3, response="ℓ̄ 長さ \u2028 \x7f 🙂")]}, [4, 6, 3], {},
     "a line ends at a line feed only"),
    ("a score that is nan", {"f": [*PLAIN, plain("p", math.nan, 3)]}, [4, 6], {NO_SCORE: ["f.jsonl:3"]},
     "nobody knows whether it was right"),
    ("a score that is infinite", {"f": [*PLAIN, plain("p", -math.inf, 3), '{"prompt": "p", "score": 1e999}']}, [4, 6],
     {NO_SCORE: ["f.jsonl:4", "f.jsonl:3"]}, "no mean of its group"),
    ("a score as text", {"f": [*PLAIN, plain("p", "1.0", 3)]}, [4, 6], {NO_SCORE: ["f.jsonl:3"]},
     "a reward is a number, and text may be a grade"),
    ("a score that is not there", {"f": [*PLAIN, plain("p", None, 3)]}, [4, 6], {NO_SCORE: ["f.jsonl:3"]}, "unknown"),
    ("a reward that is true or false", {"f": [plain("p", True, 4), {"prompt": "p", "reward": False, "length": 6}]},
     [4, 6], {}, "1 and 0"),
    ("nan in a field that is not needed", {"f": [*PLAIN, plain("p", 1.0, 3, loss=math.nan)]}, [4, 6, 3], {},
     "Python writes NaN, which JSON does not have; the rest of the line is whole"),
    ("an empty output that ended at once", {"f": [verls(1, length=1, output=""), verls(1, score=0.0)]}, [1, 4], {},
     "its end token"),
    ("an empty output that is masked", {"f": [verls(1, length=0, output=""), verls(1, score=0.0)]}, [0, 4], {},
     "a response without a valid token weighs nothing, and counts as empty"),
    ("a length below 0", {"f": [*PLAIN, plain("p", 1.0, -2)]}, [4, 6], {NO_LENGTH: ["f.jsonl:3"]}, "no length"),
    ("a length as text, or true", {"f": [*PLAIN, plain("p", 1.0, "3"), plain("p", 1.0, True)]}, [4, 6],
     {NO_LENGTH: ["f.jsonl:3", "f.jsonl:4"]}, "no number"),
    ("a step as text", {"f": [*PLAIN, plain("p", 1.0, 3, step="last")]}, [4, 6],
     {"the step is not a whole number": ["f.jsonl:3"]}, "its group is unknown"),
    ("neither uid nor prompt", {"f": [*PLAIN, {"response": "r", "score": 1.0, "length": 2}]}, [4, 6],
     {NO_GROUP: ["f.jsonl:3"]}, "its group is unknown"),
    ("two forms", {"f": [*PLAIN, verls(0)]}, [4, 6, 4], {"another form": ["f.jsonl:3"]}, "both say what is needed"),
    ("a group of one", {"f": [*PLAIN, plain("alone", 1.0, 2)]}, [4, 6, 2], {ALONE: ["f.jsonl:3"]}, "it is what training saw"),
    ("a step cut between two lines", {str(i): [verls(i, f"{i}{j // 8}_{j}_0") for j in range(64 if i < 3 else 21)]
     for i in (1, 2, 3)}, [4] * 149, {SHORT_STEP: ["3.jsonl:1 (step 3: 21 of 64)"], SHORT_GROUP: ["3.jsonl:17 (5 of 8)"]},
     "what is there is right, and less than there was"),
    ("steps that all differ", {str(i): [verls(i, f"{i}{j // 2}_{j}_0") for j in range(2 * i)] for i in (1, 2, 3, 4)},
     [4] * 20, {}, "nothing says how many there should be"),
    ("a resumed run in one file", {"f": [line for start, steps in ((1, (1, 2, 3, 4)), (2, (3, 4))) for step in steps
     for line in group(step, "p", 10 * step + start, start)]}, [11, 1, 21, 1, 32, 2, 42, 2],
     {ABANDONED: ["f.jsonl:5", "f.jsonl:6", "f.jsonl:7"]}, "the model that goes on comes from the second start"),
    ("a resumed run that went less far", {"f": [line for start, steps in ((1, (1, 2, 3, 4)), (2, (2,))) for step in steps
     for line in group(step, "p", 10 * step + start, start)]}, [11, 1, 22, 2],
     {ABANDONED: ["f.jsonl:3", "f.jsonl:4", "f.jsonl:5"]}, "steps 3 and 4 come from the branch that was given up"),
    ("a resumed run in two files", {"a": [verls(s, f"{s}x_{i}_0", length=s) for s in (1, 2) for i in (0, 1)],
     "b": [verls(2, f"2y_{i}_0", length=9) for i in (0, 1)]}, [1, 1, 9, 9], {ABANDONED: ["a.jsonl:3", "a.jsonl:4"]},
     "uids are drawn anew, so these are no copies"),
    ("steps in the order of a shell's wildcard", {"f": [line for step in (1, 10, 11, 2, 3) for line in group(step, "p",
     step, 1)]}, [1, 1, 10, 1, 11, 1, 2, 1, 3, 1], {}, "no step comes twice"),
    ("one step in the files of two ranks", {"a": [verls(1, "x_0_0", length=1), verls(1, "y_0_0", length=2)],
     "b": [verls(1, "x_1_0", length=3), verls(1, "y_1_0", length=4)]}, [1, 3, 2, 4], {}, "the groups go on"),
    ("the same file twice", {"1": [verls(1, f"x_{i}_0") for i in (0, 1)], "copy": [verls(1, f"x_{i}_0") for i in (0, 1)]},
     [4, 4], {COPY: ["1.jsonl:1", "1.jsonl:2"]}, "a uid stands for one row; the folder's other file is read first"),
    ("two files in a third", {"1": group(1, "p", 3, 5), "2": group(2, "p", 3, 5), "all": group(1, "p", 3, 5) +
     group(2, "p", 3, 5)}, [3, 5, 3, 5], {COPY: ["1.jsonl:1", "1.jsonl:2", "2.jsonl:1"]}, "the same lines"),
    ("plain lines in two files", {"a": PLAIN, "b": [PLAIN[1], plain("p", 1.0, 9)]}, [4, 6, 9], {COPY: ["b.jsonl:1"]},
     "the same prompt, response and score, which another draw of the same text would repeat within a file as well"),
    ("equal responses in one file", {"f": [PLAIN[0], PLAIN[0], PLAIN[1]]}, [4, 4, 6], {}, "a model may say the same twice"),
    ("equal lines of two steps", {"1": PLAIN, "2": PLAIN}, [4, 6, 4, 6], {}, "the step is the file's name"),
    ("the same uid twice", {"1": [verls(1, "a_0_0"), verls(1, "a_1_0"), verls(1, "a_0_0")]}, [4, 4],
     {COPY: ["1.jsonl:3"]}, "a uid stands for one row"),
    ("a prompt twice in a step, no uid", {"1": [*group(1, "p", 2, 4), *group(1, "q", 3, 5), *group(1, "q", 7, 9),
     *group(1, "r", 6, 8)]}, [2, 4, 6, 8], {SEVERAL: ["1.jsonl:3 (4 responses, other groups 2)"]},
     "its two groups have means of their own, and nothing says which response is whose"),
    ("a prompt twice in a step, with uids", {"1": [verls(1, f"{g}_{i}_0", length=i + 1) for g in "ab" for i in (0, 1)]},
     [1, 2, 1, 2], {}, "the uids tell them apart"),
    ("a prompt in two steps", {"1": group(1, "p", 2, 4), "2": group(2, "p", 2, 4)}, [2, 4, 2, 4], {}, "two updates"),
    ("groups of different size in a plain file", {"f": [plain(p, 1.0, 3) for p in "aabbcccc"]}, [3] * 8,
     {f"{SEVERAL}; used all the same": ["f.jsonl:5 (4 responses, other groups 2)"]}, "there the prompt is the group"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "lengths", "problems"), [case[1:4] for case in ODD], ids=[case[0] for case in ODD])
def test_what_is_odd_costs_itself_and_is_counted_with_its_place(tmp_path, files, lengths, problems):
    for name, lines in files.items():
        text = [line if isinstance(line, str | bytes) else json.dumps(line, ensure_ascii=True) for line in lines]
        whole = b"".join((t.encode() if isinstance(t, str) else t) + b"\n" for t in text)
        (tmp_path / f"{name}.jsonl").write_bytes(whole.removesuffix(b"|\n"))
    got = read_rollouts(find_files(tmp_path))
    assert got.length.tolist() == lengths
    assert {name.split(" (")[0]: places for name, places in got.problems.places.items()} == problems
    assert len(got.group_label) == len(set(got.group.tolist())) == len(got.group_step) == len(got.group_place)


def test_the_table_says_why():
    assert all(case[4] for case in ODD)


def test_texts_that_are_counted_may_be_odd_too(tmp_path):
    lines = [plain("p", 1.0, 0, response=text) for text in ("ab", "", "\ud83d", None, 3)]
    got = read_rollouts([write(tmp_path / "f.jsonl", lines)], lambda texts: [len(t.encode()) for t in texts])
    assert got.length.tolist() == [2, 0, 1]
    assert list(got.problems.counts.values()) == [2]
    path = tmp_path / "g.jsonl"
    path.write_bytes(b'{"prompt": "p", "response": "\xff", "score": 1}\n' + path.with_name("f.jsonl").read_bytes())
    got = read_rollouts([path], lambda texts: [len(t.encode()) for t in texts])
    assert got.problems.places == {"no response text (expected a string in 'output' or 'response')": [
        "g.jsonl:1", "g.jsonl:5", "g.jsonl:6"]}  # fmt: skip


def test_only_the_first_places_of_a_problem_are_kept(tmp_path):
    got = read_rollouts([write(tmp_path / "f.jsonl", ["{"] * 9 + [plain("p", 1.0, 4)])])
    assert got.problems.counts["not JSON"] == 9
    assert got.problems.places["not JSON"] == ["f.jsonl:1", "f.jsonl:2", "f.jsonl:3"]
    files = [write(tmp_path / f"{name}.jsonl", [plain("p", 1.0, n) for n in range(9)]) for name in "ab"]
    got = read_rollouts(files)
    (name,) = got.problems.counts
    assert got.problems.counts[name] == 9
    assert got.problems.places[name] == ["b.jsonl:1", "b.jsonl:2", "b.jsonl:3"]


def test_nothing_usable_is_one_error_that_says_why(tmp_path):
    with pytest.raises(
        NoRollouts, match=r"none of 2 lines could be used: 2 × no length .*'response_length' or 'length'"
    ):
        read_rollouts([write(tmp_path / "f.jsonl", [{"prompt": "p", "response": "r", "score": 1}] * 2)])
    with pytest.raises(NoRollouts, match="the files are empty"):
        read_rollouts([write(tmp_path / "empty.jsonl", [])])
    with pytest.raises(NoRollouts, match="got no such path"):
        find_files(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(NoRollouts, match=r"expected a JSONL file, or a folder of them .*; got notes.txt"):
        find_files(tmp_path / "other")


@pytest.mark.parametrize("counting", [False, True])
def test_memory_does_not_grow_with_the_text(tmp_path, counting):
    peaks = []
    for words in (1000, 8000):
        long = "word " * words
        path = write(
            tmp_path / f"{words}.jsonl", [plain(f"{i % 50} {long}", 1.0, 5, response=long) for i in range(300)]
        )
        read: list[int] = []
        tracemalloc.start()
        read_rollouts([path], (lambda texts: [1] * len(texts)) if counting else None, on_bytes=read.append)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sum(read) == path.stat().st_size
        assert len(read) >= path.stat().st_size // (2 * rollouts._BLOCK)  # progress moves
    assert peaks[1] < 1.5 * peaks[0]  # the file is 8 times as large: 24 MB


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)
    return folder


def test_lengths_are_the_texts_tokens_and_the_end_token_up_to_the_limit(tokenizer_folder):
    texts = ["a b a", "", "b " * 20]
    assert tokens.token_counter(tokenizer_folder)(texts) == [4, 1, 21]
    assert tokens.token_counter(tokenizer_folder, 20)(texts) == [4, 1, 20]


# --------------------------------------------------------------------------------------------------------------------
# Numbers
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", weighing.ADVANTAGES)
def test_advantages_are_verls(estimator):
    from verl.trainer.ppo import core_algos

    rng = np.random.default_rng(3)
    group = np.append(rng.integers(0, 12, 96), 12)  # the last group has one response
    score = rng.choice([0.0, 1.0, 0.25], 97)
    score[group == 5] = 1.0
    rewards = torch.zeros(97, 3)
    rewards[:, -1] = torch.tensor(score)
    mask = torch.ones(97, 3)
    if estimator == "rloo":
        expected, _ = core_algos.compute_rloo_outcome_advantage(rewards, mask, group)
    else:
        expected, _ = core_algos.compute_grpo_outcome_advantage(
            rewards, mask, group, norm_adv_by_std_in_grpo=estimator == "grpo"
        )
    got = weighing.advantages(score, group, estimator)
    np.testing.assert_allclose(got, expected[:, 0].numpy(), atol=2e-6)
    assert (got[group == 5] == 0).all()


def test_an_unknown_estimator_is_an_error():
    with pytest.raises(ValueError, match="--advantage gae: expected one of grpo"):
        weighing.advantages(np.ones(2), np.zeros(2, dtype=int), "gae")


def test_a_step_of_a_dump_has_the_numbers_that_training_logs(tmp_path):
    path = synthetic(tmp_path / "f.jsonl", gap=1.5, variation=0.4)
    read = read_rollouts([path])
    result = weighing.weigh(read, resamples=10)
    advantage = weighing.advantages(read.score, read.group, "grpo")
    for step in (1, 2):
        rows = read.group_step[read.group] == step
        sign = np.sign(advantage[rows]).astype(int)
        live = balance_metrics(
            read.length[rows].tolist(),
            read.group[rows].tolist(),
            sign.tolist(),
            advantage[rows].tolist(),
            active_mode="balanced",
        )
        for name, estimate in result.steps[step].items():
            assert estimate.value == pytest.approx(live[f"balance/{name}"], abs=1e-12), name


def test_intervals_are_scipys(tmp_path):
    read = read_rollouts([synthetic(tmp_path / "f.jsonl", groups=60, gap=1.4, variation=0.5, steps=1)])
    got = weighing.weigh(read, resamples=4000).overall["token-mean/gradient_share_negative"]
    advantage = np.abs(weighing.advantages(read.score, read.group, "grpo"))
    each = np.bincount(read.group, weights=advantage * read.length)
    negative = np.bincount(read.group, weights=advantage * read.length * (read.score == 0))
    expected = scipy.stats.bootstrap(
        (negative, each),
        lambda n, d, axis: n.sum(axis) / d.sum(axis),
        paired=True,
        method="percentile",
        n_resamples=4000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert got.value == pytest.approx(negative.sum() / each.sum())
    width = expected.high - expected.low
    assert got.low == pytest.approx(expected.low, abs=0.1 * width)
    assert got.high == pytest.approx(expected.high, abs=0.1 * width)


def test_overall_puts_the_steps_together_and_a_seed_repeats(tmp_path):
    read = read_rollouts([synthetic(tmp_path / "f.jsonl", gap=1.5, variation=0.3, steps=4)])
    first, again = weighing.weigh(read, resamples=50), weighing.weigh(read, resamples=50)
    other = weighing.weigh(read, resamples=50, seed=1)
    assert first.overall == again.overall
    assert first.overall != other.overall
    shares = [s["token-mean/gradient_share_negative"].value for s in first.steps.values()]
    assert min(shares) < first.overall["token-mean/gradient_share_negative"].value < max(shares)
    assert first.overall["groups"].value == 40
    assert first.decile_weight["token-mean"] == pytest.approx([1.0] * 10)
    assert first.length_counts[1].sum() + first.length_counts[-1].sum() == 320


def test_the_most_tilted_group_comes_first_with_its_place(tmp_path):
    lines = [plain("even", s, 50) for s in (1.0, 0.0)] + [plain("odd", s, n) for s, n in ((1.0, 10), (0.0, 90))]
    result = weighing.weigh(read_rollouts([write(tmp_path / "f.jsonl", lines)]), resamples=10)
    (group,) = result.tilted  # the even group is not tilted
    assert (group.label, group.place, group.positives, group.negatives) == ("odd", "f.jsonl:3", 1, 1)
    assert (group.positive_length, group.negative_length) == (10, 90)
    assert (group.fair, group.negative_share, group.tilt) == pytest.approx((0.5, 0.9, 0.4))


@pytest.mark.parametrize(
    ("gap", "variation", "says", "does_not_say"),
    [
        (1.6, 0.0, "length gap is large", "nearly agree"),
        (0.5, 0.0, "token-mean gives the positive responses", "nearly agree"),
        (1.0, 0.6, "Length variation is large", "length gap is large"),
        (1.0, 0.01, "nearly agree", "is large"),
        (1.6, 0.6, "Length variation is large", "nearly agree"),
    ],
)
def test_the_advice_speaks_of_gap_and_variation(tmp_path, gap, variation, says, does_not_say):
    read = read_rollouts([synthetic(tmp_path / "f.jsonl", groups=200, gap=gap, variation=variation)])
    advice = " ".join(weighing.weigh(read, resamples=100).advice)
    assert says in advice
    assert does_not_say not in advice


def test_without_mixed_groups_the_advice_says_so(tmp_path):
    read = read_rollouts([write(tmp_path / "f.jsonl", [plain("p", 1.0, 4), plain("p", 1.0, 6)])])
    assert "No group has responses of both signs" in weighing.weigh(read, resamples=10).advice[0]


# --------------------------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)])


def test_analyze_prints_and_writes_its_report(tmp_path):
    path = synthetic(tmp_path / "[bold]f.jsonl", gap=1.5, variation=0.3)
    path.write_text(path.read_text() + "{cut")
    result = run(path, "--out", tmp_path / "out", "--resamples", 50)
    assert result.exit_code == 0, result.output
    assert "length gap is large" in " ".join(result.output.split())
    assert "[bold]f.jsonl:321" in result.output
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"analyze.html", "analyze.md", "analyze.json", "overview.png", "lengths.png", "steps.png"}
    numbers = json.loads((tmp_path / "out" / "analyze.json").read_text())
    assert numbers["input"]["problems"]["counts"] == {"the last line is cut: the run was killed while it wrote": 1}
    assert numbers["weighing"]["overall"]["balanced/tilt"]["value"] == pytest.approx(0, abs=1e-9)
    assert set(numbers["weighing"]["steps"]) == {"1", "2"}
    text = (tmp_path / "out" / "analyze.md").read_text()
    assert all(f"| {mode} |" in text for mode in ALL_MODES)
    assert "![" in text


def test_analyze_counts_tokens_with_the_runs_tokenizer(tmp_path, tokenizer_folder):
    lines = [{"input": "p", "output": "a " * n, "gts": "", "score": s, "step": 1} for n, s in ((3, 1.0), (9, 0.0))]
    result = run(write(tmp_path / "1.jsonl", lines), "--tokenizer", tokenizer_folder, "--max-response-length", 8)
    assert result.exit_code == 0, result.output
    assert "8.0" in result.output
    assert "2.00" in result.output  # 8 against 4 tokens


def test_analyze_says_what_to_do_about_bad_arguments(tmp_path):
    path = write(tmp_path / "f.jsonl", [{"prompt": "p", "response": "r", "score": 1.0}])
    for arguments, message in (
        ([path], "Give the run's tokenizer with --tokenizer"),
        ([path, "--advantage", "gae"], "--advantage gae: expected one of grpo, grpo-no-std, rloo"),
        ([path, "--tokenizer", tmp_path / "no"], "no such folder"),
        ([path, "--tokenizer", tmp_path], "no tokenizer could be loaded"),
        ([path, "--tokenizer", tmp_path, "--length-field", "n"], "give one"),
        ([tmp_path / "no.jsonl"], "got no such path"),
    ):
        result = run(*arguments)
        assert result.exit_code == 1
        assert message in result.output
        assert isinstance(result.exception, SystemExit)


def test_estimates_print_without_what_is_missing():
    from verl_ba.tools.analysis.estimate import Estimate

    assert Estimate(0.5, 0.25, 0.75).text(".2f") == "0.50 [0.25, 0.75]"
    assert Estimate(0.5).text(".2f") == "0.50"
    assert Estimate(math.nan).text() == "–"


def test_the_command_line_is_light_until_a_command_runs():
    heavy = ("matplotlib", "scipy", "transformers", "verl")
    code = f"import sys, verl_ba.tools.cli; print([name for name in {heavy} if name in sys.modules])"
    root = Path(rollouts.__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root).stdout
    assert out.strip() == "[]"
