"""Reward functions of whole runs, in a module without torch, so that the processes that grade load it in a moment."""

from __future__ import annotations

from typing import Any


def odd(completion_ids: list[list[int]]) -> list[float]:
    """A reward that differs within most groups."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def varied(completion_ids: list[list[int]]) -> list[float]:
    """A reward that differs within nearly every group."""
    return [sum(ids) / 100 for ids in completion_ids]


def first_token(completion_ids: list[list[int]]) -> list[float]:
    """A reward that the first token decides."""
    return [float(ids[0] % 2) for ids in completion_ids]


def varied_text(completions: list[str], **_: Any) -> list[float]:
    """A reward of whole texts that differs within nearly every group."""
    return [sum(map(ord, completion)) % 7 / 7 for completion in completions]


def lengths(completions: list[str], **_: Any) -> list[float]:
    """The number of characters of each completion."""
    return [float(len(completion)) for completion in completions]


def length(completion: str) -> float:
    """The number of characters of one completion."""
    return float(len(completion))


def parity(completion: str) -> float:
    """A reward of one text that differs within most groups."""
    return float(sum(map(ord, completion)) % 2)


def low_first_digit(completion: str) -> float:
    """A reward that the first character decides."""
    return float(completion[:1] in "01234")


def wrong_length(completions: list[str]) -> list[float]:
    """One score too few."""
    return [0.0] * (len(completions) - 1)


def not_a_number(completions: list[str]) -> list[float]:
    """Scores that are no numbers."""
    return [float("nan")] * len(completions)


def raises(completion: str) -> float:
    """An error for every completion."""
    raise KeyError("answer")


def asks_for_a_column(completion: str, solution: str) -> float:
    """A function of a column that no task here has."""
    return 0.0
