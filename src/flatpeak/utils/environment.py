"""The way torch and transformers load: environment variables that are set before, and no garbage collection."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from flatpeak.kernels.processor import vendor

DEFAULTS: Final = {
    # Threads that spin while they wait made runs on a busy machine 13 to 20 times slower; a bounded spin is no way out
    # (docs/engine.md, Threads).
    "OMP_WAIT_POLICY": "PASSIVE",
    # Its threads would warn at every fork.
    "TOKENIZERS_PARALLELISM": "false",
    # A bar for every checkpoint would tear the display apart.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
STRICT_MKL: Final = ("MKL_CBWR", "AUTO,STRICT")
"""Intel's processors only: MKL otherwise multiplies few rows there by other kernels than many, so that a completion's
bits depend on its company (docs/engine.md)."""


def set_defaults() -> None:
    """Set what the user has not."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if vendor() == "GenuineIntel":
        os.environ.setdefault(*STRICT_MKL)


@contextmanager
def without_collection() -> Iterator[None]:
    """A context for imports and loading, without garbage collection: it finds none, and took a sixth of their time.

    What is there then moves to the oldest generation: else the next collection of each generation looks through it.
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
