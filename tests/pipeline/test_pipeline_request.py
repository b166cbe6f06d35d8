"""Runs that a Python caller gave objects, and what goes on from their checkpoints without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flatpeak
from flatpeak.apps.chat import Console, chat_loop
from flatpeak.apps.compare import compare_checkpoints
from flatpeak.errors import UserError
from flatpeak.rollout.engine import NativeEngine
from flatpeak.tasks.arithmetic import ArithmeticConfig
from support.reward_functions import odd
from support.runs import Recipe, Train

FUNCTION = ["rewards.correctness.type=function", "rewards.correctness.function=support.reward_functions:odd"]


class Own(NativeEngine):
    """A sampler of a caller's own."""


OBJECTS: dict[str, Any] = {
    "reward": odd,
    "task": ArithmeticConfig(max_value=4, train_size=8, test_size=3).load(),
    "sampler": Own,
}


@pytest.mark.parametrize("name", OBJECTS)
def test_what_came_from_python_has_to_be_given_again(recipe: Recipe, train: Train, name: str) -> None:
    given = {name: OBJECTS[name]}
    first = Path(train(recipe(run={"name": "first"}), **given).path)
    refused = rf"step_000002 was trained with a {name} from Python, .*: give it again, .*{name}=\.\.\. of flatpeak"
    with pytest.raises(UserError, match=refused):
        train(recipe(run={"name": "first"}, training={"steps": 3}), resume=True)
    with pytest.raises(UserError, match=refused):
        flatpeak.fork(first, 2, name="second", settings={"training.steps": 3})
    assert train(recipe(run={"name": "first"}, training={"steps": 3}), **given, resume=True).summary.last_step == 3


def test_a_fork_may_name_another_reward_in_its_recipe(recipe: Recipe, train: Train) -> None:
    first = Path(train(recipe(run={"name": "first"}), reward=odd).path)
    forked = flatpeak.fork(first, 2, name="second", settings=["training.steps=3", *FUNCTION])
    assert (forked.summary.status, forked.summary.last_step) == ("done", 3)
    assert train(forked.path / "config.yaml", resume=True).summary.last_step == 3


def test_answers_are_not_judged_by_a_reward_that_the_one_from_python_replaced(
    recipe: Recipe, train: Train, tmp_path: Path
) -> None:
    run = str(train(recipe(), reward=odd).path)
    with pytest.raises(UserError, match=r"trained with a reward from Python, .* rewards\.correctness\.function=FILE"):
        compare_checkpoints([run])
    comparison = compare_checkpoints([run], [*FUNCTION, "run.grading_workers=0"])
    assert comparison.evaluations[0].mean("accuracy") == comparison.evaluations[0].mean("reward")


def test_nothing_is_asked_of_the_task_that_the_one_from_python_replaced(
    recipe: Recipe, train: Train, tmp_path: Path
) -> None:
    run = str(train(recipe(), task=OBJECTS["task"]).path)
    with pytest.raises(UserError, match=r"trained on a task from Python, .*task\.factory=FILE\.py:NAME"):
        compare_checkpoints([run])
    assert compare_checkpoints([run], ["task.max_value=8", "task.test_size=3"]).evaluations[0].size == 3
    lines: list[str] = []

    def end(prompt: str) -> str:
        raise EOFError

    chat_loop(run, console=Console(read=end, write=lines.append, note=lines.append))
    assert not any(line.startswith("try: ") for line in lines)
