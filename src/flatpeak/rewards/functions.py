"""Rewards that users write: found by name, called as their parameters ask, checked in what they return."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatpeak.errors import UserError
from flatpeak.rewards.calls import Failed, as_list, as_score, call_each, describe, one_line
from flatpeak.rewards.parts import PartScores
from flatpeak.rewards.signatures import nearest, read_signature

if TYPE_CHECKING:
    from flatpeak.types import Completion, Group, Prompt, Score


def load_function(reference: str) -> Callable[..., Any]:
    """The function that `module:name` or `file.py:name` names; a UserError that says what is missing.

    Modules are looked for in the working directory too, and a file may import its neighbours: both directories join
    the end of `sys.path`. A file is run once, however many functions are taken from it.
    """
    source, _, name = reference.rpartition(":")
    if not source or not name:
        raise UserError(f"function {reference!r}: write module:name or file.py:name")
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    if not hasattr(module, name):
        functions = [known for known, value in vars(module).items() if callable(value)]
        raise UserError(f"function {reference!r}: {source} defines no {name!r}{nearest(name, functions)}")
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"function {reference!r}: {name!r} is {describe(function)}, not a function")
    return function  # type: ignore[no-any-return]


def _load_module(name: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UserError(f"cannot import module {name!r}: {one_line(error)}") from error


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"there is no file {path}: give a path that exists, relative to {Path.cwd()} or absolute")
    name = f"flatpeak_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _make_importable(path.parent)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"cannot run {path}: {one_line(error)}") from error
    return module


def _make_importable(directory: Path) -> None:
    # At the end: a user's types.py must not take the standard library's place.
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def function_name(function: Callable[..., Any]) -> str:
    """What to call a function: its own name, that of what a partial wraps, or its class's."""
    wrapped = getattr(function, "func", function)
    return str(getattr(wrapped, "__name__", type(wrapped).__name__))


class FunctionReward:
    """A user's function as a reward part; the signatures are listed in `flatpeak.rewards.signatures`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name or function_name(function)
        self._function = function
        self._signature = read_signature(function, name=self.name, arguments=arguments or {})

    def score(self, groups: Sequence[Group]) -> PartScores:
        """Call the function for all completions; where a call raises, those it covers are missing.

        A result of the wrong length, or with something that is no finite number in it, is a UserError.
        """
        flat, failed, first_error = self._flat_scores(groups)
        remaining = iter(flat)
        return PartScores(
            scores=[[next(remaining) for _ in group.completions] for group in groups],
            failed=failed,
            first_error=first_error,
        )

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """The stripped text: a function says how good an answer is, not what it is."""
        return completion.text.strip()

    def _flat_scores(self, groups: Sequence[Group]) -> tuple[list[Score], int, Exception | None]:
        sizes = self._call_sizes(groups)
        if not sum(sizes):
            return [], 0, None
        scores: list[Score] = []
        errors: list[Exception] = []
        failed = 0
        for size, result in zip(sizes, call_each(self._function, self._signature.calls(groups)), strict=True):
            if isinstance(result, Failed):
                errors.append(result.error)
                failed += size
                scores += [None] * size
                continue
            values = [result] if self._signature.way == "completion" else as_list(result, expected=size, name=self.name)
            scores += [as_score(value, name=self.name, index=len(scores) + at) for at, value in enumerate(values)]
        return scores, failed, errors[0] if errors else None

    def _call_sizes(self, groups: Sequence[Group]) -> list[int]:
        lengths = [len(group.completions) for group in groups]
        match self._signature.way:
            case "batch":
                return [sum(lengths)]
            case "group":
                return lengths
            case "completion":
                return [1] * sum(lengths)
