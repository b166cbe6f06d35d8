"""The examples run, and do what they say. tests/rewards has the one for examples/custom_reward.py."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from flatpeak.errors import UserError
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.rollout_log import logged_steps, read_rollouts
from flatpeak.tasks.config import build_task
from flatpeak.tasks.custom import CustomTaskConfig
from flatpeak.types import Completion
from support.runs import Recipe, Train

EXAMPLES = Path(__file__).parents[2] / "examples"
FACTORY = f"{EXAMPLES / 'custom_task.py'}:largest_number"


@pytest.mark.usefixtures("one_thread")
def test_the_minimal_loop_learns_from_rewards_alone() -> None:
    example = runpy.run_path(str(EXAMPLES / "minimal_loop.py"))
    rewards = example["train"](22)
    # Chance is half of 1 in 15 tokens, and a little for stopping there.
    assert rewards[0] == pytest.approx(0.5 / 15, abs=0.015)
    assert sum(rewards[-3:]) / 3 > 3 * rewards[0]


def test_the_minimal_loop_pays_half_for_the_digit_and_half_for_stopping() -> None:
    reward = runpy.run_path(str(EXAMPLES / "minimal_loop.py"))["reward"]
    assert [reward(text, "7") for text in ("7", "71", "17", "")] == [1.0, 0.5, 0.0, 0.0]


def test_the_minimal_loop_fits_on_a_page() -> None:
    assert len((EXAMPLES / "minimal_loop.py").read_text(encoding="utf-8").splitlines()) < 150


def test_the_custom_task_asks_for_the_largest_number() -> None:
    arguments = {"numbers": 4, "train_size": 50, "test_size": 20}
    task = build_task(CustomTaskConfig(factory=FACTORY, arguments=arguments))
    assert (task.name, len(task.train), len(task.test)) == ("largest_of_4", 50, 20)
    for example in [*task.train, *task.test]:
        drawn = [int(number) for number in example.question.removesuffix("=").split(" ")]
        assert len(drawn) == 4
        assert example.gold == example.rationale == str(sorted(drawn)[-1])


def test_the_custom_task_refuses_what_it_cannot_make() -> None:
    with pytest.raises(UserError, match=r"task\.arguments\.numbers=1"):
        build_task(CustomTaskConfig(factory=FACTORY, arguments={"numbers": 1}))
    with pytest.raises(UserError, match="too few questions"):
        build_task(CustomTaskConfig(factory=FACTORY, arguments={"numbers": 2, "train_size": 5000}))


def test_a_recipe_trains_on_the_custom_task(recipe: Recipe, train: Train) -> None:
    task = {"type": "custom", "factory": FACTORY, "arguments": {"train_size": 30, "test_size": 5}}
    result = train(recipe(task=task, training={"steps": 1}))
    assert [(row.task, row.size, row.step) for row in result.summary.evaluations] == [
        ("largest_of_3", 5, 0),
        ("largest_of_3", 5, 1),
    ]


def test_the_custom_sampler_draws_from_the_model_being_trained_and_repeats_itself_less(
    recipe: Recipe, train: Train
) -> None:
    example = runpy.run_path(str(EXAMPLES / "custom_sampler.py"))

    def odd(completion_ids: list[list[int]]) -> list[float]:
        return [float(sum(ids) % 2) for ids in completion_ids]

    sections = {"rollout": {"group_size": 8, "max_new_tokens": 2}, "training": {"steps": 3}}
    texts: dict[str, list[str]] = {}
    for name, sampler in (("plain", None), ("distinct", example["make_sampler"])):
        result = train(recipe(run={"name": name}, **sections), sampler=sampler, reward=odd, progress=False)
        texts[name] = [
            f"{path.name} {row['group']} {row['text']}"
            for path in logged_steps(result.path / "rollouts").values()
            for row in read_rollouts(path)
        ]
        rows = read_metrics(result.path / "metrics.jsonl")
        gaps = [row["rollout/logprob_gap_mean"] for row in rows if row["stage"] == "train"]
        assert len(gaps) == 3
        assert max(gaps) < 1e-4
    assert len(texts["plain"]) == len(texts["distinct"]) == 3 * 4 * 8
    assert len(set(texts["distinct"])) > len(set(texts["plain"]))


def test_the_custom_sampler_prefers_texts_that_no_earlier_completion_has() -> None:
    distinct_first = runpy.run_path(str(EXAMPLES / "custom_sampler.py"))["distinct_first"]
    drawn = [
        Completion(token_ids=(index,), logprobs=(-1.0,), finish_reason="stop", text=text)
        for index, text in enumerate("abacb")
    ]
    assert [completion.token_ids[0] for completion in distinct_first(drawn)] == [0, 1, 3, 2, 4]


def test_the_custom_task_prints_a_few_questions(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "custom_task.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == ["49 97 53= 97", "5 33 65= 65", "62 51 38= 62"]
