"""Child processes: a function of flatpeak's in a fresh interpreter, its process group, and its end in words.

`multiprocessing` would import the user's main module again, torch and all.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, Protocol

_BOOT: Final = (
    "import sys; module, name, arguments, *sys.path = sys.argv[1:]; "
    "from flatpeak.utils.child_process import call; call(module, name, arguments)"
)


class Process(Protocol):
    """A process that leads a group of its own: a `subprocess.Popen`, or the fork of a server."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, or minus the signal; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """The exit code once it has ended; subprocess.TimeoutExpired where that takes longer."""
        ...


def start(
    function: Callable[..., None], *arguments: Any, channel: socket.socket | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Call a function of a module in a new interpreter with this process's `sys.path`, nothing to read, its own group.

    `arguments` are JSON values; a `channel` comes before them, as its descriptor. `options` are those of
    `subprocess.Popen`. The terminal's Ctrl-C reaches this process alone.
    """
    descriptors = [] if channel is None else [channel.fileno()]
    target = [function.__module__, function.__name__, json.dumps([*descriptors, *arguments])]
    return subprocess.Popen(
        [sys.executable, "-P", "-u", "-c", _BOOT, *target, *sys.path],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        process_group=0,
        **options,
    )


def call(module: str, name: str, arguments: str) -> None:
    """Call the function, in the new process."""
    getattr(import_module(module), name)(*json.loads(arguments))


def kill_group(process: Process) -> None:
    """End a process, and whatever it has started and left in its group."""
    with suppress(ProcessLookupError, PermissionError):  # macOS raises the second for groups that have ended
        os.killpg(process.pid, signal.SIGKILL)


def wait_for_end(process: Process, *, seconds: float) -> int | None:
    """The exit code of a process that is about to end, whose group is killed; None where it took longer and was too."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_group(process)
        process.wait()


def ending(code: int) -> str:
    """The end of a process in words: `exit code 1`, `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"
