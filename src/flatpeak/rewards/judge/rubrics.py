"""Rubrics, weighted criteria that a judge marks, and the formats in which verdicts by them are asked for and read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

from pydantic import Field, ValidationError, field_validator, model_validator

from flatpeak.errors import UserError
from flatpeak.rewards.judge.protocol import NoVerdictError, Output, number_field, parse_fields
from flatpeak.utils.schema import StrictConfig

_BUILT_IN: Final = Path(__file__).parents[1] / "rubrics"
_WORD: Final = r"^[a-z][a-z0-9_]*$"
_RESERVED: Final = frozenset({"rationale", "better"})
_PAIRWISE_SCORES: Final = {"a": 1.0, "tie": 0.5, "b": 0.0}


class Criterion(StrictConfig):
    """A criterion of a rubric, marked either with one of `levels` or with any number in `range`."""

    question: str
    """The question to the judge; say what the best and the worst mark mean."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    levels: tuple[float, ...] | None = None
    """All possible marks, in ascending order."""
    range: tuple[float, float] | None = None
    """Lowest and highest mark."""

    @model_validator(mode="after")
    def _one_scale(self) -> Criterion:
        marks = self.levels if self.levels is not None else self.range
        if (self.levels is None) == (self.range is None) or marks is None:
            raise ValueError("a criterion needs either levels, such as [0, 0.5, 1], or range, such as [0, 10]")
        if len(marks) < 2 or any(low >= high for low, high in pairwise(marks)):
            raise ValueError(f"marks {list(marks)}: give at least two, in ascending order")
        return self

    @property
    def low(self) -> float:
        """The lowest possible mark."""
        return (self.levels or self.range or (0.0,))[0]

    @property
    def high(self) -> float:
        """The highest possible mark."""
        return (self.levels or self.range or (1.0,))[-1]

    def allows(self, mark: float) -> bool:
        """Whether a judge may give this mark."""
        return mark in self.levels if self.levels is not None else self.low <= mark <= self.high

    def normalized(self, mark: float) -> float:
        """(mark - low) / (high - low)."""
        return (mark - self.low) / (self.high - self.low)

    @property
    def scale(self) -> str:
        """The possible marks, in words."""
        if self.levels is not None:
            return "one of " + ", ".join(f"{mark:g}" for mark in self.levels)
        return f"a number from {self.low:g} to {self.high:g}"


class Gate(StrictConfig):
    """The other criteria count as 0 unless this one, normalized, reaches `at_least`."""

    criterion: str
    at_least: Annotated[float, Field(gt=0, le=1)] = 0.5


class Rubric(StrictConfig):
    """score = sum of weight * normalized mark, divided by the sum of the weights."""

    name: str
    criteria: Annotated[dict[Annotated[str, Field(pattern=_WORD)], Criterion], Field(min_length=1)]
    """The criteria by name: lower-case letters, digits and underscores."""
    gate: Gate | None = None
    guidance: str = ""
    """Further instructions to the judge, in a sentence or two."""

    @field_validator("criteria")
    @classmethod
    def _free_names(cls, criteria: dict[str, Criterion]) -> dict[str, Criterion]:
        if reserved := sorted(_RESERVED & criteria.keys()):
            raise ValueError(f"a criterion cannot be called {reserved[0]!r}: the reply uses that name")
        return criteria

    @model_validator(mode="after")
    def _gate_exists(self) -> Rubric:
        if self.gate is not None and self.gate.criterion not in self.criteria:
            raise ValueError(f"gate.criterion={self.gate.criterion!r}: choose one of {', '.join(self.criteria)}")
        return self

    def score(self, marks: Mapping[str, float]) -> float:
        """The score of marks that are all allowed, between 0 and 1."""
        normalized = {name: criterion.normalized(marks[name]) for name, criterion in self.criteria.items()}
        if self.gate is not None and normalized[self.gate.criterion] < self.gate.at_least:
            normalized = {name: value if name == self.gate.criterion else 0.0 for name, value in normalized.items()}
        total = math.fsum(criterion.weight for criterion in self.criteria.values())
        return math.fsum(self.criteria[name].weight * value for name, value in normalized.items()) / total


def built_in_rubrics() -> list[str]:
    """The names of the rubrics that come with flatpeak."""
    return sorted(path.stem for path in _BUILT_IN.glob("*.yaml"))


def load_rubric(reference: str) -> Rubric:
    """A built-in rubric by its name, or a YAML file of your own (a name that ends in .yaml or .yml)."""
    import yaml

    is_file = reference.endswith((".yaml", ".yml"))
    path = Path(reference).expanduser() if is_file else _BUILT_IN / f"{reference}.yaml"
    if not is_file and reference not in built_in_rubrics():
        raise UserError(f"rubric {reference!r}: choose one of {', '.join(built_in_rubrics())}, or give a YAML file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"rubric {reference}: {error.strerror}: give a YAML file that can be read") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"rubric {reference} is no YAML: {' '.join(str(error).split())}") from error
    try:
        return Rubric.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        location = ".".join(str(key) for key in problem["loc"])
        raise UserError(f"rubric {reference}: {location + ': ' if location else ''}{problem['msg']}") from error


class VerdictFormat(Protocol):
    """The format of a verdict: the instructions for it, and the reading of a reply."""

    @property
    def instructions(self) -> str:
        """Instructions on the marks and on the form of the reply."""
        ...

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of the reply; None where none is sent."""
        ...

    @property
    def best_reply(self) -> str:
        """The reply with the highest score, as an attacker would write it."""
        ...

    def parse(self, text: str) -> float:
        """The score in a reply, from 0 to 1; NoVerdictError without one."""
        ...


@dataclass(frozen=True, kw_only=True)
class RubricFormat:
    """A verdict with one mark for every criterion."""

    rubric: Rubric
    output: Output

    @property
    def instructions(self) -> str:
        """The criteria with their scales, then the form of the reply."""
        criteria = [f"- {name} ({c.scale}): {c.question.strip()}" for name, c in self.rubric.criteria.items()]
        guidance = [self.rubric.guidance.strip()] if self.rubric.guidance.strip() else []
        return "\n".join(["Mark each of these:", *criteria, *guidance, self._reply_form])

    @property
    def _reply_form(self) -> str:
        names = list(self.rubric.criteria)
        marks = ", ".join(f'"{name}": mark' for name in names)
        return f'Reply with one JSON object and nothing else: {{"rationale": "two sentences at most", {marks}}}'

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema, with the rationale first so that the marks follow from it."""
        if self.output != "json_schema":
            return None
        marks: dict[str, Any] = {}
        for name, criterion in self.rubric.criteria.items():
            marks[name] = {"type": "number"}
            if criterion.levels is not None:
                marks[name]["enum"] = list(criterion.levels)
            else:
                marks[name] |= {"minimum": criterion.low, "maximum": criterion.high}
        return _object_schema({"rationale": {"type": "string"}, **marks})

    @property
    def best_reply(self) -> str:
        """The reply with the highest marks."""
        marks = {name: criterion.high for name, criterion in self.rubric.criteria.items()}
        return _reply_text(marks, "The answer agrees with the reference in every respect.")

    def parse(self, text: str) -> float:
        """The rubric's score; every mark has to be present and allowed, none is clipped into its range."""
        fields = parse_fields(text)
        marks = {name: number_field(fields, name) for name in self.rubric.criteria}
        for name, mark in marks.items():
            if not self.rubric.criteria[name].allows(mark):
                raise NoVerdictError(f"{name} was {mark:g}, but has to be {self.rubric.criteria[name].scale}")
        return self.rubric.score(marks)


@dataclass(frozen=True, kw_only=True)
class PairwiseFormat:
    """A verdict on the better of two answers: 1 for A, 0 for B, 0.5 for a tie."""

    rubric: Rubric
    output: Output

    @property
    def instructions(self) -> str:
        """The criteria of better, then the form of the reply."""
        criteria = [f"- {name} (weight {c.weight:g}): {c.question.strip()}" for name, c in self.rubric.criteria.items()]
        form = (
            'Reply with one JSON object and nothing else: {"rationale": "two sentences at most", "better": '
            '"A", "B" or "tie"}'
        )
        order = "Their order is random and means nothing; length is no merit. Say tie where neither is clearly better."
        return "\n".join(["Say which answer is better by these:", *criteria, order, form])

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema: A, B or tie."""
        if self.output != "json_schema":
            return None
        return _object_schema(
            {"rationale": {"type": "string"}, "better": {"type": "string", "enum": ["A", "B", "tie"]}}
        )

    @property
    def best_reply(self) -> str:
        """The reply in which the first answer wins."""
        return _reply_text({"better": "A"}, "Answer A is better in every respect.")

    def parse(self, text: str) -> float:
        """The score from A's point of view."""
        choice = parse_fields(text).get("better")
        if not isinstance(choice, str) or choice.lower() not in _PAIRWISE_SCORES:
            raise NoVerdictError("better was not A, B or tie")
        return _PAIRWISE_SCORES[choice.lower()]


def _object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def _reply_text(fields: Mapping[str, Any], rationale: str) -> str:
    return json.dumps({"rationale": rationale, **fields})
