"""An event loop in a thread, on which synchronous code runs coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

from flatpeak.errors import StoppedError

T = TypeVar("T")

_POLL_SECONDS: Final = 0.2
"""Seconds between two checks whether a run has been asked to stop."""
_CLOSE_SECONDS: Final = 10.0
"""Longest wait for coroutines that refuse to end."""


class BackgroundLoop:
    """An event loop in a thread; it starts with the first coroutine and ends with `close` or with the process.

    Clients that keep connections between coroutines stay usable, and a loop that already runs in the calling thread, as
    in a notebook, does not interfere.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, T], *, stopping: Callable[[], bool] = lambda: False) -> T:
        """The coroutine's result. Once `stopping()` is true it is cancelled, and StoppedError is raised."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._started())
        try:
            while not wait([future], timeout=_POLL_SECONDS).done:
                if stopping():
                    raise StoppedError("a signal asked to stop while an answer was awaited")
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel unfinished coroutines, and end the thread."""
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=_CLOSE_SECONDS)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                made: Future[asyncio.AbstractEventLoop] = Future()
                self._thread = threading.Thread(target=_serve, args=(made,), name=self._name, daemon=True)
                self._thread.start()
                self._loop = made.result()
            return self._loop


def _serve(made: Future[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner() as runner:  # cancels what is unfinished once the loop stops
        made.set_result(runner.get_loop())
        runner.get_loop().run_forever()


async def gather(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """All results in order. If one raises or the caller is cancelled, the others are cancelled too."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # a run that stops must not keep paying for answers
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
