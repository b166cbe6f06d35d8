"""The interface of a judge: what is graded, requests and replies, and verdicts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flatpeak.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """An answer to be graded, with its question."""

    question: str
    reference: str
    """The reference answer; empty where the data has none."""
    text: str
    """The text of the completion that the judge sees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A score, or the reason for its absence."""

    score: float | None
    """From 0 to 1; None is missing."""
    reason: str | None = None
    """The reason for a missing score, or the rule by which it is 0 without a call."""


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
