"""Accuracy on perturbed questions beside that on the same questions as they were."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.evaluation.evaluate import PolicyEvaluator
from flatpeak.evaluation.result import Evaluation
from flatpeak.evaluation.tables import Comparison
from flatpeak.evaluation.text_perturbations import DISTRACTORS
from flatpeak.functional import paired_bootstrap, wilson_interval
from flatpeak.rewards.reward_set import as_reward
from flatpeak.tasks.prompts import PromptConfig
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams

QUESTIONS = [
    *(f"Nadia has {n} plums and finds 5 plums. How many plums does she have?" for n in (11, 12, 13)),
    *(f"{n}+1=" for n in (20, 30)),
]
GOLDS = ["16", "17", "18", "21", "31"]


def correctness(completion: str, gold: str) -> float | None:
    return None if completion == "?" else float(completion == gold)


class AddsUp:
    """Adds the question's numbers: right wherever there are two, and nothing else to add."""

    def __init__(self) -> None:
        self.questions: list[str] = []

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        groups = []
        for prompt in prompts:
            self.questions.append(prompt.text)
            text = str(sum(int(number) for number in re.findall(r"\d+", prompt.text)))
            said = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason="stop", text=text)
            groups.append(Group(prompt=prompt, completions=(said,) * group_size))
        return groups


class Characters:
    """A tokenizer with a token per character."""

    eos_token_id = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]


def prompts_of(examples: Sequence[Example]) -> list[Prompt]:
    return [Prompt(id=one.id, token_ids=(1,), text=one.question, example=one) for one in examples]


def run(*kinds: str, fits: int = 10**6, first: int = 0, **settings: object) -> Evaluation:
    examples = [
        Example(id=f"q{index}", question=question, gold=gold)
        for index, (question, gold) in enumerate(zip(QUESTIONS[first:], GOLDS[first:], strict=True))
    ]
    evaluator = PolicyEvaluator(
        config=EvaluationConfig(robustness=kinds, **settings),
        task="plums",
        prompts=prompts_of(examples),
        sampler=AddsUp(),
        reward=as_reward(correctness, name="correctness"),
        max_new_tokens=5,
        tokenizer=Characters(),  # type: ignore[arg-type]
        prompt=PromptConfig(),
        longest_prompt=fits,
    )
    return evaluator.evaluate(robustness=True)


def test_each_kind_stands_beside_the_same_questions_as_they_were() -> None:
    result = run("numbers", "distractor", "rename", "framing")
    assert result.mean("accuracy") == 1.0
    numbers, distractor = result.robustness["numbers"], result.robustness["distractor"]
    # The sums have no operands in columns and ask `how many` of nothing; the stories are computed again.
    assert (numbers.asked, len(numbers.clean)) == (5, 3)
    assert numbers.perturbed == [1.0, 1.0, 1.0]
    assert numbers.estimate.interval == wilson_interval(3, 3)
    added = [next(text for text in DISTRACTORS if text in row["question"]) for row in distractor.rows]
    misled = [float(re.search(r"\d", sentence) is None) for sentence in added]
    assert distractor.clean == [1.0, 1.0, 1.0]
    assert distractor.perturbed == misled
    change = paired_bootstrap([1.0] * 3, misled)
    assert distractor.as_dict()["difference"] == change.difference
    assert distractor.as_dict()["difference_interval"] == [change.low, change.high]
    assert len(result.robustness["framing"].clean) == 5
    assert result.robustness["rename"].estimate.mean == 1.0


def test_the_figures_are_metrics_and_the_questions_are_written_down() -> None:
    result = run("numbers", "typos")
    assert result.metrics()["robustness/numbers"] == 1.0
    assert "robustness/numbers" not in result.as_dict()["counted"]
    assert result.as_dict()["robustness"]["numbers"]["covered"] == 3
    row = result.robustness["numbers"].rows[0]
    assert (row["id"], row["perturbation"]) == ("q0", "numbers")
    assert row["question"] != QUESTIONS[0]
    assert row["text"] == row["gold"] != GOLDS[0]
    rows = list(Comparison(labels=["m"], evaluations=[result]).rows())
    assert [row.get("perturbation") for row in rows] == [None] * 5 + ["numbers"] * 3 + ["typos"] * 3


def test_what_fits_no_context_and_what_lies_beyond_the_size_is_not_asked() -> None:
    assert len(run("framing", robustness_size=2).robustness["framing"].clean) == 2
    assert run("framing", robustness_size=2).robustness["framing"].asked == 2
    short = run("framing", fits=50).robustness["framing"]
    assert (short.asked, len(short.clean)) == (5, 2)
    none = run("rename", first=3).robustness["rename"]  # sums have no names
    assert (none.asked, len(none.clean), none.difference) == (2, 0, None)
    assert math.isnan(none.estimate.mean)


def test_the_first_questions_alone_say_nothing_of_perturbed_ones() -> None:
    assert run("numbers").first(2).robustness == {}
    assert run().robustness == {}


def test_without_greedy_answers_the_sampled_ones_are_compared() -> None:
    result = run("numbers", greedy=False, samples=2, metric="sampled/accuracy")
    assert result.robustness["numbers"].perturbed == [1.0, 1.0, 1.0]
    assert result.robustness["numbers"].rows[0]["samples_correct"] == [1.0, 1.0]


def test_the_table_shows_coverage_both_accuracies_and_the_difference() -> None:
    result = run("numbers")
    text = Comparison(labels=["m"], evaluations=[result]).render()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "│ numbers │ m │ 3 of 5 │ 1 [0.4385, 1] │ 1 [0.4385, 1] │ +0 [-0.5615, +0.5615] │ 0 │" in lines


def test_a_run_perturbs_before_and_after_training_and_not_between(tmp_path: Path) -> None:
    from flatpeak.pipeline.train import train
    from flatpeak.runs.metrics import read_metrics
    from flatpeak.runs.summary import read_summary
    from support.runs import tiny_recipe

    recipe = tiny_recipe(
        tmp_path,
        sft={"steps": 1, "batch_size": 2},
        training={"steps": 2},
        evaluation={"every": 1, "robustness": ["numbers", "typos"], "robustness_size": 4},
    )
    result = train(recipe)
    actual = read_summary(result.path / "summary.json").evaluations
    assert [(one.stage, one.step, bool(one.robustness)) for one in actual] == [
        ("start", 0, True),
        ("sft", 1, True),
        ("train", 1, False),
        ("train", 2, True),
    ]
    last = actual[-1].robustness
    assert (last["numbers"]["asked"], last["numbers"]["covered"], last["typos"]["covered"]) == (4, 4, 0)
    rows = [row for row in read_metrics(result.path / "metrics.jsonl") if row["stage"] == "eval"]
    assert ["eval/arithmetic/robustness/numbers" in row for row in rows] == [True, True, False, True]
    assert rows[-1]["eval/arithmetic/robustness/typos"] is None
    written = (result.path / "evaluations" / "train_000002_perturbed.jsonl").read_text().splitlines()
    assert [json.loads(line)["perturbation"] for line in written] == ["numbers"] * 4
    assert not (result.path / "evaluations" / "train_000001_perturbed.jsonl").exists()


@pytest.mark.slow
def test_a_run_without_accuracy_chooses_by_reward(tmp_path: Path) -> None:
    from flatpeak.errors import UserError
    from flatpeak.pipeline.train import train
    from support.runs import tiny_recipe

    rlhf = {"accuracy": None, "metric": "reward", "samples": 2}
    result = train(tiny_recipe(tmp_path, evaluation=rlhf))
    assert result.summary.metric == "reward"
    assert "accuracy" not in result.summary.evaluations[-1].metrics
    assert "reward" in result.summary.evaluations[-1].metrics
    with pytest.raises(UserError, match="metric=worth: choose one of reward, length, truncated, correctness"):
        train(tiny_recipe(tmp_path, run={"name": "other"}, evaluation={**rlhf, "metric": "worth"}))
