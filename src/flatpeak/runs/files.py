"""Files that survive a crash: small files replaced atomically, and JSON lines whose last line may be incomplete."""

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
    """Write `text` (UTF-8) to a temporary file next to `path`, sync it, and rename it to `path`."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        # If the directory is not writable, deleting fails too: raise the error of writing.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def fsync_path(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LineWriter:
    """A writer of JSON lines; `write` passes each line to the system before it returns, so that a crash loses none."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._torn = False

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row. Raises OSError if the disk is full; only that row is lost."""
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        # An incomplete write leaves the start of a line; the newline ends it, so that only that row is lost.
        data = ("\n" * self._torn + text + "\n").encode(errors="backslashreplace")
        self._torn = True
        written = self._file.write(data)
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False

    def sync(self) -> None:
        """Flush the lines to the disk, so that they survive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; all lines are already written."""
        self._file.close()


def read_lines(path: Path) -> list[tuple[int, Row]]:
    """Read (byte offset of the line's end, row) of every complete line with a step and a stage; none without a file."""
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
