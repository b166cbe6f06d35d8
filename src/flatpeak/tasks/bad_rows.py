"""Rows that cannot be used: refused, or left out and counted."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Literal

from flatpeak.errors import UserError

BadRows = Literal["refuse", "skip"]
_ALWAYS_LEFT_OUT: Final = 10
"""The number of bad rows that may be left out of data of any size."""
_SHARE: Final = 0.01
"""The share of bad rows above which the data are refused."""
_LISTED: Final = 3
"""The most bad rows that the error lists."""


class BadRowLog:
    """A block that reads one row in `with log:` and raises UserError if the row cannot be used.

    The log passes the error on, with `refuse` together with the way out; with `skip` it counts the row.
    """

    def __init__(self, treatment: BadRows | None = None) -> None:
        self.usable = 0
        """The number of other rows, counted by the caller."""
        self._treatment = treatment
        self._bad = 0
        self._first: list[str] = []

    def __enter__(self) -> None:
        """Begin to read a row."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        """Whether the error is one of a row that is left out."""
        if not isinstance(error, UserError) or self._treatment is None:
            return False
        if self._treatment == "refuse":
            raise UserError(f"{error} (task.bad_rows=skip leaves such rows out)") from error
        self._bad += 1
        if self._bad <= _LISTED:
            self._first.append(str(error))
        return True

    def notices(self) -> tuple[str, ...]:
        """A notice about the rows that were left out, if any. UserError if they are too many, or all."""
        if not self._bad:
            return ()
        total = self.usable + self._bad
        if self._bad > max(_ALWAYS_LEFT_OUT, _SHARE * total) or not self.usable:
            listed = "; ".join(self._first) + ("; ..." if self._bad > len(self._first) else "")
            raise UserError(
                f"{self._bad} of {total} rows cannot be used, and task.bad_rows=skip leaves out at most "
                f"{_ALWAYS_LEFT_OUT}, or {_SHARE:.0%} of many: {listed}"
            )
        return (f"{self._bad} of {total} rows left out (task.bad_rows=skip); the first: {self._first[0]}",)
