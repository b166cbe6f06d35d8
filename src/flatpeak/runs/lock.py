"""One trainer per run directory."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import weakref
from pathlib import Path
from typing import IO

from flatpeak.errors import UserError


class RunLock:
    """An exclusive lock on a run, released by `release` or by the kernel when the process ends, however it ends.

    The file stays: deleting it could let two trainers lock two different files of the same name.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises UserError naming the process that holds it."""
        self.path = path
        self._file: IO[str] = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            error = _held_by_another(path, self._file)
            self._file.close()
            raise error from None
        _held.add(self)
        self._file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, self._file)
        self._file.flush()

    def release(self) -> None:
        """Let go; harmless when called twice."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()

    def forget(self) -> None:
        """Close the file without a word in it."""
        self._file.close()


def check_unlocked(path: Path) -> None:
    """UserError naming the process that holds the lock; it is neither taken nor made."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _held_by_another(path, file) from None


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_held):
        lock.forget()


# A forked worker shares the locked file: one that outlives a killed trainer would keep the run locked.
os.register_at_fork(after_in_child=_forget_in_child)


def _held_by_another(path: Path, file: IO[str]) -> UserError:
    return UserError(f"{path.parent} is being written by {_holder(file)}: stop it first, or choose another run.name")


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        content = json.loads(file.read())
        return f"process {content['pid']} on {content['host']}"
    except (ValueError, KeyError, TypeError):
        # Between taking the lock and writing its name, the holder is nameless.
        return "another process"
