"""`flatpeak patterns`: what the reward of a run pays for in any prompt, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from flatpeak.report.logged_step import logged_step
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.paid_patterns import FEWEST_PROMPTS, Pattern, logged_patterns, unequal_groups

COLUMNS: Final = (
    "pattern",
    "share at first",
    "share now",
    "extra reward",
    "in spreads",
    "prompts",
    "an example that has it",
)


def patterns_of(run: Path, *, step: int | None = None) -> tuple[list[int], list[Pattern]]:
    """The logged steps up to one (the last by default) whose groups were read, and their patterns.

    UserError if there are no rollouts.
    """
    last, _ = logged_step(run, step)
    return logged_patterns(RunPaths(run), last)


def reason_for_none(run: Path, *, step: int | None = None) -> str:
    """A line about steps without a pattern: nothing pays, or nothing can be compared."""
    last, _ = logged_step(run, step)
    if unequal_groups(RunPaths(run), last) >= FEWEST_PROMPTS:
        return f"no pattern of completions pays in {FEWEST_PROMPTS} prompts or more"
    return (
        f"rewards differ within fewer than {FEWEST_PROMPTS} groups of these steps, so that nothing can be compared: "
        "--step shows earlier ones"
    )


def cells(one: Pattern) -> tuple[str, ...]:
    """The columns of a pattern, as in COLUMNS."""
    example = " ".join(one.example.split())
    return (
        one.name,
        f"{one.share_at_first:.1%}",
        f"{one.share:.1%}",
        f"{one.gain:+.3g} ± {2 * one.error:.2g}",
        f"{one.spreads:.1f}",
        str(one.prompts),
        example if len(example) <= 80 else f"{example[:77]}...",
    )


def visible(text: str) -> str:
    """A text with the characters escaped that a terminal does not print."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def render_patterns(patterns: Sequence[Pattern]) -> Any:
    """A table of patterns for the terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*COLUMNS)
    for one in patterns:
        table.add_row(*(Text(visible(cell)) for cell in cells(one)))
    return table
