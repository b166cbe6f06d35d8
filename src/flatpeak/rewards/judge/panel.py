"""From requests to verdicts: the panel asks a judge and reads its replies, with a cache, transcripts and counts."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flatpeak.errors import UserError
from flatpeak.rewards.judge.client import encodable
from flatpeak.rewards.judge.prompt import repair_request, template_hash
from flatpeak.rewards.judge.protocol import Judge, JudgeReply, JudgeRequest, NoVerdictError, SystemClock

if TYPE_CHECKING:
    from flatpeak.rewards.judge.rubrics import VerdictFormat

WINDOW: Final = 200
"""Number of the latest verdicts in the valid fraction that may stop a run."""
_GRACE_SECONDS = 5.0
"""Added to a deadline before a custom judge is given up: the endpoint's own client ends in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A score, or the reason for its absence."""

    score: float | None
    """From 0 to 1; None is missing."""
    reason: str | None = None
    """The reason for a missing score, or the rule by which it is 0 without a call."""


@dataclass(kw_only=True, slots=True)
class VerdictCounts:
    """Counts of questions, calls and verdicts since the last `take`."""

    asked: int = 0
    """Different questions, those answered from the cache included."""
    valid: int = 0
    cached: int = 0
    calls: int = 0
    """Requests sent, retries and repairs included."""
    retries: int = 0
    repairs: int = 0
    cost: float = 0.0
    replies: int = 0
    latency: float = 0.0
    """Total seconds of all replies."""
    skipped: int = 0
    """Completions that scored 0 by rule."""
    recent: deque[str | None] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """For each of the latest questions None, or the reason why it has no verdict; `take` does not reset it."""

    def take(self) -> dict[str, float]:
        """The metrics by name, those without a value left out; resets the counts."""
        metrics = {
            "calls": float(self.calls),
            "retries": float(self.retries),
            "repairs": float(self.repairs),
            "cost": self.cost,
            "skipped": float(self.skipped),
        }
        if self.asked:
            metrics["valid_fraction"] = self.valid / self.asked
            metrics["cache_hit_fraction"] = self.cached / self.asked
        if self.replies:
            metrics["latency_seconds"] = self.latency / self.replies
        self.asked = self.valid = self.cached = self.calls = self.retries = self.repairs = self.skipped = 0
        self.replies = 0
        self.cost = self.latency = 0.0
        return metrics


class Transcripts:
    """A JSON Lines file of all calls in the run directory, without secrets; none before `attach`.

    After a failed write, `error` says why, and grading goes on without transcripts.
    """

    def __init__(self, *, scrub: Callable[[str], str]) -> None:
        self.path: Path | None = None
        self.error: str | None = None
        self._scrub = scrub

    def attach(self, path: Path) -> None:
        """Write to this file from now on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.error = path, None

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row to the file."""
        if self.path is None or self.error is not None:
            return
        line = json.dumps(_scrubbed(row, self._scrub), ensure_ascii=False) + "\n"
        try:
            # Opened for each line, so that the file may be moved or removed in the meantime.
            with self.path.open("ab") as file:
                file.write(line.encode("utf-8", "replace"))
        except OSError as error:
            self.error = f"{self.path.name}: {error.strerror}"


def _scrubbed(value: Any, scrub: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, Mapping):
        return {key: _scrubbed(item, scrub) for key, item in value.items()}
    return [_scrubbed(item, scrub) for item in value] if isinstance(value, list | tuple) else value


class ReplyCache:
    """A SQLite file of replies that held a verdict. Several processes may share one.

    A run does not fail with its cache: after a failed read or write, `error` says why, and the cache stays empty.
    """

    def __init__(self, path: Path) -> None:
        """UserError if the file is no SQLite file or cannot be made."""
        self.path = path
        self.error: str | None = None
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=10.0, check_same_thread=False, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT, seconds REAL)")
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"judge cache {path}: {error}: name a file that can be written, or remove this one"
            ) from error

    def get(self, key: str) -> str | None:
        """The reply stored under a key."""
        row = self._run("SELECT reply FROM replies WHERE key = ?", (key,))
        return str(row[0]) if row else None

    def put(self, key: str, reply: str) -> None:
        """Store a reply, unless the key has one."""
        self._run("INSERT OR IGNORE INTO replies VALUES (?, ?, ?)", (key, reply, time.time()))

    def close(self) -> None:
        """Close the SQLite file."""
        with self._lock:
            self._file.close()

    def _run(self, statement: str, values: tuple[object, ...]) -> tuple[object, ...] | None:
        if self.error is not None:
            return None
        try:
            with self._lock:
                row: tuple[object, ...] | None = self._file.execute(statement, values).fetchone()
                return row
        except sqlite3.Error as error:
            self.error = f"{type(error).__name__}: {error}"
            return None


class JudgePanel:
    """Asks a judge and reads its replies as verdicts.

    Equal requests are asked once, a reply without a verdict is repaired once, and every call is counted and written to
    the transcripts.
    """

    def __init__(self, judge: Judge, verdict_format: VerdictFormat, *, cache: ReplyCache | None = None) -> None:
        self.judge = judge
        self.verdict_format = verdict_format
        self.counts = VerdictCounts()
        self.transcripts = Transcripts(scrub=self.scrub)
        self.template = template_hash(verdict_format)
        self._cache = cache

    def scrub(self, text: str) -> str:
        """The text without the judge's secrets."""
        scrub: Callable[[str], str] | None = getattr(self.judge, "scrub", None)
        return text if scrub is None else scrub(text)

    async def verdicts(self, requests: Sequence[JudgeRequest], *, fresh: bool = False) -> list[Verdict]:
        """A verdict for each request, in order. Equal requests are asked once; `fresh` ignores the cache.

        A UserError of the judge ends the whole batch, and pending requests are cancelled.
        """
        keys = [request.key(self.judge.identity) for request in requests]
        verdicts: dict[str, Verdict] = {}
        pending: dict[str, JudgeRequest] = {}
        for key, request in zip(keys, requests, strict=True):
            if key not in verdicts and key not in pending:
                cached = None if fresh else self._cached_verdict(key)
                if cached is None:
                    pending[key] = request
                else:
                    verdicts[key] = cached
        self._count(verdicts.values(), cached=True)
        size = getattr(self.judge, "batch_size", None) or max(1, len(pending))
        entries = list(pending.items())
        batches = [entries[start : start + size] for start in range(0, len(entries), size)]
        for judged in await _gather([self._judge_batch(batch, fresh=fresh) for batch in batches]):
            verdicts |= judged
        return [verdicts[key] for key in keys]

    async def _judge_batch(self, batch: Sequence[tuple[str, JudgeRequest]], *, fresh: bool) -> dict[str, Verdict]:
        requests = dict(batch)
        replies = await self._ask(list(requests.values()))
        first = {key: self._read(reply) for key, reply in zip(requests, replies, strict=True)}
        verdicts = {key: verdict for key, (verdict, _) in first.items()}
        self._record(requests, replies, verdicts, fresh=fresh, repair=False)
        unreadable = {key: why for key, (_, why) in first.items() if why is not None}
        if unreadable:
            reply_of = dict(zip(requests, replies, strict=True))
            again = {
                key: repair_request(
                    requests[key], reply_of[key].text or "", why=why, verdict_format=self.verdict_format
                )
                for key, why in unreadable.items()
            }
            repaired = await self._ask(list(again.values()))
            second = {key: self._read(reply)[0] for key, reply in zip(again, repaired, strict=True)}
            self.counts.repairs += len(again)
            self._record(again, repaired, second, fresh=fresh, repair=True)
            verdicts |= second
        self._count(verdicts.values(), cached=False)
        return verdicts

    async def _ask(self, requests: Sequence[JudgeRequest]) -> list[JudgeReply]:
        """The judge's replies; any exception but UserError, such as one in a user's judge, makes them missing."""
        deadlines = [request.deadline for request in requests if request.deadline is not None]
        left = min(deadlines) - SystemClock().now() + _GRACE_SECONDS if deadlines else None
        try:
            async with asyncio.timeout(left):
                replies = list(await self.judge.ask(requests))
            if len(replies) != len(requests):
                raise ValueError(f"the judge returned {len(replies)} replies for {len(requests)} requests")
            replies = [_validated(reply) for reply in replies]
        except UserError:
            raise
        except Exception as error:
            late = isinstance(error, TimeoutError)
            reason = "no reply before the deadline" if late else self.scrub(f"{type(error).__name__}: {error}")[:300]
            return [JudgeReply(text=None, reason=reason, attempts=1, errors=(reason,)) for _ in requests]
        return replies

    def _read(self, reply: JudgeReply) -> tuple[Verdict, str | None]:
        """(verdict, the fault of a reply without one); no fault where the reply is good or missing."""
        if reply.text is None:
            return Verdict(score=None, reason=reply.reason or "no reply"), None
        try:
            if reply.cut:
                raise NoVerdictError("it was cut off at the token limit")
            return Verdict(score=self.verdict_format.parse(reply.text)), None
        except NoVerdictError as error:
            return Verdict(score=None, reason=f"no verdict: {reply.reason or error}"), str(error)

    def _cached_verdict(self, key: str) -> Verdict | None:
        text = None if self._cache is None else self._cache.get(key)
        if text is None:
            return None
        verdict, _ = self._read(JudgeReply(text=text, attempts=0))
        return verdict if verdict.score is not None else None

    def _count(self, verdicts: Any, *, cached: bool) -> None:
        for verdict in verdicts:
            valid = verdict.score is not None
            self.counts.asked += 1
            self.counts.valid += valid
            self.counts.cached += cached
            self.counts.recent.append(None if valid else verdict.reason or "no reply")

    def _record(
        self,
        requests: dict[str, JudgeRequest],
        replies: Sequence[JudgeReply],
        verdicts: dict[str, Verdict],
        *,
        fresh: bool,
        repair: bool,
    ) -> None:
        for (key, request), reply in zip(requests.items(), replies, strict=True):
            verdict = verdicts[key]
            self.counts.calls += reply.attempts
            self.counts.retries += max(0, reply.attempts - 1)
            self.counts.cost += reply.cost
            if reply.text is not None:
                self.counts.replies += 1
                self.counts.latency += reply.latency
            if self._cache is not None and verdict.score is not None and not fresh:
                # Under the key of the question, not of its repair: the question is what a later step asks again.
                self._cache.put(key, self.scrub(reply.text or ""))
            self.transcripts.write(
                {
                    "request": key,
                    "template": self.template,
                    "judge": self.judge.identity,
                    "repair": repair,
                    "messages": [dict(message) for message in request.messages],
                    "reply": reply.text,
                    "score": verdict.score,
                    "error": verdict.reason,
                    "attempts": reply.attempts,
                    "attempt_errors": list(reply.errors),
                    "latency_seconds": round(reply.latency, 4),
                    "prompt_tokens": reply.prompt_tokens,
                    "completion_tokens": reply.completion_tokens,
                    "cost": reply.cost,
                }
            )


def _validated(reply: Any) -> JudgeReply:
    """The reply with text that can be written to a file; TypeError for anything but a JudgeReply."""
    if not isinstance(reply, JudgeReply) or not isinstance(reply.text, str | None):
        raise TypeError(f"the judge returned {type(reply).__name__} where a JudgeReply with a text belongs")
    return reply if reply.text is None else replace(reply, text=encodable(reply.text))


async def _gather(coroutines: Sequence[Any]) -> list[Any]:
    """All results; where one raises, the others are cancelled before the error is passed on."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
