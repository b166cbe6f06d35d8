"""The result of a run: its directory and summary, and its figures as tables and plots."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from flatpeak.errors import UserError, did_you_mean
from flatpeak.report.canvas import notebook_figure
from flatpeak.report.charts import held_out_curve
from flatpeak.report.evaluations import headline_metric
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.rollout_log import logged_steps, read_rollouts
from flatpeak.runs.summary import RunSummary, read_summary
from flatpeak.utils.user_code import describe_value

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    from matplotlib.figure import Figure

    from flatpeak.pipeline.answering import ChatModel

_PANEL_INCHES = (5.4, 3.2)


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """The directory, the summary and the exit code of a run that has ended."""

    path: Path
    """The run directory."""
    summary: RunSummary
    """The content of summary.json."""
    report: Path
    """The report page; `flatpeak report` writes that of a sweep's run, or of one that a signal stopped."""
    exit_code: int
    """0 when done; 130 or 143 when a signal stopped it, with a valid checkpoint left."""
    stopped_rank: int | None = None
    """Of several processes the one that alone got that signal."""

    def __repr__(self) -> str:
        evaluations = self.summary.evaluations
        metric = headline_metric(evaluations[-1], metric=self.summary.metric) if evaluations else None
        values = [evaluation.metrics.get(metric) for evaluation in evaluations] if metric is not None else []
        known = [f"{value:.3f}" for value in values if value is not None and math.isfinite(value)]
        change = f", {metric} {' -> '.join(dict.fromkeys((known[0], known[-1])))}" if known else ""
        return f"RunResult({self.path.as_posix()}: {self.summary.status} after step {self.summary.last_step}{change})"

    @property
    def best(self) -> Path:
        """The best checkpoint, which `from_pretrained` loads; after SFT alone its last one."""
        best = self.path / "checkpoints" / "best"
        return best if best.exists() else self.path / "checkpoints" / "sft" / "last"

    @property
    def metrics(self) -> pandas.DataFrame:
        """The rows of metrics.jsonl: a row per step and evaluation, a column per metric (docs/metrics.md)."""
        import pandas  # slow, and installed with `datasets`

        return pandas.DataFrame(read_metrics(RunPaths(self.path).metrics))

    def rollouts(self, step: int | None = None) -> pandas.DataFrame:
        """The completions of a logged step, by default the newest, a row each. UserError for a step without a log."""
        import pandas

        steps = logged_steps(RunPaths(self.path).rollouts)
        if not steps:
            raise UserError(
                f"{self.path} has no rollouts: no step of RL was logged; run.log_rollouts_every=0 logs none"
            )
        chosen = max(steps) if step is None else step
        if chosen not in steps:
            raise UserError(f"{self.path} logged no rollouts of step {chosen}; it has {', '.join(map(str, steps))}")
        return pandas.DataFrame(read_rollouts(steps[chosen]))

    def chat(
        self, question: str, *, temperature: float | None = None, max_new_tokens: int | None = None, seed: int = 0
    ) -> str:
        """The best checkpoint's answer to a question, worded as in training and drawn as in evaluations.

        `temperature` and `max_new_tokens` change how it is drawn. The model stays loaded for the next question.
        """
        if not isinstance(question, str):
            raise UserError(f"the question is {describe_value(question)}: ask with a text")
        return self._chat_model.answer(question, seed=seed, temperature=temperature, max_new_tokens=max_new_tokens)

    @cached_property
    def _chat_model(self) -> ChatModel:
        from flatpeak.pipeline.answering import open_chat  # loads torch

        return open_chat(str(self.path))

    def plot(self, *metrics: str) -> Figure:
        """A figure with the curve of each metric over its steps; by default the reward and the held-out metric."""
        rows = self.metrics
        names = metrics or _usual(rows.columns, self.summary)
        for name in names:
            if name not in rows:
                raise UserError(f"{self.path} has no metric {name!r}{did_you_mean(name, rows.columns)}")
        figure = notebook_figure((_PANEL_INCHES[0] * len(names), _PANEL_INCHES[1]))
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            known = rows[rows[name].notna()]
            steps, values = known["step"], known[name]
            if name.startswith("eval/"):  # the model before RL is at step 0
                curve = held_out_curve(self.summary.evaluations, name.split("/", 2)[2], on=name.split("/", 2)[1])
                steps, values = (curve.steps, curve.values) if curve is not None else ((), ())
            axes.plot(steps, values, marker="o" if len(steps) < 30 else None)
            axes.set(title=name, xlabel="step")
        return figure


def _usual(columns: pandas.Index, summary: RunSummary) -> list[str]:
    """The names of the mean reward and of the metric that chose the best checkpoint, as far as the run has them."""
    evaluated = [f"eval/{evaluation.task}/{summary.metric}" for evaluation in summary.evaluations[-1:]]
    return [name for name in ("reward/mean", *evaluated) if name in columns]


def load_run(path: str | Path) -> RunResult:
    """The result of a run that was made before, from its directory. UserError if it is not a run's."""
    run = RunPaths(Path(path))
    summary = read_summary(run.summary)
    code = 128 + summary.signal if summary.signal else int(summary.status == "failed")
    return RunResult(path=run.path, summary=summary, report=run.report, exit_code=code)
