"""When a failed call is worth another, and how long to wait before it."""

from __future__ import annotations

import email.utils
import math
import random
import time
from dataclasses import dataclass
from typing import Final

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
