"""The recorder of a run: metrics, rollouts, evaluations, checkpoints, summary, and the state that a resume needs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from flatpeak.distributed.ranks import ALONE, Ranks
from flatpeak.errors import StoppedError
from flatpeak.evaluation.config import EvaluationConfig, is_verdict
from flatpeak.evaluation.evaluate import Evaluator
from flatpeak.evaluation.result import Evaluation, no_accuracy
from flatpeak.protocols import Progress, SavesModel
from flatpeak.runs.call_log import CallLog
from flatpeak.runs.callbacks import Callbacks
from flatpeak.runs.checkpoints import (
    BEST,
    LAST,
    checkpoint_name,
    checkpoint_steps,
    link_checkpoint,
    prune,
    write_checkpoint,
)
from flatpeak.runs.config import RunSectionConfig
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.files import fsync_path
from flatpeak.runs.metrics import MetricsWriter
from flatpeak.runs.notices import NoticeLog
from flatpeak.runs.rollout_log import RolloutLog, rollout_rows, write_answers
from flatpeak.runs.signals import StopSignals
from flatpeak.runs.summary import EvaluationStage, RunSummary, Status, write_summary
from flatpeak.tracking.trackers import Trackers
from flatpeak.training.collect import Rollouts
from flatpeak.training.history import (
    CompletedStep,
    History,
    LogprobGapMonitor,
    MissingRewardMonitor,
    SkippedUpdateMonitor,
    Stage,
    ZeroAdvantageMonitor,
)
from flatpeak.training.optimizer import check_finite
from flatpeak.utils.out_of_memory import Halvings

SAMPLER_STATE = "sampler"
"""Key of the sampler's state in a stage's."""
HALVED = "halved"
"""Key of the settings that were halved, in a checkpoint's state."""


@dataclass(eq=False)
class Recorder:
    """Recorder of a run, which never changes what training does."""

    run: RunPaths
    _: KW_ONLY
    config: RunSectionConfig
    evaluation: EvaluationConfig
    evaluator: Evaluator
    stop: StopSignals
    progress: Progress
    notices: NoticeLog
    trackers: Trackers
    history: History
    texts: Mapping[str, str]
    """Contents of the files that every checkpoint has beside its model's, by name."""
    model_bytes: int = 0
    """Size of the weights as saved."""
    zero_advantages: ZeroAdvantageMonitor | None = None
    evaluated: bool = True
    """Whether the evaluation that was due after the last step, if one was, has been made."""
    ranks: Ranks = ALONE
    callbacks: Callbacks = field(default_factory=Callbacks)
    halvings: Halvings = field(default_factory=Halvings)
    status: Status = field(init=False, default="running")
    ended_by: str | None = field(init=False, default=None)
    """The condition that ended the run, if its steps did not."""

    def __post_init__(self) -> None:
        self.rollout_log = RolloutLog(self.run.rollouts, notice=self.progress.notice)
        self.call_log = CallLog(self.run.calls, rank=self.ranks.rank, notice=self.progress.notice)
        self.missing_rewards = MissingRewardMonitor(self.progress.notice)
        self.logprob_gaps = LogprobGapMonitor(self.progress.notice)
        self._completed: CompletedStep | None = None
        """The last step, as long as no checkpoint has it."""
        self._since = time.perf_counter()
        self._open_metrics()

    def _open_metrics(self) -> None:
        self.metrics = MetricsWriter(self.run.metrics, notice=self.progress.notice)

    @property
    def stopped(self) -> bool:
        """Whether a signal or a callback asked to stop."""
        return self.stop.signal is not None

    def check_stop(self) -> None:
        """Raise StoppedError if a signal asks to stop and the last completed step is still as it was, or is saved.

        Several ranks stop at the end of a step: one that left a pass would not answer the others.
        """
        done = self._completed
        if self.stop.asked and self.ranks.size == 1 and (done is None or done.intact(interrupted=False)):
            raise StoppedError("a signal asked to stop before a pass")

    def begin_step(self, stage: Stage, step: int) -> None:
        """Assign notices and results of calls to this step, until the next one begins."""
        self.notices.begin_step(stage.name, step)
        self.call_log.begin_step(stage.name, step)

    def complete(
        self, stage: Stage, step: int, total: int, metrics: Mapping[str, float], *, evaluation_due: bool
    ) -> None:
        """Log and show a completed step. It can be saved from here on, whatever happens before the next update."""
        self.callbacks.call("on_step", stage.name, step, dict(metrics))
        metrics = self.callbacks.with_logged(metrics)
        self.stop.agree()
        self._log(stage.name, step, metrics)
        self.logprob_gaps.observe(metrics)
        if stage.name == "train" and self.config.log_rollouts_every:
            self.rollout_log.announce_size(step, total=total, every=self.config.log_rollouts_every)
        self.evaluated = not evaluation_due
        self._completed = self._capture(stage, step)
        self.progress.update(stage.name, step=step, total=total, metrics=metrics)
        self.ranks.first(self.callbacks.check)

    def _log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row of metrics, and send it to the trackers."""
        self.metrics.write(step, stage, metrics)
        self.trackers.log(metrics, step=step, stage=stage)

    def _capture(self, stage: Stage, step: int) -> CompletedStep:
        return CompletedStep.capture(stage, step, evaluated=self.evaluated, history=self.history)

    def check_skipped(self, stage: str, step: int, skipped: SkippedUpdateMonitor, *, limit: int, at_end: bool) -> None:
        """Give a notice of skipped updates, or raise RunError where they are too many, or nothing had a reward."""
        skipped.check(stage, step, limit=limit, at_end=at_end, notice=self.progress.notice)
        self.missing_rewards.check(at_end=at_end)

    def rollouts(self, step: int, rollouts: Rollouts, advantages_PG: Tensor) -> None:
        """Log the completions of a step, where they are asked for, and announce steps without signal."""
        self.missing_rewards.observe(rollouts)
        if self.zero_advantages is not None:
            self.zero_advantages.observe(rollouts, advantages_PG)
        self._log_rollouts(step, rollouts, advantages_PG)
        advantages, scores = advantages_PG.tolist(), rollouts.scores
        self.callbacks.call("on_rollouts", "train", step, rollouts.groups, scores=scores, advantages=advantages)

    def _log_rollouts(self, step: int, rollouts: Rollouts, advantages_PG: Tensor) -> None:
        """Write every completion of a step as `run.log_rollouts_every` says, and send some to the trackers."""
        every = self.config.log_rollouts_every
        logged = rollouts.groups, rollouts.scores, advantages_PG.tolist()
        if every and step % every == 0:
            self.rollout_log.write(step, *logged)
        if self.trackers.wants_completions(step):
            self.trackers.log_completions(rollout_rows(*logged), step=step)

    def begin(self, stage: Stage, *, goal: float | None = None) -> bool:
        """Evaluate and save the model before the first step of RL: it is the first candidate for the best checkpoint.

        Returns whether it reaches the goal already.
        """
        self.begin_step(stage, 0)
        self.evaluate_start(size=self._large_size)
        value = float(self.history.evaluations[-1]["choice"])
        self.history.consider(0, value)
        self.checkpoint(stage, 0)
        reached = goal is not None and value >= goal
        if reached:
            self.progress.notice(
                f"no step is taken: training.stop_at={goal:g} is reached by the model that RL would begin with "
                f"({self.metric} {value:g})"
            )
        return reached

    def evaluate_start(self, *, size: int | None) -> None:
        """Evaluate the model before any training, once: the first row of every table."""
        if not self.history.evaluations:
            self.evaluate("start", 0, size=size, robustness=True)

    def evaluate_after_sft(self, step: int) -> None:
        """Evaluate the model at the end of SFT."""
        self.evaluate("sft", step, size=self._large_size, robustness=True)

    def evaluate(self, stage: EvaluationStage, step: int, *, size: int | None, robustness: bool) -> float:
        """Evaluate now, log the answers, and return the metric that chooses checkpoints."""
        started = time.perf_counter()
        evaluation = self._without_graded_accuracy(self.evaluator.evaluate(size=size, robustness=robustness))
        seconds = time.perf_counter() - started
        # Every evaluation answers so many questions, the first ones: by these checkpoints are compared.
        sizes = [size for size in (self.evaluation.size, self.evaluation.final_size) if size is not None]
        compared = evaluation.first(min(sizes, default=None))
        own = compared.mean(self.metric), compared.mean("reward") if "reward" in compared.values else math.nan
        # The first rank's: where letters are ranked, ranks may round apart, and all have to save the same steps.
        choice, reward = self.ranks.first(lambda: own)
        results = evaluation.as_dict()
        self.history.add({"stage": stage, "step": step, **results, "choice": choice, "reward": reward})
        for suffix, rows in evaluation.answers.items():
            self._log_answers(f"{stage}_{step:06d}{suffix}", rows)
        metrics: Mapping[str, float] = {**evaluation.logged, "time/eval": seconds}
        self.callbacks.call("on_evaluation", stage, step, dict(metrics), rows=evaluation.rows)
        metrics = self.callbacks.with_logged(metrics)
        self._log("eval", step, metrics)
        self.progress.update("eval", step=step, total=step, metrics=metrics)
        for one in (evaluation, *evaluation.apart.values()):
            self.trackers.log_evaluation(one.as_dict(), one.rows, step=step)
        if stage == "train":
            self.history.consider(step, choice)
        self.stop.agree()
        self.ranks.first(self.callbacks.check)
        return choice

    def _without_graded_accuracy(self, evaluation: Evaluation) -> Evaluation:
        """The evaluation, without accuracy from the first one on whose scores are not all 0 or 1.

        Until then accuracy was the mean of these scores: earlier evaluations lose it too, and no checkpoint its rank.
        """
        graded_by = self.ranks.first(lambda: evaluation.graded_by)
        if graded_by is not None and not self.history.graded:
            chose = is_verdict(self.evaluation.metric)
            self.progress.notice(no_accuracy(graded_by) + ("; the reward chooses the best checkpoint" if chose else ""))
            self.history.end_accuracy(chose=chose)
        return evaluation.without_verdicts() if self.history.graded else evaluation

    def _log_answers(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        path = self.run.evaluations / f"{name}.jsonl"
        try:
            write_answers(path, rows)
        except OSError as error:  # answers are worth less than the run
            self.progress.notice(f"{path}: {error.strerror}; the answers of this evaluation are not kept")

    def evaluation_due(self, step: int, *, total: int) -> bool:
        """Whether a step is evaluated: every `evaluation.every` steps and at the end."""
        every = self.evaluation.every
        return step == total or bool(every and step % every == 0)

    def evaluate_if_due(self, stage: EvaluationStage, step: int, *, total: int, goal: float | None) -> bool:
        """Evaluate where it is due and no signal asks to stop; returns whether the goal is reached.

        A signal leaves little time, which the checkpoint needs: a resumed run makes up for the evaluation.
        """
        at_end = step == total
        if self.stopped or not self.evaluation_due(step, total=total):
            return False
        size = self._large_size if at_end else self.evaluation.size
        value = self.evaluate(stage, step, size=size, robustness=at_end)
        reached = goal is not None and value >= goal
        if reached and not at_end and (size != self._large_size or self.evaluation.robustness):
            self.evaluate(stage, step, size=self._large_size, robustness=True)
        self.evaluated = True
        return reached

    @property
    def metric(self) -> str:
        """The metric that chooses the best checkpoint."""
        return "reward" if self.history.graded and is_verdict(self.evaluation.metric) else self.evaluation.metric

    @property
    def _large_size(self) -> int | None:
        return self.evaluation.final_size or self.evaluation.size

    def checkpoint_if_due(self, stage: Stage, step: int, *, last: bool) -> None:
        """Save every `run.checkpoint_every` steps, at the end, on a signal, and where a new best was found."""
        every = self.config.checkpoint_every
        due = bool(every) and step % every == 0
        if due or last or self.stopped or self.history.best_step == step:
            self.checkpoint(stage, step)
        else:
            self._completed = self._capture(stage, step)

    def checkpoint(self, stage: Stage, step: int) -> None:
        """Save the policy and everything the next step depends on; RL's checkpoints carry `best` and `last`.

        Raises DivergedError, and saves nothing, where a weight is NaN or infinite.
        """
        self._save(self._capture(stage, step))

    def save_completed(self, *, interrupted: bool = False) -> None:
        """Save the last completed step, unless it is saved, or an update has changed what it left."""
        done = self._completed
        if done is not None and done.step and done.intact(interrupted=interrupted):
            self._save(done)

    def _save(self, done: CompletedStep) -> None:
        stage, step = done.stage, done.step
        check_finite(stage.learner.masters.precise, step=step)
        self._count_time()
        history = replace(done.history.copy(), last_step=step, seconds=self.history.seconds)
        tensors = stage.tensors()
        with stage.learner.whole() as save_model:
            path = self.ranks.first(partial(self._write, done, history, save_model=save_model, tensors=tensors))
        self.history = history  # only now: a summary names steps that are on disk
        self._completed = None
        self.callbacks.call("on_checkpoint", stage.name, step, path)
        self.ranks.first(self.callbacks.check)

    def _write(
        self, done: CompletedStep, history: History, *, save_model: SavesModel, tensors: Mapping[str, Tensor]
    ) -> Path:
        """Write the checkpoint of a step, link it, and delete those that are no longer kept."""
        stage, step = done.stage, done.step
        self._sync_logs()
        parent = self.run.checkpoints if stage.name == "train" else self.run.checkpoints / stage.name
        path = write_checkpoint(
            parent,
            step,
            save_model=save_model,
            tensors=tensors,
            state={
                "stage": done.state,
                "learner": done.learner_state,
                "history": asdict(history),
                "evaluated": done.evaluated,
                **({HALVED: self.halvings.values} if self.halvings.values else {}),
                **stage.learner.computed_by,  # a probe decides anew in a resumed run, and of kernels a self-test
            },
            texts=self.texts,
            model_bytes=self.model_bytes,
        )
        link_checkpoint(parent, LAST, path)
        if stage.name == "train" and history.best_step == step:
            link_checkpoint(parent, BEST, path)
        prune(parent, keep=self.config.keep_checkpoints)
        self.call_log.forget(done=f"{stage.name}_{step:06d}" if done.evaluated else "")
        return path

    def _sync_logs(self) -> None:
        """Force the logs to the disk: after a power cut a checkpoint must not be ahead of them."""
        try:
            for log in (self.metrics, self.notices, self.rollout_log):
                log.sync()
            for directory in (self.run.path, self.run.evaluations):
                if directory.exists():
                    fsync_path(directory)
        except OSError as error:  # a log is worth less than the run
            self.progress.notice(f"{self.run.path}: {error.strerror}; a power cut may take the last rows of its logs")

    def point_at(self, newest: Path) -> None:
        """Set the links of a resumed run again: a kill may have come between a checkpoint and its links.

        Where the best checkpoint is not at hand (a fork has only some), it is the best of those that are.
        """
        self.history = self.ranks.first(lambda: self._point_at(newest))

    def _point_at(self, newest: Path) -> History:
        link_checkpoint(newest.parent, LAST, newest)
        self.history.choose_among(checkpoint_steps(self.run.checkpoints))
        if self.history.best_step is not None:
            link_checkpoint(self.run.checkpoints, BEST, self.run.checkpoints / checkpoint_name(self.history.best_step))
        return self.history

    @property
    def summary(self) -> RunSummary:
        """The state of the run."""
        return RunSummary(
            name=self.config.name,
            status=self.status,
            metric=self.metric,
            best_step=self.history.best_step,
            last_step=self.history.last_step,
            evaluations=self.history.stage_evaluations,
            checkpoints=tuple(checkpoint_name(step) for step in checkpoint_steps(self.run.checkpoints)),
            wall_seconds=self.history.seconds,
            signal=self.stop.signal or None,
            ended_by=self.ended_by or self.callbacks.run.stopped_by,
        )

    def summarize(self, status: Status) -> RunSummary:
        """Write summary.json and return its content."""
        self.status = status
        self._count_time()
        self._write_summary(self.summary)
        return self.summary

    def _write_summary(self, summary: RunSummary) -> None:
        try:
            write_summary(self.run.summary, summary)
        except OSError as error:
            self.progress.notice(f"{self.run.summary}: {error.strerror}; it is not up to date")

    def close(self) -> None:
        """Close the metrics file."""
        self.metrics.close()

    def _count_time(self) -> None:
        now = time.perf_counter()
        self.history.seconds += now - self._since
        self._since = now
