"""The report of a run: report.html, one self-contained page with everything the run has written, and tables of runs."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import yaml

from flatpeak.errors import UserError
from flatpeak.report.charts import charts, reward_weights
from flatpeak.report.evaluations import (
    EvaluationColumn,
    best_evaluation,
    cell,
    evaluation_columns,
    extraction_failure_metric,
    headline_metric,
    metric_table,
    robustness_table,
    subset_tables,
)
from flatpeak.runs.directory import RunPaths, run_hint
from flatpeak.runs.files import write_atomic
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.notices import START, no_signal_message, read_notices
from flatpeak.runs.rollout_log import logged_steps, read_rollouts
from flatpeak.runs.signals import signal_name
from flatpeak.runs.summary import RunSummary, StageEvaluation, read_summary

Row = dict[str, Any]

COLUMNS: Final = (
    "run",
    "status",
    "task",
    "questions",
    "start_accuracy",
    "sft_accuracy",
    "final_accuracy",
    "final_low",
    "final_high",
    "extraction_failed",
    "metric",
    "best_step",
    "best_value",
    "last_step",
    "wall_seconds",
)
"""The columns of the run-summary table."""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path. UserError if there is no run."""
    from jinja2 import Environment, FileSystemLoader

    run = RunPaths(Path(run_dir))
    if not run.config.exists() and not run.metrics.exists():
        hint = run_hint(run.path) or ": give one with a config.yaml, such as runs/demo"
        raise UserError(f"{run.path} is not a run's directory{hint}")
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    environment.filters["shorten_hashes"] = shorten_hashes
    page = environment.get_template("report.html.jinja").render(page_content(run))
    write_atomic(run.report, page)
    return run.report


def page_content(run: RunPaths) -> dict[str, Any]:
    """The variables of the page's template."""
    rows = read_metrics(run.metrics)
    manifest = json.loads(run.manifest.read_text(encoding="utf-8")) if run.manifest.exists() else None
    summary = read_summary(run.summary) if run.summary.exists() else None
    evaluations = summary.evaluations if summary else evaluations_of(rows)
    config = run.config.read_text(encoding="utf-8") if run.config.exists() else None
    metric, best_step = (summary.metric, summary.best_step) if summary else (None, None)
    is_reward_model = _trains_reward_model(rows)
    after = "after training" if is_reward_model else "after RL"
    columns = evaluation_columns(evaluations, best_step=best_step, after=after)
    return {
        "name": summary.name if summary else run.path.name,
        "summary": summary,
        "subject": subject(config, evaluations),
        "signal": signal_name(summary.signal) if summary and summary.signal else None,
        "is_reward_model": is_reward_model,
        "headline": headline(summary, columns, rows),
        "no_signal": no_signal_warning(rows, evaluations, config),
        "notices": [(_position(row), row["text"]) for row in read_notices(run.notices)],
        "charts": charts(rows, evaluations, weights=reward_weights(config), metric=metric),
        "unit": "pairs" if is_reward_model else "questions",
        "metric_table": metric_table(columns),
        "subset_tables": subset_tables(columns, metric=metric),
        "robustness_table": robustness_table(columns),
        "evaluations": evaluations,
        "eval_metrics": list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics)),
        "rollouts": example_rollouts(run),
        "manifest": manifest,
        "started": _minute(manifest["started"]) if manifest else None,
        "command": shlex.join(manifest["command"]) if manifest else None,
        "config": config,
        "cell": cell,
    }


def subject(config: str | None, evaluations: Sequence[StageEvaluation]) -> str | None:
    """The model and the task of a run, as named in its recipe; None if that names no model."""
    content: Any = yaml.safe_load(config) if config else None
    model = content.get("model") if isinstance(content, Mapping) else None
    if not isinstance(model, Mapping):
        return None
    new = model.get("new") or {}
    name = model.get("path") or (f"a new {new['architecture']}" if "architecture" in new else "a caller's model")
    task = evaluations[-1].task if evaluations else content.get("task", {}).get("type")
    return f"{name} on {task}" if task else str(name)


def shorten_hashes(text: str) -> str:
    """The text with hashes of 16 hexadecimal digits or more cut to eight; manifest.json has the full hashes."""
    return re.sub(r"(?<![0-9a-z])([0-9a-f]{8})[0-9a-f]{8,}(?![0-9a-z])", r"\1", text)


def _minute(started: str) -> str:
    """`2026-01-02 03:04 UTC` from an ISO time in any zone."""
    return datetime.fromisoformat(started).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def headline(
    summary: RunSummary | None, columns: Sequence[EvaluationColumn], rows: Sequence[Row]
) -> list[tuple[str, str]]:
    """The (label, value) pairs at the top of the page, as far as the run has them."""
    pairs = []
    for column in columns:
        metric = headline_metric(column.evaluation, metric=summary.metric if summary else None)
        if metric is not None:
            pairs.append((f"Held-out {metric} {column.label}", _with_failures(column.evaluation, metric)))
    trained = [row for row in rows if row.get("stage") == "train"]
    if summary is not None and summary.best_step is not None:
        pairs.append((f"Best step, by {summary.metric}", str(summary.best_step)))
    is_reward_model = _trains_reward_model(rows)
    for name, label in (("train", "Steps" if is_reward_model else "RL steps"), ("sft", "SFT steps")):
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
        pairs.append(("Wall time" if is_reward_model else "Wall time of SFT and RL", f"{summary.wall_seconds:.0f} s"))
    return pairs


def no_signal_warning(rows: Sequence[Row], evaluations: Sequence[StageEvaluation], config: str | None) -> str | None:
    """The warning about RL steps without an informative group, if there are at least three, and half of all steps."""
    trained = [row for row in rows if row.get("stage") == "train" and "groups/informative_fraction" in row]
    without_signal = [
        row for row in trained if row["groups/informative_fraction"] == 0 and not row.get("policy/grad_norm")
    ]
    if len(without_signal) < 3 or 2 * len(without_signal) < len(trained):
        return None
    recipe = yaml.safe_load(config) if config else None
    failed = [evaluation.metrics.get("extraction_failed") for evaluation in evaluations]
    rewards = [row["reward/mean"] for row in without_signal if row.get("reward/mean") is not None]
    return no_signal_message(
        f"{len(without_signal)} of {len(trained)} RL steps",
        reward=sum(rewards) / len(rewards) if rewards else None,
        truncated=sum(row["rollout/truncated_fraction"] for row in without_signal) / len(without_signal),
        unanswered=failed[-1] if failed else None,
        limit=recipe["rollout"]["max_new_tokens"] if recipe else None,
    )


def evaluations_of(rows: Sequence[Row]) -> tuple[StageEvaluation, ...]:
    """Read evaluations from metrics.jsonl, for a run that has no summary yet: they lack sizes and intervals.

    An evaluation belongs to the stage whose steps precede it.
    """
    evaluations: list[StageEvaluation] = []
    stage: Any = "start"
    for row in rows:
        if row.get("stage") != "eval":
            stage = row.get("stage")
            continue
        by_name = {name: value for name, value in row.items() if name.startswith("eval/")}
        task = next(iter(by_name)).split("/")[1] if by_name else ""
        metrics = {name.removeprefix(f"eval/{task}/"): value for name, value in by_name.items()}
        evaluations.append(
            StageEvaluation(stage=stage, step=row["step"], task=task, size=0, metrics=metrics, intervals={})
        )
    return tuple(evaluations)


def example_rollouts(run: RunPaths) -> dict[str, Any] | None:
    """The best, median and worst completion of the group with the most different rewards, at the last logged step."""
    steps = logged_steps(run.rollouts)
    if not steps:
        return None
    step, rows = _last_whole_step(steps)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["reward"] is not None:
            groups.setdefault(row["group"], []).append(row)
    if not groups:
        return None
    group = max(groups.values(), key=_spread)
    ranked = sorted(group, key=lambda row: row["reward"], reverse=True)
    picked = {"best": ranked[0], "median": ranked[len(ranked) // 2], "worst": ranked[-1]}
    return {"step": step, "prompt": ranked[0]["prompt"], "gold": ranked[0]["gold"], "size": len(group), "rows": picked}


def _position(notice: Row) -> str:
    """The stage and step of a notice."""
    if notice["stage"] == START:
        return "start"
    return f"{'SFT' if notice['stage'] == 'sft' else 'training'} step {notice['step']}"


def _last_whole_step(steps: Mapping[int, Path]) -> tuple[int, list[Row]]:
    """The last step whose file can be read, and its rows; (0, []) if there is none."""
    for step in sorted(steps, reverse=True):
        with suppress(UserError):
            return step, read_rollouts(steps[step])
    return 0, []


def _spread(group: Sequence[Row]) -> float:
    rewards = [float(row["reward"]) for row in group]
    return max(rewards) - min(rewards)


def _trains_reward_model(rows: Sequence[Row]) -> bool:
    """Whether the run trained a reward model."""
    return any("reward_model/loss" in row for row in rows)


def _with_failures(evaluation: StageEvaluation, metric: str) -> str:
    """The estimate; for accuracy with the share without an extracted answer, which shows if the format is learned."""
    failed = evaluation.metrics.get(extraction_failure_metric(metric))
    failures = "" if failed is None or not metric.endswith("accuracy") else f"; no answer found in {failed:.1%}"
    return cell(evaluation, metric) + failures


def run_table(runs: Sequence[Path]) -> str:
    """The run-summary table as CSV; missing values are empty cells. UserError if a directory is not a run's."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in runs:
        writer.writerow({"run": run.as_posix()} | _summary_row(read_summary(RunPaths(run).summary)))
    return text.getvalue()


def compared_runs(runs: Sequence[Path]) -> str:
    """A table of runs for a terminal: the held-out metric at every stage, its last interval, best and last step, time.

    The metric is accuracy if the run has it, else the metric that chose its checkpoints. A dash marks a missing value.
    """
    rows: list[tuple[str, ...]] = [("run", "metric", "start", "SFT", "final", "95% interval", "best", "last", "time")]
    rows += [_comparison_row(run, RunPaths(run).summary) for run in runs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        # Words are aligned to the left, numbers to the right.
        padded = [text.ljust(width) for text, width in zip(row[:2], widths[:2], strict=True)]
        padded += [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _comparison_row(run: Path, path: Path) -> tuple[str, ...]:
    if not path.exists():
        return (f"{run.as_posix()} (no summary)", *("-" for _ in range(8)))
    summary = read_summary(path)
    final = summary.evaluations[-1] if summary.evaluations else None
    metric = (headline_metric(final, metric=summary.metric) if final else None) or summary.metric
    interval = final.intervals.get(metric) if final else None
    stages = (summary.evaluation("start"), summary.evaluation("sft"), final)
    return (
        run.as_posix() if summary.status == "done" else f"{run.as_posix()} ({summary.status})",
        metric,
        *(_short(None if evaluation is None else evaluation.metrics.get(metric)) for evaluation in stages),
        "-" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]",
        "-" if summary.best_step is None else str(summary.best_step),
        str(summary.last_step),
        f"{summary.wall_seconds:.0f} s",
    )


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _summary_row(summary: RunSummary) -> dict[str, Any]:
    final = summary.evaluations[-1] if summary.evaluations else None
    low, high = _interval(final)
    best = best_evaluation(summary)
    return {
        "status": summary.status,
        "task": final.task if final else None,
        "questions": final.size if final else None,
        "start_accuracy": _accuracy(summary.evaluation("start")),
        "sft_accuracy": _accuracy(summary.evaluation("sft")),
        "final_accuracy": _accuracy(final),
        "final_low": low,
        "final_high": high,
        "extraction_failed": _metric_value(final, "extraction_failed"),
        "metric": summary.metric,
        "best_step": summary.best_step,
        "best_value": best.metrics.get(summary.metric) if best else None,
        "last_step": summary.last_step,
        "wall_seconds": round(summary.wall_seconds, 1),
    }


def _accuracy(evaluation: StageEvaluation | None) -> float | None:
    """The accuracy of greedy answers; of samples if there are no greedy answers."""
    return _metric_value(evaluation, "accuracy")


def _metric_value(evaluation: StageEvaluation | None, metric: str) -> float | None:
    metrics = {} if evaluation is None else evaluation.metrics
    return metrics.get(metric, metrics.get(f"sampled/{metric}"))


def _interval(evaluation: StageEvaluation | None) -> tuple[float | None, float | None]:
    intervals = {} if evaluation is None else evaluation.intervals
    return intervals.get("accuracy", intervals.get("sampled/accuracy", (None, None)))
