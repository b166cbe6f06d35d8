"""Small files written so that a reader sees the old content or the new, never half of it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str) -> None:
    """Write `text` (UTF-8) under a temporary name beside `path`, sync it, and rename it into place."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def fsync_path(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


Row = dict[str, Any]


class LineWriter:
    """Appends rows, each handed to the system before `write` returns: what ends the process later loses none."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._torn = False

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. OSError where it does not fit on the disk; only that row is lost then."""
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        # After a torn write the rest of the line is missing: the newline ends it, so that only that row is lost.
        data = ("\n" * self._torn + text + "\n").encode(errors="backslashreplace")
        self._torn = True
        written = self._file.write(data)
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path) -> list[tuple[int, Row]]:
    """(byte offset of the line's end, row) of every whole line that has a step and a stage; none without a file."""
    if not path.is_file():
        return []
    found: list[tuple[int, Row]] = []
    offset = 0
    for line in path.read_bytes().splitlines(keepends=True):
        offset += len(line)
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row and "stage" in row:
            found.append((offset, row))
    return found


def silence(
    scope: str,
    *,
    reward: float | None,
    truncated: float,
    unanswered: float | None,
    limit: int | None,
    effect: str = "no weight changed",
) -> str:
    """`scope` ("the last 3 steps") had no group whose rewards differ; the figures that say why.

    `reward` is the mean, None where every score is missing; `truncated` and `unanswered` are shares of completions, the
    latter None where it is not known; `limit` is rollout.max_new_tokens, where that is known.
    """
    causes = ["no completion has a score" if reward is None else f"the mean reward is {reward:.3g}"]
    if unanswered:
        causes.append(f"no answer is found in {unanswered:.0%} of completions")
    causes.append(f"{truncated:.0%} are cut at rollout.max_new_tokens" + (f"={limit}" if limit else ""))
    listed = ", ".join(causes[:-1]) + f" and {causes[-1]}"
    return (
        f"no group of {scope} had rewards that differ, so {effect}: {listed}; see groups/informative_fraction in "
        "docs/metrics.md"
    )
