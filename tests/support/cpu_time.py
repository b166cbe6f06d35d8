"""A limit on CPU seconds for tests that hostile input must not slow down."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cpu_seconds_below(limit: float) -> Iterator[None]:
    """Assert that the block takes less; without garbage collection, whose passes cost by what else the process holds.

    In a process that has run thousands of tests one pass takes more than a second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    start = time.process_time()
    try:
        yield
        seconds = time.process_time() - start
    finally:
        if was_enabled:
            gc.enable()
    assert seconds < limit, f"{seconds:.2f} CPU seconds, {limit} allowed"
