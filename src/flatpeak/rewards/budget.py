"""The time that a training step may lose to answers that cannot be graded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class GradingBudget:
    """Seconds that one step may lose to calls that run out of time or memory; calls that give a score cost nothing."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """The budget as it began."""
        self.left = seconds
        """Seconds not lost yet, never below 0."""

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self.left <= 0

    def spend(self, seconds: float) -> None:
        """Take lost seconds off."""
        self.left = max(0.0, self.left - seconds)


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """A list that holds the seconds of the block once it is over."""
    started, seconds = time.monotonic(), list[float]()
    try:
        yield seconds
    finally:
        seconds.append(time.monotonic() - started)
