"""What worker processes print: whole lines on standard error, each marked, whatever else is displayed there."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Final

MARK: Final = "reward: "
"""Before every line."""
_CHUNK: Final = 65536


def capture() -> int:
    """A descriptor to be a process's standard output and error; the caller closes its own copy once that has started.

    A thread passes on what comes until every process that holds it has ended. Processes that wrote to the terminal
    themselves would write into each other's lines, and into a live display.
    """
    source, sink = os.pipe()
    threading.Thread(target=_pass_on, args=(source,), name="flatpeak-reward-output", daemon=True).start()
    return sink


def _pass_on(source: int) -> None:
    begun = b""
    with os.fdopen(source, "rb", buffering=0) as pipe:
        while chunk := pipe.read(_CHUNK):
            *lines, begun = (begun + chunk).split(b"\n")
            _show(lines)
    if begun:
        _show([begun])


def _show(lines: list[bytes]) -> None:
    """All at once: a live display draws itself anew behind every write."""
    text = "".join(f"{MARK}{line.decode(errors='replace')}\n" for line in lines)
    # Looked up each time: a live display stands in for it while it lasts. Nothing can be done where it is closed.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()
