"""The task `custom`, made by a function of the user's, and the check of tasks that are not flatpeak's own."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, cast

from pydantic import Field

from flatpeak.errors import UserError, did_you_mean
from flatpeak.protocols import Task
from flatpeak.types import Example
from flatpeak.utils.schema import StrictConfig

_REQUIREMENT: Final = "a task has `name`, `train` and `test`, the last two sequences of flatpeak.types.Example"


class CustomTaskConfig(StrictConfig):
    """A task of your own: `factory` names a function (module:name or file.py:name) that returns an object with
    `name`, `train` and `test`."""

    type: Literal["custom"] = "custom"
    factory: str
    arguments: dict[str, Any] = Field(default_factory=dict)

    def load(self) -> Task:
        """Call the user's factory and check the task it returns. Errors inside the factory are not caught."""
        factory = load_object(self.factory)
        if not callable(factory):
            raise UserError(
                f"task.factory={self.factory} is a {type(factory).__name__}; name a function that returns a task"
            )
        try:
            inspect.signature(factory).bind(**self.arguments)
        except TypeError as error:
            raise UserError(
                f"task.factory={self.factory}: {error}; change task.arguments to fit its parameters"
            ) from error
        return check_task(factory(**self.arguments), where=f"task.factory={self.factory}")


def load_object(location: str) -> Any:
    """The object at `module:name` or `file.py:name`. UserError where the module, file or name is not there."""
    place, _, name = location.rpartition(":")
    if not place or not name:
        raise UserError(f"task.factory={location}: write module:name or file.py:name")
    module = _load_file(place, location) if place.endswith(".py") else _load_module(place, location)
    try:
        return getattr(module, name)
    except AttributeError as error:
        public = [known for known in vars(module) if not known.startswith("_")]
        raise UserError(f"task.factory={location}: {place} has no {name!r}{did_you_mean(name, public)}") from error


def _load_file(path: str, location: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"task.factory={location}: {file} does not exist; give the file's path from here or from /")
    # The name is the file's own, so that two files called task.py do not answer for each other.
    name = f"flatpeak_task_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module


def _load_module(name: str, location: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"task.factory={location}: {error}; install it, or write file.py:name for a file here"
        ) from error


def check_task(task: Any, *, where: str) -> Task:
    """Check a task of any class; UserError for what is missing, empty or of the wrong type, and for repeated ids."""
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
