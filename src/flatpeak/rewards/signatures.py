"""How a user's function wants to be called, read off its parameter names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from flatpeak.errors import UserError

if TYPE_CHECKING:
    from flatpeak.types import Completion, Group, Prompt

Way = Literal["batch", "group", "completion"]
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
            raise UserError(f"reward function {name!r} has no parameter {argument!r}{nearest(argument, by_name)}")
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


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that looks most like it, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _nearest_column(name: str, available: Iterable[str]) -> str:
    """A hint at the column that holds what is elsewhere called `name`, else at one of a similar name."""
    for meant, others in _SYNONYMS.items():
        if name.casefold().removesuffix("s") in others:
            # A data set may have a column of such a name beside flatpeak's own.
            found = [meant, *(column for column in sorted(available) if column in others)]
            return f" (did you mean {' or '.join(map(repr, found))}?)"
    return nearest(name, available)


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
