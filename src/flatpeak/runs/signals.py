"""Stop signals: SIGINT and SIGTERM as a request to stop at the next step boundary."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_CAUGHT = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context in which a first SIGINT or SIGTERM is only recorded, and a second one raises KeyboardInterrupt.

    The loop checks `stop.signal` wherever it can stop with its state whole, writes a checkpoint, and ends. Outside the
    main thread, where Python delivers no signals, it does nothing.
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
            self._previous = {number: signal.signal(number, self._receive) for number in _CAUGHT}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
