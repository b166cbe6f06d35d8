"""The interface of a judge: requests and replies, errors, and the reading of the verdict's fields in a reply."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from flatpeak.errors import RunError, StoppedError
from flatpeak.types import Message
from flatpeak.utils.answers import after_thinking

Output = Literal["json_schema", "json"]

_MAX_CHARACTERS: Final = 20_000
_MAX_BRACES: Final = 50
_OBJECT: Final = re.compile(r'\{\s*"')
"""The beginning of a JSON object; sets and LaTeX have braces too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeRequest:
    """One question to a judge."""

    messages: tuple[Message, ...]
    """Chat messages with `role` and `content`."""
    max_tokens: int
    """Limit on the reply's tokens, rationale and verdict together."""
    temperature: float | None = 0.0
    """None leaves it to the endpoint."""
    schema: Mapping[str, Any] | None = None
    """The JSON schema of the reply, for backends that can enforce one."""
    deadline: float | None = None
    """`time.monotonic()` seconds after which the reply is of no use."""

    def key(self, identity: str) -> str:
        """A hash, 64 hexadecimal digits, of everything that decides the reply of the judge of that identity."""
        content = {
            "judge": identity,
            "messages": [dict(message) for message in self.messages],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "schema": self.schema,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeReply:
    """A judge's reply, or the reason for its absence."""

    text: str | None
    """None where the judge did not reply; empty where its reply cannot be read."""
    reason: str | None = None
    """The reason for the absence of a text."""
    cut: bool = False
    """Whether the text ends because `max_tokens` was reached."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """In the currency of the configured prices; 0 without prices."""
    latency: float = 0.0
    """Seconds of the last attempt, from sending to the end of the reply."""
    attempts: int = 1
    """Number of requests sent."""
    errors: tuple[str, ...] = ()
    """The error of each attempt that failed."""


class Judge(Protocol):
    """The backend of a judge. It may also have

    - `batch_size`: how many requests it wants at a time (1: each alone, as many side by side as there are),
    - `reserved_tokens`: texts that its tokenizer reads as control tokens, which no candidate may contain,
    - `async close()`, `scrub(text)` (hides its secrets), and `take_notices() -> list[str]`,
    - `spent() -> (calls, cost)` and `add_spent(calls, cost)`: the part of a budget that is spent, logged with the run.
    """

    @property
    def identity(self) -> str:
        """The judge's name in cache keys: equal identities give equal replies to equal requests."""
        ...

    async def ask(self, requests: Sequence[JudgeRequest]) -> Sequence[JudgeReply]:
        """One reply for each request, in order. A UserError stops the run; any other exception is a missing reply."""
        ...


class JudgeDownError(RunError):
    """The endpoint has not replied for too long to go on waiting. The last checkpoint stays valid."""


class JudgeInterruptedError(StoppedError):
    """A signal to stop arrived while the run waited for a judge; nothing of the batch is scored."""


class JudgeError(Exception):
    """The reason for a missing score, in one line without secrets."""


class Clock(Protocol):
    """A source of time that tests can replace."""

    def now(self) -> float:
        """Monotonic time in seconds."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""
        ...


class SystemClock:
    """The clock of the machine."""

    def now(self) -> float:
        """Monotonic time in seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""
        await asyncio.sleep(seconds)


class NoVerdictError(Exception):
    """A reply that cannot be read as a verdict; its text says why, in words for the judge's repair request."""


def parse_fields(text: str) -> dict[str, Any]:
    """The fields of the verdict in a reply, without the judge's thinking.

    The verdict is the one JSON object at the top level of the reply, with nothing but a closing fence after it. A judge
    may quote a verdict from the answer it grades, indistinguishable from its own: a reply with two that differ, or with
    a malformed one before the last, holds no verdict.
    """
    reply = after_thinking(text).strip()
    if not reply:
        raise NoVerdictError("it was empty, or ended within the thinking")
    return _read_json(reply)


def number_field(fields: Mapping[str, Any], name: str) -> float:
    """A field that has to be a finite number; true, "7" and NaN are refused."""
    if name not in fields:
        raise NoVerdictError(f"{name} was missing")
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NoVerdictError(f"{name} was not a number")
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise NoVerdictError(f"{name} was not a finite number")
    return value


def _read_json(reply: str) -> dict[str, Any]:
    # The end of a long reply decides, and a reply of any length is cheap to read.
    reply = reply[-_MAX_CHARACTERS:].removesuffix("```").rstrip()
    decoder = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_reject_constant)
    earlier: list[dict[str, Any]] = []
    begin = _OBJECT.search(reply)
    for _ in range(_MAX_BRACES):
        if begin is None:
            break
        try:
            content, end = decoder.raw_decode(reply, begin.start())
        except (ValueError, RecursionError):
            break
        if end == len(reply):
            if any(_conflict(content, other) for other in earlier):
                raise NoVerdictError("it held several JSON objects that differ")
            return content  # type: ignore[no-any-return]
        earlier.append(content)
        begin = _OBJECT.search(reply, end)
    raise NoVerdictError("it did not end with one valid JSON object")


def _conflict(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two objects differ in a field that both have, rationales aside."""
    return any(one[name] != other[name] for name in one.keys() & other.keys() - {"rationale"})


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key occurs twice")
    return fields


def _reject_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
