"""Limits on the calls of a judge: rate limits, budget, outages, and the waits between attempts."""

from __future__ import annotations

import asyncio
import email.utils
import math
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from flatpeak.errors import RunError

_MINUTE: Final = 60.0
RETRIED_STATUSES: Final = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
"""Too many requests, and servers that are late, restarting or overloaded (529 is Anthropic's). All others would fail
again."""
FIRST_DELAY: Final = 1.0
"""The longest wait before the first retry in seconds; it doubles with each."""
LONGEST_DELAY: Final = 60.0
"""Seconds, unless the server asks for more."""
FAILURES: Final = 20
"""Failed calls in a row after which an endpoint is taken to be down."""
PAUSE: Final = 10.0
"""Seconds between two calls to an endpoint that is down."""
LONGEST_PAUSE: Final = 120.0
"""Longest Retry-After in seconds that is honoured in full; beyond it the next attempt comes sooner."""


class JudgeDownError(RunError):
    """The endpoint has not replied for too long to go on waiting. The last checkpoint stays valid."""


class PauseTooLongError(Exception):
    """The server asked for a pause that ends after the deadline; the text has its length."""


def now() -> float:
    """The time of the running event loop in seconds; for asyncio's own loops that of `time.monotonic`."""
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class Reservation:
    """Tokens that one request may use; once it is settled, those that it used."""

    tokens: float
    until: float = math.inf
    """Time at which it leaves the window: a minute after it was settled, as the server may count it until then."""


class RateLimiter:
    """At most so many requests and tokens in any 60 seconds, in order of arrival; None is no limit."""

    def __init__(self, *, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        self._requests = requests_per_minute
        self._tokens = tokens_per_minute
        self._sent: deque[float] = deque()
        self._reservations: list[Reservation] = []
        self._paused_until = -math.inf
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()

    async def acquire(self, tokens: int, *, deadline: float | None = None) -> Reservation:
        """Wait until a request of at most so many tokens may be sent, and reserve them until `settle`.

        A request above the limit of a whole minute is sent alone. PauseTooLongError where the server asked for a pause
        that is not over at the deadline.
        """
        async with self._lock:
            while (wait := self._wait(tokens, deadline)) > 0:
                await self._pause(wait)
            self._sent.append(now())
            reservation = Reservation(float(tokens))
            self._reservations.append(reservation)
            return reservation

    def settle(self, reservation: Reservation, tokens: float) -> None:
        """Count the tokens that the request used; the rest of its reservation is free at once."""
        reservation.tokens, reservation.until = float(tokens), now() + _MINUTE
        self._changed.set()

    def pause(self, seconds: float) -> None:
        """Send nothing for so many seconds, as the server asked."""
        self._paused_until = max(self._paused_until, now() + seconds)
        self._changed.set()  # the pause may be too long for requests that wait

    def end_long_pause(self, deadline: float) -> None:
        """End a pause that is not over at the deadline; the next requests show whether the server still wants it."""
        if self._paused_until > deadline:
            self._paused_until = -math.inf

    async def _pause(self, seconds: float) -> None:
        """Wait so many seconds, or until a reservation or pause changes."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds if math.isfinite(seconds) else None):
                await self._changed.wait()

    def _wait(self, tokens: int, deadline: float | None) -> float:
        """Seconds until a request may be sent; infinite where another has to be settled first."""
        moment = now()
        if deadline is not None and self._paused_until > deadline:
            raise PauseTooLongError(
                f"the endpoint asked for a pause of {self._paused_until - moment:.0f} s, and less time is left"
            )
        while self._sent and self._sent[0] <= moment - _MINUTE:
            self._sent.popleft()
        self._reservations = [reservation for reservation in self._reservations if reservation.until > moment]
        wait = self._paused_until - moment
        # Slightly longer each, so that rounding cannot leave an entry in the window with no time to wait.
        if self._requests is not None and len(self._sent) >= self._requests:
            wait = max(wait, self._sent[0] + _MINUTE - moment + 1e-6)
        used = sum(reservation.tokens for reservation in self._reservations)
        if self._tokens is not None and used and used + tokens > self._tokens:
            wait = max(wait, min(reservation.until for reservation in self._reservations) - moment + 1e-6)
        return wait


class BudgetSpentError(Exception):
    """The next call would exceed the budget."""


class Budget:
    """Caps on the requests sent and on their cost, which is reserved before a call and corrected after it."""

    def __init__(self, *, max_calls: int | None, max_cost: float | None) -> None:
        self._max_calls = max_calls
        self._max_cost = max_cost
        self._reserved = 0.0
        self._changed = asyncio.Event()
        self.calls = 0
        """Requests sent, those of earlier processes included."""
        self.cost = 0.0
        """Cost of the finished calls, in the currency of the prices."""

    async def reserve(self, cost: float) -> None:
        """Count a call of at most this cost; BudgetSpentError beyond the cap.

        While other calls hold reservations, it waits for the rest that they give back.
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
        """Replace a call's reservation by its cost, or drop a call that was never sent."""
        self.calls -= not sent
        self._reserved = max(0.0, self._reserved - reserved)
        self.cost += cost
        self._changed.set()


class Outage:
    """Counts failures in a row. After FAILURES of them the endpoint is down, and one call in each PAUSE tries it."""

    def __init__(
        self, *, give_up: float, what: str = "the judge", notice: Callable[[str], None] = lambda text: None
    ) -> None:
        """`give_up` is in seconds; `what` names the endpoint in messages."""
        self._give_up = give_up
        self._what = what
        self._notice = notice
        self._is_announced = False
        self._failures = 0
        self._since = 0.0
        self._last_error = ""
        self._turn = asyncio.Lock()

    async def admit(self) -> None:
        """Wait while the endpoint is down; JudgeDownError after `give_up` seconds without an answer."""
        async with self._turn:
            if self._failures < FAILURES:
                return
            silent = now() - self._since
            if silent >= self._give_up:
                raise JudgeDownError(
                    f"{self._what} has not answered for {silent:.0f} s and {self._failures} calls in a row (the last "
                    f"one: {self._last_error}): bring it back and try again, or resume the run"
                )
            if not self._is_announced:
                self._is_announced = True
                self._notice(f"{self._what} does not answer ({self._last_error}): waiting up to {self._give_up:g} s")
            await asyncio.sleep(PAUSE)

    def record_answer(self) -> None:
        """The endpoint replied, whatever its reply: it is not down."""
        self._failures = 0
        self._is_announced = False

    def record_failure(self, error: str) -> None:
        """Count a call without a reply, or with an error of the server."""
        if self._failures == 0:
            self._since = now()
        self._failures += 1
        self._last_error = error


def retry_delay(attempt: int, *, retry_after: float | None, generator: random.Random) -> float:
    """Seconds to wait after attempt 0, 1, ...; at least those that the server asked for, up to LONGEST_PAUSE.

    Exponential backoff with full jitter: uniform in [0, min(LONGEST_DELAY, FIRST_DELAY * 2^attempt)]. Source:
    "Exponential Backoff And Jitter", AWS Architecture Blog, 2015: the variant that finishes soonest with the fewest
    calls, because clients that failed together do not retry together.
    """
    jitter = generator.uniform(0.0, min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(attempt, 30)))
    return jitter if retry_after is None else min(retry_after, LONGEST_PAUSE) + min(jitter, FIRST_DELAY)


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
