"""A run in words: what happened, what looks wrong and what to try, where the time went, and what to run next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from pydantic import BaseModel

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import duration, plural
from flatpeak.report.evaluations import headline_metric
from flatpeak.runs.summary import RunSummary, StageEvaluation

Row = Mapping[str, Any]

_LAST: Final = 0.1
"""The share of a run's steps that its end is judged by."""
_CUT_OFF: Final = 0.2
"""Truncated completions above this share are too many."""
_NARROW: Final = 0.1
"""Entropy below this share of its start leaves little to explore."""
_SAME: Final = 0.02
"""A change of accuracy that is no progress."""
_FALL: Final = 0.1
"""A fall of accuracy beyond noise."""
_RISE: Final = 0.005
"""The least rise of the reward that is progress, relative to it: rewards have any scale."""
PHASES: Final = {
    "rollout": "sampling completions",
    "reward": "grading them",
    "train": "gradients and updates",
    "eval": "held-out evaluations",
}
"""The phases of a step by the names of their metrics."""


def sentence(summary: RunSummary | None, evaluations: Sequence[StageEvaluation], rows: Sequence[Row]) -> str | None:
    """The course of the run in two or three sentences; None before the first evaluation."""
    metric = headline_metric(evaluations[-1], metric=summary.metric if summary else None) if evaluations else None
    if metric is None:
        return None
    values = [evaluation.metrics.get(metric) for evaluation in evaluations]
    first, last = next((value for value in values if value is not None), None), values[-1]
    if first is None or last is None:
        return None
    stages = _stages(rows)
    if not stages:
        return f"Held-out {metric} is {first:.3f} before any training."
    ended = "" if summary is None or summary.ended_by is None else f" It ended early: {summary.ended_by}."
    if len(values) == 1:
        return f"Held-out {metric} was {first:.3f} before training; it was not measured again.{ended}"
    time = "" if summary is None or summary.status == "running" else f", in {duration(summary.wall_seconds)}"
    change = f"Held-out {metric} went from {first:.3f} to {last:.3f} over {' and '.join(stages)}{time}."
    best = ""
    if summary is not None and summary.best_step is not None and summary.best_step < summary.last_step:
        best = f" The best checkpoint is that of step {summary.best_step}."
    return f"{change}{ended}{best}"


def _stages(rows: Sequence[Row]) -> list[str]:
    """`280 steps of SFT`, `120 steps of RL`, as far as the run has got."""
    names = {"sft": "SFT", "train": "RL"}
    if any("reward_model/loss" in row for row in rows):
        names = {"train": "training"}
    counts = {name: sum(row.get("stage") == stage for row in rows) for stage, name in names.items()}
    return [f"{plural(count, 'step')} of {name}" for name, count in counts.items() if count]


def warnings(rows: Sequence[Row], evaluations: Sequence[StageEvaluation], *, limit: int | None = None) -> list[str]:
    """Problems at the end of the run so far, each with a remedy; `limit` is rollout.max_new_tokens."""
    trained = [row for row in rows if row.get("stage") == "train" and "rollout/length_mean" in row]
    if len(trained) < 3:
        return []
    ends = _Ends(first=trained[: _share(trained)], last=trained[-_share(trained) :])
    return [*_hacking_warning(ends, evaluations), *_step_warnings(ends, limit), *_format_warning(evaluations)]


def _share(rows: Sequence[Row]) -> int:
    return max(1, round(_LAST * len(rows)))


@dataclass(frozen=True, kw_only=True)
class _Ends:
    """The first and the last steps of RL."""

    first: Sequence[Row]
    last: Sequence[Row]

    def of(self, metric: str) -> tuple[float, float] | None:
        """The metric's mean over the first steps and over the last; None where one of them lacks it."""
        both = [[row[metric] for row in rows if row.get(metric) is not None] for rows in (self.first, self.last)]
        return (fmean(both[0]), fmean(both[1])) if all(both) else None


def _hacking_warning(ends: _Ends, evaluations: Sequence[StageEvaluation]) -> Iterator[str]:
    """The warning about a policy that earns reward without doing the task."""
    reward = ends.of("reward/mean")
    before = [e for e in evaluations if e.stage != "train"][-1:]
    measured = [*before, *(e for e in evaluations if e.stage == "train")]
    known = [right for e in measured if (right := e.metrics.get("accuracy")) is not None]
    if reward is not None and len(known) > 1 and reward[1] > reward[0] and known[-1] < known[0] - _FALL:
        yield (
            f"The reward rose from {reward[0]:.2f} to {reward[1]:.2f}, but held-out accuracy fell from {known[0]:.3f} "
            f"to {known[-1]:.3f}: the policy earns reward without doing the task (reward hacking). Read some "
            "completions, lower the weight of the reward that they earn, or add kl.coefficient=0.04."
        )


def _step_warnings(ends: _Ends, limit: int | None) -> Iterator[str]:
    reward = ends.of("reward/mean")
    gained = reward is not None and reward[1] - reward[0] > _RISE * max(map(abs, reward))
    cut_off = ends.of("rollout/truncated_fraction")
    if cut_off is not None and cut_off[1] > _CUT_OFF:
        tokens = "" if limit is None else f"={limit}"
        yield (
            f"{cut_off[1]:.0%} of the last completions were cut off at rollout.max_new_tokens{tokens}. Raise it, or "
            "let them teach nothing: objective.truncated=mask."
        )
    entropy = ends.of("policy/entropy")
    if entropy is not None and not gained and entropy[1] < _NARROW * entropy[0]:
        yield (
            f"Entropy fell from {entropy[0]:.2g} to {entropy[1]:.2g} nats per token while the reward did not rise: the "
            "completions of a group are nearly the same. Lower optimizer.learning_rate, or add "
            "objective.entropy_coefficient=0.01."
        )
    length = ends.of("rollout/length_mean")
    if length is not None and not gained and not 0.5 <= length[1] / max(length[0], 1e-9) <= 2:
        change = "longer" if length[1] > length[0] else "shorter"
        yield (
            f"Completions became {change}, from {length[0]:.0f} to {length[1]:.0f} tokens, while the reward did not "
            "rise. Read some in `flatpeak explain`; objective.normalization=constant removes the bias towards length."
        )


def _format_warning(evaluations: Sequence[StageEvaluation]) -> Iterator[str]:
    """The warning about a policy that has learned where to put answers, and not to give right ones."""
    for prefix in ("", "sampled/"):
        both = [(e.metrics.get(f"{prefix}accuracy"), e.metrics.get(f"{prefix}extraction_failed")) for e in evaluations]
        known = [(right, failed) for right, failed in both if right is not None and failed is not None]
        if len(known) > 1 and known[0][1] - known[-1][1] > 0.2 and known[-1][0] - known[0][0] < _SAME:
            yield (
                f"Answers without a result fell from {known[0][1]:.0%} to {known[-1][1]:.0%}, but accuracy only went "
                f"from {known[0][0]:.3f} to {known[-1][0]:.3f}: the format was learned, not the task. Give easier "
                "questions first (curriculum), or a larger model."
            )
            return


def phases(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The time and the peak of memory of each phase of RL, with its share of all phases' time."""
    trained = [row for row in rows if row.get("stage") in ("train", "eval")]
    seconds = {name: sum(row.get(f"time/{name}") or 0.0 for row in trained) for name in PHASES}
    total = sum(seconds.values())
    table = []
    for name, meaning in PHASES.items():
        peaks = [peak for row in trained if (peak := row.get(f"memory/{name}_peak_gib")) is not None]
        if total and seconds[name]:
            table.append(
                {
                    "phase": meaning,
                    "time": duration(seconds[name]),
                    "share": f"{seconds[name] / total:.0%}",
                    "memory": f"{max(peaks):.2f} GiB" if peaks else "",
                }
            )
    return table


def changes(config: BaseModel, default: BaseModel | None = None) -> dict[str, Any]:
    """The settings of a configuration that differ from flatpeak's defaults, nested as in a recipe."""
    default = default if isinstance(default, type(config)) else None
    changed: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        usual = field.get_default(call_default_factory=True) if default is None else getattr(default, name)
        if value != usual or field.is_required():
            changed[name] = _changed(value, usual)
    tag = getattr(config, "type", None)
    return {"type": tag, **changed} if tag is not None else changed


def _changed(value: Any, usual: Any) -> Any:
    if isinstance(value, BaseModel):
        return changes(value, usual)
    if isinstance(value, Mapping):
        return {key: _changed(item, None) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(item, None) for item in value]
    return str(value) if isinstance(value, Path) else value


def recipe_changes(config: RunConfig) -> dict[str, Any]:
    """The settings of a run's recipe other than defaults, without the name of the run."""
    changed = changes(config)
    changed.get("run", {}).pop("name", None)
    return {section: content for section, content in changed.items() if content != {}}


def next_commands(
    run: Path, summary: RunSummary | None, *, from_command: bool = True, rollouts: bool = True
) -> list[tuple[str, str]]:
    """Commands for a run that has ended, each with what it does; none while it may be running.

    `from_command` says whether its recipe has all of the run, and no object of a Python caller; `rollouts` whether
    completions are logged.
    """
    name = shlex.quote(run.as_posix())
    if summary is None or summary.status == "running":
        return []
    if summary.status != "done":
        again = f"flatpeak train {name}/config.yaml --resume" if from_command else "flatpeak.train(..., resume=True)"
        return [(again, "continue from the last checkpoint")]
    commands = {
        f"flatpeak explain {name}": "one group of completions, from rewards to the loss",
        f"flatpeak chat {name}": "ask the trained model",
        f"flatpeak eval {name}": "evaluate the best checkpoint, on other questions if you like",
        f"flatpeak export {name} DIRECTORY": "write the model for transformers and vLLM",
    }
    left_out = {f"flatpeak explain {name}": not rollouts, f"flatpeak eval {name}": not from_command}
    return [(command, meaning) for command, meaning in commands.items() if not left_out.get(command)]
