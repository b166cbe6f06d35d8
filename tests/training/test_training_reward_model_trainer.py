"""A reward model learns from pairs, says how well, and goes on where it was stopped."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from flatpeak.config.load import merge
from flatpeak.errors import UserError
from flatpeak.pipeline.train_reward_model import train_reward_model
from flatpeak.policy.config import TokenizerConfig
from flatpeak.policy.loading import build_tokenizer
from flatpeak.rewards.reward_model import load_scorer
from flatpeak.rewards.sequence_classifier import PLAIN, Classifier, Spread, Wording, read_record
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.summary import read_summary
from flatpeak.tasks.preferences import PreferencePair
from flatpeak.training.config import RewardModelConfig, RewardModelOptimizerConfig
from flatpeak.training.reward_model_trainer import (
    EncodedPair,
    PairEvaluation,
    PairEvaluator,
    PreferenceLearner,
    encode_pairs,
    spread,
)
from support.models import run_model
from support.preferences import reward_model_recipe, write_pairs
from support.resumes import Death, die
from support.runs import Watcher, speed_up_runs

pytestmark = pytest.mark.usefixtures("one_thread")

SGD = RewardModelOptimizerConfig(name="sgd", learning_rate=0.5, max_grad_norm=None)


@pytest.fixture
def learn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`learn(sections, **options)`: train_reward_model without what takes most of a tiny run's time."""
    speed_up_runs(monkeypatch)
    pairs = write_pairs(tmp_path / "pairs.jsonl")

    def run(sections: dict[str, Any] | None = None, **options: Any) -> Any:
        return train_reward_model(reward_model_recipe(tmp_path / "runs", pairs, **(sections or {})), **options)

    return run


def make_classifier(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> Classifier:
    from transformers import LlamaConfig

    from support.preferences import SIZES

    tokenizer = build_tokenizer(TokenizerConfig(), ["abcdefgh: \n"])
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES, vocab_size=len(tokenizer), num_labels=1, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.score.weight.data.mul_(20)
    return Classifier(model.to(dtype), Wording(tokenizer=tokenizer, template=PLAIN))


def make_learner(classifier: Classifier, *, micro_batch_tokens: int | None = None, **settings: Any):
    return PreferenceLearner(
        classifier,
        RewardModelConfig(**{"optimizer": SGD, **settings}),
        micro_batch_tokens=micro_batch_tokens,
    )


PAIRS = [
    EncodedPair(id="0", chosen_ids=(3, 4, 5, 1), rejected_ids=(6, 7, 1), extra_length=1),
    EncodedPair(id="1", chosen_ids=(8, 1), rejected_ids=(9, 9, 9, 4, 3, 5, 1), extra_length=-5),
    EncodedPair(id="2", chosen_ids=(4, 4, 6, 7, 8, 1), rejected_ids=(5, 1), extra_length=4),
]


def evaluate_pairs(classifier: Any, pairs: list[EncodedPair]) -> PairEvaluation:
    return PairEvaluator(classifier=classifier, pairs=pairs, task="t", batch_tokens=None).evaluate()


def gradients(classifier: Classifier) -> list[torch.Tensor]:
    return [weight.grad.clone() for weight in classifier.model.parameters() if weight.grad is not None]


@pytest.mark.parametrize(("margin", "center"), [(0.0, 0.0), (0.7, 0.0), (0.3, 0.05)])
def test_the_gradient_is_that_of_the_mean_bradley_terry_loss(margin: float, center: float) -> None:
    classifier = make_classifier()
    # Each text by transformers' own forward, alone.
    scores = [
        [classifier.model(torch.tensor([text])).logits[0, 0] for text in (pair.chosen_ids, pair.rejected_ids)]
        for pair in PAIRS
    ]
    loss = sum(-torch.sigmoid(c - r - margin).log() + center * (c + r) ** 2 for c, r in scores) / len(PAIRS)
    loss.backward()
    expected = gradients(classifier)
    classifier.model.zero_grad()
    statistics = make_learner(classifier, margin=margin, center=center).accumulate_gradients(PAIRS)
    assert statistics.loss == pytest.approx(loss.item(), abs=1e-6)
    assert statistics.chosen == pytest.approx(sum(c.item() for c, _ in scores) / 3, abs=1e-6)
    assert statistics.rejected == pytest.approx(sum(r.item() for _, r in scores) / 3, abs=1e-6)
    assert statistics.accuracy == pytest.approx(sum(c.item() > r.item() for c, r in scores) / 3)
    for result, wanted in zip(gradients(classifier), expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("budget", [1, 20, 24, 1000])
def test_micro_batches_change_memory_and_not_the_gradient(budget: int) -> None:
    whole, parts = make_classifier(), make_classifier()
    make_learner(whole).accumulate_gradients(PAIRS)
    learner = make_learner(parts, micro_batch_tokens=budget)
    sizes = [len(micro) for micro in learner.micro_batches(PAIRS)]
    assert sizes == {1: [1, 1, 1], 20: [1, 1, 1], 24: [1, 2], 1000: [3]}[budget]
    learner.accumulate_gradients(PAIRS)
    for result, wanted in zip(gradients(parts), gradients(whole), strict=True):
        torch.testing.assert_close(result, wanted, atol=1e-6, rtol=1e-5)


def test_updates_tell_a_pair_apart() -> None:
    classifier = make_classifier()
    learner = make_learner(classifier, optimizer=RewardModelOptimizerConfig(learning_rate=1e-2))
    first = learner.update(PAIRS, rate=1e-2)
    for _ in range(30):
        last = learner.update(PAIRS, rate=1e-2)
    assert last.loss < 0.1 < first.loss
    assert last.accuracy == 1.0


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    classifier = make_classifier()
    learner = make_learner(classifier, optimizer=RewardModelOptimizerConfig(learning_rate=1e-2))
    classifier.model.score.weight.data[0, 0] = float("inf")
    before = {name: weight.clone() for name, weight in classifier.model.state_dict().items()}
    assert learner.update(PAIRS, rate=1e-2).skipped
    for name, weight in classifier.model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_bfloat16_weights_have_masters_that_small_steps_add_up_in() -> None:
    classifier = make_classifier(dtype=torch.bfloat16)
    learner = make_learner(classifier)
    before = [master.clone() for master in learner.masters.stepped]
    weights = [weight.clone() for weight in classifier.model.parameters()]
    assert all(master.dtype == torch.float32 for master in before)
    for _ in range(3):
        learner.update(PAIRS, rate=1e-5)
    moved = [not torch.equal(a, b) for a, b in zip(before, learner.masters.stepped, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(weights, classifier.model.parameters(), strict=True)]
    assert all(moved)
    assert any(kept)  # the step is less than half of bfloat16's


def test_pairs_are_worded_shortened_and_dropped_as_they_fit() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(), ["abcdefgh: \n<|>userasitn"])
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    pairs = [
        PreferencePair(id="0", prompt="ab", chosen="c", rejected="de"),
        PreferencePair(id="1", prompt="abcdefgh", chosen="c", rejected="d"),
        PreferencePair(id="2", prompt="a", chosen="abcdefgh", rejected="d"),
    ]
    result = encode_pairs(pairs, Wording(tokenizer=tokenizer, template=PLAIN, max_tokens=7))
    assert (result.truncated, result.dropped) == (1, 1)
    assert [pair.extra_length for pair in result.pairs] == [-1, 0]
    assert result.pairs[0].rejected_ids == (*tokenizer.encode("ab\n\nde"), 1)
    assert result.pairs[1].chosen_ids == (*tokenizer.encode("fgh\n\nc"), 1)

    conversation = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    talk = PreferencePair(id="3", prompt="written out", chosen="d", rejected="e", columns={"messages": conversation})
    result = encode_pairs([talk, pairs[0]], Wording(tokenizer=tokenizer, template="chat"))
    assert list(result.pairs[0].chosen_ids) == tokenizer.encode("<user>a|<assistant>b|<user>c|<assistant>d|")
    assert list(result.pairs[1].chosen_ids) == tokenizer.encode("<user>ab|<assistant>c|")


def test_an_evaluation_says_what_length_alone_would_have_said() -> None:
    def pair(index: int, extra: int) -> EncodedPair:
        return EncodedPair(id=str(index), chosen_ids=(3,), rejected_ids=(4,), extra_length=extra)

    class Fixed:
        def score_all(self, texts: Any, **options: Any) -> list[float]:
            return [2.0, 0.0, 1.0, 1.5, 0.0, 0.0, 3.0, float("nan"), 0.0, 2.0]

    result = evaluate_pairs(Fixed(), [pair(0, 5), pair(1, 3), pair(2, 0), pair(3, 1), pair(4, -2)])
    assert result.values["accuracy"] == [1.0, 0.0, 0.5, None, 0.0]
    assert result.values["difference"] == [2.0, -0.5, 0.0, None, -2.0]
    assert result.values["longer_wins"] == [1.0, 1.0, 0.5, 1.0, 0.0]
    assert result.values["prefers_longer"] == [1.0, 0.0, None, None, 1.0]
    assert result.values["accuracy/chosen_longer"] == [1.0, 0.0, None, None, None]
    assert result.values["accuracy/same_length"] == [None, None, 0.5, None, None]
    assert result.values["accuracy/chosen_shorter"] == [None, None, None, None, 0.0]
    assert result.values["loss"][0] == pytest.approx(log(1 + exp(-2)))
    assert result.rows[3] == {"id": "3", "chosen": 3.0, "rejected": None, "extra_length": 1}
    sure, half = 1 / (1 + exp(-2)), 1 / (1 + exp(-0.5))
    # Confidences by bin: both 2.0 in [0.8, 0.9), one right and one wrong; 0.5 in [0.6, 0.7), wrong; 0 at 0.5, half.
    expected = 2 / 4 * abs(sure - 0.5) + 1 / 4 * half + 1 / 4 * 0
    assert result.metrics()["calibration_error"] == pytest.approx(expected)
    assert result.first(1).metrics()["accuracy"] == 1.0


def test_an_infinite_score_is_missing_from_every_figure() -> None:
    class Fixed:
        def score_all(self, texts: Any, **options: Any) -> list[float]:
            return [float("inf"), 0.0, 1.0, 0.0]

    pairs = [EncodedPair(id=id, chosen_ids=(3,), rejected_ids=(4,), extra_length=1) for id in "ab"]
    result = evaluate_pairs(Fixed(), pairs)
    assert result.values["accuracy"] == [None, 1.0]
    assert result.rows[0]["chosen"] is None
    assert result.metrics()["calibration_error"] == pytest.approx(1 - 1 / (1 + exp(-1)))


def test_a_run_learns_beyond_chance_and_beyond_length(learn: Callable[..., Any], tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl", count=500)
    section = {"steps": 60, "batch_size": 32, "evaluate_every": 30, "optimizer": {"learning_rate": 1e-2}}
    result = learn({"reward_model": section, "run": {"threads": 1}})
    last = result.summary.evaluation("train")
    assert last.intervals["accuracy"][0] > 0.6
    assert last.intervals["accuracy"][0] > last.metrics["longer_wins"]
    assert [(e.stage, e.step) for e in result.summary.evaluations] == [("start", 0), ("train", 30), ("train", 60)]


def test_a_run_leaves_a_model_that_others_load_and_score_alike(learn: Callable[..., Any], tmp_path: Path) -> None:
    result = learn()
    assert {"config.yaml", "manifest.json", "metrics.jsonl", "summary.json", "checkpoints", "evaluations"} <= {
        path.name for path in result.path.iterdir()
    }
    last = result.path / "checkpoints" / "last"
    model, info = AutoModelForSequenceClassification.from_pretrained(last, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(last)
    record = read_record(last)
    assert record is not None
    assert (record.template, record.max_tokens) == (PLAIN, 48)
    rows = read_rows(result.path / "evaluations" / "train_000004.jsonl")
    pairs = read_rows(tmp_path / "pairs.jsonl")
    scorer = load_scorer(path=str(result.path / "checkpoints" / "last"), device="cpu", where="r")
    for row in rows[:5]:
        pair = pairs[int(row["id"])]
        for side in ("chosen", "rejected"):
            ids = tokenizer.encode(f"{pair['prompt']}\n\n{pair[side]}<eos>")
            with torch.no_grad():
                theirs = model.eval()(torch.tensor([ids])).logits[0, 0].item()
            encoded = scorer.classifier.wording.encode(pair["prompt"], pair[side])
            assert encoded is not None
            assert list(encoded.token_ids) == ids
            assert scorer.classifier.score_all([encoded.token_ids])[0] == pytest.approx(theirs, abs=1e-5)
            assert row[side] == pytest.approx(theirs, abs=1e-5)
    values = [row[side] for row in rows for side in ("chosen", "rejected")]
    assert record.scores is not None
    assert record.scores.count == len(values)
    assert record.scores.mean == pytest.approx(torch.tensor(values).mean().item(), abs=1e-5)
    assert record.scores.std == pytest.approx(torch.tensor(values).std().item(), abs=1e-5)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_step_writes_its_metrics(learn: Callable[..., Any]) -> None:
    rows = [row for row in read_metrics(learn().path / "metrics.jsonl") if row["stage"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert set(rows[0]) == {"step", "stage", "optimizer/learning_rate", "optimizer/skipped", "time/step"} | {
        f"reward_model/{name}" for name in ("loss", "accuracy", "difference", "mean_score", "grad_norm")
    }
    # The first batch of an untrained model is a coin's throw.
    assert rows[0]["reward_model/loss"] == pytest.approx(log(2), abs=0.05)


@pytest.mark.parametrize(
    ("stop_at", "dtype"),
    [
        (1, "float32"),
        (3, "bfloat16"),
        pytest.param(3, "float32", marks=pytest.mark.slow),
        pytest.param(1, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_died_goes_on_bit_for_bit(learn: Callable[..., Any], stop_at: int, dtype: str) -> None:
    sections = {"run": {"checkpoint_every": 1}, "model": {"dtype": dtype}, "training": {"micro_batch_tokens": 64}}
    whole = outcome(learn(sections).path)
    name = {"run": {"name": "died"}}
    with pytest.raises(Death):
        learn(merge(sections, name), progress=Watcher({("train", stop_at): die}))
    resumed = learn(merge(sections, name), resume=True)
    result = outcome(resumed.path)
    for what in ("weights", "optimizer"):
        assert result[what].keys() == whole[what].keys()
        for key, tensor in whole[what].items():
            assert torch.equal(result[what][key], tensor), (what, key)
    assert result["metrics"] == whole["metrics"]
    assert result["record"] == whole["record"]
    assert (result["summary"], result["best"]) == (whole["summary"], whole["best"])


def outcome(path: Path) -> dict[str, Any]:
    """All that a run leaves behind, but for times."""
    last = path / "checkpoints" / "last"
    summary = read_summary(path / "summary.json")
    return {
        "weights": load_file(last / "model.safetensors"),
        "optimizer": load_file(last / "trainer" / "state.safetensors"),
        "metrics": [
            {name: value for name, value in row.items() if not name.startswith("time/")}
            for row in read_metrics(path / "metrics.jsonl")
        ],
        "record": read_record(last),
        "summary": (summary.status, summary.best_step, summary.last_step, summary.evaluations),
        "best": (path / "checkpoints" / "best").readlink(),
    }


def test_a_signal_stops_with_a_checkpoint_and_resume_goes_on(
    learn: Callable[..., Any], send: Callable[[int], Callable[[], None]]
) -> None:
    stopped = learn(progress=Watcher({("train", 2): send(15)}))
    assert (stopped.exit_code, stopped.summary.status, stopped.summary.last_step) == (143, "stopped", 2)
    done = learn(resume=True)
    assert (done.exit_code, done.summary.status, done.summary.last_step) == (0, "done", 4)
    with pytest.raises(UserError, match="resume=True, delete it with overwrite=True"):
        learn()
    with pytest.raises(UserError, match=r"reward_model\.margin: 0\.0 -> 1\.0"):
        learn({"reward_model": {"margin": 1.0}}, resume=True)


def test_a_language_model_gets_a_head_that_its_seed_draws(learn: Callable[..., Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from support.preferences import SIZES

    tokenizer = build_tokenizer(TokenizerConfig(), ["abcd0123456789:\n"])
    policy = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, vocab_size=len(tokenizer), eos_token_id=1))
    policy.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    base = {"model": {"path": str(tmp_path / "policy"), "new": None}, "run": {"checkpoint_every": 0}}

    def start(name: str, seed: int) -> dict[str, torch.Tensor]:
        run = learn(merge(base, {"run": {"name": name}, "reward_model": {"steps": 1, "seed": seed}})).path
        return load_file(run / "checkpoints" / "step_000000" / "model.safetensors")

    torch.manual_seed(1)
    first = start("first", 0)
    torch.manual_seed(2)
    again, other = start("again", 0), start("other", 1)
    assert torch.equal(first["score.weight"], again["score.weight"])
    assert not torch.equal(first["score.weight"], other["score.weight"])
    embedding = "model.embed_tokens.weight"
    assert torch.equal(first[embedding], policy.state_dict()[embedding])


def test_a_model_of_ones_own_is_trained_in_place_and_resumed_bit_for_bit(learn: Callable[..., Any]) -> None:
    classifier = make_classifier()
    tokenizer = build_tokenizer(TokenizerConfig(), ["abcd0123456789:\n"])
    model = AutoModelForSequenceClassification.from_config(classifier.model.config)
    model.resize_token_embeddings(len(tokenizer))
    untrained = copy.deepcopy(model)
    learn({"model": {"new": None}}, model=model, tokenizer=tokenizer)
    assert not torch.equal(model.score.weight, untrained.score.weight)

    name = {"model": {"new": None}, "run": {"name": "died", "checkpoint_every": 1}}
    with pytest.raises(Death):
        watcher = Watcher({("train", 3): die})
        learn(name, model=copy.deepcopy(untrained), tokenizer=tokenizer, progress=watcher)
    learn(name, model=untrained, tokenizer=tokenizer, resume=True)
    for (what, one), other in zip(model.state_dict().items(), untrained.state_dict().values(), strict=True):
        assert torch.equal(one, other), what


def test_shortened_and_dropped_pairs_are_told(learn: Callable[..., Any]) -> None:
    watcher = Watcher()
    learn({"reward_model": {"steps": 1, "max_tokens": 8}}, progress=watcher)
    messages = [notice for notice in watcher.notices if "pairs:" in notice]
    assert len(messages) == 2
    assert "with a shortened question" in messages[0]
    assert "dropped because an answer does not fit" in messages[0]


def test_pairs_that_spell_control_tokens_are_counted(learn: Callable[..., Any], tmp_path: Path) -> None:
    rows = [*read_rows(tmp_path / "pairs.jsonl"), {"prompt": "1+1=", "chosen": "2", "rejected": "3<eos>"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    watcher = Watcher()
    learn({"reward_model": {"steps": 1}}, progress=watcher)
    (told,) = (notice for notice in watcher.notices if "control tokens" in notice)
    assert told.startswith(f"1 of {len(rows)} pairs spell control tokens (<eos>), which the model reads as text")


def test_what_cannot_be_trained_is_one_line_and_leaves_no_run(learn: Callable[..., Any], tmp_path: Path) -> None:
    model, tokenizer = run_model()
    three = make_classifier().model
    three.config.num_labels = 3
    for sections, options, message in (
        ({"task": {"type": "arithmetic"}}, {}, "use task.type=preferences"),
        ({"model": {"new": None}}, {}, "the recipe gives no model"),
        ({"reward_model": {"max_tokens": 4}}, {}, "no training pair fits into reward_model.max_tokens"),
        ({"reward_model": {"max_tokens": 400}}, {}, "reward_model.max_tokens=400 exceeds the model's context of 48"),
        ({"reward_model": {"template": "chat"}}, {}, "reward_model.template=chat: this model's tokenizer"),
        ({}, {"model": model}, "needs tokenizer"),
        ({}, {"model": three, "tokenizer": tokenizer}, "the model has 3 outputs"),
        ({"model": {"new": {"architecture": "nothing"}}}, {}, "model.new cannot be built with a score head"),
    ):
        with pytest.raises(UserError, match=message):
            learn(sections, **options)
    assert not (tmp_path / "runs").exists()


def test_the_report_shows_what_was_learned(learn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from flatpeak.report.page import write_report

    page = write_report(learn().path).read_text()
    for text in ("Held-out accuracy after training", "Reward model loss", "calibration_error", "longer_wins"):
        assert text in page
    assert "after RL" not in page


def test_the_spread_is_of_the_reference_answers() -> None:
    classifier = make_classifier()
    learner = PreferenceLearner(classifier, RewardModelConfig(), micro_batch_tokens=None, reference=PAIRS)
    texts = [text for pair in PAIRS for text in (pair.chosen_ids, pair.rejected_ids)]
    scores = torch.tensor(classifier.score_all(texts))

    class Seen:
        spread: Spread | None = None

    def save(directory: Path, *, scores: Spread | None) -> None:
        Seen.spread = scores

    classifier.save = save  # type: ignore[method-assign]
    learner.save_model(Path())
    assert Seen.spread is not None
    assert Seen.spread.mean == pytest.approx(scores.mean().item(), abs=1e-6)
    assert Seen.spread.std == pytest.approx(scores.std().item(), abs=1e-6)


def test_scores_that_are_not_finite_have_no_spread_and_a_checkpoint_all_the_same() -> None:
    assert spread([1.0, float("inf")]) is None
    assert spread([1.0, float("nan")]) is None
    assert spread([1.0, 3.0]) == Spread(mean=2.0, std=2**0.5, count=2)
