"""The charts of the report page, drawn from a run's metrics and evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from flatpeak.report.curves import Curve, curve_svg
from flatpeak.report.evaluations import headline_metric
from flatpeak.runs.summary import StageEvaluation

Row = dict[str, Any]

SETS: Final = "Held-out results by task"
_SETS_NOTE: Final = "A curve for each task of a mixture and for each further evaluation set."
OVEROPTIMIZATION: Final = "Over-optimization"
_OVEROPTIMIZATION_NOTE: Final = (
    "Held-out means of the reward parts, each in its own unit; of samples if evaluations draw any, else of greedy "
    "answers. Solid, left axis: what training pays for. "
    "Dashed, right axis: what it only measures. A solid curve that rises while a dashed curve falls is a hacked "
    "reward."
)
_BESIDE_ACCURACY: Final = {
    "extraction_failed": "no answer found",
    "longer_wins": "always preferring the longer answer",
}
"""Metrics drawn in the chart of accuracy, with the labels of their curves."""
_FALL: Final = "sharpness/fall_"
_SHARPNESS_NOTE: Final = (
    "Reward lost to random noise in the weights, by the noise's norm relative to that of each matrix; mean over its "
    "directions. The lower, the flatter the peak."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart of the page: the metrics of one stage that match a pattern, and a note on how to read them."""

    title: str
    metrics: str
    """A pattern of metric names."""
    stage: str = "train"
    unit: str = ""
    """The unit of the y axis."""
    without: tuple[str, ...] = ()
    """Patterns of metric names to leave out."""
    absent_is_zero: bool = False
    """Whether a step without the metric counts as 0, as for counts of events that are written only if they occur."""
    beside: str | None = None
    """A metric that must exist for the chart to be drawn; None: no condition."""
    unless_zero: bool = False
    """Whether to leave out a metric that is 0 at every step."""
    note: str = ""


_NAMESPACES: Final = (
    *("reward", "judge", "groups", "policy", "gradreg", "rollout", "reference", "reward_model", "optimizer"),
    *("time", "throughput", "memory", "tracking"),
)
"""Beginnings of the names of flatpeak's metrics of training steps (docs/metrics.md)."""
CHARTS: Final = (
    Chart(
        title="SFT loss",
        stage="sft",
        metrics="sft/loss",
        unit="nats",
        note="Per target token. Not falling: see the learning rate, or whether rationales follow from questions.",
    ),
    Chart(title="Reward model loss", metrics="reward_model/loss", unit="nats", note="Per training pair."),
    Chart(title="Accuracy on training pairs", metrics="reward_model/accuracy", unit="share of pairs"),
    Chart(
        title="Reward",
        metrics="reward/*",
        without=("reward/std", "reward/missing_fraction", "reward/*/*"),
        note="Mean over the sampled training completions, in total and by part. Good: rising, with held-out accuracy.",
    ),
    Chart(
        title="Reward by task",
        metrics="reward/*/mean",
        note="Mean total reward of each task of the mixture. Flat for one task: it is too hard, or has a small weight.",
    ),
    Chart(
        title="Missing rewards",
        metrics="reward/missing_fraction",
        unit="share of completions",
        unless_zero=True,
        note="Completions without a reward: nothing is learned from them, and they do not count as 0.",
    ),
    Chart(
        title="Failures of reward parts",
        metrics="reward/*/failed",
        unit="completions per step",
        absent_is_zero=True,
        note="Without a score because the part raised an error, ran out of time, died or returned no number.",
    ),
    Chart(
        title="Answers that ran out of time",
        metrics="reward/*/timeouts",
        unit="completions per step",
        absent_is_zero=True,
        note="Not graded within limits of time and memory, and scored as wrong.",
    ),
    Chart(
        title="Judge: questions with a verdict",
        metrics="judge/*valid_fraction",
        unit="share of questions",
        note="The others have no score; they are not counted as 0.",
    ),
    Chart(
        title="Judge: worthless answers that fooled it",
        metrics="judge/*canary_false_positive_rate",
        unit="share of canaries",
        note="In the last canaries. Above 0, the policy can find what works too.",
    ),
    Chart(
        title="Judge minus verifier",
        metrics="judge/*shadow_gap",
        unit="score",
        note="On completions that both judged. If the gap grows, the judge is being gamed.",
    ),
    Chart(
        title="Judge: cost",
        metrics="judge/*cost",
        unit="per step",
        note="In the currency of the prices in the recipe.",
        unless_zero=True,
    ),
    Chart(
        title="Response length",
        metrics="rollout/length_mean",
        unit="tokens",
        note="Worry if it grows together with truncated completions, or shrinks to a few tokens.",
    ),
    Chart(
        title="Informative groups",
        metrics="groups/informative_fraction",
        unit="share of groups",
        note="Groups whose rewards differ: nothing is learned from the others. Near 0: too hard, or solved.",
    ),
    Chart(
        title="Entropy",
        metrics="policy/entropy",
        unit="nats per token",
        note="Good: falling slowly. Near 0 early: nothing is explored any more. Rising: the policy becomes random.",
    ),
    Chart(
        title="KL to the reference",
        metrics="policy/kl_reference",
        unit="nats per token",
        note="Good: rising slowly. Growing fast: raise kl.coefficient, or lower the learning rate.",
    ),
    Chart(
        title="Policy loss",
        metrics="policy/loss",
        note="About 0 with one update per rollout, although its gradient is not: watch the reward.",
    ),
    Chart(
        title="Gradient norm",
        metrics="policy/grad_norm",
        note="Before clipping. 0: no informative group. Rising while entropy falls: lower the learning rate.",
    ),
    Chart(
        title="Truncated completions",
        metrics="rollout/truncated_fraction",
        unit="share of completions",
        note="Cut off at rollout.max_new_tokens. High: raise it, set rollout.stop, or objective.truncated=mask.",
    ),
    Chart(
        title="Clipped tokens",
        metrics="policy/clip_fraction",
        unit="share of tokens",
        unless_zero=True,
        note="No longer pushed by their advantage. Above about 0.2: fewer or smaller updates per rollout.",
    ),
    Chart(
        title="Penalty ratio",
        metrics="gradreg/penalty_ratio",
        note="Gradient regularization: norm of the penalty's gradient over that of g1.",
    ),
    Chart(
        title="Gradient norm without penalty",
        metrics="gradreg/g1_norm",
        beside="gradreg/penalty_ratio",
        note="Over the parameters that gradient regularization perturbs or would perturb; it lowers this norm.",
    ),
    Chart(
        title="Cosine of gradient and penalty",
        metrics="gradreg/cosine",
        note="Above 0, learning flattens too; below 0, the two disagree.",
    ),
    Chart(title="Perturbation kept", metrics="gradreg/perturbation_kept", note="1: nothing lost to rounding."),
    Chart(
        title="Logged by rewards",
        metrics="reward/*/*",
        without=("reward/*/mean", "reward/*/failed", "reward/*/timeouts"),
    ),
    Chart(title="Logged by callbacks", metrics="*", without=("step", "stage", *(f"{name}/*" for name in _NAMESPACES))),
)


def charts(
    rows: Sequence[Row],
    evaluations: Sequence[StageEvaluation],
    *,
    weights: Mapping[str, float] | None = None,
    metric: str | None = None,
) -> list[dict[str, Any]]:
    """Draw the charts for which the run has data.

    `weights` are the rewards' weights, by name. `metric` chose the best checkpoint, and has a chart if there is no
    accuracy.
    """
    drawn = []
    accuracy = accuracy_curves(evaluations)
    if accuracy:
        drawn.append({"svg": curve_svg("Held-out accuracy", accuracy, unit="share"), "note": ""})
    elif metric is not None and (chosen := held_out_curve(evaluations, metric)):
        answers = "samples" if metric.startswith("sampled/") else "one greedy answer to each question"
        note = f"Of {answers}. It chooses the best checkpoint."
        drawn.append({"svg": curve_svg(f"Held-out {metric}", [chosen]), "note": note})
    if apart := set_curves(evaluations, metric):
        drawn.append({"svg": curve_svg(SETS, apart, legend=True), "note": _SETS_NOTE})
    paid, measured = paid_and_measured(evaluations, weights or {})
    if paid:
        svg = curve_svg(
            OVEROPTIMIZATION,
            paid,
            right=measured,
            unit="paid for (solid)",
            right_unit="only measured (dashed)",
        )
        drawn.append({"svg": svg, "note": _OVEROPTIMIZATION_NOTE})
    falls = sharpness_curves(evaluations)
    if falls:
        drawn.append({"svg": curve_svg("Sharpness", falls, unit="reward lost", legend=True), "note": _SHARPNESS_NOTE})
    known = {None, *(name for row in rows for name in row)}
    by_chart = ((chart, metric_curves(rows, chart)) for chart in CHARTS if chart.beside in known)
    return drawn + [
        # A pattern's curves are named after metrics, so even a single one needs a legend.
        {"svg": curve_svg(chart.title, curves, unit=chart.unit, legend="*" in chart.metrics), "note": chart.note}
        for chart, curves in by_chart
        if curves
    ]


def metric_curves(rows: Sequence[Row], chart: Chart) -> list[Curve]:
    """One curve for each metric of the chart that has a value at some step; one curve for all equal metrics.

    For example, a reward with one component equals its mean, up to rounding: the second curve would hide the first.
    """
    rows = [row for row in rows if row.get("stage") == chart.stage]
    names = dict.fromkeys(name for row in rows for name in row if fnmatchcase(name, chart.metrics))
    absent = 0.0 if chart.absent_is_zero else None
    curves: list[Curve] = []
    for name in (name for name in names if not any(fnmatchcase(name, pattern) for pattern in chart.without)):
        by_step = [(row["step"], row.get(name, absent)) for row in rows]
        points = [(step, value) for step, value in by_step if value is not None]
        if not points or (chart.unless_zero and not any(value for _, value in points)):
            continue
        steps, values = zip(*points, strict=True)
        same = next((index for index, one in enumerate(curves) if _coincide(one, steps, values)), None)
        if same is None:
            curves.append(Curve(label=name, steps=steps, values=values))
        else:
            curves[same] = replace(curves[same], label=f"{curves[same].label} = {name}")
    return curves


def _coincide(curve: Curve, steps: Sequence[float], values: Sequence[float]) -> bool:
    """Whether a curve has these steps and, up to rounding in float32, these values."""
    pairs = zip(curve.values, values, strict=False)
    return curve.steps == steps and all(math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-7) for one, other in pairs)


def accuracy_curves(evaluations: Sequence[StageEvaluation]) -> list[Curve]:
    """Held-out accuracy over RL steps, of samples if there are no greedy answers, and the metrics in the same chart.

    The model before RL is at step 0. Empty if no evaluation has an accuracy.
    """
    for prefix in ("", "sampled/"):
        accuracy = held_out_curve(evaluations, f"{prefix}accuracy")
        if accuracy is not None:
            others = (
                held_out_curve(evaluations, prefix + name, label=label) for name, label in _BESIDE_ACCURACY.items()
            )
            return [accuracy, *(curve for curve in others if curve is not None)]
    return []


def set_curves(evaluations: Sequence[StageEvaluation], metric: str | None) -> list[Curve]:
    """The headline metric on each task of a mixture and each evaluation set, over RL steps."""
    headline = headline_metric(evaluations[-1], metric=metric) if evaluations else None
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.sets)
    curves = [held_out_curve(evaluations, headline, on=name, label=name) for name in names if headline is not None]
    return [curve for curve in curves if curve is not None]


def sharpness_curves(evaluations: Sequence[StageEvaluation]) -> list[Curve]:
    """The fall of the total reward over RL steps, one curve for each radius of noise."""
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics if name.startswith(_FALL))
    totals = [name for name in names if "/" not in name.removeprefix(_FALL)]
    curves = (held_out_curve(evaluations, name, label=f"radius {name.removeprefix(_FALL)}") for name in totals)
    return [curve for curve in curves if curve is not None]


def reward_weights(recipe: Mapping[str, Any]) -> dict[str, float]:
    """The weight of each component of the reward in a resolved recipe."""
    rewards = recipe.get("rewards", {})
    return {name: float(reward["weight"]) for name, reward in rewards.items() if "weight" in reward}


def paid_and_measured(
    evaluations: Sequence[StageEvaluation], weights: Mapping[str, float]
) -> tuple[list[Curve], list[Curve]]:
    """The curves of the rewards with a weight, and of those with weight 0; both empty if a run lacks either.

    They are for sampled completions, on which training is rewarded, if an evaluation has any; else for greedy ones.
    """
    paid = [curve for name, weight in weights.items() if weight and (curve := _reward_curve(evaluations, name))]
    measured = [curve for name, weight in weights.items() if not weight and (curve := _reward_curve(evaluations, name))]
    return (paid, measured) if paid and measured else ([], [])


def held_out_curve(
    evaluations: Sequence[StageEvaluation], metric: str, *, on: str | None = None, label: str | None = None
) -> Curve | None:
    """A metric over RL steps, with the model before RL at step 0; None if no evaluation has it.

    `on` is a task of a mixture or an evaluation set; None: the whole of the task.
    """
    points: dict[int, tuple[float, tuple[float, float] | None]] = {}
    for evaluation in (one if on is None else one.on(on) for one in evaluations):
        if evaluation is None:
            continue
        value = evaluation.metrics.get(metric)
        if value is not None:
            step = evaluation.step if evaluation.stage == "train" else 0
            points[step] = value, evaluation.intervals.get(metric)
    if not points:
        return None
    return Curve(
        label=label or metric,
        steps=list(points),
        values=[value for value, _ in points.values()],
        intervals=[interval for _, interval in points.values()],
    )


def _reward_curve(evaluations: Sequence[StageEvaluation], name: str) -> Curve | None:
    """A component of the reward, for sampled completions if there are any."""
    return held_out_curve(evaluations, f"sampled/{name}", label=name) or held_out_curve(evaluations, name)
