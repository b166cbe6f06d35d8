"""The history of a run: what a checkpoint is made of, and what calls for a notice.

The notices: steps without signal or rewards, skipped updates, and a sampler that disagrees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from flatpeak.errors import RunError, plural
from flatpeak.evaluation.result import without_verdicts
from flatpeak.rewards.checked_calls import reaches_power_of_ten
from flatpeak.runs.notices import no_signal_message
from flatpeak.runs.summary import StageEvaluation
from flatpeak.training.collect import Rollouts, known_scores
from flatpeak.training.objective_config import SamplerCorrectionConfig
from flatpeak.training.optimizer import BaseLearner
from flatpeak.types import Group

ANNOUNCED = ("3", "1")
"""Leading digits of the step counts that are announced: 3, 10, 30, 100, ..."""

FIX = (
    "lower optimizer.learning_rate (sft.optimizer.learning_rate in SFT) or look for a loss or reward that overflows, "
    "and start anew or fork the run from an earlier checkpoint: flatpeak fork RUN STEP --name NEW key=value"
)

GAP_BOUND = 0.1
"""Nats per token: a mean distance of sampler and trainer above it is no rounding."""

SMALL_CORRECTION = 0.8
"""A mean importance weight of whole completions, 1 without a cap, below which the cap decides by length."""

Unanswered = Callable[[Group], Sequence[bool]]
"""Returns, for each completion of a group, whether its grader finds no answer in it."""


@dataclass(kw_only=True, slots=True)
class _Sums:
    """Sums over the completions of consecutive steps."""

    steps: int = 0
    completions: int = 0
    scored: int = 0
    reward: float = 0.0
    truncated: int = 0
    unanswered: int = 0


class ZeroAdvantageMonitor:
    """Counter of consecutive steps whose advantages are all 0; gives a notice of the third, the 10th, the 30th, ..."""

    def __init__(
        self, notice: Callable[[str], None], *, limit: int, other_terms: bool, unanswered: Unanswered | None
    ) -> None:
        """`limit` is rollout.max_new_tokens; `other_terms`: whether KL or entropy move the weights all the same."""
        self._notice = notice
        self._limit = limit
        self._effect = "the rewards changed no weight" if other_terms else "no weight changed"
        self._unanswered = unanswered
        self._sums = _Sums()
        self._announced = 0

    def observe(self, rollouts: Rollouts, advantages_PG: Tensor) -> None:
        """Count one step. Steps in which no completion has a score have a notice of their own."""
        scores = known_scores(rollouts.scores.total)
        if not scores:
            return
        if bool(advantages_PG.any()):
            self._sums = _Sums()
            return
        sums = self._sums
        sums.steps += 1
        sums.scored += len(scores)
        sums.reward += sum(scores)
        for group in rollouts.groups:
            sums.completions += len(group.completions)
            sums.truncated += sum(completion.finish_reason == "length" for completion in group.completions)
            sums.unanswered += sum(self._unanswered(group)) if self._unanswered else 0
        if _announced(sums.steps) and sums.steps > self._announced:
            self._announced = sums.steps
            message = no_signal_message(
                f"the last {sums.steps} steps",
                reward=sums.reward / sums.scored,
                truncated=sums.truncated / sums.completions,
                unanswered=sums.unanswered / sums.completions,
                limit=self._limit,
                effect=self._effect,
            )
            self._notice(message)


def _announced(steps: int) -> bool:
    digits = str(steps)
    return steps >= 3 and digits[0] in ANNOUNCED and not digits[1:].strip("0")


@dataclass(kw_only=True, slots=True)
class SkippedUpdateMonitor:
    """Counter of the skipped updates over a stage of a run."""

    updates: int = 0
    skipped: int = 0
    in_a_row: int = 0
    """Consecutive skipped updates up to the last update."""
    reported: int = 0
    """Number of skipped updates at the last notice."""
    since_start: int = 0
    """Updates since the run was started or resumed last."""

    def observe(self, skipped: Iterable[bool]) -> None:
        """Count the updates of a step, in their order."""
        for was_skipped in skipped:
            self.updates, self.since_start = self.updates + 1, self.since_start + 1
            self.skipped += was_skipped
            self.in_a_row = self.in_a_row + 1 if was_skipped else 0

    def check(self, stage: str, step: int, *, limit: int, at_end: bool, notice: Callable[[str], None]) -> None:
        """Give a notice of the first skipped update, the 10th, the 100th, ...

        Raises RunError where `limit` in a row were skipped, or, at the end of the stage, all since the run was started
        or resumed.
        """
        if reaches_power_of_ten(self.reported, self.skipped):
            self.reported = self.skipped
            notice(
                f"{stage} step {step}: {self.skipped} of {self.updates} updates so far skipped, because the gradient "
                "was NaN or infinite; the weights are left as they were"
            )
        if self.in_a_row >= limit:
            raise RunError(
                f"the last {self.in_a_row} updates were skipped, because the gradient was NaN or infinite "
                f"(training.max_skipped_updates={limit}); the weights are those of the last finite one: {FIX}"
            )
        if at_end and self.since_start and self.in_a_row >= self.since_start:
            raise RunError(
                f"all {self.in_a_row} updates up to the end were skipped, because the gradient was NaN or infinite, so "
                f"nothing was learned: {FIX}"
            )

    def state(self) -> dict[str, int]:
        """The counts that a checkpoint keeps."""
        return {"updates": self.updates, "skipped": self.skipped, "in_a_row": self.in_a_row, "told": self.reported}

    @classmethod
    def of(cls, state: Mapping[str, int]) -> SkippedUpdateMonitor:
        """Restore the counts that `state` gave."""
        counts = dict(state)
        return cls(reported=counts.pop("told"), **counts)


class MissingRewardMonitor:
    """Counter of steps in which no completion has a reward: they train nothing, and no error says so."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self.count = 0
        self._notice = notice
        self._has_scored = False
        self._why = ""

    def observe(self, rollouts: Rollouts) -> None:
        """Count the step if it is one; a notice is given of the first, the 10th, the 100th, ..."""
        if known_scores(rollouts.scores.total):
            self._has_scored = True
            return
        self.count += 1
        failed = ", ".join(f"{name} on {count}" for name, count in rollouts.failed.items())
        silent = [name for name, rows in rollouts.scores.parts.items() if not known_scores(rows)]
        self._why = f" ({' and '.join(silent)} gave none: return a number)" if silent else ""
        self._why = f" (failed: {failed})" if failed else self._why
        if reaches_power_of_ten(self.count - 1, self.count):
            self._notice(
                f"{plural(self.count, 'step')} so far without a reward for any completion, and so no update{self._why}"
            )

    def check(self, *, at_end: bool) -> None:
        """Raise RunError at the end of a stage if no step since the run was started or resumed has had a reward."""
        if at_end and self.count and not self._has_scored:
            raise RunError(
                f"no completion of {plural(self.count, 'step')} had a reward, so nothing was learned{self._why}: "
                "correct the reward function, and start anew with --overwrite"
            )


class LogprobGapMonitor:
    """Counter of steps in which the sampler's log-probabilities are not the trainer's, rounding aside."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self.count = 0
        self._notice = notice

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Count the step if it is one; a notice is given of the first, the 10th, the 100th, ..."""
        gap = metrics.get("rollout/logprob_gap_mean", 0.0)
        if not gap > GAP_BOUND:  # or is not a number
            return
        self.count += 1
        if reaches_power_of_ten(self.count - 1, self.count):
            steps = "1 step" if self.count == 1 else f"{self.count} steps"
            self._notice(
                f"in {steps} so far the sampler's log-probabilities were more than {GAP_BOUND} nats per token from the "
                f"trainer's before any update (now {gap:.3g} on average): the sampler has other weights (those of the "
                "step before with rollout.staleness=1), another temperature, or log-probabilities after top-p or "
                "top-k, or model.dropout is on; without objective.sampler_correction every importance ratio is off by "
                "as much in float32, and below it completions count as the policy's own"
            )


class SequenceWeightMonitor:
    """Counter of steps in which the cap takes much of the weights that whole completions have by the sampler."""

    def __init__(self, config: SamplerCorrectionConfig) -> None:
        self.count = 0
        self._config = config

    def observe(self, metrics: Mapping[str, float], *, notice: Callable[[str], None]) -> None:
        """Count the step if it is one; a notice is given of the first, the 10th, the 100th, ..."""
        mean = metrics.get("rollout/correction_mean", 1.0)
        if self._config.level != "sequence" or not mean < SMALL_CORRECTION:  # or is not a number
            return
        self.count += 1
        if reaches_power_of_ten(self.count - 1, self.count):
            steps = "1 step" if self.count == 1 else f"{self.count} steps"
            notice(
                f"in {steps} so far the weights of objective.sampler_correction were below {SMALL_CORRECTION} on "
                f"average (now {mean:.2f}): with level=sequence they spread with the length, and the cap of "
                f"{self._config.cap:g} takes most from long completions; level=token treats all lengths alike, and a "
                "sampler closer to the trainer needs less correction"
            )


@dataclass(kw_only=True, slots=True)
class History:
    """The history of a run so far, saved in every checkpoint for the resumed run."""

    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Results by evaluation; `choice` chooses the best checkpoint, `reward` does once there is no accuracy."""
    best_step: int | None = None
    best_value: float | None = None
    graded: bool = False
    """Whether some evaluation had scores other than right and wrong: there is no accuracy then, and `best_value` is of
    the reward."""
    last_step: int = 0
    seconds: float = 0.0
    """Wall time of SFT and RL, their evaluations and checkpoints included."""

    @property
    def stage_evaluations(self) -> tuple[StageEvaluation, ...]:
        """The evaluations as a summary has them."""
        internal = ("choice", "reward")
        return tuple(
            StageEvaluation(**{key: value for key, value in row.items() if key not in internal})
            for row in self.evaluations
        )

    def copy(self) -> History:
        """Copy the present state; evaluations are replaced in the list, never changed."""
        return replace(self, evaluations=list(self.evaluations))

    def add(self, evaluation: dict[str, Any]) -> None:
        """Append an evaluation; of those in training, the best and the last keep their tables of subsets.

        Tables of every checkpoint would drown the summary; the rows they are made of stay.
        """
        for index, earlier in enumerate(self.evaluations):
            if evaluation["stage"] == "train" == earlier["stage"] and earlier["step"] != self.best_step:
                sets = {name: {**one, "subsets": {}} for name, one in earlier.get("sets", {}).items()}
                self.evaluations[index] = {**earlier, "subsets": {}} | ({"sets": sets} if sets else {})
        self.evaluations.append(evaluation)

    def consider(self, step: int, value: float) -> None:
        """Make a step the best where its value is higher than that of the best so far, and than NaN."""
        best = self.best_value
        if best is None or value > best or (math.isnan(best) and not math.isnan(value)):
            self.best_step, self.best_value = step, value

    def choose_among(self, at_hand: Collection[int]) -> None:
        """Choose the best of these steps, unless the best of all is one of them."""
        if self.best_step is None or self.best_step in at_hand:
            return
        self.best_step = self.best_value = None
        for row in self.evaluations:
            if _rl_step(row) in at_hand:
                self.consider(_rl_step(row), row["choice"])

    def end_accuracy(self, *, chose: bool) -> None:
        """Remove accuracy from all evaluations; where it chose checkpoints, the reward does from now on.

        The best step stays: its checkpoint is at hand, and others may not be.
        """
        self.graded = True
        if chose:
            self.evaluations = [{**row, "choice": row.get("reward", row["choice"])} for row in self.evaluations]
            best = [row["choice"] for row in self.evaluations if _rl_step(row) == self.best_step]
            self.best_value = best[-1] if best else None
        self.evaluations = [without_verdicts(row) for row in self.evaluations]

    def reached(self, goal: float | None) -> bool:
        """Whether the evaluation of the saved step reaches this goal, which in a fork may be another than before."""
        last = ("train", self.last_step)
        values = [row["choice"] for row in self.evaluations if (row["stage"], row["step"]) == last]
        return goal is not None and any(value >= goal for value in values)


def _rl_step(row: Mapping[str, Any]) -> int:
    """The step of RL of an evaluation; the model before RL is at step 0."""
    return int(row["step"]) if row["stage"] == "train" else 0


class Stage(Protocol):
    """A part of a run that takes steps and can be saved."""

    name: str

    @property
    def learner(self) -> BaseLearner[Any, Any]:
        """The optimizer and the model that it trains."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything but weights and learner that the next step depends on, as JSON."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything that it depends on and is in tensors, but the policy's weights."""
        ...


@dataclass(frozen=True, kw_only=True)
class CompletedStep:
    """State at the end of a step, without its tensors: it can be saved until an update changes these.

    The state is taken at once because sampling moves what decides the order of work, and an evaluation may fail
    halfway.
    """

    stage: Stage
    step: int
    evaluated: bool
    """Whether the evaluation that was due after the step, if one was, is in the history."""
    state: Mapping[str, Any]
    learner_state: Mapping[str, Any]
    history: History
    updates: int
    """The learner's updates so far."""

    @classmethod
    def capture(cls, stage: Stage, step: int, *, evaluated: bool, history: History) -> CompletedStep:
        """Capture the present state of a stage."""
        return cls(
            stage=stage,
            step=step,
            evaluated=evaluated,
            state=stage.state(),
            learner_state=stage.learner.state(),
            history=history.copy(),
            updates=stage.learner.updates,
        )

    def intact(self, *, interrupted: bool) -> bool:
        """Whether weights and optimizer are still as the step left them.

        An error in an update is raised before the optimizer steps, once perturbed weights are put back. An interrupt
        may have come while they were.
        """
        learner = self.stage.learner
        return learner.updates == self.updates and not (interrupted and learner.updating)
