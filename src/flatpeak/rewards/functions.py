"""Rewards that users write: found by name, called as their parameters ask, checked in what they return."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal

from flatpeak.errors import UserError, did_you_mean
from flatpeak.rewards.base import PartScores, joined
from flatpeak.rewards.calls import BadResultError, Failed, as_list, as_score, call_each, describe, one_line
from flatpeak.rewards.workers.process import USER_FILE

if TYPE_CHECKING:
    from flatpeak.types import Completion, Group, Prompt, Score

Way = Literal["batch", "group", "completion"]
HINT: Final = " (did you mean {}?)"
SIGNATURES: Final = (
    "f(completions, ...): all completions at once, with prompts, completion_ids and columns as lists, as in TRL; "
    "f(group, ...): one group at a time, returning a score for each of its completions; "
    "f(completion, ...): one completion's text at a time, with prompt, question, gold and other columns by name"
)
_GIVEN: Final[dict[Way, frozenset[str]]] = {
    "batch": frozenset({"completions", "prompts", "completion_ids"}),
    "group": frozenset({"group"}),
    "completion": frozenset({"completion", "prompt"}),
}
_SYNONYMS: Final = {
    "gold": frozenset(
        {"answer", "solution", "label", "target", "reference", "expected", "ground_truth", "reference_answer"}
        | {"final_answer", "correct_answer", "gold_answer", "expected_answer"}
    ),
    "question": frozenset({"problem", "query", "input", "instruction"}),
    "rationale": frozenset({"reasoning", "explanation", "cot", "chain_of_thought"}),
}
"""What data sets and other libraries' rewards call the columns that every row has here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """A function's parameters, as far as calling it with rewards' arguments goes."""

    name: str
    """What messages call the function."""
    way: Way
    """What one call covers: every completion of every group, one group, or one completion."""
    required: frozenset[str]
    """Parameters without a default that no configured argument fills."""
    parameters: frozenset[str]
    """All that can be passed by name."""
    takes_all: bool
    """Whether it has `**kwargs`, and so is given every column."""
    arguments: Mapping[str, Any]
    """Configured arguments, the same at every call."""

    def calls(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """The keyword arguments of each call, which together cover all completions in order."""
        for group in groups:
            self._check_columns(group.prompt)
        pairs = [(completion, group.prompt) for group in groups for completion in group.completions]
        match self.way:
            case "batch":
                return [self._select(_batch(pairs), _batch_columns([prompt for _, prompt in pairs]))]
            case "group":
                return [self._select({"group": group}, columns(group.prompt)) for group in groups]
            case "completion":
                return [
                    self._select({"completion": completion.text, "prompt": prompt.text}, columns(prompt))
                    for completion, prompt in pairs
                ]

    def _select(self, given: Mapping[str, Any], by_name: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in {**by_name, **given, **self.arguments}.items()
            if self.takes_all or name in self.parameters
        }

    def _check_columns(self, prompt: Prompt) -> None:
        available = columns(prompt)
        for name in sorted(self.required - _GIVEN[self.way] - available.keys()):
            raise UserError(
                f"reward function {self.name!r} has a parameter {name!r}, but row {prompt.id!r} has no such column"
                f"{_nearest_column(name, available)}: rename the parameter, give it a default, or set it under "
                f"`arguments` (columns: {', '.join(sorted(available))})"
            )


def read_signature(function: Callable[..., Any], *, name: str, arguments: Mapping[str, Any]) -> Signature:
    """The function's signature; a UserError if it is none of `SIGNATURES` or does not take the arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        raise UserError(f"reward function {name!r} does not show its parameters; write one of {SIGNATURES}") from None
    by_name = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        raise UserError(f"reward function {name!r} has parameters without a usable name; write one of {SIGNATURES}")
    way = _way(by_name.keys(), name)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for argument in arguments:
        if argument in _GIVEN[way]:
            raise UserError(
                f"reward function {name!r}: {argument!r} is filled in by flatpeak; remove it from arguments"
            )
        if argument not in by_name and not takes_all:
            raise UserError(f"reward function {name!r} has no parameter {argument!r}{did_you_mean(argument, by_name)}")
    required = {p.name for p in by_name.values() if p.default is p.empty}
    return Signature(
        name=name,
        way=way,
        required=frozenset(required - arguments.keys()),
        parameters=frozenset(by_name),
        takes_all=takes_all,
        arguments=dict(arguments),
    )


def _way(names: Iterable[str], name: str) -> Way:
    # Some of TRL's own rewards look at token ids only, so either list marks its signature.
    if {"completions", "completion_ids"} & set(names):
        return "batch"
    ways: list[Way] = [way for way in ("group", "completion") if way in names]
    if len(ways) != 1:
        found = f"({', '.join(names)})"
        raise UserError(f"reward function {name!r} has parameters {found}, but needs exactly one of {SIGNATURES}")
    return ways[0]


def columns(prompt: Prompt) -> dict[str, Any]:
    """What a function can ask for by name: the row's columns, and the example's own fields, which win."""
    example = prompt.example
    return {
        **example.columns,
        "question": example.question,
        "gold": example.gold,
        "rationale": example.rationale,
    }


def _nearest_column(name: str, available: Iterable[str]) -> str:
    """A hint at the column that holds what is elsewhere called `name`, else at one of a similar name."""
    for meant, others in _SYNONYMS.items():
        if name.casefold().removesuffix("s") in others:
            # A data set may have a column of such a name beside flatpeak's own.
            found = [meant, *(column for column in sorted(available) if column in others)]
            return HINT.format(" or ".join(map(repr, found)))
    return did_you_mean(name, available, form=HINT)


def _batch(pairs: Sequence[tuple[Completion, Prompt]]) -> dict[str, Any]:
    return {
        "prompts": [
            prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]
            for _, prompt in pairs
        ],
        "completions": [
            completion.text if prompt.messages is None else [{"role": "assistant", "content": completion.text}]
            for completion, prompt in pairs
        ],
        "completion_ids": [list(completion.token_ids) for completion, _ in pairs],
    }


def _batch_columns(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """One list per column, one entry per completion; None where a row lacks a column that others have."""
    rows = [columns(prompt) for prompt in prompts]
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def load_function(reference: str) -> Callable[..., Any]:
    """The function that `module:name` or `file.py:name` names; a UserError that says what is missing.

    Modules are looked for in the working directory too, and a file may import its neighbours: both directories join
    the end of `sys.path`. A file is run once, however many functions are taken from it.
    """
    source, _, name = reference.rpartition(":")
    if not source or not name:
        raise UserError(f"function {reference!r}: write module:name or file.py:name")
    module = load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    if not hasattr(module, name):
        functions = [known for known, value in vars(module).items() if callable(value)]
        raise UserError(f"function {reference!r}: {source} defines no {name!r}{did_you_mean(name, functions)}")
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


def load_file(path: Path) -> ModuleType:
    """The file as a module; a UserError if it is not there or fails."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"there is no file {path}: give a path that exists, relative to {Path.cwd()} or absolute")
    name = f"{USER_FILE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A function that is called and has its result checked: what travels to worker processes."""

    function: Callable[..., Any]
    name: str
    """What messages call it."""
    one: bool
    """Whether a call is about one completion, and returns its score and no list."""

    def __call__(self, arguments: Mapping[str, Any], size: int, index: int) -> PartScores:
        """Call it for `size` completions, the first of which messages call `index`."""
        return self.read(call_each(self.function, [arguments])[0], size=size, index=index)

    def read(self, result: object, *, size: int, index: int) -> PartScores:
        """What a call returned, or `Failed`, as one row of scores; what is no score is missing."""
        if isinstance(result, Failed):
            return PartScores(scores=[[None] * size], failed=size, first_error=result.error)
        try:
            values = [result] if self.one else as_list(result, expected=size, name=self.name)
        except BadResultError as error:
            return PartScores(scores=[[None] * size], failed=size, first_error=error)
        scores: list[Score] = []
        errors: list[Exception] = []
        for at, value in enumerate(values):
            try:
                scores.append(as_score(value, name=self.name, index=index + at))
            except BadResultError as error:
                scores.append(None)
                errors.append(error)
        return PartScores(scores=[scores], failed=len(errors), first_error=errors[0] if errors else None)


class FunctionReward:
    """A user's function as a reward part; the signatures are listed in `flatpeak.rewards.functions`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name or function_name(function)
        self._signature = read_signature(function, name=self.name, arguments=arguments or {})
        self.call = Call(function=function, name=self.name, one=self._signature.way == "completion")

    @property
    def way(self) -> Way:
        """What one call covers."""
        return self._signature.way

    def calls(self, groups: Sequence[Group]) -> list[tuple[dict[str, Any], int, int]]:
        """The arguments of `call` that together cover all completions in order; calls about none are left out.

        A column that a row lacks is a UserError.
        """
        lengths = [len(group.completions) for group in groups]
        match self.way:
            case "batch":
                sizes = [sum(lengths)]
            case "group":
                sizes = lengths
            case "completion":
                sizes = [1] * sum(lengths)
        if not any(sizes):
            return []
        starts = accumulate(sizes, initial=0)
        calls = zip(self._signature.calls(groups), sizes, starts, strict=False)
        return [(arguments, size, start) for arguments, size, start in calls if size]

    def score(self, groups: Sequence[Group]) -> PartScores:
        """Call the function for all completions, in this process; what a call that raises covers is missing.

        A result of the wrong length makes what the call covers missing too, and so does something that is no finite
        number the completion it stands for.
        """
        calls = self.calls(groups)
        results = call_each(self.call.function, [arguments for arguments, _, _ in calls])
        return joined(
            [
                self.call.read(result, size=size, index=start)
                for (_, size, start), result in zip(calls, results, strict=True)
            ],
            groups,
        )

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """The stripped text: a function says how good an answer is, not what it is."""
        return completion.text.strip()
