"""Files of one JSON object a line: appended to whole, read as far as they are whole."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
