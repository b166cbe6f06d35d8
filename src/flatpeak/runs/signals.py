"""Stop signals: SIGINT, SIGTERM, SIGHUP and SIGUSR1 request a stop at the next step boundary."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from flatpeak.errors import StoppedError

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, a termination request, a closed terminal or connection, and a batch system's warning before a time limit."""

REQUEST = 0
"""The null signal, which no process receives, stands for a callback that asks to stop."""
_ANSWER = b"\nstopping, with a checkpoint of the last step; the same again ends at once, without one\n"
_INTERRUPTED = "a signal asked to stop during a call of a user's function"


def signal_name(number: int) -> str:
    """The display name of a signal: Ctrl-C, SIGTERM, ..."""
    if number == signal.SIGINT:
        return "Ctrl-C"
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class StopSignals:
    """A context in which the first stop signal is only recorded and the second raises KeyboardInterrupt.

    If SIGHUP is ignored, as under nohup, it stays ignored. The training loop checks `stop.signal` wherever it can stop
    in a consistent state, writes a checkpoint, and ends. Outside the main thread, where Python delivers no signals,
    this class does nothing.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.rank: int | None = None
        """With several processes, the rank that received the signal if only one did."""
        self._previous: dict[signal.Signals, Any] = {}
        self._raises = False

    @property
    def exit_code(self) -> int:
        """The exit code: 128 + the signal's number (130 for SIGINT, 143 for SIGTERM), or 0 without a signal."""
        return 128 + self.signal if self.signal else 0

    @property
    def asked(self) -> bool:
        """Whether this process has received a stop signal, even before `agree`; not for a mere `request`."""
        return bool(self.signal)

    def request(self) -> None:
        """Ask to stop at the next step boundary, without a signal."""
        if self.signal is None:
            self.signal = REQUEST

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A context for a user's code: a first signal raises StoppedError in the middle of it.

        The code may catch that error, but its result is not used: the context ends with StoppedError all the same.
        """
        self._raises = True
        try:
            yield
        except Exception:
            if self._raises:
                raise
        finally:
            interrupted, self._raises = not self._raises, False
        if interrupted:
            raise StoppedError(_INTERRUPTED)

    def agree(self) -> None:
        """Act on signals at the end of a step; a single process acts on each signal as it arrives."""

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._receive)
                for number in _CAUGHT
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None means that the handler was not installed from Python and cannot be restored from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number
        with suppress(OSError):
            if os.isatty(2):  # not through sys.stderr, whose lock this thread may hold
                os.write(2, _ANSWER)
        self._interrupt()

    def _interrupt(self) -> None:
        """Raise StoppedError within `at_once`."""
        if self._raises:
            self._raises = False
            raise StoppedError(_INTERRUPTED)


def _leave_terminal() -> None:
    """Discard output once the terminal is gone, because write errors would end the run before it saves."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)
