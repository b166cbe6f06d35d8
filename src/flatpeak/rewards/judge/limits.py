"""How fast and how much may be asked: requests and tokens in any minute, calls and cost in a run."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from flatpeak.rewards.judge.protocol import Clock

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
