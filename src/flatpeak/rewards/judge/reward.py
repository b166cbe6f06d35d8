"""A judge as a reward: how it is built, its checks before and during a run, its scores, metrics and notices."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

from flatpeak.errors import UserError
from flatpeak.rewards.background_loop import BackgroundLoop
from flatpeak.rewards.base import ComponentScores, Scorer
from flatpeak.rewards.judge.canaries import CanaryReport, check_judge, run_canaries
from flatpeak.rewards.judge.config import CanaryConfig, CustomJudgeConfig, EndpointConfig, JudgeConfig, LocalConfig
from flatpeak.rewards.judge.panel import JudgePanel, ReplyCache
from flatpeak.rewards.judge.prompt import Show, visible_text
from flatpeak.rewards.judge.protocol import Candidate, Judge
from flatpeak.rewards.judge.rubrics import Output, PairwiseFormat, Rubric, RubricFormat, load_rubric
from flatpeak.utils.user_code import load_function

if TYPE_CHECKING:
    from flatpeak.types import Completion, Example, Group, Prompt

T = TypeVar("T")

TRANSCRIPTS: Final = "judge"
"""The folder of transcripts in a run directory."""
_FEWEST_VERDICTS: Final = 20
"""Verdicts that a judge needs before the next limit is applied."""
_MIN_VALID_FRACTION: Final = 0.5
"""The run stops below this share of verdicts among the latest questions."""
_CANARY_EXAMPLES: Final = 4
"""Questions for which every canary is graded; 17 calls each, and twice as many for pairs."""


class JudgeError(Exception):
    """The reason for a missing score, in one line without secrets."""


class JudgeReward(Scorer):
    """A reward that asks a judge. The first `score` checks the judge, unless `prepare` was called before."""

    is_judge = True

    def __init__(
        self,
        judge: Judge,
        *,
        rubric: Rubric | str = "correctness",
        name: str = "judge",
        mode: Literal["score", "pairwise"] = "score",
        show: Show = "final_answer",
        output: Output = "json",
        max_tokens: int = 1024,
        temperature: float | None = 0.0,
        deadline: float | None = None,
        cache: ReplyCache | Path | None = None,
        canaries: CanaryConfig | None = None,
        shadow: str | None = None,
    ) -> None:
        """`judge` is any object with `identity` and `async ask(requests)`; the rest is as in a recipe."""
        self.name = name
        self.shadow = shadow
        """The name of the verifier that `shadow_metrics` compares with."""
        rubric = load_rubric(rubric) if isinstance(rubric, str) else rubric
        kind = PairwiseFormat if mode == "pairwise" else RubricFormat
        self._cache = ReplyCache(cache) if isinstance(cache, Path) else cache
        self._panel = JudgePanel(
            judge,
            kind(rubric=rubric, output=output),
            cache=self._cache,
            max_tokens=max_tokens,
            temperature=temperature,
            deadline=deadline,
        )
        self._show = show
        self._canaries = canaries or CanaryConfig()
        self._loop = BackgroundLoop("flatpeak-judge")
        self._examples: tuple[Candidate, ...] | None = None
        self._canary_rate: float | None = None
        self._stopping: Callable[[], bool] = lambda: False
        self._spent_file: Path | None = None
        self._notices: list[str] = []
        self._notified: set[str] = set()

    @property
    def template_hash(self) -> str:
        """12 hexadecimal digits that change with any word of the prompt or the rubric; every transcript has them."""
        return self._panel.template

    def attach(self, directory: Path, *, stopping: Callable[[], bool] | None = None) -> None:
        """Write transcripts into a run's directory; once `stopping()` is true, StoppedError ends a wait.

        The calls and cost of the run are logged there too, so that a resumed run counts them against its budget.
        """
        self._panel.transcripts.attach(directory / TRANSCRIPTS / f"{self.name}.jsonl")
        self._stopping = stopping or self._stopping
        if (judge := self._panel.judge) and hasattr(judge, "spent") and hasattr(judge, "add_spent"):
            self._spent_file = directory / TRANSCRIPTS / f"{self.name}.spent.json"
            judge.add_spent(*_read_spent(self._spent_file))

    def prepare(self, examples: Sequence[Example]) -> CanaryReport | None:
        """Check that the judge prefers a right answer to a wrong one, then run the canaries; UserError if it fails.

        None where canaries are switched off; the first check is made all the same.
        """
        candidates = [Candidate(question=e.question, reference=e.gold, text="") for e in examples]
        self._examples = tuple(candidates[:_CANARY_EXAMPLES])
        self._run(check_judge(self._panel, self._examples))
        return self.run_canaries()

    def run_canaries(self) -> CanaryReport | None:
        """Grade the canaries of the examples that `prepare` was given. UserError if too many are above the threshold.

        None where they are switched off.
        """
        if not self._canaries.enabled:
            return None
        if self._examples is None:
            raise ValueError("call prepare first: it has the examples")
        report = self._run(run_canaries(self._panel, self._examples))
        self._canary_rate = report.false_positive_rate
        if report.false_positive_rate > self._canaries.max_false_positive_rate:
            names = ", ".join(dict.fromkeys(report.fooled_by))
            raise UserError(
                f"reward {self.name!r}: the judge is fooled by {len(report.fooled_by)} of {report.judged} worthless "
                f"answers ({names}): use a stronger judge or a stricter rubric, or raise "
                f"rewards.{self.name}.canaries.max_false_positive_rate"
            )
        if report.missing:
            self._notify(f"reward {self.name!r}: the judge gave no verdict on {report.missing} canaries")
        return report

    def score(self, groups: Sequence[Group]) -> ComponentScores:
        """A score for every completion; missing without a verdict, and unfit where too few questions have one."""
        if self._examples is None and groups:
            self.prepare([group.prompt.example for group in groups])
        candidates = [self._candidates(group) for group in groups]
        verdicts = self._run(self._panel.grade(candidates))
        missing = [verdict for group in verdicts for verdict in group if verdict.score is None]
        return ComponentScores(
            scores=[[verdict.score for verdict in group] for group in verdicts],
            failed=len(missing),
            first_error=JudgeError(f"the judge gave no score: {missing[0].reason}") if missing else None,
            tolerated=True,  # the valid fraction is their limit
            unfit=self._unfit(),
        )

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """The text that the judge sees; None if it is empty."""
        return visible_text(completion, prompt, show=self._show) or None

    def metrics(self) -> dict[str, float]:
        """`judge/...` (`judge/NAME/...` for a part of another name) since the last call; defined in docs/judges.md."""
        metrics = self._panel.metrics()
        if self._canary_rate is not None:
            metrics["canary_false_positive_rate"] = self._canary_rate
        prefix = "judge" if self.name == "judge" else f"judge/{self.name}"
        return {f"{prefix}/{name}": value for name, value in metrics.items()}

    def notices(self) -> list[str]:
        """Messages for the user since the last call, each only once."""
        judge = self._panel.judge
        for text in getattr(judge, "take_notices", list)():
            self._notify(f"reward {self.name!r}: {text}")
        if self._cache is not None and self._cache.error is not None:
            self._notify(f"reward {self.name!r}: the cache is not used any more: {self._cache.error}")
        if (error := self._panel.transcripts.error) is not None:
            self._notify(f"reward {self.name!r}: transcripts are not written any more: {error}")
        notices, self._notices = self._notices, []
        return notices

    def close(self) -> None:
        """Cancel pending requests, and close connections, cache and thread."""
        closing = getattr(self._panel.judge, "close", None)
        try:
            if closing is not None:
                self._loop.run(closing())
        finally:
            self._loop.close()
            if self._cache is not None:
                self._cache.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self._loop.run(coroutine, stopping=self._stopping)
        finally:
            if self._spent_file is not None:
                _write_spent(self._spent_file, *cast("Any", self._panel.judge).spent())

    def _candidates(self, group: Group) -> list[Candidate]:
        example = group.prompt.example
        return [
            Candidate(
                question=example.question,
                reference=" or ".join(example.golds),
                text=visible_text(completion, group.prompt, show=self._show),
            )
            for completion in group.completions
        ]

    def _unfit(self) -> str | None:
        recent = self._panel.recent
        reasons = [reason for reason in recent if reason is not None]
        valid = len(recent) - len(reasons)
        if len(recent) < _FEWEST_VERDICTS or valid >= _MIN_VALID_FRACTION * len(recent):
            return None
        reason, _ = Counter(reasons).most_common(1)[0]
        last = f"the last {len(recent)} questions"
        return f"only {valid} of {last} have a verdict (most often: {reason}); repair the judge"

    def _notify(self, text: str) -> None:
        if text not in self._notified:
            self._notified.add(text)
            self._notices.append(text)


def _read_spent(path: Path) -> tuple[int, float]:
    """(calls, cost) of a run until now; zeros where the file is absent or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        calls, cost = int(content["calls"]), float(content["cost"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return 0, 0.0
    return (calls, cost) if calls >= 0 and cost >= 0 and math.isfinite(cost) else (0, 0.0)


def _write_spent(path: Path, calls: int, cost: float) -> None:
    """Replace the file whole. A failure costs no scores: the notice of the transcripts, on the same disk, is enough."""
    new = path.with_suffix(".new")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps({"calls": calls, "cost": cost}) + "\n", encoding="utf-8")
        new.replace(path)


judge_reward = JudgeReward
"""The name for Python's users: `judge_reward(judge, rubric="weighted")`."""


def build_judge_reward(name: str, config: JudgeConfig) -> JudgeReward:
    """The judge reward of a recipe; UserError where the rubric, the key or the judge is missing."""
    try:
        rubric = load_rubric(config.rubric)  # before a model is loaded
        return JudgeReward(
            _judge(name, config),
            rubric=rubric,
            name=name,
            mode=config.mode,
            show=config.show,
            output=config.output,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            deadline=config.deadline,
            cache=None if config.cache is None else config.cache.expanduser(),
            canaries=config.canaries,
            shadow=config.shadow,
        )
    except UserError as error:
        raise UserError(f"rewards.{name}: {error}") from None


def _judge(name: str, config: JudgeConfig) -> Judge:
    match config.backend:
        case EndpointConfig() as endpoint:
            from flatpeak.rewards.judge.client import EndpointJudge

            return EndpointJudge(name, config, endpoint)
        case LocalConfig() as local:
            from flatpeak.rewards.judge.local import LocalJudge

            return LocalJudge(
                local.path, dtype=local.dtype, device=local.device, batch_size=local.batch_size, revision=local.revision
            )
        case CustomJudgeConfig() as custom:
            judge = load_function(custom.factory)(**custom.arguments)
            if not callable(getattr(judge, "ask", None)) or not isinstance(getattr(judge, "identity", None), str):
                raise UserError(
                    f"backend.factory={custom.factory} must return an object with `identity`, a text, and "
                    "`async ask(requests)`"
                )
            return cast("Judge", judge)
