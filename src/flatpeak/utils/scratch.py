"""Temporary directories of large files, which the next process like it deletes where one was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path


class ScratchDirectory:
    """A directory that this process has locked: the kernel releases the lock however the process ends."""

    def __init__(self, name: str, parent: Path | None = None) -> None:
        """`parent` is the system's directory for temporary files unless given; OSError if it cannot be written to."""
        parent = parent or Path(tempfile.gettempdir())
        prefix = f"flatpeak-{name}-{socket.gethostname()}-"  # locks of other hosts may not be seen
        for left in parent.glob(f"{prefix}*/"):
            _delete_abandoned(left)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = os.open(self.path, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks, where nothing is deleted either
            fcntl.flock(lock, fcntl.LOCK_EX)
        self._delete = weakref.finalize(self, _delete, self.path, lock)

    def close(self) -> None:
        """Delete the directory now; otherwise it is deleted as the process ends."""
        self._delete()


def _delete(directory: Path, lock: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


def _delete_abandoned(directory: Path) -> None:
    """Delete a directory that no process has locked; an empty one may be new, and about to be locked."""
    with suppress(OSError):  # another user's, or in use
        lock = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if any(directory.iterdir()):
                shutil.rmtree(directory)
        finally:
            os.close(lock)
