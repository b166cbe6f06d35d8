"""The charts of the report page, and what each reads from the metrics and evaluations."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import yaml

from flatpeak.runs.summary import StageEvaluation

# More points than this are drawn faint, with their running mean over them.
_MANY = 40
_REACH_FRACTION = 0.05
_WIDEST = 2.2
_SIZE_INCHES = (5.4, 3.2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line of a chart."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    """As long as `steps`, finite."""
    intervals: Sequence[tuple[float, float] | None] = ()
    """(low, high) per value, drawn as bars; empty for none."""


def curve_svg(
    title: str,
    curves: Sequence[Curve],
    *,
    right: Sequence[Curve] = (),
    unit: str = "",
    right_unit: str = "",
    legend: bool = False,
) -> str:
    """An `<svg>` element with the curves over the steps; the same input gives the same text.

    Those of `right` are dashed and measured by an axis of their own, on that side. `unit` and `right_unit` name what
    the two axes count. Several curves have a legend, one has none unless `legend`.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # The salt names the clip paths: charts of one page must not share them.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        other = axes.twinx() if right else axes
        for index, curve in enumerate([*curves, *right]):
            on_the_right = index >= len(curves)
            style = {"color": f"C{index}", "linestyle": "--" if on_the_right else "-"}
            # Of curves that coincide, the lower one shows beside the upper.
            _draw(other if on_the_right else axes, curve, style | {"linewidth": max(1.2, _WIDEST - 0.5 * index)})
        axes.set_title(title, loc="left")
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        if right:
            other.set_ylabel(right_unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.grid(alpha=0.25)
        _widen_if_flat(axes, curves)
        for one in {axes, other}:
            one.spines[["top"] if right else ["top", "right"]].set_visible(False)
        if legend or len(curves) + len(right) > 1:
            handles = [handle for one in dict.fromkeys((axes, other)) for handle in one.get_legend_handles_labels()[0]]
            # Below, where it hides no curve.
            figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=min(3, len(handles)))
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    # Without the XML declaration and document type, which have no place inside HTML.
    return text.getvalue()[text.getvalue().index("<svg") :]


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each value and its `reach` neighbours on either side (of those there are, at the ends)."""
    parts = [values[max(0, index - reach) : index + reach + 1] for index in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _widen_if_flat(axes: Any, curves: Sequence[Curve]) -> None:
    """A curve that is flat between 0 and 1 would get an axis around that one value, as if it were precise."""
    values = {value for curve in curves for value in curve.values}
    if len(values) == 1 and 0 <= min(values) <= 1 and not any(curve.intervals for curve in curves):
        axes.set_ylim(-0.05, 1.05)


def _draw(axes: Any, curve: Curve, style: dict[str, Any]) -> None:
    many = len(curve.steps) > _MANY
    if curve.intervals:
        bars = [interval or (value, value) for interval, value in zip(curve.intervals, curve.values, strict=True)]
        # Rounding may put an end of an interval a hair on the wrong side of its value.
        below = [max(0.0, value - low) for (low, _), value in zip(bars, curve.values, strict=True)]
        above = [max(0.0, high - value) for (_, high), value in zip(bars, curve.values, strict=True)]
        settings = {"marker": "o", "markersize": 4, "capsize": 3, "elinewidth": 1.2}
        axes.errorbar(curve.steps, curve.values, yerr=[below, above], label=curve.label, **style, **settings)
        return
    marker = "o" if len(curve.steps) == 1 else None
    label = None if many else curve.label
    alpha = 0.3 if many else 1.0
    width = 1.2 if many else style["linewidth"]
    axes.plot(curve.steps, curve.values, **(style | {"linewidth": width}), alpha=alpha, marker=marker, label=label)
    if many:
        means = running_mean(curve.values, round(len(curve.values) * _REACH_FRACTION))
        axes.plot(curve.steps, means, **style, label=curve.label)


TITLE = "Over-optimization"
NOTE = (
    "Held-out means of the reward parts, each in its own unit, of samples where evaluations draw some, else of greedy "
    "answers: solid, by the left axis, what training pays for; "
    "dashed, by the right one, what it only measures. A solid curve that rises while a dashed one falls is a hacked "
    "reward."
)


def reward_weights(config: str | None) -> dict[str, float]:
    """The weight of each reward part that a run's config.yaml names."""
    content: Any = yaml.safe_load(config) if config else None
    rewards = content.get("rewards") if isinstance(content, Mapping) else None
    return {name: float(part["weight"]) for name, part in (rewards or {}).items() if "weight" in part}


def paid_and_measured(
    evaluations: Sequence[StageEvaluation], weights: Mapping[str, float]
) -> tuple[list[Curve], list[Curve]]:
    """(curves of the parts with a weight, of those with weight 0); both empty where a run has not both.

    Of sampled completions where an evaluation drew some, which is what training pays for; else of greedy ones.
    """
    paid = [curve for name, weight in weights.items() if weight and (curve := _curve(evaluations, name))]
    measured = [curve for name, weight in weights.items() if not weight and (curve := _curve(evaluations, name))]
    return (paid, measured) if paid and measured else ([], [])


def held_out_curve(evaluations: Sequence[StageEvaluation], metric: str, *, label: str | None = None) -> Curve | None:
    """A metric over RL steps, None if no evaluation has it; at step 0 stands the model that RL began with."""
    points: dict[int, tuple[float, tuple[float, float] | None]] = {}
    for found in evaluations:
        value = found.metrics.get(metric)
        if value is not None:
            points[found.step if found.stage == "train" else 0] = value, found.intervals.get(metric)
    if not points:
        return None
    return Curve(
        label=label or metric,
        steps=list(points),
        values=[value for value, _ in points.values()],
        intervals=[interval for _, interval in points.values()],
    )


def _curve(evaluations: Sequence[StageEvaluation], part: str) -> Curve | None:
    """A reward part, of sampled completions where there are some."""
    return held_out_curve(evaluations, f"sampled/{part}", label=part) or held_out_curve(evaluations, part)


Row = dict[str, Any]

BESIDE_ACCURACY = {
    "extraction_failed": "no answer found",
    "longer_wins": "always preferring the longer answer",
}
"""What accuracy is read with, and what its curve is called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A curve of the page: which metrics of which stage, with what reading it needs."""

    title: str
    metrics: str
    """A pattern over metric names."""
    stage: str = "train"
    unit: str = ""
    """What the y axis counts."""
    without: tuple[str, ...] = ()
    """Patterns of names that are left out."""
    absent_is_zero: bool = False
    """Whether a step without the metric counts as 0, as for counts that are only written where something happened."""
    unless_zero: bool = False
    """Left out where the metric never was anything but 0."""
    note: str = ""


CHARTS = (
    Chart(title="SFT loss", stage="sft", metrics="sft/loss", unit="nats", note="Per target token."),
    Chart(title="Reward model loss", metrics="reward_model/loss", unit="nats", note="Per training pair."),
    Chart(title="Accuracy on training pairs", metrics="reward_model/accuracy", unit="share of pairs"),
    Chart(
        title="Reward",
        metrics="reward/*",
        without=("reward/std", "reward/missing_fraction", "reward/*/failed", "reward/*/timeouts"),
        note="Mean over the sampled training completions, in all and by part.",
    ),
    Chart(
        title="Missing rewards",
        metrics="reward/missing_fraction",
        unit="share of completions",
        unless_zero=True,
        note="Completions without a reward: they teach nothing, and are not counted as 0.",
    ),
    Chart(
        title="Failures of reward parts",
        metrics="reward/*/failed",
        unit="completions per step",
        absent_is_zero=True,
        note="Without a score because the part raised, ran out of time, died or returned no number.",
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
        note="Of the last canaries. Above 0, the policy can find what works too.",
    ),
    Chart(
        title="Judge minus verifier",
        metrics="judge/*shadow_gap",
        unit="score",
        note="On the completions that both judged. A gap that grows is a judge that is being gamed.",
    ),
    Chart(
        title="Judge: cost",
        metrics="judge/*cost",
        unit="per step",
        note="In the currency of the prices in the recipe.",
        unless_zero=True,
    ),
    Chart(title="Response length", metrics="rollout/length_mean", unit="tokens"),
    Chart(
        title="Informative groups",
        metrics="groups/informative_fraction",
        unit="share of groups",
        note="Groups whose rewards differ: the others teach nothing.",
    ),
    Chart(title="Entropy", metrics="policy/entropy", unit="nats per token"),
    Chart(title="KL to the reference", metrics="policy/kl_reference", unit="nats per token"),
    Chart(
        title="Policy loss",
        metrics="policy/loss",
        note="About 0 with one update per rollout, while its gradient is not: watch the reward.",
    ),
    Chart(title="Gradient norm", metrics="policy/grad_norm", note="Before clipping."),
    Chart(title="Truncated completions", metrics="rollout/truncated_fraction", unit="share of completions"),
    Chart(title="Clipped tokens", metrics="policy/clip_fraction", unit="share of tokens", unless_zero=True),
    Chart(
        title="Penalty ratio",
        metrics="gradreg/penalty_ratio",
        note="Gradient regularization: norm of the penalty's gradient over that of g1.",
    ),
    Chart(
        title="Gradient norm without penalty",
        metrics="gradreg/g1_norm",
        note="Of the perturbed parameters: what regularization lowers.",
    ),
    Chart(
        title="Cosine of gradient and penalty",
        metrics="gradreg/cosine",
        note="Above 0, learning flattens too; below 0, the two disagree.",
    ),
    Chart(title="Perturbation kept", metrics="gradreg/perturbation_kept", note="1: nothing lost to rounding."),
)


def charts(
    rows: Sequence[Row],
    evaluations: Sequence[StageEvaluation],
    *,
    weights: Mapping[str, float] | None = None,
    metric: str | None = None,
) -> list[dict[str, Any]]:
    """The charts that have something to show.

    `weights` are the reward parts', by name; `metric` chose the best checkpoint, and has a chart where no accuracy has.
    """
    drawn = []
    found = accuracy_curves(evaluations)
    if found:
        drawn.append({"svg": curve_svg("Held-out accuracy", found, unit="share"), "note": ""})
    elif metric is not None and (chosen := held_out_curve(evaluations, metric)):
        answers = "samples" if metric.startswith("sampled/") else "one greedy answer to each question"
        note = f"Of {answers}. It chooses the best checkpoint."
        drawn.append({"svg": curve_svg(f"Held-out {metric}", [chosen]), "note": note})
    paid, measured = paid_and_measured(evaluations, weights or {})
    if paid:
        svg = curve_svg(TITLE, paid, right=measured, unit="paid for (solid)", right_unit="only measured (dashed)")
        drawn.append({"svg": svg, "note": NOTE})
    curves = ((chart, metric_curves(rows, chart)) for chart in CHARTS)
    return drawn + [
        # A pattern's curves bear the names of parts, which even a single one has to tell.
        {"svg": curve_svg(chart.title, found, unit=chart.unit, legend="*" in chart.metrics), "note": chart.note}
        for chart, found in curves
        if found
    ]


def metric_curves(rows: Sequence[Row], chart: Chart) -> list[Curve]:
    """A curve per metric of the chart that ever had a finite value."""
    rows = [row for row in rows if row.get("stage") == chart.stage]
    names = dict.fromkeys(name for row in rows for name in row if fnmatchcase(name, chart.metrics))
    absent = 0.0 if chart.absent_is_zero else None
    curves = []
    for name in (name for name in names if not any(fnmatchcase(name, pattern) for pattern in chart.without)):
        found = [(row["step"], row.get(name, absent)) for row in rows]
        points = [(step, value) for step, value in found if value is not None]
        if points and not (chart.unless_zero and not any(value for _, value in points)):
            steps, values = zip(*points, strict=True)
            curves.append(Curve(label=name, steps=steps, values=values))
    return curves


def accuracy_curves(evaluations: Sequence[StageEvaluation]) -> list[Curve]:
    """Held-out accuracy over RL steps, of samples where there are no greedy answers, and what it is read with.

    At step 0 stands the model that RL began with. Empty where no evaluation has an accuracy.
    """
    for prefix in ("", "sampled/"):
        accuracy = held_out_curve(evaluations, f"{prefix}accuracy")
        if accuracy is not None:
            beside = (
                held_out_curve(evaluations, prefix + name, label=label) for name, label in BESIDE_ACCURACY.items()
            )
            return [accuracy, *(curve for curve in beside if curve is not None)]
    return []
