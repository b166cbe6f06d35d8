"""Candidates to verdicts: each completion marked by itself against the reference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flatpeak.rewards.judge.panel import Examiner, Verdict
from flatpeak.rewards.judge.prompt import build_request, neutralize, worthless
from flatpeak.rewards.judge.protocol import JudgeRequest, RealClock


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """What is graded."""

    question: str
    reference: str
    """The reference answer; empty where the data has none."""
    text: str
    """What the judge is shown of the completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """How every request is made."""

    max_tokens: int = 1024
    temperature: float | None = 0.0
    deadline: float | None = None
    """Seconds for a whole batch, retries and waiting included."""
    max_characters: int = 16_000
    """Of the question, the reference and each answer; longer ones lose their middle."""


class Grader(Protocol):
    """Groups of candidates to one verdict each."""

    examiner: Examiner

    async def grade(self, groups: Sequence[Sequence[Candidate]], *, fresh: bool = False) -> list[list[Verdict]]:
        """The verdict of each candidate of each group; `fresh` ignores what the cache holds."""
        ...


class RubricGrader:
    """Marks every candidate on its own."""

    def __init__(self, examiner: Examiner, asking: Asking) -> None:
        self.examiner = examiner
        self._asking = asking

    async def grade(self, groups: Sequence[Sequence[Candidate]], *, fresh: bool = False) -> list[list[Verdict]]:
        """Rules first, then the judge for the rest."""
        flat = [candidate for group in groups for candidate in group]
        verdicts: dict[int, Verdict] = {}
        requests: dict[int, JudgeRequest] = {}
        deadline = deadline_of(self._asking)
        for index, candidate in enumerate(flat):
            rule = worthless(candidate.text, candidate.reference)
            if rule is not None:
                verdicts[index] = Verdict(score=0.0, reason=rule)
            else:
                requests[index] = self._request(candidate, deadline=deadline)
        self.examiner.tally.skipped += len(verdicts)
        examined = await self.examiner.examine(list(requests.values()), fresh=fresh)
        verdicts |= dict(zip(requests, examined, strict=True))
        remaining = iter(range(len(flat)))
        return [[verdicts[next(remaining)] for _ in group] for group in groups]

    def _request(self, candidate: Candidate, *, deadline: float | None) -> JudgeRequest:
        named = {"question": candidate.question, "reference answer": candidate.reference, "answer": candidate.text}
        return make_request(named, self.examiner, self._asking, deadline=deadline)


def deadline_of(asking: Asking) -> float | None:
    """When a batch that begins now has to be over."""
    return None if asking.deadline is None else RealClock().now() + asking.deadline


def make_request(texts: dict[str, str], examiner: Examiner, asking: Asking, *, deadline: float | None) -> JudgeRequest:
    """A request about texts by their names, each made neutral; an empty reference answer is left out."""
    reserved: Sequence[str] = getattr(examiner.judge, "reserved_tokens", ())
    plain = {
        name: neutralize(text, reserved=reserved, limit=asking.max_characters)
        for name, text in texts.items()
        if text.strip() or name != "reference answer"
    }
    return build_request(
        plain, examiner.form, max_tokens=asking.max_tokens, temperature=asking.temperature, deadline=deadline
    )


@dataclass(kw_only=True)
class _Comparison:
    """One pair: `left` and `right` are candidates of one group, right None for the reference."""

    group: int
    left: int
    right: int | None
    outcome: Verdict | None = None
    """From the left one's point of view."""
    requests: list[JudgeRequest] = field(default_factory=list)
    """Left first, then right first."""


class PairGrader:
    """The score is the win rate of an answer: 1 for a win, 0.5 for a tie, 0 for a loss.

    Each answer meets the reference (`opponents=0`), or its next so many neighbours in the group, on either side, so
    that every answer meets equally many. An order that turns the verdict around makes a tie. An answer that is nothing
    by rule loses without a call; one of whose comparisons has no verdict is missing.
    """

    def __init__(self, examiner: Examiner, asking: Asking, *, opponents: int = 0) -> None:
        self.examiner = examiner
        self._asking = asking
        self._opponents = opponents

    async def grade(self, groups: Sequence[Sequence[Candidate]], *, fresh: bool = False) -> list[list[Verdict]]:
        """The win rate of each candidate of each group."""
        comparisons = [pair for index, group in enumerate(groups) for pair in self._pairs(index, group)]
        deadline = deadline_of(self._asking)
        for comparison in comparisons:
            self._prepare(comparison, groups[comparison.group], deadline=deadline)
        requests = [request for comparison in comparisons for request in comparison.requests]
        examined = iter(await self.examiner.examine(requests, fresh=fresh))
        for comparison in comparisons:
            if comparison.outcome is None:
                comparison.outcome = agreed(next(examined), next(examined))
        met = _met(comparisons)
        return [
            [self._verdict(candidate, met[index, place]) for place, candidate in enumerate(group)]
            for index, group in enumerate(groups)
        ]

    def _pairs(self, index: int, group: Sequence[Candidate]) -> list[_Comparison]:
        # Where there is nobody else to meet, as with one greedy answer at an evaluation, the reference stands in.
        if self._opponents == 0 or len(group) < 2:
            return [_Comparison(group=index, left=place, right=None) for place in range(len(group))]
        met: set[tuple[int, int]] = set()
        for place in range(len(group)):
            for step in range(1, self._opponents + 1):
                other = (place + step) % len(group)
                if other != place:
                    met.add((min(place, other), max(place, other)))
        return [_Comparison(group=index, left=left, right=right) for left, right in sorted(met)]

    def _prepare(self, comparison: _Comparison, group: Sequence[Candidate], *, deadline: float | None) -> None:
        left = group[comparison.left]
        other = left.reference if comparison.right is None else group[comparison.right].text
        left_worthless = worthless(left.text, left.reference) is not None
        right_worthless = worthless(other, left.reference) is not None and comparison.right is not None
        if left_worthless or right_worthless or left.text.strip() == other.strip():
            score = 0.5 if left_worthless == right_worthless else float(right_worthless)
            comparison.outcome = Verdict(score=score, reason="rule")
            self.examiner.tally.skipped += 1
            return
        reference = {"reference answer": left.reference if comparison.right is not None else ""}
        for first, second in ((left.text, other), (other, left.text)):
            texts = {"question": left.question, **reference, "answer A": first, "answer B": second}
            comparison.requests.append(make_request(texts, self.examiner, self._asking, deadline=deadline))

    def _verdict(self, candidate: Candidate, met: Sequence[Verdict]) -> Verdict:
        rule = worthless(candidate.text, candidate.reference)
        if rule is not None:
            return Verdict(score=0.0, reason=rule)
        missing = next((verdict for verdict in met if verdict.score is None), None)
        if missing is not None:
            return missing
        scores = [verdict.score for verdict in met if verdict.score is not None]
        return Verdict(score=sum(scores) / len(scores))


def agreed(left_first: Verdict, right_first: Verdict) -> Verdict:
    """What both orders say, from the left answer's point of view; a tie where they differ, missing where one is."""
    if left_first.score is None or right_first.score is None:
        return left_first if left_first.score is None else right_first
    turned = 1.0 - right_first.score
    return Verdict(score=left_first.score if left_first.score == turned else 0.5)


def _met(comparisons: Sequence[_Comparison]) -> dict[tuple[int, int], list[Verdict]]:
    """What came of the comparisons of each candidate, by its group and its place, from its own point of view."""
    found: dict[tuple[int, int], list[Verdict]] = defaultdict(list)
    for comparison in comparisons:
        outcome = comparison.outcome
        if outcome is None:
            continue
        found[comparison.group, comparison.left].append(outcome)
        if comparison.right is not None:
            turned = Verdict(score=None if outcome.score is None else 1.0 - outcome.score, reason=outcome.reason)
            found[comparison.group, comparison.right].append(turned)
    return found
