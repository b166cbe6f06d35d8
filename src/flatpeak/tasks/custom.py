"""The task `custom`, made by a user's function, and the check of tasks from outside flatpeak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, cast

from pydantic import Field

from flatpeak.errors import UserError
from flatpeak.protocols import Task
from flatpeak.types import Example
from flatpeak.utils.schema import StrictConfig
from flatpeak.utils.user_code import check_call, load_object

_REQUIREMENT: Final = "a task has `name`, `train` and `test`, the last two sequences of flatpeak.types.Example"


class CustomTaskConfig(StrictConfig):
    """A task of your own: `factory` names a function (module:name or file.py:name) that returns an object with
    `name`, `train` and `test`."""

    type: Literal["custom"] = "custom"
    factory: str
    """The function that returns the task: file.py:name or module:name."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that function."""

    def load(self) -> Task:
        """Call the user's factory and check the task it returns. Errors inside the factory are not caught."""
        factory = load_object(self.factory, where=f"task.factory={self.factory}")
        if not callable(factory):
            raise UserError(
                f"task.factory={self.factory} is a {type(factory).__name__}; name a function that returns a task"
            )
        where = f"task.factory={self.factory}"
        check_call(factory, given=(), arguments=self.arguments, where=where, key="task.arguments")
        return check_task(factory(**self.arguments), where=where)


def check_task(task: Any, *, where: str) -> Task:
    """Check a task of any class; UserError if anything is missing, empty or of the wrong type, or if ids repeat."""
    missing = [name for name in ("name", "train", "test") if not hasattr(task, name)]
    if missing:
        raise UserError(f"{where}: a {type(task).__name__} without {missing[0]}; {_REQUIREMENT}")
    if not isinstance(task.name, str):
        raise UserError(f"{where}: name is a {type(task.name).__name__}, not a string; {_REQUIREMENT}")
    ids: set[str] = set()
    for side in ("train", "test"):
        _check_examples(getattr(task, side), where=f"{where}: {side}", ids=ids)
    return cast("Task", task)


def _check_examples(examples: Sequence[Any], *, where: str, ids: set[str]) -> None:
    if not hasattr(examples, "__len__") or not hasattr(examples, "__getitem__"):
        raise UserError(
            f"{where} is a {type(examples).__name__}, not a sequence; return a list of flatpeak.types.Example"
        )
    if not len(examples):
        raise UserError(f"{where} is empty; both train and test need at least one example")
    for index, example in enumerate(examples):
        if not isinstance(example, Example):
            raise UserError(
                f"{where}[{index}] is a {type(example).__name__}, not a flatpeak.types.Example; wrap it in one"
            )
        for name in ("id", "question", "gold"):
            if not isinstance(getattr(example, name), str):
                raise UserError(f"{where}[{index}].{name} is {getattr(example, name)!r}, not a string; make it one")
        if example.id in ids:
            raise UserError(
                f"{where}[{index}] has id {example.id!r}, which is taken; ids are unique across train and test"
            )
        ids.add(example.id)
