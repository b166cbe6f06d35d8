"""A task of the user's own, made by a function they name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from flatpeak.errors import UserError, did_you_mean
from flatpeak.protocols import Task
from flatpeak.tasks.config import CustomTaskConfig
from flatpeak.types import Example

_CONTRACT = "a task has `name`, `train` and `test`, the last two sequences of flatpeak.types.Example"


def custom_task(config: CustomTaskConfig) -> Task:
    """Call the user's factory and check what it returns. Errors inside the factory are the user's own and pass."""
    factory = load_object(config.factory)
    if not callable(factory):
        raise UserError(
            f"task.factory={config.factory} is a {type(factory).__name__}; name a function that returns a task"
        )
    try:
        inspect.signature(factory).bind(**config.arguments)
    except TypeError as error:
        raise UserError(
            f"task.factory={config.factory}: {error}; change task.arguments to fit its parameters"
        ) from error
    return check_task(factory(**config.arguments), where=f"task.factory={config.factory}")


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
    """The task, if it is one: UserError for what is missing, empty, of the wrong type, or an id that occurs twice."""
    missing = [part for part in ("name", "train", "test") if not hasattr(task, part)]
    if missing:
        raise UserError(f"{where}: a {type(task).__name__} without {missing[0]}; {_CONTRACT}")
    if not isinstance(task.name, str):
        raise UserError(f"{where}: name is a {type(task.name).__name__}, not a string; {_CONTRACT}")
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
        for part in ("id", "question", "gold"):
            if not isinstance(getattr(example, part), str):
                raise UserError(f"{where}[{index}].{part} is {getattr(example, part)!r}, not a string; make it one")
        if example.id in ids:
            raise UserError(
                f"{where}[{index}] has id {example.id!r}, which is taken; ids are unique across train and test"
            )
        ids.add(example.id)
