from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.runs import Recipe, Train, Watch

pytestmark = pytest.mark.usefixtures("one_thread")


class Judge:
    """Scores rollouts by what they are, and held-out answers by a script: `scripted[step]` after that step."""

    def __init__(self, scripted: dict[int, float | None]) -> None:
        self.scripted = scripted
        self.step = 0

    def __call__(self, group: Any) -> list[float | None]:
        if len(group.completions) == 1:
            return [self.scripted[self.step]]
        return [sum(completion.token_ids) / 100 for completion in group.completions]

    def at(self, steps: int) -> dict[tuple[str, int], Callable[[], None]]:
        return {("train", step): lambda step=step: setattr(self, "step", step) for step in range(1, steps + 1)}


def test_the_best_checkpoint_is_the_one_with_the_highest_evaluation_metric(
    recipe: Recipe, train: Train, watch: Watch
) -> None:
    judge = Judge({0: 0.1, 2: 0.7, 4: 0.2, 6: 0.6})
    config = recipe(
        run={"checkpoint_every": 1, "keep_checkpoints": 1},
        training={"steps": 6},
        evaluation={"every": 2, "metric": "reward"},
    )
    result = train(config, reward=judge, progress=watch(judge.at(6)))
    assert (result.best.readlink(), result.summary.best_step) == (Path("step_000002"), 2)
    assert (result.path / "checkpoints" / "last").readlink() == Path("step_000006")
    # Step 5 is the newest that is neither first, best nor last.
    assert result.summary.checkpoints == ("step_000000", "step_000002", "step_000005", "step_000006")
    assert [row.step for row in result.summary.evaluations] == [0, 2, 4, 6]
    assert [row.metrics["reward"] for row in result.summary.evaluations] == pytest.approx([0.1, 0.7, 0.2, 0.6])
    best, last = (load_file(result.path / "checkpoints" / name / "model.safetensors") for name in ("best", "last"))
    assert not any(torch.equal(best[name], last[name]) for name in best)


def test_an_evaluation_whose_grader_failed_is_not_the_best(recipe: Recipe, train: Train, watch: Watch) -> None:
    judge = Judge({0: None, 1: 0.3, 2: None, 3: 0.2})
    config = recipe(training={"steps": 3}, evaluation={"every": 1, "metric": "reward"})
    result = train(config, reward=judge, progress=watch(judge.at(3)))
    assert (result.best.readlink(), result.summary.best_step) == (Path("step_000001"), 1)


def test_training_stops_once_the_goal_is_reached(recipe: Recipe, train: Train, watch: Watch) -> None:
    judge = Judge({0: 0.0, 1: 0.49, 2: 0.5, 3: 1.0})
    config = recipe(
        training={"steps": 3, "stop_at": 0.5},
        evaluation={"every": 1, "metric": "reward", "size": 2, "final_size": 5},
    )
    seen = watch(judge.at(3))
    result = train(config, reward=judge, progress=seen)
    assert seen.steps("train") == [1, 2]
    assert (result.summary.status, result.summary.last_step, result.summary.best_step) == ("done", 2, 2)
    # The last word is on the large set: at the start and once the goal is reached.
    assert [(row.step, row.size) for row in result.summary.evaluations] == [(0, 5), (1, 2), (2, 2), (2, 5)]


def test_without_a_baseline_equal_rewards_teach(recipe: Recipe, train: Train, watch: Watch) -> None:
    seen = watch()
    config = recipe(advantage={"baseline": "none", "scale": "none"})
    train(config, reward=lambda completion: 1.0, progress=seen)
    assert min(seen.values("policy/grad_norm")) > 0


def test_a_graded_function_has_no_accuracy_and_the_reward_chooses_the_best_checkpoint(
    recipe: Recipe, train: Train, watch: Watch
) -> None:
    judge = Judge({0: 2.8, 1: 1.0, 2: 3.5})
    seen = watch(judge.at(2))
    config = recipe(training={"steps": 2}, evaluation={"every": 1, "samples": 2})
    result = train(config, reward=judge, progress=seen)
    assert [row.metrics["reward"] for row in result.summary.evaluations] == pytest.approx([2.8, 1.0, 3.5])
    verdicts = {"accuracy", "sampled/accuracy", "pass@1", "maj@1", "extraction_failed"}
    assert not any(verdicts & row.metrics.keys() for row in result.summary.evaluations)
    assert (result.summary.metric, result.summary.best_step) == ("reward", 2)
    assert [text for text in seen.notices if "no accuracy" in text] == [
        "reward 'correctness' gives scores other than 0 and 1: there is no accuracy (evaluation.accuracy=correctness "
        "counts scores of at least 1 as right); the reward chooses the best checkpoint"
    ]


def test_scores_that_are_graded_later_end_the_accuracy_of_the_whole_run(
    recipe: Recipe, train: Train, watch: Watch
) -> None:
    judge = Judge({0: 0.0, 1: 1.0, 2: 0.4, 3: 1.0, 4: 0.0, 5: 1.5})
    config = recipe(training={"steps": 3}, evaluation={"every": 1})
    first = train(config, reward=judge, progress=watch(judge.at(3)))
    assert not any("accuracy" in row.metrics for row in first.summary.evaluations)
    # Step 1 was the best by accuracy, and stays it by the reward, which 0/1 scores make the same.
    assert (first.summary.metric, first.summary.best_step) == ("reward", 1)
    # A resumed run says nothing twice, and goes on from the best reward, whatever its scores are.
    seen = watch(judge.at(5))
    more = train({**config, "training": {"steps": 5}}, reward=judge, progress=seen, resume=True)
    assert not any("no accuracy" in text for text in seen.notices)
    assert [row.metrics["reward"] for row in more.summary.evaluations] == pytest.approx([0, 1, 0.4, 1, 0, 1.5])
    assert not any("accuracy" in row.metrics for row in more.summary.evaluations)
    assert (more.summary.metric, more.summary.best_step) == ("reward", 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluation": {"every": 1, "accuracy": "correctness"}},
        {"evaluation": {"every": 1}, "training": {"steps": 1, "stop_at": 1.0}},
    ],
)
def test_a_graded_function_that_the_recipe_calls_right_keeps_its_accuracy(
    recipe: Recipe, train: Train, watch: Watch, changes: dict[str, Any]
) -> None:
    judge = Judge({0: 0.4, 1: 1.0})
    result = train(recipe(**{"training": {"steps": 1}, **changes}), reward=judge, progress=watch(judge.at(1)))
    assert [row.metrics["accuracy"] for row in result.summary.evaluations] == [0.0, 1.0]
    assert (result.summary.metric, result.summary.best_step) == ("accuracy", 1)
