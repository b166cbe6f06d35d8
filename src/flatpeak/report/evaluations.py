"""The tables of a report's held-out evaluations: metrics by stage, values of each subset, perturbed questions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatpeak.runs.summary import RunSummary, StageEvaluation

MANY_VALUES = 12
"""A subset table with more rows is folded, and sorted by its figure."""
MEANINGS = {
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
_BEST = "at its best"
_FIRST = ("accuracy", "extraction_failed", "reward", "missing", "timeouts")
_METHODS = {"wilson": "Wilson", "bootstrap": "bootstrap"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """An evaluation that has a column of its own."""

    label: str
    evaluation: StageEvaluation
    outcome: bool
    """Whether it is the best or the last of RL: those have tables by subset."""


def shown_evaluations(
    evaluations: Sequence[StageEvaluation], *, best_step: int | None, after: str = "after RL"
) -> list[Shown]:
    """Before training, after SFT, the best of RL and the last one, each once; those the run has."""
    labels: dict[int, list[str]] = {}
    for stage, label in (("start", "before training"), ("sft", "after SFT")):
        places = [place for place, found in enumerate(evaluations) if found.stage == stage]
        if places:
            labels.setdefault(places[-1], []).append(label)
    best = [place for place, found in enumerate(evaluations) if _rl_step(found) == best_step]
    if best:
        labels.setdefault(best[-1], []).append(_BEST)
    last = [place for place, found in enumerate(evaluations) if found.stage == "train"]
    if last:
        labels.setdefault(last[-1], []).insert(0, after)
    return [
        Shown(
            label=" and ".join(names) + _step(evaluations[place]),
            evaluation=evaluations[place],
            outcome=bool({_BEST, after} & set(names)),
        )
        for place, names in labels.items()
    ]


def best_evaluation(summary: RunSummary) -> StageEvaluation | None:
    """The evaluation of the best RL step; of step 0, that of the model RL began with."""
    found = [one for one in summary.evaluations if _rl_step(one) == summary.best_step]
    return found[-1] if found else None


def headline_metric(evaluation: StageEvaluation, *, metric: str | None = None) -> str | None:
    """What stands for an evaluation: its accuracy, else what chooses the best checkpoint, else its reward."""
    names = ("accuracy", "sampled/accuracy", metric, "reward", "sampled/reward")
    return next((name for name in names if name in evaluation.metrics), None)


def beside(metric: str) -> str:
    """The extraction failures of the same answers."""
    return "sampled/extraction_failed" if metric.startswith("sampled/") else "extraction_failed"


def metric_table(shown: Sequence[Shown]) -> dict[str, Any] | None:
    """A row per metric, a column per evaluation, and the interval's method. The perturbed questions have their own."""
    if not shown:
        return None
    names = dict.fromkeys(name for one in shown for name in one.evaluation.metrics)
    told = any(one.evaluation.robustness for one in shown)
    names = {name: None for name in names if not (told and name.startswith("robustness/"))}
    ordered = sorted(names, key=_order)
    return {
        "columns": [{"label": one.label, "size": one.evaluation.size} for one in shown],
        "ranked": [one.label for one in shown if one.evaluation.choices == "rank"],
        "sizes_differ": len({one.evaluation.size for one in shown}) > 1,
        "with_sampled": any(name.startswith("sampled/") for name in ordered),
        "rows": [
            {
                "metric": name,
                "meaning": MEANINGS.get(name.removeprefix("sampled/"), ""),
                "cells": [cell(one.evaluation, name) for one in shown],
                "method": _methods(one.evaluation.methods.get(name) for one in shown),
            }
            for name in ordered
        ],
    }


def cell(evaluation: StageEvaluation, metric: str) -> str:
    """`0.970 [0.954, 0.984]`, with ` of 98` where the mean is over fewer questions than were asked."""
    if metric not in evaluation.metrics:
        return ""
    return _cell(
        {"metrics": evaluation.metrics, "intervals": evaluation.intervals, "counted": evaluation.counted}, metric
    )


def subset_tables(shown: Sequence[Shown], *, metric: str | None = None) -> list[dict[str, Any]]:
    """One table per column of the best and the last evaluation: rows by value, then the micro and macro average.

    Of the last one there is where a run has no RL.
    """
    found = []
    for one in [one for one in shown if one.outcome] or shown[-1:]:
        figure = headline_metric(one.evaluation, metric=metric)
        if figure is not None:
            tables = one.evaluation.subsets.items()
            found += [_subset_table(one, column, content, figure) for column, content in tables]
    return sorted(found, key=lambda table: table["column"])


def _subset_table(shown: Shown, column: str, content: Mapping[str, Any], metric: str) -> dict[str, Any]:
    values: Mapping[str, Any] = content["values"]
    failed = beside(metric)
    rows = [_subset_row(name, row, metric) for name, row in values.items()]
    many = len(rows) > MANY_VALUES
    if many:
        rows.sort(key=lambda row: -math.inf if row["value"] is None else row["value"], reverse=True)
    micro, macro = content["micro"], content["macro"]
    size = sum(row["size"] for row in values.values())
    known = [row for row in rows if row["value"] is not None]
    return {
        "column": column,
        "metric": metric,
        "label": shown.label,
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
        "failed": _number(row["metrics"].get(beside(metric))),
        "method": row.get("methods", {}).get(metric),
    }


def robustness_table(shown: Sequence[Shown]) -> dict[str, Any] | None:
    """A row per kind and evaluation: coverage, clean beside perturbed on the same questions, and their difference."""
    asked = [one for one in shown if one.evaluation.robustness]
    if not asked:
        return None
    kinds = dict.fromkeys(kind for one in asked for kind in one.evaluation.robustness)
    rows = [_robustness_row(kind, one) for kind in kinds for one in asked if kind in one.evaluation.robustness]
    return {"rows": rows, "methods": _methods(row["method"] for row in rows)}


def _robustness_row(kind: str, one: Shown) -> dict[str, Any]:
    found: Mapping[str, Any] = one.evaluation.robustness[kind]
    fewer = "" if found["counted"] == found["covered"] else f" of {found['counted']}"
    interval, change = found["difference_interval"], found["difference"]
    none = not found["counted"]
    return {
        "kind": kind,
        "label": one.label,
        "covered": f"{found['covered']} of {found['asked']}",
        "clean": "" if none else _with_interval(found["clean"], found["clean_interval"]) + fewer,
        "perturbed": "" if none else _with_interval(found["accuracy"], found["interval"]) + fewer,
        "difference": "" if change is None else f"{change:+.3f} [{interval[0]:+.3f}, {interval[1]:+.3f}]",
        "certain": interval is not None and (interval[0] > 0 or interval[1] < 0),
        "failed": _number(found["extraction_failed"]) if found["covered"] else "",
        "method": one.evaluation.methods.get(f"robustness/{kind}"),
    }


def _rl_step(evaluation: StageEvaluation) -> int:
    return evaluation.step if evaluation.stage == "train" else 0


def _step(evaluation: StageEvaluation) -> str:
    return f", step {evaluation.step}" if evaluation.stage == "train" else ""


def _order(name: str) -> tuple[int, int]:
    """Greedy answers, samples, then what is made of several samples; in each, accuracy and its failures come first."""
    plain = name.removeprefix("sampled/")
    kind = 2 if name.startswith(("pass@", "maj@")) else int(plain != name)
    return kind, _FIRST.index(plain) if plain in _FIRST else len(_FIRST)


def _cell(row: Mapping[str, Any], metric: str) -> str:
    text = _with_interval(row["metrics"].get(metric), row["intervals"].get(metric))
    counted = row["counted"].get(metric)
    return f"{text} of {counted}" if counted else text


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    text = _number(value)
    return text if interval is None else f"{text} [{interval[0]:.3f}, {interval[1]:.3f}]"


def _number(value: float | None) -> str:
    return "unknown" if value is None or not math.isfinite(value) else f"{value:.3f}"


def _methods(found: Any) -> str:
    return " / ".join(_METHODS.get(name, name) for name in dict.fromkeys(name for name in found if name is not None))
