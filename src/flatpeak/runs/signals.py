"""Stop signals: SIGINT, SIGTERM, SIGHUP and SIGUSR1 as a request to stop at the next step boundary."""

from __future__ import annotations

import os
import signal
import stat
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, an end asked for, a terminal or connection that is lost, and what batch systems send before a time limit."""

_ANSWER = b"\nstopping after this step, with a checkpoint; the same again ends at once, without one\n"


def signal_name(number: int) -> str:
    """The words for a signal: Ctrl-C, SIGTERM, ..."""
    if number == signal.SIGINT:
        return "Ctrl-C"
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class StopSignals:
    """A context in which a first stop signal is only recorded, and a second one raises KeyboardInterrupt.

    A SIGHUP that is ignored, as under nohup, stays ignored. The loop checks `stop.signal` wherever it can stop with
    its state whole, writes a checkpoint, and ends. Outside the main thread, where Python delivers no signals, it
    does nothing.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.rank: int | None = None
        """Of several processes the one that alone got the signal."""
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """The exit code, 128 + the signal's number (130 for SIGINT, 143 for SIGTERM); 0 where none came."""
        return 0 if self.signal is None else 128 + self.signal

    @property
    def asked(self) -> bool:
        """Whether a signal asks this process to stop, also before `agree`."""
        return self.signal is not None

    def agree(self) -> None:
        """Take up signals at the end of a step; here each is taken up as it comes."""

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
            # None: the handler was not installed from Python and cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        with suppress(OSError):
            if os.isatty(2):  # not through sys.stderr, whose lock this thread may hold
                os.write(2, _ANSWER)


def _leave_terminal() -> None:
    """Send output to nowhere in place of a terminal that is gone: its errors would end the run before it has saved."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)
