"""Errors with messages of one line that name the fix, and the hints that such messages share."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable

DIVERGED = (
    "fork the run from an earlier checkpoint with a lower optimizer.learning_rate: flatpeak fork RUN STEP --name NEW "
    "optimizer.learning_rate=..."
)
"""The advice in every error about diverged weights."""
LONGEST_REASON = 300
"""The most characters of another library's message that are repeated in one of flatpeak's."""
_EXPLAINED = "flatpeak: "
"""The beginning of the notes that `explain` adds to an exception."""


class UserError(ValueError):
    """Bad input: a recipe, a file, a model or an argument. The message says what to change."""


class UnreachableDataError(UserError):
    """Data that a recipe does not name, or that is available neither on the Hub nor in the local cache."""


class RunError(UserError):
    """A failure after the run has started; its last checkpoint is complete."""

    saves_nothing = False
    """Whether no checkpoint can follow it."""


class DivergedError(RunError):
    """A failure because the run's weights have diverged: they are not saved as a checkpoint."""

    saves_nothing = True


class StoppedError(Exception):
    """A stop signal during a wait; partial results are discarded."""


class ReportedElsewhereError(RunError):
    """An error that another rank reports: this rank ends silently."""

    def __init__(self, text: str, *, saves_nothing: bool = False) -> None:
        super().__init__(text)
        self.saves_nothing = saves_nothing


class LostRankError(RunError):
    """Another rank has ended while this one was waiting for it."""


def explain(error: Exception, text: str) -> None:
    """Attach an explanatory line to an unexpected error whose traceback is saved elsewhere."""
    error.add_note(_EXPLAINED + text)


def explanation(error: Exception) -> str | None:
    """The line that `explain` attached, or None."""
    notes = getattr(error, "__notes__", [])
    return next((note.removeprefix(_EXPLAINED) for note in notes if note.startswith(_EXPLAINED)), None)


def brief(error: BaseException) -> str:
    """The first paragraph of an error's message as one line: the first line alone may be cut off."""
    line = " ".join(str(error).strip().split("\n\n")[0].split())
    return textwrap.shorten(line, LONGEST_REASON, placeholder=" ...") or type(error).__name__


def plural(count: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(seconds: float) -> str:
    """Seconds in words, such as `40 s`, `12 min` or `3.1 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def nearest(name: str, known: Iterable[str], *, count: int = 1) -> list[str]:
    """The known names most similar to `name`, at most `count` of them, ignoring case; empty if none is similar."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    return [by_folded[close] for close in difflib.get_close_matches(name.casefold(), by_folded, n=count)]


def did_you_mean(name: str, known: Iterable[str], *, form: str = ", did you mean {}?") -> str:
    """A hint at the known name most similar to `name`, in quotes; empty if none is similar."""
    return "".join(form.format(repr(close)) for close in nearest(name, known))


def check_characters(text: str, *, where: str) -> None:
    """Raise UserError if a text contains half of a character (a lone surrogate), which UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise UserError(f"{where}: {half} is half of a character; write the whole character, or remove it") from None
