"""The charts of the report page, and what each reads from the metrics and evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from flatpeak.experiments.curves import Curve, curve_svg
from flatpeak.experiments.overoptimization import NOTE, TITLE, held_out_curve, paid_and_measured
from flatpeak.runs.summary import StageEvaluation

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
