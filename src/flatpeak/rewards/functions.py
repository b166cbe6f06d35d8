"""Rewards that users write as functions: how their parameters are filled, and which process calls them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from flatpeak.errors import UserError, did_you_mean
from flatpeak.rewards.base import ComponentScores, Isolation, Scorer, WorkerCalls, join_scores
from flatpeak.rewards.checked_calls import LOG_METRIC, CheckedFunction

if TYPE_CHECKING:
    from flatpeak.types import Completion, Group, Prompt

Scope = Literal["batch", "group", "completion"]
"""The completions that one call covers: those of every group, of one group, or a single completion."""
Timeout = float | Literal["auto"] | None
_HINT: Final = " (did you mean {}?)"
SIGNATURES: Final = (
    "f(completions, ...): all completions at once, with prompts, completion_ids and columns as lists, as in TRL; "
    "f(group, ...): one group at a time, returning a score for each of its completions; "
    "f(completion, ...): one completion's text at a time, with prompt, question, gold and other columns by name; "
    "each may have a parameter log_metric, a function (name, value)"
)
_FILLED_IN: Final[dict[Scope, frozenset[str]]] = {
    "batch": frozenset({"completions", "prompts", "completion_ids", LOG_METRIC}),
    "group": frozenset({"group", LOG_METRIC}),
    "completion": frozenset({"completion", "prompt", LOG_METRIC}),
}
_SYNONYMS: Final = {
    "gold": frozenset(
        {"answer", "solution", "label", "target", "reference", "expected", "ground_truth", "reference_answer"}
        | {"final_answer", "correct_answer", "gold_answer", "expected_answer"}
    ),
    "question": frozenset({"problem", "query", "input", "instruction"}),
    "rationale": frozenset({"reasoning", "explanation", "cot", "chain_of_thought"}),
}
"""Names of other data sets and libraries for the columns that every row has here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """The parameters of a reward function, and which arguments fill them."""

    name: str
    """The function's name in messages."""
    scope: Scope
    """The completions that one call covers."""
    required: frozenset[str]
    """Parameters without a default that no configured argument fills."""
    parameters: frozenset[str]
    """All parameters that can be passed by name."""
    takes_all: bool
    """Whether it has `**kwargs`, and so gets every column."""
    arguments: Mapping[str, Any]
    """Configured arguments, equal in every call."""

    def calls(self, groups: Sequence[Group]) -> list[tuple[dict[str, Any], int, int]]:
        """(keyword arguments, completions, index of the first) of calls that cover all completions in order.

        Calls without completions are left out; a column that a row lacks is a UserError.
        """
        for group in groups:
            self.check_columns(group.prompt)
        pairs = [(completion, group.prompt) for group in groups for completion in group.completions]
        match self.scope:
            case "batch":
                calls = [(self._select(_batch(pairs), _batch_columns(pairs)), len(pairs))] if pairs else []
            case "group":
                calls = [
                    (self._select({"group": group}, row_columns(group.prompt)), len(group.completions))
                    for group in groups
                    if group.completions
                ]
            case "completion":
                calls = [
                    (self._select({"completion": completion.text, "prompt": prompt.text}, row_columns(prompt)), 1)
                    for completion, prompt in pairs
                ]
        starts = accumulate((size for _, size in calls), initial=0)
        return [(arguments, size, start) for (arguments, size), start in zip(calls, starts, strict=False)]

    def _select(self, completions: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in {**columns, **completions, **self.arguments}.items()
            if self.takes_all or name in self.parameters
        }

    def check_columns(self, prompt: Prompt) -> None:
        """UserError if a row lacks a column that fills a parameter."""
        available = row_columns(prompt)
        for name in sorted(self.required - _FILLED_IN[self.scope] - available.keys()):
            raise UserError(
                f"reward function {self.name!r} has a parameter {name!r}, but row {prompt.id!r} has no such column"
                f"{_nearest_column(name, available)}: rename the parameter, give it a default, or set it under "
                f"`arguments` (columns: {', '.join(sorted(available))})"
            )


def read_signature(function: Callable[..., Any], *, name: str, arguments: Mapping[str, Any]) -> Signature:
    """The function's signature; UserError if it is not one of `SIGNATURES` or does not accept the arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        raise UserError(f"reward function {name!r} does not show its parameters; write one of {SIGNATURES}") from None
    by_name = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        raise UserError(f"reward function {name!r} has parameters without a usable name; write one of {SIGNATURES}")
    scope = _scope(by_name.keys(), name)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for argument in arguments:
        if argument in _FILLED_IN[scope]:
            raise UserError(
                f"reward function {name!r}: {argument!r} is filled in by flatpeak; remove it from arguments"
            )
        if argument not in by_name and not takes_all:
            raise UserError(f"reward function {name!r} has no parameter {argument!r}{did_you_mean(argument, by_name)}")
    required = {p.name for p in by_name.values() if p.default is p.empty}
    return Signature(
        name=name,
        scope=scope,
        required=frozenset(required - arguments.keys()),
        parameters=frozenset(by_name),
        takes_all=takes_all,
        arguments=dict(arguments),
    )


def _scope(names: Iterable[str], name: str) -> Scope:
    # Some of TRL's rewards read only token ids, so either list identifies its signature.
    if {"completions", "completion_ids"} & set(names):
        return "batch"
    scopes: list[Scope] = [scope for scope in ("group", "completion") if scope in names]
    if len(scopes) != 1:
        listed = f"({', '.join(names)})"
        raise UserError(f"reward function {name!r} has parameters {listed}, but needs exactly one of {SIGNATURES}")
    return scopes[0]


def row_columns(prompt: Prompt) -> dict[str, Any]:
    """The values that a function can take by name: the row's columns and the example's fields, which win."""
    example = prompt.example
    rationale = example.columns.get("rationale") if example.rationale is None else example.rationale
    return {
        "golds": list(example.golds),
        **example.columns,
        "question": example.question,
        "gold": example.gold,
        "rationale": rationale,
    }


def _nearest_column(name: str, available: Iterable[str]) -> str:
    """A hint at the column that other data sets call `name`, else at a column with a similar name."""
    for meant, others in _SYNONYMS.items():
        if name.casefold().removesuffix("s") in others:
            # A data set may also have a column with such a name.
            known = [meant, *(column for column in sorted(available) if column in others)]
            return _HINT.format(" or ".join(map(repr, known)))
    return did_you_mean(name, available, form=_HINT)


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


def _batch_columns(pairs: Sequence[tuple[Completion, Prompt]]) -> dict[str, list[Any]]:
    """One list per column, one entry per completion; None if a row lacks a column that others have."""
    rows = [row_columns(prompt) for _, prompt in pairs]
    names: dict[str, None] = {}  # a set that keeps their order
    for row in rows:
        names.update(dict.fromkeys(row))
    return {name: [row.get(name) for row in rows] for name in names}


def function_name(function: object) -> str:
    """The name of a function, of the function in a partial, or of a callable object's class."""
    wrapped = getattr(function, "func", function)
    return str(getattr(wrapped, "__name__", type(wrapped).__name__))


class FunctionReward(Scorer):
    """A user's function as a scorer, with one of the `SIGNATURES`.

    `timeout` alone decides where it is called: None means this process, seconds mean a worker process, and `auto` a
    worker if that cannot change scores. It cannot for functions of one completion or one group. Functions of all
    completions (TRL's signature) may compare any completions, and async functions wait for many at once: they stay in
    this process, unless an attribute `by_group = True` allows one call per group. `by_group = False` keeps a function
    in this process.
    """

    may_hang: ClassVar[bool] = True
    is_function: ClassVar[bool] = True

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        timeout: Timeout = None,
        on_timeout: float | None = None,
    ) -> None:
        """`name` is for messages. UserError for a `timeout` or `on_timeout` that does not work with the function."""
        self.name = name or function_name(function)
        self._signature = read_signature(function, name=self.name, arguments=arguments or {})
        self.function = CheckedFunction(
            function,
            name=self.name,
            returns_list=self._signature.scope != "completion",
            logs=LOG_METRIC in self._signature.parameters,
        )
        self._isolation = self._worker_limits(timeout, on_timeout)
        if on_timeout is not None and self._isolation is None:
            raise UserError(
                f"on_timeout={on_timeout:g} has no effect in the trainer's own process, which nothing interrupts: give "
                "the function a `timeout` in seconds, or leave on_timeout out"
            )

    @property
    def isolation(self) -> Isolation | None:
        """The limits of a worker's calls; None if this process calls the function."""
        return self._isolation

    def check_rows(self, prompts: Iterable[Prompt]) -> None:
        """UserError if a row lacks a column that fills a parameter."""
        for prompt in prompts:
            self._signature.check_columns(prompt)

    def worker_calls(self, groups: Sequence[Group]) -> WorkerCalls:
        """The calls that a worker makes, with their positions for messages."""
        calls = self._signature.calls(groups)
        return WorkerCalls(function=self.function, arguments=calls, sizes=[size for _, size, _ in calls])

    def score(self, groups: Sequence[Group]) -> ComponentScores:
        """Call the function for all completions, in this process.

        Completions have no score if their call raises or returns a wrong number of scores, or if their score is not a
        finite number.
        """
        return join_scores(self.function.call_each(self._signature.calls(groups)), groups)

    def _worker_limits(self, timeout: Timeout, on_timeout: float | None) -> Isolation | None:
        # A worker calls it if `timeout` is in seconds, or if it is `auto` and no score depends on another group.
        obstacle = _import_obstacle(self.function.function)
        in_worker = timeout is not None and (timeout != "auto" or self._by_group)
        if not in_worker:
            self.unprotected = obstacle
            return None
        seconds = None if timeout == "auto" else timeout
        required = seconds is not None or self._by_group_attribute is True
        if obstacle and seconds is not None:
            raise UserError(f"timeout={seconds:g} needs a worker process, but {obstacle}; set timeout: null")
        if obstacle and not required:
            self.unprotected = obstacle
            return None
        single_call = self._signature.scope == "batch" and self._by_group_attribute is not True
        return Isolation(timeout=seconds, single_call=single_call, required=required, on_timeout=on_timeout)

    @property
    def _by_group_attribute(self) -> Any:
        return getattr(self.function.function, "by_group", None)

    @property
    def _by_group(self) -> bool:
        """Whether scores depend on one group only, according to the function's attribute, else its signature."""
        if isinstance(self._by_group_attribute, bool):
            return self._by_group_attribute
        return self._signature.scope != "batch" and not _is_async(self.function.function)


def _is_async(function: Callable[..., Any]) -> bool:
    method = getattr(type(function), "__call__", None)  # noqa: B004 - reads the call itself instead of testing for it
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def _import_obstacle(function: Callable[..., Any]) -> str | None:
    """The reason why another process cannot import the function; None if it can."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module == "__main__":
        return "it is defined in the script that is run: move it to a module, or name it file.py:name in the recipe"
    importable: Any = sys.modules.get(str(module))
    for name in str(path).split("."):
        importable = getattr(importable, name, None)
    if importable is not function:
        return "it is a lambda, a closure or an object: define a function in a module"
    return None
