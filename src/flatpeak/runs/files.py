"""Files that survive a crash: small ones replaced whole, and JSON lines of which only the last can be torn."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""One line of a JSON lines file."""


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
        # Where nothing may be written, nothing may be deleted either: the error of writing is the one to raise.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def fsync_path(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LineWriter:
    """A writer of JSON lines; each is handed to the system before `write` returns, so that a later crash loses none."""

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

    def sync(self) -> None:
        """Force the lines to the disk, where a power cut leaves them too."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, whose lines are all written."""
        self._file.close()


def read_lines(path: Path) -> list[tuple[int, Row]]:
    """Read (byte offset of the line's end, row) of every whole line with a step and a stage; none without a file."""
    if not path.is_file():
        return []
    rows: list[tuple[int, Row]] = []
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
            rows.append((offset, row))
    return rows
