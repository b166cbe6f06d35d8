"""CPU seconds of a block, for tests that hostile input must not slow down."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Spent:
    """The CPU seconds that a block took, once it has ended."""

    seconds: float = float("nan")


@contextmanager
def cpu_time() -> Iterator[Spent]:
    """Measure a block without garbage collection, whose passes cost by what else the process holds.

    In a process that has run thousands of tests one pass takes more than a second.
    """
    spent, was_enabled = Spent(), gc.isenabled()
    gc.disable()
    start = time.process_time()
    try:
        yield spent
        spent.seconds = time.process_time() - start
    finally:
        if was_enabled:
            gc.enable()
