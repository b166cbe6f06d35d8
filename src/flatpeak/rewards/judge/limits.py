"""How fast and how much may be asked: requests and tokens in any minute, calls and cost in a run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import email.utils
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from flatpeak.rewards.judge.protocol import Clock, JudgeDownError, JudgeInterruptedError

_MINUTE: Final = 60.0


class HeldError(Exception):
    """The server asked for a pause that is not over before the deadline; as text, how long it is."""


@dataclass(slots=True)
class Receipt:
    """What one request may use, until it is settled; then what it did use."""

    tokens: float
    until: float = math.inf
    """When it leaves the window: a minute after it was settled, for nobody knows when the server counts it."""


class RateLimits:
    """At most so many requests and tokens in any 60 seconds, first come first served; None is no limit."""

    def __init__(self, *, requests_per_minute: int | None, tokens_per_minute: int | None, clock: Clock) -> None:
        self._requests = requests_per_minute
        self._tokens = tokens_per_minute
        self._clock = clock
        self._sent: deque[float] = deque()
        self._receipts: list[Receipt] = []
        self._held_until = -math.inf
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    async def take(self, tokens: int, *, left: float | None = None) -> Receipt:
        """Wait until a request of at most so many tokens may be sent; a receipt that has to be settled.

        All of them count as used until then. A request above the limit of a whole minute goes when nothing else does.
        HeldError where the server asked for a pause that is not over in `left` seconds.
        """
        until = None if left is None else self._clock.now() + left
        async with self._turn:
            while (wait := self._wait(tokens, until)) > 0:
                await self._pause(wait)
            self._sent.append(self._clock.now())
            receipt = Receipt(float(tokens))
            self._receipts.append(receipt)
            return receipt

    def settle(self, receipt: Receipt, tokens: float) -> None:
        """Count what the request really used; what it leaves may be used at once."""
        receipt.tokens, receipt.until = float(tokens), self._clock.now() + _MINUTE
        self._changed.set()

    def hold(self, seconds: float) -> None:
        """Send nothing for so long: the server asked for it."""
        self._held_until = max(self._held_until, self._clock.now() + seconds)
        self._changed.set()  # those who wait may have no time for it

    def release(self, left: float) -> None:
        """Forget a pause that is not over in `left` seconds: the next requests find out whether it still holds."""
        if self._held_until > self._clock.now() + left:
            self._held_until = -math.inf

    async def _pause(self, seconds: float) -> None:
        """Wait so long, or until something has changed."""
        self._changed.clear()
        waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._changed.wait())]
        if math.isfinite(seconds):
            waiting.append(asyncio.ensure_future(self._clock.sleep(seconds)))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()

    def _wait(self, tokens: int, until: float | None) -> float:
        """Seconds until a request may go, as far as is known: infinite where one has to be settled first."""
        now = self._clock.now()
        if until is not None and self._held_until > until:
            raise HeldError(f"the endpoint asked for a pause of {self._held_until - now:.0f} s, and less time is left")
        while self._sent and self._sent[0] <= now - _MINUTE:
            self._sent.popleft()
        self._receipts = [receipt for receipt in self._receipts if receipt.until > now]
        wait = self._held_until - now
        # A hair longer each, so that rounding cannot leave something in the window with no time to wait.
        if self._requests is not None and len(self._sent) >= self._requests:
            wait = max(wait, self._sent[0] + _MINUTE - now + 1e-6)
        used = sum(receipt.tokens for receipt in self._receipts)
        if self._tokens is not None and used and used + tokens > self._tokens:
            wait = max(wait, min(receipt.until for receipt in self._receipts) - now + 1e-6)
        return wait


class BudgetSpentError(Exception):
    """The next call would go over the cap."""


class Budget:
    """Caps on the requests sent and on their cost, which is reserved before a call and corrected after it."""

    def __init__(self, *, max_calls: int | None, max_cost: float | None) -> None:
        self._max_calls = max_calls
        self._max_cost = max_cost
        self._reserved = 0.0
        self._changed = asyncio.Event()
        self.calls = 0
        """Requests sent, those of earlier processes among them."""
        self.cost = 0.0
        """Of the finished ones, in the currency of the prices."""

    def add(self, *, calls: int, cost: float) -> None:
        """Count what an earlier process of the same run has spent."""
        self.calls += calls
        self.cost += cost

    async def reserve(self, cost: float) -> None:
        """Count a call of at most this cost; BudgetSpentError if the cap does not allow it.

        While other calls hold reservations, it waits for what they leave.
        """
        while self._max_cost is not None and self.cost + self._reserved + cost > self._max_cost:
            if self._reserved <= 0:
                raise BudgetSpentError
            self._changed.clear()
            await self._changed.wait()
        if self._max_calls is not None and self.calls >= self._max_calls:
            raise BudgetSpentError
        self.calls += 1
        self._reserved += cost

    def settle(self, reserved: float, cost: float, *, sent: bool = True) -> None:
        """The call is over and cost this much, or was never sent."""
        self.calls -= not sent
        self._reserved = max(0.0, self._reserved - reserved)
        self.cost += cost
        self._changed.set()


class CircuitBreaker:
    """Opens after so many failures in a row. While open, one call in each `pause` goes through, as a probe.

    A probe that succeeds closes it. Every call is announced with `admit` and ended with one of `succeeded`, `failed`
    and `abandoned`.
    """

    def __init__(self, *, failures: int, pause: float, give_up: float, clock: Clock, what: str = "the judge") -> None:
        """`pause` and `give_up` are in seconds; `what` names the endpoint in the error."""
        self._limit = failures
        self._pause = pause
        self._give_up = give_up
        self._clock = clock
        self._what = what
        self._in_a_row = 0
        self._down_since: float | None = None
        self._next_probe: float | None = None
        self._probing = False
        self._last_error = ""

    @property
    def open(self) -> bool:
        """Whether calls are held back."""
        return self._next_probe is not None

    async def admit(self) -> None:
        """Return when a call may be made; JudgeDownError once there was no success for `give_up` seconds."""
        while self._next_probe is not None:
            now = self._clock.now()
            if self._down_since is not None and now - self._down_since >= self._give_up:
                raise JudgeDownError(
                    f"{self._what} has not answered for {now - self._down_since:.0f} s and {self._in_a_row} calls in a "
                    f"row (the last one: {self._last_error}): bring it back and try again, or resume the run"
                )
            if now >= self._next_probe and not self._probing:
                self._probing = True
                return
            await self._clock.sleep(max(self._next_probe - now, self._pause / 20))

    def succeeded(self) -> None:
        """The endpoint is alive, whatever it said."""
        self._in_a_row, self._down_since, self._next_probe, self._probing = 0, None, None, False

    def failed(self, error: str) -> None:
        """It did not answer, or said that it cannot."""
        now = self._clock.now()
        self._in_a_row += 1
        self._last_error = error
        self._down_since = now if self._down_since is None else self._down_since
        if self._probing or self._in_a_row >= self._limit:
            self._next_probe, self._probing = now + self._pause, False

    def abandoned(self) -> None:
        """The call was cancelled: nothing is known, and another may probe."""
        self._probing = False


RETRIED_STATUSES: Final = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
"""Too many requests, and what servers say when they are late, restarting or overloaded (529 is Anthropic's). Everything
else fails again."""
LONGEST_PAUSE: Final = 120.0
"""Seconds of a Retry-After that are waited for: a server that asks for an hour is asked again sooner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter: uniform in [0, min(longest, first * 2^attempt)].

    Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015: of the variants compared there it finishes
    soonest for the fewest calls, because clients that failed together do not come back together.
    """

    retries: int
    """Further attempts after the first."""
    first: float = 1.0
    """Seconds."""
    longest: float = 60.0
    """Seconds."""

    def delay(self, attempt: int, *, retry_after: float | None, generator: random.Random) -> float:
        """Seconds to wait after attempt 0, 1, ...; never less than the server asked for, up to LONGEST_PAUSE."""
        jitter = generator.uniform(0.0, min(self.longest, self.first * 2.0 ** min(attempt, 30)))
        return jitter if retry_after is None else min(retry_after, LONGEST_PAUSE) + min(jitter, self.first)


def read_retry_after(value: str | None) -> float | None:
    """Seconds in a Retry-After header (RFC 9110, section 10.2.3): a number or a date; None if it is neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


T = TypeVar("T")
_LOOK_SECONDS: Final = 0.2


class BackgroundLoop:
    """Runs coroutines for a thread that waits. It starts with the first one and ends with `close`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T], *, stopping: Callable[[], bool] = lambda: False) -> T:
        """The coroutine's result. Once `stopping()` is true it is cancelled, and JudgeInterruptedError is raised."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        try:
            while True:
                try:
                    return future.result(timeout=_LOOK_SECONDS)
                except concurrent.futures.TimeoutError:
                    if future.done():
                        return future.result()
                    if stopping():
                        raise JudgeInterruptedError("a signal asked to stop while the judge was being asked") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is None or thread is None:
            return
        with contextlib.suppress(TimeoutError):  # a task of a judge of the user's may refuse to end
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(timeout=10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10.0)
        if not thread.is_alive():
            loop.close()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="flatpeak-judge", daemon=True)
            self._thread.start()
        return self._loop


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
