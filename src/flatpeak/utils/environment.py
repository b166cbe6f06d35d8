"""Loading torch and transformers: environment variables to set first, and imports without garbage collection."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from flatpeak.kernels.processor import vendor

DEFAULTS: Final = {
    # Threads that spin while waiting made runs on a busy machine 13 to 20 times slower; a bounded spin does not help
    # (docs/results/performance.md, Threads).
    "OMP_WAIT_POLICY": "PASSIVE",
    # Its threads would warn at every fork.
    "TOKENIZERS_PARALLELISM": "false",
    # A progress bar for every checkpoint would break the display.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
STRICT_MKL: Final = ("MKL_CBWR", "AUTO,STRICT")
"""Intel's processors only: otherwise MKL multiplies few rows by other kernels than many, so that a completion's bits
depend on the other completions (docs/engine.md)."""


def set_defaults() -> None:
    """Set the variables that the user has not set."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if vendor() == "GenuineIntel":
        os.environ.setdefault(*STRICT_MKL)


@contextmanager
def without_collection() -> Iterator[None]:
    """A context for imports and loading without garbage collection, which took a sixth of their time to find nothing.

    Afterwards all objects move to the oldest generation, so that the next collections need not look through them.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if collects:
            gc.enable()
