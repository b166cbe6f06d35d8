"""Requests to verdicts: each different one asked once, read strictly, repaired once, kept, and written down."""

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
from flatpeak.rewards.judge.client import plain
from flatpeak.rewards.judge.prompt import repair_messages, template_hash
from flatpeak.rewards.judge.protocol import Judge, JudgeReply, JudgeRequest, NoVerdictError, RealClock

if TYPE_CHECKING:
    from flatpeak.rewards.judge.rubrics import Form

WINDOW: Final = 200
"""How many of the latest verdicts the valid fraction that may stop a run is taken over."""


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts since `take` was called last."""

    asked: int = 0
    """Different questions, those answered from the cache among them."""
    valid: int = 0
    cached: int = 0
    calls: int = 0
    """Requests sent, retries and repairs among them."""
    retries: int = 0
    repairs: int = 0
    cost: float = 0.0
    replies: int = 0
    latency: float = 0.0
    """Seconds, of all replies together."""
    skipped: int = 0
    """Completions that scored 0 by rule."""
    recent: deque[str | None] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Of the latest questions: None for a verdict, else why there was none. It outlives `take`."""

    def take(self) -> dict[str, float]:
        """The figures by name, those without a value left out; the counts begin again."""
        figures = {
            "calls": float(self.calls),
            "retries": float(self.retries),
            "repairs": float(self.repairs),
            "cost": self.cost,
            "skipped": float(self.skipped),
        }
        if self.asked:
            figures["valid_fraction"] = self.valid / self.asked
            figures["cache_hit_fraction"] = self.cached / self.asked
        if self.replies:
            figures["latency_seconds"] = self.latency / self.replies
        self.asked = self.valid = self.cached = self.calls = self.retries = self.repairs = self.skipped = 0
        self.replies = 0
        self.cost = self.latency = 0.0
        return figures


class Transcripts:
    """Appends to a file in the run directory, with secrets hidden; nowhere before it is given one.

    Where the disk is full it says so once in `error`, and grading goes on.
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
        """Append a line."""
        if self.path is None or self.error is not None:
            return
        line = json.dumps(_scrubbed(row, self._scrub), ensure_ascii=False) + "\n"
        try:
            # Opened for each line: a file that is moved or removed in the meantime costs nothing.
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

    A cache is worth less than a run: where it cannot be read or written any more, it says so once in `error` and is
    empty from then on.
    """

    def __init__(self, path: Path) -> None:
        """UserError if the file is something else or cannot be made."""
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
        """The reply kept under a key."""
        row = self._run("SELECT reply FROM replies WHERE key = ?", (key,))
        return str(row[0]) if row else None

    def put(self, key: str, reply: str) -> None:
        """Keep a reply; the first one stays."""
        self._run("INSERT OR IGNORE INTO replies VALUES (?, ?, ?)", (key, reply, time.time()))

    def close(self) -> None:
        """Close the file."""
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


_GRACE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A score, or why there is none."""

    score: float | None
    """From 0 to 1; None is missing."""
    reason: str | None = None
    """Why it is missing, or by which rule it is 0 without a call."""


class Examiner:
    """Puts requests to a judge and reads its replies by a form."""

    def __init__(self, judge: Judge, form: Form, *, cache: ReplyCache | None = None, repair: bool = True) -> None:
        self.judge = judge
        self.form = form
        self.tally = Tally()
        self.transcripts = Transcripts(scrub=self.scrub)
        self.template = template_hash(form)
        self._cache = cache
        self._repair = repair

    def scrub(self, text: str) -> str:
        """The text without the judge's secrets."""
        hide: Callable[[str], str] | None = getattr(self.judge, "scrub", None)
        return text if hide is None else hide(text)

    async def examine(self, requests: Sequence[JudgeRequest], *, fresh: bool = False) -> list[Verdict]:
        """A verdict for each request, in order. Equal requests are asked once; `fresh` ignores what the cache holds.

        A UserError of the judge's ends the whole batch, and what is still being asked is cancelled.
        """
        keys = [request.key(self.judge.identity) for request in requests]
        found: dict[str, Verdict] = {}
        waiting: dict[str, JudgeRequest] = {}
        for key, request in zip(keys, requests, strict=True):
            if key not in found and key not in waiting:
                kept = None if fresh else self._kept(key)
                if kept is None:
                    waiting[key] = request
                else:
                    found[key] = kept
        self._count(found.values(), cached=True)
        size = getattr(self.judge, "batch_size", None) or max(1, len(waiting))
        entries = list(waiting.items())
        batches = [entries[start : start + size] for start in range(0, len(entries), size)]
        for verdicts in await _together([self._examine(batch, fresh=fresh) for batch in batches]):
            found |= verdicts
        return [found[key] for key in keys]

    async def _examine(self, batch: Sequence[tuple[str, JudgeRequest]], *, fresh: bool) -> dict[str, Verdict]:
        requests = dict(batch)
        replies = await self._ask(list(requests.values()))
        first = {key: self._read(reply) for key, reply in zip(requests, replies, strict=True)}
        verdicts = {key: verdict for key, (verdict, _) in first.items()}
        self._record(requests, replies, verdicts, fresh=fresh, repair=False)
        broken = {key: why for key, (_, why) in first.items() if why is not None} if self._repair else {}
        if broken:
            texts = dict(zip(requests, replies, strict=True))
            again = {
                key: replace(
                    requests[key],
                    messages=repair_messages(requests[key], texts[key].text or "", why=why, form=self.form),
                )
                for key, why in broken.items()
            }
            repaired = await self._ask(list(again.values()))
            second = {key: self._read(reply)[0] for key, reply in zip(again, repaired, strict=True)}
            self.tally.repairs += len(again)
            self._record(again, repaired, second, fresh=fresh, repair=True)
            verdicts |= second
        self._count(verdicts.values(), cached=False)
        return verdicts

    async def _ask(self, requests: Sequence[JudgeRequest]) -> list[JudgeReply]:
        """The judge's replies. Whatever is wrong with a judge that a user wrote is a missing reply."""
        deadlines = [request.deadline for request in requests if request.deadline is not None]
        left = min(deadlines) - RealClock().now() + _GRACE_SECONDS if deadlines else None
        try:
            async with asyncio.timeout(left):
                replies = list(await self.judge.ask(requests))
            if len(replies) != len(requests):
                raise ValueError(f"the judge returned {len(replies)} replies for {len(requests)} requests")
            replies = [_checked(reply) for reply in replies]
        except UserError:
            raise
        except Exception as error:
            late = isinstance(error, TimeoutError)
            reason = "no reply before the deadline" if late else self.scrub(f"{type(error).__name__}: {error}")[:300]
            return [JudgeReply(text=None, reason=reason, attempts=1, errors=(reason,)) for _ in requests]
        return replies

    def _read(self, reply: JudgeReply) -> tuple[Verdict, str | None]:
        """The verdict, and where the judge did answer but not as asked, what was wrong with it."""
        if reply.text is None:
            return Verdict(score=None, reason=reply.reason or "no reply"), None
        try:
            if reply.cut:
                raise NoVerdictError("it was cut off at the token limit")
            return Verdict(score=self.form.read(reply.text)), None
        except NoVerdictError as error:
            return Verdict(score=None, reason=f"no verdict: {reply.reason or error}"), str(error)

    def _kept(self, key: str) -> Verdict | None:
        text = None if self._cache is None else self._cache.get(key)
        if text is None:
            return None
        verdict, _ = self._read(JudgeReply(text=text, attempts=0))
        return verdict if verdict.score is not None else None

    def _count(self, verdicts: Any, *, cached: bool) -> None:
        for verdict in verdicts:
            valid = verdict.score is not None
            self.tally.asked += 1
            self.tally.valid += valid
            self.tally.cached += cached
            self.tally.recent.append(None if valid else verdict.reason or "no reply")

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
            self.tally.calls += reply.attempts
            self.tally.retries += max(0, reply.attempts - 1)
            self.tally.cost += reply.cost
            if reply.text is not None:
                self.tally.replies += 1
                self.tally.latency += reply.latency
            if self._cache is not None and verdict.score is not None and not fresh:
                # Under the key of the question, not of its repair: that is what is asked again.
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


def _checked(reply: Any) -> JudgeReply:
    """A reply whose text can be read and written down; TypeError where it is something else."""
    if not isinstance(reply, JudgeReply) or not isinstance(reply.text, str | None):
        raise TypeError(f"the judge returned {type(reply).__name__} where a JudgeReply with a text belongs")
    return reply if reply.text is None else replace(reply, text=plain(reply.text))


async def _together(coroutines: Sequence[Any]) -> list[Any]:
    """All results; where one raises, the others are cancelled before the error goes on."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
