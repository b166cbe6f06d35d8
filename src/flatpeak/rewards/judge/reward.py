"""A judge as a part of the reward."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from flatpeak.errors import UserError
from flatpeak.rewards.base import PartScores
from flatpeak.rewards.judge.canaries import CanaryReport, check_alive, run_canaries
from flatpeak.rewards.judge.limits import BackgroundLoop
from flatpeak.rewards.judge.prompt import Show, shown_text
from flatpeak.rewards.judge.protocol import JudgeError
from flatpeak.rewards.judge.scoring import Candidate, Grader

if TYPE_CHECKING:
    from flatpeak.rewards.judge.panel import ReplyCache, Verdict
    from flatpeak.types import Completion, Example, Group, Prompt


class Ledger:
    """A small file of two figures, replaced whole at every change.

    A file that cannot be written costs no scores: the transcripts, on the same disk, tell the user.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[int, float]:
        """(calls, cost) so far; zeros where there is no such file, or it is damaged."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            calls, cost = int(content["calls"]), float(content["cost"])
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            return 0, 0.0
        return (calls, cost) if calls >= 0 and cost >= 0 and math.isfinite(cost) else (0, 0.0)

    def write(self, calls: int, cost: float) -> None:
        """Keep these figures."""
        new = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps({"calls": calls, "cost": cost}) + "\n", encoding="utf-8")
            new.replace(self._path)
        except OSError:
            return


TRANSCRIPTS: Final = "judge"
"""The folder of a run directory that transcripts go to."""
_FEWEST_VERDICTS: Final = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Safety:
    """When a judge is not good enough to train on."""

    canaries: bool = True
    canary_examples: int = 4
    threshold: float = 0.5
    max_false_positive_rate: float = 0.01
    min_valid_fraction: float = 0.5


class JudgeReward:
    """A Scorer that asks a judge. Before its first score it checks the judge, unless `prepare` was called already."""

    def __init__(
        self,
        grader: Grader,
        *,
        name: str = "judge",
        show: Show = "final_answer",
        safety: Safety | None = None,
        cache: ReplyCache | None = None,
        shadow: str | None = None,
    ) -> None:
        self.name = name
        self.shadow = shadow
        """The part that knows the truth, for `shadow_metrics`."""
        self._show = show
        self._safety = safety or Safety()
        self._cache = cache
        self._loop = BackgroundLoop()
        self._grader = grader
        self._examples: tuple[Candidate, ...] | None = None
        self._canary_rate: float | None = None
        self._stopping: Callable[[], bool] = lambda: False
        self._ledger: Ledger | None = None
        self._notices: list[str] = []
        self._told: set[str] = set()

    @property
    def template_hash(self) -> str:
        """12 hexadecimal digits that change with any word of the prompt or the rubric; every transcript has them."""
        return self._grader.examiner.template

    def attach(self, directory: Path, *, stopping: Callable[[], bool] | None = None) -> None:
        """Write transcripts into a run's directory; give up waiting, with JudgeInterruptedError, when `stopping()`.

        What the run has spent is kept there too: a run that is resumed goes on with what is left of its budget.
        """
        self._grader.examiner.transcripts.attach(directory / TRANSCRIPTS / f"{self.name}.jsonl")
        self._stopping = stopping or self._stopping
        if (judge := self._grader.examiner.judge) and hasattr(judge, "spent") and hasattr(judge, "add_spent"):
            self._ledger = Ledger(directory / TRANSCRIPTS / f"{self.name}.spent.json")
            judge.add_spent(*self._ledger.read())

    def prepare(self, examples: Sequence[Example]) -> CanaryReport | None:
        """One live call, a right answer against a wrong one, then the canaries; UserError if the judge fails any.

        None where canaries are switched off; the live call is made all the same.
        """
        candidates = [Candidate(question=e.question, reference=e.gold, text="") for e in examples]
        self._examples = tuple(candidates[: max(2, self._safety.canary_examples)])
        self._run(check_alive(self._grader, self._examples))
        return self.run_canaries()

    def run_canaries(self) -> CanaryReport | None:
        """Try the canaries on the examples that `prepare` had. UserError if too many score above the threshold.

        None where they are switched off.
        """
        if not self._safety.canaries:
            return None
        if self._examples is None:
            raise ValueError("prepare comes first: it brings the examples")
        chosen = self._examples[: self._safety.canary_examples]
        report: CanaryReport = self._run(run_canaries(self._grader, chosen, threshold=self._safety.threshold))
        self._canary_rate = report.false_positive_rate
        if report.false_positive_rate > self._safety.max_false_positive_rate:
            names = ", ".join(dict.fromkeys(report.fooled_by))
            raise UserError(
                f"reward {self.name!r}: the judge is fooled by {len(report.fooled_by)} of {report.judged} worthless "
                f"answers ({names}): use a stronger judge or a stricter rubric, or raise "
                f"rewards.{self.name}.canaries.max_false_positive_rate"
            )
        if report.missing:
            self._tell(f"reward {self.name!r}: the judge gave no verdict on {report.missing} canaries")
        return report

    def score(self, groups: Sequence[Group]) -> PartScores:
        """A score for every completion; missing where the judge gave no verdict. UserError if it hardly ever does."""
        if self._examples is None and groups:
            self.prepare([group.prompt.example for group in groups])
        verdicts = self.verdicts(groups)
        self._watch()
        missing = [verdict for group in verdicts for verdict in group if verdict.score is None]
        return PartScores(
            scores=[[verdict.score for verdict in group] for group in verdicts],
            failed=len(missing),
            first_error=JudgeError(_why(missing[0])) if missing else None,
            tolerated=True,  # min_valid_fraction says when it is too much
        )

    def verdicts(self, groups: Sequence[Group], *, fresh: bool = False) -> list[list[Verdict]]:
        """What the judge says of every completion, without a look at how good it is; `fresh` does not use the cache."""
        candidates = [self._candidates(group) for group in groups]
        found: list[list[Verdict]] = self._run(self._grader.grade(candidates, fresh=fresh))
        return found

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """What the judge is shown; None if that is nothing."""
        return shown_text(completion, prompt, show=self._show) or None

    def metrics(self) -> dict[str, float]:
        """`judge/...` (`judge/NAME/...` for a part of another name) since the last time; names in docs/judges.md."""
        figures = self._grader.examiner.tally.take()
        if self._canary_rate is not None:
            figures["canary_false_positive_rate"] = self._canary_rate
        prefix = "judge" if self.name == "judge" else f"judge/{self.name}"
        return {f"{prefix}/{name}": value for name, value in figures.items()}

    def notices(self) -> list[str]:
        """What the user should know, each once; taking them empties the list."""
        judge = self._grader.examiner.judge
        for text in getattr(judge, "take_notices", list)():
            self._tell(f"reward {self.name!r}: {text}")
        if self._cache is not None and self._cache.error is not None:
            self._tell(f"reward {self.name!r}: the cache is not used any more: {self._cache.error}")
        if (error := self._grader.examiner.transcripts.error) is not None:
            self._tell(f"reward {self.name!r}: transcripts are not written any more: {error}")
        notices, self._notices = self._notices, []
        return notices

    def close(self) -> None:
        """Cancel what is being asked, and close connections, cache and thread."""
        closing = getattr(self._grader.examiner.judge, "close", None)
        try:
            if closing is not None:
                self._loop.run(closing())
        finally:
            self._loop.close()
            if self._cache is not None:
                self._cache.close()

    def _run(self, coroutine: Any) -> Any:
        try:
            return self._loop.run(coroutine, stopping=self._stopping)
        finally:
            if self._ledger is not None:
                self._ledger.write(*cast("Any", self._grader.examiner.judge).spent())

    def _candidates(self, group: Group) -> list[Candidate]:
        example = group.prompt.example
        return [
            Candidate(
                question=example.question,
                reference=example.gold,
                text=shown_text(completion, group.prompt, show=self._show),
            )
            for completion in group.completions
        ]

    def _watch(self) -> None:
        recent = self._grader.examiner.tally.recent
        reasons = [reason for reason in recent if reason is not None]
        valid = len(recent) - len(reasons)
        if len(recent) >= _FEWEST_VERDICTS and valid < self._safety.min_valid_fraction * len(recent):
            reason, _ = Counter(reasons).most_common(1)[0]
            raise UserError(
                f"reward {self.name!r}: only {valid} of the last {len(recent)} questions have a verdict (most "
                f"often: {reason}); mend the judge, or lower rewards.{self.name}.min_valid_fraction"
            )

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._notices.append(text)


def _why(verdict: Verdict) -> str:
    return f"the judge gave no score: {verdict.reason}"
