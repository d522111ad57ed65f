"""`verl-ba gradients`: projected score gradients of a Hugging Face model, and split halves of them."""

import json

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from verl_ba.aggregation import ALL_MODES, pool_mean_length
from verl_ba.tools.analysis import rollouts
from verl_ba.tools.cli import app
from verl_ba.tools.gradients import measure, scores


@pytest.fixture
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, max_position_embeddings=64, **shape)).eval()


def some_tokens(responses=6):
    rng = np.random.default_rng(0)
    return [
        (rng.integers(20, size=3).tolist(), rng.integers(20, size=rng.integers(1, 9)).tolist())
        for _ in range(responses)
    ]


# --- score gradients ------------------------------------------------------------------------------------------------


def test_the_projected_gradient_is_the_sketch_of_autograds(model, tmp_path):
    tokens = some_tokens()
    found = scores.score_gradients(model, tokens, tmp_path / "s.npz", last=1, size=256)
    named = [(n, p) for n, p in model.named_parameters() if ".layers.2." in n]
    assert len(named) > 5
    projection = scores.Projection([p for _, p in named], 256)
    for (prompt, response), row in zip(tokens, found, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        total = sum(logits[len(prompt) - 1 + t, token] for t, token in enumerate(response))
        gradients = torch.autograd.grad(total, [p for _, p in named])
        np.testing.assert_allclose(row, projection(gradients).numpy(), rtol=1e-3, atol=1e-5)


def test_the_sketch_keeps_inner_products():
    torch.manual_seed(0)
    shapes = [(30, 40), (50,)]
    a, b = ([torch.rand(s) for s in shapes] for _ in range(2))  # of one sign: without random signs they would add up
    flat = [torch.cat([x.flatten() for x in v]).double() for v in (a, b)]
    found = []
    for seed in range(200):
        projection = scores.Projection(a, 256, seed)
        found.append(float(projection(a).double() @ projection(b).double()))
    expected = float(flat[0] @ flat[1])
    spread = float(flat[0].norm() * flat[1].norm()) / 16
    assert np.mean(found) == pytest.approx(expected, abs=4 * spread / np.sqrt(200))
    assert np.std(found) < 2 * spread


def test_a_run_goes_on_where_it_stopped_and_other_responses_are_refused(model, tmp_path, monkeypatch):
    tokens, file = some_tokens(), tmp_path / "s.npz"
    monkeypatch.setattr(scores, "_SAVE_EVERY", 2)

    class Stop(Exception):
        pass

    def stop(done, total):
        if done == 5:
            raise Stop

    with pytest.raises(Stop):
        scores.score_gradients(model, tokens, file, size=256, on_response=stop)
    seen = []
    found = scores.score_gradients(model, tokens, file, size=256, on_response=lambda done, total: seen.append(done))
    assert seen[0] == 4
    np.testing.assert_array_equal(found, scores.score_gradients(model, tokens, tmp_path / "t.npz", size=256))
    with pytest.raises(ValueError, match="gradients of other responses or settings"):
        scores.score_gradients(model, tokens[:-1], file, size=256)


def test_only_the_chosen_blocks_take_part(model):
    assert {name.split(".")[2] for name, _ in scores.chosen_parameters(model, 2)} == {"1", "2"}
    assert len(scores.chosen_parameters(model, None)) == len(list(model.parameters()))
    with pytest.raises(ValueError, match="named after a block"):
        scores.chosen_parameters(torch.nn.Linear(2, 2), 1)


# --- split halves ---------------------------------------------------------------------------------------------------


def made_up(prompts=200, size=6, noise=1.0, seed=0):
    """Score gradients whose noise is larger in long responses: dividing by the own length helps."""
    rng = np.random.default_rng(seed)
    n = prompts * size
    group, length = np.arange(n) // size, rng.integers(5, 200, n).astype(float)
    score = rng.integers(2, size=n).astype(float)
    true = np.zeros(64)
    true[0] = 2.0
    return (score - 0.5)[:, None] * true + noise * length[:, None] / 60 * rng.normal(size=(n, 64)), length, score, group


def test_coefficients_are_the_advantage_over_the_modes_length():
    _, length, score, group = made_up()
    found = measure.coefficients(length, score, group, "grpo-no-std")
    advantage = score - (np.bincount(group, weights=score) / np.bincount(group))[group]
    for mode, row in zip(ALL_MODES, found, strict=True):
        mean = pool_mean_length(mode, length.astype(int), group.tolist(), np.sign(advantage).astype(int))
        np.testing.assert_allclose(row, advantage / mean.numpy(), rtol=1e-12)


def test_the_mode_with_less_noise_is_favoured():
    found = measure.measure(*made_up(), prompts=8)
    assert found.favoured == "seq-mean-token-mean"
    assert found.half["seq-mean-token-mean"].value > found.half["token-mean"].value > 0
    assert found.gain["token-mean"].value == pytest.approx(0)
    assert found.turn["token-mean"].value == pytest.approx(1)
    assert found.signal["seq-mean-token-mean"].value > found.signal["token-mean"].value


def test_pure_noise_favours_nothing_and_has_no_signal():
    found = measure.measure(*made_up(noise=1e6), prompts=4)
    assert all(e.low < 0.02 for e in found.half.values())
    assert found.favoured is None


def test_two_updates_by_hand():
    """One prompt an update, four updates: the split-half cosine is the mean of the six cosines."""
    gradient = np.array([[1.0, 0], [0, 0], [1, 1], [0, 0], [0, 1], [0, 0], [2, 0], [0, 0]])
    score, group = np.tile([1.0, 0.0], 4), np.repeat(np.arange(4), 2)
    found = measure.measure(gradient, np.full(8, 5.0), score, group, prompts=1, cuts=1)
    s = 1 / np.sqrt(2)
    assert found.half["balanced"].value == pytest.approx(np.mean([s, 0, 1, s, s, 0]))


def test_too_few_prompts_are_an_error():
    with pytest.raises(ValueError, match="expected at least 32 prompts whose responses differ in score"):
        measure.measure(*made_up(prompts=20), prompts=8)


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(model, tmp_path):
    """A model's folder and a dump of its rollouts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<end>", "<unknown>", *(f"w{i}" for i in range(18))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unknown>").save_pretrained(
        folder
    )
    rng = np.random.default_rng(0)
    lines = [
        {
            "prompt": f"w{g % 18} w{g // 18}",
            "response": " ".join(f"w{w}" for w in rng.integers(18, size=3 + i)),
            "score": i % 2,
        }
        for g in range(20)
        for i in range(4)
    ]
    (tmp_path / "dump.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder, tmp_path / "dump.jsonl", tmp_path / "out"


def test_the_command_writes_a_page_and_goes_on(run):
    folder, dump, out = run
    arguments = ["gradients", str(folder), str(dump), "--out", str(out), "--prompts", "4", "--size", "256"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "split-half cosine" in result.output
    html, numbers = (out / "gradients.html").read_text(), json.loads((out / "gradients.json").read_text())
    assert "<svg" in html
    assert "20 of them with different scores" in html
    assert set(numbers["gradients"]["half"]) == set(ALL_MODES)
    assert (out / "halves.png").exists()
    assert CliRunner().invoke(app, arguments).exit_code == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--mode", "mean"], "--mode mean: expected one of"),
        (["--layers", "0"], "--layers 0: expected a number of blocks"),
        (["--device", "cuda"], "--device cuda: torch finds no CUDA device"),
        (["--prompts", "9"], "expected at least 36 prompts"),
    ],
)
def test_wrong_arguments_say_what_to_do(run, more, message):
    if more[0] == "--device" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    folder, dump, out = run
    result = CliRunner().invoke(app, ["gradients", str(folder), str(dump), "--out", str(out), "--size", "256", *more])
    assert result.exit_code == 1
    assert message in result.output.replace("\n", " ")


def test_text_follows_the_responses_when_sessions_are_sorted(tmp_path):
    file = tmp_path / "1.jsonl"
    rows = [("a_1_0", "second"), ("b_0_0", "third"), ("a_0_0", "first")]
    file.write_text(
        "".join(
            json.dumps({"input": u[0], "output": t, "gts": "", "score": 0, "step": 1, "uid": u, "length": len(t)})
            + "\n"
            for u, t in rows
        )
    )
    read = rollouts.read_rollouts([file], keep_text=True)
    assert read.text is not None
    assert [t for _, t in read.text] == ["first", "second", "third"]
    assert read.length.tolist() == [5, 6, 5]
    file.write_text(file.read_text().replace("a_1_0", "a_0_1"))
    with pytest.raises(rollouts.NoRollouts, match="several rows"):
        rollouts.read_rollouts([file], keep_text=True)
