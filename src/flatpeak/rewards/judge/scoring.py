"""The two ways in which a judge scores candidates: marks by a rubric, and win rates of pairwise comparisons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flatpeak.rewards.judge.panel import JudgePanel, Verdict
from flatpeak.rewards.judge.prompt import build_request, rejection_reason, sanitize
from flatpeak.rewards.judge.protocol import JudgeRequest, SystemClock


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
    max_characters: int = 16_000
    """Limit on the question, the reference and each answer; longer ones lose their middle."""


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
        name: sanitize(text, reserved=reserved, limit=settings.max_characters)
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


@dataclass(kw_only=True)
class _Comparison:
    """A pair of answers: `left` and `right` index candidates of one group, right None is the reference."""

    group: int
    left: int
    right: int | None
    outcome: Verdict | None = None
    """The verdict from the left answer's point of view."""
    requests: list[JudgeRequest] = field(default_factory=list)
    """The request with the left answer first, then the one with the right answer first."""


class PairwiseScoring:
    """Scores by win rate: 1 for a win, 0.5 for a tie, 0 for a loss, averaged over an answer's comparisons.

    Each answer is compared with the reference (`opponents=0`), or with its next `opponents` neighbours in the group on
    either side, so that all answers have equally many comparisons. Both orders are asked, and a verdict that depends
    on the order is a tie. An answer that a rule rejects loses without a call; the score is missing where a comparison
    has no verdict.
    """

    def __init__(self, panel: JudgePanel, settings: RequestSettings, *, opponents: int = 0) -> None:
        self.panel = panel
        self._settings = settings
        self._opponents = opponents

    async def verdicts(self, groups: Sequence[Sequence[Candidate]], *, fresh: bool = False) -> list[list[Verdict]]:
        """The win rate of each candidate of each group."""
        comparisons = [pair for group_index, group in enumerate(groups) for pair in self._pair_up(group_index, group)]
        deadline = batch_deadline(self._settings)
        for comparison in comparisons:
            self._prepare(comparison, groups[comparison.group], deadline=deadline)
        requests = [request for comparison in comparisons for request in comparison.requests]
        judged = iter(await self.panel.verdicts(requests, fresh=fresh))
        for comparison in comparisons:
            if comparison.outcome is None:
                comparison.outcome = combine_orders(next(judged), next(judged))
        outcomes = _outcomes_by_candidate(comparisons)
        return [
            [self._verdict(candidate, outcomes[group_index, index]) for index, candidate in enumerate(group)]
            for group_index, group in enumerate(groups)
        ]

    def _pair_up(self, group_index: int, group: Sequence[Candidate]) -> list[_Comparison]:
        # A group of one, such as the greedy answer of an evaluation, is compared with the reference.
        if self._opponents == 0 or len(group) < 2:
            return [_Comparison(group=group_index, left=index, right=None) for index in range(len(group))]
        pairs: set[tuple[int, int]] = set()
        for index in range(len(group)):
            for step in range(1, self._opponents + 1):
                other = (index + step) % len(group)
                if other != index:
                    pairs.add((min(index, other), max(index, other)))
        return [_Comparison(group=group_index, left=left, right=right) for left, right in sorted(pairs)]

    def _prepare(self, comparison: _Comparison, group: Sequence[Candidate], *, deadline: float | None) -> None:
        left = group[comparison.left]
        other = left.reference if comparison.right is None else group[comparison.right].text
        left_rejected = rejection_reason(left.text, left.reference) is not None
        right_rejected = rejection_reason(other, left.reference) is not None and comparison.right is not None
        if left_rejected or right_rejected or left.text.strip() == other.strip():
            score = 0.5 if left_rejected == right_rejected else float(right_rejected)
            comparison.outcome = Verdict(score=score, reason="rule")
            self.panel.counts.skipped += 1
            return
        reference = {"reference answer": left.reference if comparison.right is not None else ""}
        for first, second in ((left.text, other), (other, left.text)):
            texts = {"question": left.question, **reference, "answer A": first, "answer B": second}
            comparison.requests.append(make_request(texts, self.panel, self._settings, deadline=deadline))

    def _verdict(self, candidate: Candidate, outcomes: Sequence[Verdict]) -> Verdict:
        rule = rejection_reason(candidate.text, candidate.reference)
        if rule is not None:
            return Verdict(score=0.0, reason=rule)
        missing = next((verdict for verdict in outcomes if verdict.score is None), None)
        if missing is not None:
            return missing
        scores = [verdict.score for verdict in outcomes if verdict.score is not None]
        return Verdict(score=sum(scores) / len(scores))


def combine_orders(left_first: Verdict, right_first: Verdict) -> Verdict:
    """The verdict of both orders, from the left answer's view: a tie where they differ, missing where one is."""
    if left_first.score is None or right_first.score is None:
        return left_first if left_first.score is None else right_first
    left_score = 1.0 - right_first.score
    return Verdict(score=left_first.score if left_first.score == left_score else 0.5)


def _outcomes_by_candidate(comparisons: Sequence[_Comparison]) -> dict[tuple[int, int], list[Verdict]]:
    """The outcomes of each candidate's comparisons, from its own point of view, by (group, index in the group)."""
    outcomes: dict[tuple[int, int], list[Verdict]] = defaultdict(list)
    for comparison in comparisons:
        outcome = comparison.outcome
        if outcome is None:
            continue
        outcomes[comparison.group, comparison.left].append(outcome)
        if comparison.right is not None:
            score = None if outcome.score is None else 1.0 - outcome.score
            outcomes[comparison.group, comparison.right].append(Verdict(score=score, reason=outcome.reason))
    return outcomes
