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
"""Characters of another library's message that are repeated in one of flatpeak's."""
_EXPLAINED = "flatpeak: "
"""The beginning of the notes that `explain` adds to an exception."""


class UserError(ValueError):
    """Bad input: a recipe, a file, a model or an argument. The message says what to change."""


class UnreachableDataError(UserError):
    """Data of the Hub that neither it nor its local cache gives."""


class RunError(UserError):
    """The failure of a run that had begun well; its last checkpoint is whole."""

    saves_nothing = False
    """Whether no checkpoint can follow it."""


class DivergedError(RunError):
    """The failure of a run whose weights have diverged: they are no checkpoint to go on from."""

    saves_nothing = True


class StoppedError(Exception):
    """A stop signal during a wait; nothing of what was waited for is kept."""


class ReportedElsewhereError(RunError):
    """The error of another rank, which reports it: this one ends silently."""

    def __init__(self, text: str, *, saves_nothing: bool = False) -> None:
        super().__init__(text)
        self.saves_nothing = saves_nothing


class LostRankError(RunError):
    """The end of another rank, which this one was waiting for."""


def explain(error: Exception, text: str) -> None:
    """Attach a line that explains an unexpected error whose traceback is kept elsewhere."""
    error.add_note(_EXPLAINED + text)


def explanation(error: Exception) -> str | None:
    """The line that `explain` attached, or None."""
    notes = getattr(error, "__notes__", [])
    return next((note.removeprefix(_EXPLAINED) for note in notes if note.startswith(_EXPLAINED)), None)


def brief(error: BaseException) -> str:
    """The first paragraph of an error's message as one line: a first line alone may be cut short."""
    line = " ".join(str(error).strip().split("\n\n")[0].split())
    return textwrap.shorten(line, LONGEST_REASON, placeholder=" ...") or type(error).__name__


def plural(count: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def nearest(name: str, known: Iterable[str], *, count: int = 1) -> list[str]:
    """The known names most similar to `name`, at most `count` of them, letter case aside; empty where none is near."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    return [by_folded[close] for close in difflib.get_close_matches(name.casefold(), by_folded, n=count)]


def did_you_mean(name: str, known: Iterable[str], *, form: str = ", did you mean {}?") -> str:
    """A hint at the known name most similar to `name`, in quotes; empty where none is near."""
    return "".join(form.format(repr(close)) for close in nearest(name, known))


def check_characters(text: str, *, where: str) -> None:
    """Raise UserError where a text holds half of a character (a lone surrogate), which no UTF-8 file can keep."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise UserError(f"{where}: {half} is half of a character; write the whole character, or remove it") from None
