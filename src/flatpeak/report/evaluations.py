"""The report's tables of held-out evaluations: metrics by stage, values of each subset, perturbed questions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flatpeak.runs.summary import RunSummary, StageEvaluation

MANY_VALUES: Final = 12
"""A subset table with more rows is folded, and sorted by its metric."""
MEANINGS: Final = {
    "accuracy": "answered right",
    "extraction_failed": "no answer found to grade",
    "missing": "no verdict or no reward",
    "timeouts": "not graded in time, and so wrong",
    "reward": "total reward",
    "truncated": "cut at the token limit",
    "length": "tokens of an answer",
    "longer_wins": "the longer answer is the better one",
    "prefers_longer": "the model scores the longer one higher",
    "calibration_error": "of the probabilities that the scores stand for",
}
SHARPNESS: Final = {
    "clean": "reward of samples, the weights as they are",
    "fall": "reward lost under noise of this radius in the weights",
    "relative_fall": "the same over the reward",
    "weight_norm": "norm of the perturbed weights",
    "perturbation_kept": "cosine of the noise after rounding with that before",
    "top_eigenvalue": "of the Hessian of the policy loss",
    "eigenvalue_residual": "of the eigenvalue, relative to it",
}
"""Meanings of the metrics `sharpness/<name>`; the name may be followed by a radius and a reward part."""
_BEST: Final = "at its best"
_FIRST_METRICS: Final = ("accuracy", "extraction_failed", "reward", "missing", "timeouts")
_METHODS: Final = {"wilson": "Wilson", "bootstrap": "bootstrap"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationColumn:
    """An evaluation that has a column in the tables."""

    label: str
    evaluation: StageEvaluation
    outcome: bool
    """Whether it is the best or the last evaluation of RL, which have tables by subset."""


def evaluation_columns(
    evaluations: Sequence[StageEvaluation], *, best_step: int | None, after: str = "after RL"
) -> list[EvaluationColumn]:
    """The evaluations before training, after SFT, at the best RL step and at the last step, each once."""
    labels: dict[int, list[str]] = {}
    for stage, label in (("start", "before training"), ("sft", "after SFT")):
        of_stage = [index for index, evaluation in enumerate(evaluations) if evaluation.stage == stage]
        if of_stage:
            labels.setdefault(of_stage[-1], []).append(label)
    best = [index for index, evaluation in enumerate(evaluations) if _rl_step(evaluation) == best_step]
    if best:
        labels.setdefault(best[-1], []).append(_BEST)
    last = [index for index, evaluation in enumerate(evaluations) if evaluation.stage == "train"]
    if last:
        labels.setdefault(last[-1], []).insert(0, after)
    return [
        EvaluationColumn(
            label=" and ".join(names) + _step(evaluations[index]),
            evaluation=evaluations[index],
            outcome=bool({_BEST, after} & set(names)),
        )
        for index, names in labels.items()
    ]


def best_evaluation(summary: RunSummary) -> StageEvaluation | None:
    """The evaluation of the best RL step; for step 0, of the model before RL."""
    best = [evaluation for evaluation in summary.evaluations if _rl_step(evaluation) == summary.best_step]
    return best[-1] if best else None


def headline_metric(evaluation: StageEvaluation, *, metric: str | None = None) -> str | None:
    """The metric that represents an evaluation: accuracy, else the metric that chooses checkpoints, else reward."""
    names = ("accuracy", "sampled/accuracy", metric, "reward", "sampled/reward")
    return next((name for name in names if name in evaluation.metrics), None)


def extraction_failure_metric(metric: str) -> str:
    """The metric of extraction failures of the same answers."""
    return "sampled/extraction_failed" if metric.startswith("sampled/") else "extraction_failed"


def metric_table(columns: Sequence[EvaluationColumn]) -> dict[str, Any] | None:
    """A row per metric and a column per evaluation, with the interval's method; without perturbed questions."""
    if not columns:
        return None
    evaluations = [column.evaluation for column in columns]
    has_robustness = any(evaluation.robustness for evaluation in evaluations)
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics)
    names = {name: None for name in names if not (has_robustness and name.startswith("robustness/"))}
    ordered = sorted(names, key=_order)
    return {
        "columns": [{"label": column.label, "size": column.evaluation.size} for column in columns],
        "ranked": [column.label for column in columns if column.evaluation.choices == "rank"],
        "sizes_differ": len({evaluation.size for evaluation in evaluations}) > 1,
        "with_sampled": any(name.startswith("sampled/") for name in ordered),
        "rows": [
            {
                "metric": name,
                "meaning": meaning(name),
                "cells": [cell(evaluation, name) for evaluation in evaluations],
                "method": _methods(evaluation.methods.get(name) for evaluation in evaluations),
            }
            for name in ordered
        ],
    }


def meaning(metric: str) -> str:
    """An explanation of a metric in a few words; empty if there is none."""
    namespace, _, name = metric.partition("/")
    if namespace != "sharpness":
        return MEANINGS.get(metric.removeprefix("sampled/"), "")
    stem, _, component = name.partition("/")
    return "" if component else SHARPNESS.get(re.sub(r"_[-+.e\d]+$", "", stem), "")


def cell(evaluation: StageEvaluation, metric: str) -> str:
    """`0.970 [0.954, 0.984]`, with ` of 98` if the mean is over fewer questions than the evaluation has."""
    if metric not in evaluation.metrics:
        return ""
    return _cell(
        {"metrics": evaluation.metrics, "intervals": evaluation.intervals, "counted": evaluation.counted}, metric
    )


def sets_table(columns: Sequence[EvaluationColumn], *, metric: str | None = None) -> dict[str, Any] | None:
    """The headline metric on each task of a mixture and each evaluation set; a column per evaluation."""
    names = dict.fromkeys(name for column in columns for name in column.evaluation.sets)
    headline = headline_metric(columns[-1].evaluation, metric=metric) if columns else None
    if not names or headline is None:
        return None
    rows = []
    for name in names:
        on_set = [column.evaluation.on(name) for column in columns]
        cells = [cell(one, headline) if one is not None else "" for one in on_set]
        sizes = dict.fromkeys(str(one.size) for one in on_set if one is not None and one.size)
        rows.append({"name": name, "size": " / ".join(sizes), "cells": cells})
    return {"metric": headline, "columns": [column.label for column in columns], "rows": rows}


def subset_tables(columns: Sequence[EvaluationColumn], *, metric: str | None = None) -> list[dict[str, Any]]:
    """One table per subset column of the best and the last evaluation: rows by value, micro and macro average.

    A run without RL has tables for its last evaluation.
    """
    tables = []
    for column in [column for column in columns if column.outcome] or columns[-1:]:
        headline = headline_metric(column.evaluation, metric=metric)
        if headline is not None:
            subsets = column.evaluation.subsets.items()
            tables += [_subset_table(column.label, subset, content, headline) for subset, content in subsets]
    return sorted(tables, key=lambda table: table["column"])


def _subset_table(label: str, subset: str, content: Mapping[str, Any], metric: str) -> dict[str, Any]:
    values: Mapping[str, Any] = content["values"]
    failed = extraction_failure_metric(metric)
    rows = [_subset_row(name, row, metric) for name, row in values.items()]
    many = len(rows) > MANY_VALUES
    if many:
        rows.sort(key=lambda row: -math.inf if row["value"] is None else row["value"], reverse=True)
    micro, macro = content["micro"], content["macro"]
    size = sum(row["size"] for row in values.values())
    known = [row for row in rows if row["value"] is not None]
    return {
        "column": subset,
        "metric": metric,
        "label": label,
        "with_failures": failed in micro["metrics"],
        "with_bars": all(0 <= row["value"] <= 1 for row in known),
        "folded": many,
        "extremes": (known[0], known[-1]) if many and known else None,
        "rows": rows,
        "micro": _subset_row("all questions (micro)", {"size": size, **micro}, metric),
        "macro": {"cell": _number(macro.get(metric)), "failed": _number(macro.get(failed))},
        "methods": _methods(row["method"] for row in rows) or "Wilson's where every value is 0 or 1, else a bootstrap",
    }


def _subset_row(name: str, row: Mapping[str, Any], metric: str) -> dict[str, Any]:
    interval = row["intervals"].get(metric)
    return {
        "name": name,
        "size": row["size"],
        "value": row["metrics"].get(metric),
        "interval": interval,
        "cell": _cell(row, metric),
        "failed": _number(row["metrics"].get(extraction_failure_metric(metric))),
        "method": row.get("methods", {}).get(metric),
    }


def robustness_table(columns: Sequence[EvaluationColumn]) -> dict[str, Any] | None:
    """A row per kind and evaluation: coverage, clean and perturbed accuracy on the same questions, their difference."""
    with_robustness = [column for column in columns if column.evaluation.robustness]
    if not with_robustness:
        return None
    kinds = dict.fromkeys(kind for column in with_robustness for kind in column.evaluation.robustness)
    rows = [
        _robustness_row(kind, column)
        for kind in kinds
        for column in with_robustness
        if kind in column.evaluation.robustness
    ]
    return {"rows": rows, "methods": _methods(row["method"] for row in rows)}


def _robustness_row(kind: str, column: EvaluationColumn) -> dict[str, Any]:
    result: Mapping[str, Any] = column.evaluation.robustness[kind]
    counted = "" if result["counted"] == result["covered"] else f" of {result['counted']}"
    interval, change = result["difference_interval"], result["difference"]
    is_empty = not result["counted"]
    return {
        "kind": kind,
        "label": column.label,
        "covered": f"{result['covered']} of {result['asked']}",
        "clean": "" if is_empty else _with_interval(result["clean"], result["clean_interval"]) + counted,
        "perturbed": "" if is_empty else _with_interval(result["accuracy"], result["interval"]) + counted,
        "difference": "" if change is None else f"{change:+.3f} [{interval[0]:+.3f}, {interval[1]:+.3f}]",
        "certain": interval is not None and (interval[0] > 0 or interval[1] < 0),
        "failed": _number(result["extraction_failed"]) if result["covered"] else "",
        "method": column.evaluation.methods.get(f"robustness/{kind}"),
    }


def _rl_step(evaluation: StageEvaluation) -> int:
    return evaluation.step if evaluation.stage == "train" else 0


def _step(evaluation: StageEvaluation) -> str:
    return f", step {evaluation.step}" if evaluation.stage == "train" else ""


def _order(name: str) -> tuple[int, int]:
    """Sort greedy metrics first, then sampled ones, then pass@k and maj@k; in each group, accuracy comes first."""
    plain = name.removeprefix("sampled/")
    kind = 2 if name.startswith(("pass@", "maj@")) else int(plain != name)
    return kind, _FIRST_METRICS.index(plain) if plain in _FIRST_METRICS else len(_FIRST_METRICS)


def _cell(row: Mapping[str, Any], metric: str) -> str:
    text = _with_interval(row["metrics"].get(metric), row["intervals"].get(metric))
    counted = row["counted"].get(metric)
    return f"{text} of {counted}" if counted else text


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    text = _number(value)
    return text if interval is None else f"{text} [{interval[0]:.3f}, {interval[1]:.3f}]"


def _number(value: float | None) -> str:
    return "unknown" if value is None or not math.isfinite(value) else f"{value:.3f}"


def _methods(names: Iterable[str | None]) -> str:
    return " / ".join(_METHODS.get(name, name) for name in dict.fromkeys(names) if name is not None)
