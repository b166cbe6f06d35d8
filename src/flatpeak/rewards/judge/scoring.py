"""The two ways in which a judge scores candidates: marks by a rubric, and comparisons with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from flatpeak.rewards.judge.panel import JudgePanel, Verdict
from flatpeak.rewards.judge.prompt import build_request, rejection_reason, sanitize
from flatpeak.rewards.judge.protocol import JudgeRequest, SystemClock

_MAX_CHARACTERS: Final = 16_000
"""Limit on the question, the reference and each answer; longer ones lose their middle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """An answer to be graded, with its question."""

    question: str
    reference: str
    """The reference answer; empty where the data has none."""
    text: str
    """The text of the completion that the judge sees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSettings:
    """Settings that all requests share."""

    max_tokens: int = 1024
    temperature: float | None = 0.0
    deadline: float | None = None
    """Seconds for a whole batch, retries and waiting included."""


class JudgeScoring(Protocol):
    """A way to score groups of candidates, with one verdict for each candidate."""

    panel: JudgePanel

    async def verdicts(self, groups: Sequence[Sequence[Candidate]], *, fresh: bool = False) -> list[list[Verdict]]:
        """The verdict of each candidate of each group; `fresh` ignores the cache."""
        ...


class RubricScoring:
    """Scores by a rubric: every candidate is marked on its own, against the reference."""

    def __init__(self, panel: JudgePanel, settings: RequestSettings) -> None:
        self.panel = panel
        self._settings = settings

    async def verdicts(self, groups: Sequence[Sequence[Candidate]], *, fresh: bool = False) -> list[list[Verdict]]:
        """The verdicts of the rules, and of the judge on the rest."""
        flat = [candidate for group in groups for candidate in group]
        verdicts: dict[int, Verdict] = {}
        requests: dict[int, JudgeRequest] = {}
        deadline = batch_deadline(self._settings)
        for index, candidate in enumerate(flat):
            rule = rejection_reason(candidate.text, candidate.reference)
            if rule is not None:
                verdicts[index] = Verdict(score=0.0, reason=rule)
            else:
                requests[index] = self._request(candidate, deadline=deadline)
        self.panel.counts.skipped += len(verdicts)
        judged = await self.panel.verdicts(list(requests.values()), fresh=fresh)
        verdicts |= dict(zip(requests, judged, strict=True))
        indices = iter(range(len(flat)))
        return [[verdicts[next(indices)] for _ in group] for group in groups]

    def _request(self, candidate: Candidate, *, deadline: float | None) -> JudgeRequest:
        texts = {"question": candidate.question, "reference answer": candidate.reference, "answer": candidate.text}
        return make_request(texts, self.panel, self._settings, deadline=deadline)


def batch_deadline(settings: RequestSettings) -> float | None:
    """The deadline of a batch that begins now, in `time.monotonic()` seconds."""
    return None if settings.deadline is None else SystemClock().now() + settings.deadline


def make_request(
    texts: dict[str, str], panel: JudgePanel, settings: RequestSettings, *, deadline: float | None
) -> JudgeRequest:
    """The request for a verdict on named texts, each sanitized; an empty reference answer is left out."""
    reserved: Sequence[str] = getattr(panel.judge, "reserved_tokens", ())
    sanitized = {
        name: sanitize(text, reserved=reserved, limit=_MAX_CHARACTERS)
        for name, text in texts.items()
        if text.strip() or name != "reference answer"
    }
    return build_request(
        sanitized,
        panel.verdict_format,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        deadline=deadline,
    )


class PairwiseScoring:
    """Scores by comparison with the reference answer: 1 for a win, 0.5 for a tie, 0 for a loss.

    Both orders are asked, and a verdict that depends on the order is a tie. An answer that a rule rejects loses without
    a call, and one that equals the reference ties; the score is missing where an order has no verdict.
    """

    def __init__(self, panel: JudgePanel, settings: RequestSettings) -> None:
        self.panel = panel
        self._settings = settings

    async def verdicts(self, groups: Sequence[Sequence[Candidate]], *, fresh: bool = False) -> list[list[Verdict]]:
        """The outcome of each candidate's comparison with its reference."""
        ruled = [[_rule_of_pair(candidate) for candidate in group] for group in groups]
        deadline = batch_deadline(self._settings)
        requests: list[JudgeRequest] = []
        for group, rules in zip(groups, ruled, strict=True):
            for candidate, rule in zip(group, rules, strict=True):
                if rule is not None:
                    self.panel.counts.skipped += 1
                else:
                    requests += self._both_orders(candidate, deadline=deadline)
        judged = iter(await self.panel.verdicts(requests, fresh=fresh))
        return [[rule or combine_orders(next(judged), next(judged)) for rule in rules] for rules in ruled]

    def _both_orders(self, candidate: Candidate, *, deadline: float | None) -> list[JudgeRequest]:
        """The request with the candidate first, then the one with the reference first."""
        orders = ((candidate.text, candidate.reference), (candidate.reference, candidate.text))
        return [
            make_request(
                {"question": candidate.question, "answer A": first, "answer B": second},
                self.panel,
                self._settings,
                deadline=deadline,
            )
            for first, second in orders
        ]


def _rule_of_pair(candidate: Candidate) -> Verdict | None:
    """The outcome that needs no judge; None where one is needed."""
    rule = rejection_reason(candidate.text, candidate.reference)
    if rule is not None:
        return Verdict(score=0.0, reason=rule)
    if candidate.text.strip() == candidate.reference.strip():
        return Verdict(score=0.5)
    return None


def combine_orders(candidate_first: Verdict, reference_first: Verdict) -> Verdict:
    """The verdict of both orders, from the candidate's view: a tie where they differ, missing where one is."""
    if candidate_first.score is None or reference_first.score is None:
        return candidate_first if candidate_first.score is None else reference_first
    score = 1.0 - reference_first.score
    return Verdict(score=candidate_first.score if candidate_first.score == score else 0.5)
