"""What a judge is: anything that answers requests, each with a text or with why there is none."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeRequest:
    """One question to a judge."""

    messages: tuple[Message, ...]
    """Chat messages with `role` and `content`."""
    max_tokens: int
    """The reply is cut after so many tokens; it holds the rationale and the verdict."""
    temperature: float | None = 0.0
    """None leaves it to the endpoint."""
    schema: Mapping[str, Any] | None = None
    """The JSON schema of the reply, for backends that can enforce one."""
    deadline: float | None = None
    """`time.monotonic()` seconds after which nobody waits for the reply."""

    def key(self, identity: str) -> str:
        """A hash, 64 hexadecimal digits, of all that decides the reply of the judge of that identity."""
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
    """A reply, or why there is none."""

    text: str | None
    """None where the judge did not answer; empty where it answered nothing that can be read."""
    reason: str | None = None
    """Why there is no text."""
    cut: bool = False
    """Whether the text ends because `max_tokens` was reached."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """In the currency of the configured prices; 0 without prices."""
    latency: float = 0.0
    """Seconds of the last attempt, from sending to having the whole reply."""
    attempts: int = 1
    """Requests that were sent."""
    errors: tuple[str, ...] = ()
    """What went wrong at each attempt that failed."""


class Judge(Protocol):
    """A backend. It may also have

    - `batch_size`: how many requests it wants at a time (1: each alone, as many side by side as there are),
    - `reserved_tokens`: texts that it would read as control tokens and that no candidate may contain,
    - `async close()`, `scrub(text)` (hides its secrets), and `take_notices() -> list[str]`,
    - `spent() -> (calls, cost)` and `add_spent(calls, cost)`: what counts against a budget, kept with the run.
    """

    @property
    def identity(self) -> str:
        """Names the judge in cache keys: equal identities give equal replies to equal requests."""
        ...

    async def ask(self, requests: Sequence[JudgeRequest]) -> Sequence[JudgeReply]:
        """One reply for each request, in order. A UserError stops the run; anything else raised is no reply."""
        ...


class JudgeDownError(RunError):
    """The endpoint has not answered for so long that waiting on is pointless. The last checkpoint stays valid."""


class JudgeInterruptedError(StoppedError):
    """A signal asked the run to stop while a judge was being waited for; nothing of the batch was scored."""


class JudgeError(Exception):
    """Why a completion has no score; as text, one line without secrets."""


class Clock(Protocol):
    """Time, so that tests need not wait."""

    def now(self) -> float:
        """Seconds that only grow."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return that much later."""
        ...


class RealClock:
    """The machine's time."""

    def now(self) -> float:
        """`time.monotonic()`."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """`asyncio.sleep`."""
        await asyncio.sleep(seconds)


Output = Literal["json_schema", "json", "tag"]

_MAX_CHARACTERS: Final = 20_000
_MAX_BRACES: Final = 50
_TAG: Final = re.compile(r"<verdict>((?:(?!</?verdict>).)*)</verdict>", re.DOTALL | re.IGNORECASE)
_OBJECT: Final = re.compile(r'\{\s*"')
"""The beginning of a JSON object; sets and LaTeX have braces too."""
_FIELD: Final = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*[:=]\s*(\S+)\s*")
_BLANKS: Final = re.compile(r"\s+")
_NUMBER: Final = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{1,12})?")


class NoVerdictError(Exception):
    """The reply cannot be read as a verdict; as text, why, in words that the judge itself can be told."""


def read_fields(text: str, output: Output) -> dict[str, Any]:
    """The fields of the verdict in a reply. All that the judge thinks before it answers is left out first.

    JSON: the one object at the top level of the reply, with nothing but a closing fence after it. Tag: the one
    `<verdict>name=value; name=value</verdict>`, with nothing but a period or marks of emphasis after it; without a name
    before its value the only field is called "". Where a judge quotes what an answer says its verdict is, nothing tells
    the two apart: a reply with two that differ, or with a broken one before the last, is none.
    """
    reply = after_thinking(text).strip()
    if not reply:
        raise NoVerdictError("it was empty, or ended within the thinking")
    return _read_json(reply) if output != "tag" else _read_tag(reply)


def number(fields: Mapping[str, Any], name: str) -> float:
    """A field that has to be a finite number; true, "7" and NaN are none."""
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
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)
    earlier: list[dict[str, Any]] = []
    begin = _OBJECT.search(reply)
    for _ in range(_MAX_BRACES):
        if begin is None:
            break
        try:
            found, end = decoder.raw_decode(reply, begin.start())
        except (ValueError, RecursionError):
            break
        if end == len(reply):
            if any(_differ(found, other) for other in earlier):
                raise NoVerdictError("it held several JSON objects that differ")
            return found  # type: ignore[no-any-return]
        earlier.append(found)
        begin = _OBJECT.search(reply, end)
    raise NoVerdictError("it did not end with one valid JSON object")


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two objects say different things under a name that both have; a rationale is no verdict."""
    return any(one[name] != other[name] for name in one.keys() & other.keys() - {"rationale"})


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key occurs twice")
    return fields


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _read_tag(reply: str) -> dict[str, Any]:
    tags = _TAG.findall(reply[-_MAX_CHARACTERS:])
    if not tags:
        raise NoVerdictError("it had no <verdict>...</verdict>")
    if len({_BLANKS.sub("", tag).lower() for tag in tags}) > 1:
        raise NoVerdictError("it held several <verdict>...</verdict> that differ")
    after = reply[reply.lower().rindex("</verdict>") + len("</verdict>") :]
    if after.strip(" \t\r\n.*_`"):
        raise NoVerdictError("it did not end with its <verdict>...</verdict>")
    content = tags[-1].strip()
    if _NUMBER.fullmatch(content):
        return {"": float(content)}
    fields: dict[str, Any] = {}
    for piece in re.split(r"[;,\n]", content):
        if not piece.strip():
            continue
        field = _FIELD.fullmatch(piece)
        if field is None or field[1].lower() in fields:
            raise NoVerdictError("its <verdict> did not hold name=value once for each name")
        value = field[2]
        fields[field[1].lower()] = float(value) if _NUMBER.fullmatch(value) else value
    return fields
