"""report.html: a run on one self-contained page, drawn from whatever the run has written so far."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from flatpeak.errors import UserError
from flatpeak.experiments.charts import charts
from flatpeak.experiments.held_out import (
    Shown,
    beside,
    cell,
    headline_metric,
    metric_table,
    robustness_table,
    shown_evaluations,
    subset_tables,
)
from flatpeak.experiments.overoptimization import reward_weights
from flatpeak.runs.directory import RunPaths, run_hint
from flatpeak.runs.files import silence, write_atomic
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.notices import START, read_notices
from flatpeak.runs.rollout_log import logged_steps, read_rollouts
from flatpeak.runs.summary import RunSummary, StageEvaluation, read_summary

Row = dict[str, Any]


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path. Raises UserError where no run is."""
    from jinja2 import Environment, FileSystemLoader

    run = RunPaths(Path(run_dir))
    if not run.config.exists() and not run.metrics.exists():
        hint = run_hint(run.path) or ": give one with a config.yaml, such as runs/demo"
        raise UserError(f"{run.path} is not a run's directory{hint}")
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    page = environment.get_template("report.html.jinja").render(page_content(run))
    write_atomic(run.report, page)
    return run.report


def page_content(run: RunPaths) -> dict[str, Any]:
    """Everything the page shows, by name."""
    rows = read_metrics(run.metrics)
    manifest = json.loads(run.manifest.read_text(encoding="utf-8")) if run.manifest.exists() else None
    summary = read_summary(run.summary) if run.summary.exists() else None
    evaluations = summary.evaluations if summary else evaluations_of(rows)
    config = run.config.read_text(encoding="utf-8") if run.config.exists() else None
    metric, best_step = (summary.metric, summary.best_step) if summary else (None, None)
    ranked = _ranks_pairs(rows)
    after = "after training" if ranked else "after RL"
    shown = shown_evaluations(evaluations, best_step=best_step, after=after)
    return {
        "name": summary.name if summary else run.path.name,
        "summary": summary,
        "headline": headline(summary, shown, rows),
        "silence": silent_steps(rows, evaluations, config),
        "notices": [(_place(row), row["text"]) for row in read_notices(run.notices)],
        "charts": charts(rows, evaluations, weights=reward_weights(config), metric=metric),
        "asked": "pairs" if ranked else "questions",
        "metric_table": metric_table(shown),
        "subset_tables": subset_tables(shown, metric=metric),
        "robustness_table": robustness_table(shown),
        "evaluations": evaluations,
        "eval_metrics": list(dict.fromkeys(name for found in evaluations for name in found.metrics)),
        "rollouts": example_rollouts(run),
        "manifest": manifest,
        "command": shlex.join(manifest["command"]) if manifest else None,
        "config": config,
        "cell": cell,
    }


def headline(summary: RunSummary | None, shown: Sequence[Shown], rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(what, figure) pairs, those that the run has."""
    pairs = []
    for one in shown:
        metric = headline_metric(one.evaluation, metric=summary.metric if summary else None)
        if metric is not None:
            pairs.append((f"Held-out {metric} {one.label}", _with_failures(one.evaluation, metric)))
    trained = [row for row in rows if row.get("stage") == "train"]
    if summary is not None and summary.best_step is not None:
        pairs.append((f"Best step, by {summary.metric}", str(summary.best_step)))
    ranked = _ranks_pairs(rows)
    for name, label in (("train", "Steps" if ranked else "RL steps"), ("sft", "SFT steps")):
        steps = [row["step"] for row in rows if row.get("stage") == name]
        if steps:
            pairs.append((label, str(max(steps))))
    rates = [rate for row in trained if (rate := row.get("throughput/response_tokens_per_second")) is not None]
    if rates:
        pairs.append(("Response tokens per second, median", f"{sorted(rates)[len(rates) // 2]:.0f}"))
    prices = [price for row in trained for name, price in row.items() if fnmatchcase(name, "judge/*cost") and price]
    if prices:
        pairs.append(("Cost of judges in training, in the currency of their prices", f"{sum(prices):.2f}"))
    if summary is not None:
        pairs.append(("Wall time" if ranked else "Wall time of SFT and RL", f"{summary.wall_seconds:.0f} s"))
    return pairs


def silent_steps(rows: Sequence[Row], evaluations: Sequence[StageEvaluation], config: str | None) -> str | None:
    """The sentence about RL steps without an informative group, where they are at least three, and half of all."""
    trained = [row for row in rows if row.get("stage") == "train" and "groups/informative_fraction" in row]
    silent = [row for row in trained if row["groups/informative_fraction"] == 0 and not row.get("policy/grad_norm")]
    if len(silent) < 3 or 2 * len(silent) < len(trained):
        return None
    recipe = yaml.safe_load(config) if config else None
    failed = [found.metrics.get("extraction_failed") for found in evaluations]
    rewards = [row["reward/mean"] for row in silent if row.get("reward/mean") is not None]
    return silence(
        f"{len(silent)} of {len(trained)} RL steps",
        reward=sum(rewards) / len(rewards) if rewards else None,
        truncated=sum(row["rollout/truncated_fraction"] for row in silent) / len(silent),
        unanswered=failed[-1] if failed else None,
        limit=recipe["rollout"]["max_new_tokens"] if recipe else None,
    )


def evaluations_of(rows: Sequence[Row]) -> tuple[StageEvaluation, ...]:
    """Evaluations from metrics.jsonl, for a run that has no summary yet: without sizes and intervals.

    An evaluation belongs to the stage whose steps stand before it.
    """
    found: list[StageEvaluation] = []
    stage: Any = "start"
    for row in rows:
        if row.get("stage") != "eval":
            stage = row.get("stage")
            continue
        named = {name: value for name, value in row.items() if name.startswith("eval/")}
        task = next(iter(named)).split("/")[1] if named else ""
        metrics = {name.removeprefix(f"eval/{task}/"): value for name, value in named.items()}
        found.append(StageEvaluation(stage=stage, step=row["step"], task=task, size=0, metrics=metrics, intervals={}))
    return tuple(found)


def example_rollouts(run: RunPaths) -> dict[str, Any] | None:
    """Best, median and worst completion of one group of the last logged step: the group whose rewards differ most."""
    steps = logged_steps(run.rollouts)
    if not steps:
        return None
    step, path = list(steps.items())[-1]
    groups: dict[str, list[Row]] = {}
    for row in read_rollouts(path):
        if row["reward"] is not None:
            groups.setdefault(row["group"], []).append(row)
    if not groups:
        return None
    group = max(groups.values(), key=_spread)
    ranked = sorted(group, key=lambda row: row["reward"], reverse=True)
    picked = {"best": ranked[0], "median": ranked[len(ranked) // 2], "worst": ranked[-1]}
    return {"step": step, "prompt": ranked[0]["prompt"], "gold": ranked[0]["gold"], "size": len(group), "rows": picked}


def _place(notice: Row) -> str:
    """Where in the run a notice was given."""
    if notice["stage"] == START:
        return "start"
    return f"{'SFT' if notice['stage'] == 'sft' else 'training'} step {notice['step']}"


def _spread(group: Sequence[Row]) -> float:
    rewards = [float(row["reward"]) for row in group]
    return max(rewards) - min(rewards)


def _ranks_pairs(rows: Sequence[Row]) -> bool:
    """Whether the run trained a reward model."""
    return any("reward_model/loss" in row for row in rows)


def _with_failures(evaluation: StageEvaluation, metric: str) -> str:
    """The figure, and for accuracy how often no answer was found: format that was learned shows there."""
    failed = evaluation.metrics.get(beside(metric))
    told = "" if failed is None or not metric.endswith("accuracy") else f"; no answer found in {failed:.1%}"
    return cell(evaluation, metric) + told
