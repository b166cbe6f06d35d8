"""From candidates to verdicts: the panel asks a judge and reads its replies, with a cache, transcripts and counts."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flatpeak.errors import UserError
from flatpeak.rewards.background_loop import gather
from flatpeak.rewards.judge.client import encodable
from flatpeak.rewards.judge.prompt import prompt_messages, repair_request, sanitize, template_hash
from flatpeak.rewards.judge.protocol import Candidate, Judge, JudgeReply, JudgeRequest, Verdict
from flatpeak.rewards.judge.rubrics import NoVerdictError

if TYPE_CHECKING:
    from flatpeak.rewards.judge.rubrics import VerdictFormat

WINDOW: Final = 200
"""Number of the latest verdicts in the valid fraction that may stop a run."""
_GRACE_SECONDS = 5.0
"""Added to a deadline before a custom judge is given up: the endpoint's own client ends in time."""
_MAX_CHARACTERS: Final = 16_000
"""Limit on the question, the reference and each answer; longer ones lose their middle."""


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
        self._file.close()

    def _run(self, statement: str, values: tuple[object, ...]) -> tuple[object, ...] | None:
        if self.error is not None:
            return None
        try:
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

    def __init__(
        self,
        judge: Judge,
        verdict_format: VerdictFormat,
        *,
        cache: ReplyCache | None = None,
        max_tokens: int = 1024,
        temperature: float | None = 0.0,
        deadline: float | None = None,
    ) -> None:
        """`deadline`: seconds for all requests of one call of `grade`, retries and waiting included."""
        self.judge = judge
        self.verdict_format = verdict_format
        self.transcripts = Transcripts(scrub=self.scrub)
        self.template = template_hash(verdict_format.instructions, verdict_format.schema)
        self.recent: deque[str | None] = deque(maxlen=WINDOW)
        """For each of the latest questions None, or the reason why it has no verdict."""
        self._counts: Counter[str] = Counter()
        self._cost = self._latency = 0.0
        self._cache = cache
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._deadline = deadline

    def scrub(self, text: str) -> str:
        """The text without the judge's secrets."""
        scrub: Callable[[str], str] | None = getattr(self.judge, "scrub", None)
        return text if scrub is None else scrub(text)

    def metrics(self) -> dict[str, float]:
        """Counts, cost and fractions since the last call by name, those without a value left out."""
        counts, metrics = self._counts, {"cost": self._cost}
        for name in ("calls", "retries", "repairs", "skipped"):
            metrics[name] = float(counts[name])
        if counts["asked"]:
            metrics["valid_fraction"] = counts["valid"] / counts["asked"]
            metrics["cache_hit_fraction"] = counts["cached"] / counts["asked"]
        if counts["replies"]:
            metrics["latency_seconds"] = self._latency / counts["replies"]
        self._counts, self._cost, self._latency = Counter(), 0.0, 0.0
        return metrics

    async def grade(self, groups: Sequence[Sequence[Candidate]], *, fresh: bool = False) -> list[list[Verdict]]:
        """The verdict on each candidate of each group, by rule or by the judge; `fresh` ignores the cache."""
        deadline = None if self._deadline is None else time.monotonic() + self._deadline
        ruled = [[self.verdict_format.rule(candidate) for candidate in group] for group in groups]
        requests: list[JudgeRequest] = []
        for group, rules in zip(groups, ruled, strict=True):
            for candidate, rule in zip(group, rules, strict=True):
                if rule is not None:
                    self._counts["skipped"] += 1
                    continue
                texts = self.verdict_format.questions(candidate)
                requests += [self._request(named, deadline=deadline) for named in texts]
        verdicts = iter(await self._verdicts(requests, fresh=fresh))
        return [[rule or self.verdict_format.combined(verdicts) for rule in rules] for rules in ruled]

    def _request(self, texts: Mapping[str, str], *, deadline: float | None) -> JudgeRequest:
        """The request for a verdict on named texts; an empty reference answer is left out."""
        reserved: Sequence[str] = getattr(self.judge, "reserved_tokens", ())
        sanitized = {
            name: sanitize(text, reserved=reserved, limit=_MAX_CHARACTERS)
            for name, text in texts.items()
            if text.strip() or name != "reference answer"
        }
        return JudgeRequest(
            messages=prompt_messages(sanitized, self.verdict_format.instructions),
            max_tokens=self._max_tokens,
            temperature=self._temperature,
            schema=self.verdict_format.schema,
            deadline=deadline,
        )

    async def _verdicts(self, requests: Sequence[JudgeRequest], *, fresh: bool) -> list[Verdict]:
        """A verdict for each request, in order. Equal requests are asked once.

        A UserError of the judge ends the whole batch, and pending requests are cancelled.
        """
        keys = [request.key(self.judge.identity) for request in requests]
        verdicts: dict[str, Verdict] = {}
        pending: dict[str, JudgeRequest] = {}
        for key, request in dict(zip(keys, requests, strict=True)).items():
            cached = None if fresh else self._cached_verdict(key)
            if cached is None:
                pending[key] = request
            else:
                verdicts[key] = cached
        self._counts["cached"] += len(verdicts)
        self._count(verdicts.values())
        size = getattr(self.judge, "batch_size", None) or max(1, len(pending))
        entries = list(pending.items())
        batches = [dict(entries[start : start + size]) for start in range(0, len(entries), size)]
        for judged in await gather(self._judge_batch(batch, fresh=fresh) for batch in batches):
            verdicts |= judged
        return [verdicts[key] for key in keys]

    async def _judge_batch(self, requests: Mapping[str, JudgeRequest], *, fresh: bool) -> dict[str, Verdict]:
        """The verdicts of one batch by key; replies that cannot be read are asked for once more."""
        verdicts, repairs = await self._judge_once(requests, fresh=fresh, repair=False)
        if repairs:
            self._counts["repairs"] += len(repairs)
            verdicts |= (await self._judge_once(repairs, fresh=fresh, repair=True))[0]
        self._count(verdicts.values())
        return verdicts

    async def _judge_once(
        self, requests: Mapping[str, JudgeRequest], *, fresh: bool, repair: bool
    ) -> tuple[dict[str, Verdict], dict[str, JudgeRequest]]:
        """(verdicts, requests to repair the replies that could not be read), by key."""
        form = self.verdict_format.instructions.rpartition("\n")[2]
        verdicts: dict[str, Verdict] = {}
        repairs: dict[str, JudgeRequest] = {}
        replies = await self._ask(list(requests.values()))
        for (key, request), reply in zip(requests.items(), replies, strict=True):
            verdict, fault = self._read(reply)
            verdicts[key] = verdict
            if fault is not None:
                repairs[key] = repair_request(request, reply.text or "", why=fault, form=form)
            if self._cache is not None and verdict.score is not None and not fresh:
                # Under the key of the question, not of its repair: the question is what a later step asks again.
                self._cache.put(key, self.scrub(reply.text or ""))
            self._record(key, request, reply, verdict, repair=repair)
        return verdicts, repairs

    async def _ask(self, requests: Sequence[JudgeRequest]) -> list[JudgeReply]:
        """The judge's replies; any exception but UserError, such as one in a user's judge, makes them missing."""
        deadlines = [request.deadline for request in requests if request.deadline is not None]
        left = min(deadlines) - time.monotonic() + _GRACE_SECONDS if deadlines else None
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

    def _count(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            valid = verdict.score is not None
            self._counts["asked"] += 1
            self._counts["valid"] += valid
            self.recent.append(None if valid else verdict.reason or "no reply")

    def _record(self, key: str, request: JudgeRequest, reply: JudgeReply, verdict: Verdict, *, repair: bool) -> None:
        self._counts["calls"] += reply.attempts
        self._counts["retries"] += max(0, reply.attempts - 1)
        self._cost += reply.cost
        if reply.text is not None:
            self._counts["replies"] += 1
            self._latency += reply.latency
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
