"""The report of a run: report.html, one self-contained page with everything the run has written, and tables of runs."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from os.path import commonprefix
from pathlib import Path
from typing import Any, Final

import yaml

from flatpeak.config.load import parse_config
from flatpeak.errors import UserError
from flatpeak.report import patterns, story
from flatpeak.report.charts import charts, reward_weights
from flatpeak.report.evaluations import (
    EvaluationColumn,
    cell,
    evaluation_columns,
    extraction_failure_metric,
    headline_metric,
    metric_table,
    robustness_table,
    sets_table,
    subset_tables,
)
from flatpeak.runs.directory import RunPaths, run_hint
from flatpeak.runs.files import write_atomic
from flatpeak.runs.manifest import read_starts
from flatpeak.runs.metrics import by_task, read_metrics
from flatpeak.runs.notices import START, no_signal_message, read_notices
from flatpeak.runs.rollout_log import logged_steps, read_rollouts, turn_rewards
from flatpeak.runs.signals import signal_name
from flatpeak.runs.summary import RunSummary, StageEvaluation, read_summary

Row = dict[str, Any]
GROUPS: Final = 20
"""The most groups of completions on the page."""
STEPS_OF_GROUPS: Final = 10
"""The most steps that these groups are from."""
PAUSE: Final = 60.0
"""Seconds between two pages of a run in progress, at least."""
REFRESH: Final = 20
"""Seconds after which the page of a running run reloads itself."""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path. UserError if there is no run."""
    from jinja2 import Environment, FileSystemLoader

    run = RunPaths(Path(run_dir))
    if not run.config.exists() and not run.metrics.exists():
        hint = run_hint(run.path) or ": name the directory of a run, which has a config.yaml"
        raise UserError(f"{run.path} is not a run's directory{hint}")
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    environment.filters["shorten_hashes"] = shorten_hashes
    page = environment.get_template("report.html.jinja").render(page_content(run))
    write_atomic(run.report, page)
    return run.report


class LiveReport:
    """The report of a run in progress, written again after evaluations, in at most a hundredth of the run's time."""

    def __init__(self, run: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._due = clock() + PAUSE

    def refresh(self) -> None:
        """Write the page if it is due; an error is left to the page at the end of the run, which reports it."""
        began = self._clock()
        if began < self._due:
            return
        with suppress(Exception):
            write_report(self._run)
        now = self._clock()
        self._due = now + max(PAUSE, 100 * (now - began))


def page_content(run: RunPaths) -> dict[str, Any]:
    """The variables of the page's template."""
    rows = read_metrics(run.metrics)
    manifest = next(iter(read_starts(run.manifest)), None)  # None too where a full disk has cut it short
    summary = read_summary(run.summary) if run.summary.exists() else None
    in_progress = summary is None or summary.status == "running"
    evaluations = evaluations_of(rows) if summary is None or in_progress else summary.evaluations
    config = run.config.read_text(encoding="utf-8") if run.config.exists() else None
    metric, best_step = (summary.metric, summary.best_step) if summary else (None, None)
    recipe = _read_recipe(config)
    limit = recipe.get("rollout", {}).get("max_new_tokens")
    is_reward_model = _trains_reward_model(rows)
    after = "after training" if is_reward_model else "after RL"
    columns = evaluation_columns(evaluations, best_step=best_step, after=after)
    return {
        "name": summary.name if summary else run.path.name,
        "summary": summary,
        "subject": subject(recipe, evaluations),
        "signal": signal_name(summary.signal) if summary and summary.signal else None,
        "is_reward_model": is_reward_model,
        "headline": headline(summary, columns, rows),
        "sentence": story.sentence(summary, evaluations, rows),
        "refresh": REFRESH if in_progress else None,
        "warnings": [
            *no_signal_warning(rows, evaluations, limit),
            *story.warnings(rows, evaluations, limit=limit),
        ],
        "next_commands": next_commands(run, summary, manifest) if not is_reward_model else [],
        "notices": [(_position(row), row["text"]) for row in read_notices(run.notices)],
        "charts": charts(rows, evaluations, weights=reward_weights(recipe), metric=metric),
        "unit": "pairs" if is_reward_model else "questions",
        "metric_table": metric_table(columns),
        "sets_table": sets_table(columns, metric=metric),
        "subset_tables": subset_tables(columns, metric=metric),
        "robustness_table": robustness_table(columns),
        "evaluations": evaluations,
        "eval_metrics": list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics)),
        "groups": groups_over_run(run),
        "patterns": patterns_of_page(run),
        "pattern_columns": patterns.COLUMNS,
        "phases": story.phases(rows),
        "manifest": manifest,
        "started": _minute(manifest["started"]) if manifest else None,
        "command": shlex.join(manifest["command"]) if manifest else None,
        "changes": recipe_changes(recipe),
        "config": config,
        "cell": cell,
    }


def next_commands(
    run: RunPaths, summary: RunSummary | None, manifest: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    """The next commands that work for this run."""
    from_command = manifest is None or Path(manifest["command"][0]).name == "flatpeak"
    return story.next_commands(run.path, summary, from_command=from_command, rollouts=bool(logged_steps(run.rollouts)))


def _read_recipe(config: str | None) -> Mapping[str, Any]:
    """The recipe of a config.yaml; empty without one, or if it is damaged."""
    with suppress(yaml.YAMLError):
        recipe = yaml.safe_load(config or "")
        if isinstance(recipe, Mapping):
            return recipe
    return {}


def recipe_changes(recipe: Mapping[str, Any]) -> str | None:
    """The settings of a run that differ from flatpeak's defaults, as YAML; None without a recipe of this version."""
    with suppress(UserError):
        if recipe and (changed := story.recipe_changes(parse_config(recipe))):
            return yaml.safe_dump(changed, sort_keys=False, allow_unicode=True)
    return None


def subject(recipe: Mapping[str, Any], evaluations: Sequence[StageEvaluation]) -> str | None:
    """The model and the task of a run, as named in its recipe; None if that names no model."""
    model = recipe.get("model")
    if not isinstance(model, Mapping):
        return None
    new = model.get("new") or {}
    name = model.get("path") or (f"a new {new['architecture']}" if "architecture" in new else "a caller's model")
    task = evaluations[-1].task if evaluations else recipe.get("task", {}).get("type")
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


def no_signal_warning(rows: Sequence[Row], evaluations: Sequence[StageEvaluation], limit: int | None) -> Iterator[str]:
    """The warning about RL steps without an informative group, if there are at least three, and half of all steps."""
    trained = [row for row in rows if row.get("stage") == "train" and "groups/informative_fraction" in row]
    without_signal = [
        row for row in trained if row["groups/informative_fraction"] == 0 and not row.get("policy/grad_norm")
    ]
    if len(without_signal) < 3 or 2 * len(without_signal) < len(trained):
        return
    failed = [evaluation.metrics.get("extraction_failed") for evaluation in evaluations]
    rewards = [row["reward/mean"] for row in without_signal if row.get("reward/mean") is not None]
    yield no_signal_message(
        f"{len(without_signal)} of {len(trained)} RL steps",
        reward=sum(rewards) / len(rewards) if rewards else None,
        truncated=sum(row["rollout/truncated_fraction"] for row in without_signal) / len(without_signal),
        unanswered=failed[-1] if failed else None,
        limit=limit,
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
        (task, metrics), *others = by_task(row).items() or [("", {})]
        sets = {name: {"task": name, "size": 0, "metrics": values, "intervals": {}} for name, values in others}
        evaluations.append(
            StageEvaluation(stage=stage, step=row["step"], task=task, size=0, metrics=metrics, intervals={}, sets=sets)
        )
    return tuple(evaluations)


def groups_over_run(run: RunPaths) -> list[dict[str, Any]]:
    """Groups from all over the run, at most `GROUPS`: of evenly spaced steps, those whose rewards differ most."""
    steps = logged_steps(run.rollouts)
    chosen = _evenly(sorted(steps), STEPS_OF_GROUPS)
    groups_of_page: list[dict[str, Any]] = []
    for step in chosen:
        groups: dict[str, list[Row]] = {}
        with suppress(UserError):  # a file that is cut short
            for row in read_rollouts(steps[step]):
                if row["reward"] is not None:
                    groups.setdefault(row["group"], []).append(row)
        for group in sorted(groups.values(), key=_spread, reverse=True)[: max(1, GROUPS // len(chosen))]:
            groups_of_page.append(_group(step, group))
    # A system message that all prompts share would hide their questions.
    prompts = [group["prompt"] for group in groups_of_page]
    shared = commonprefix(prompts) if len(prompts) > 1 else ""  # noqa: RUF071 - texts, not paths
    start = max(map(shared.rfind, "\n>]")) + 1
    return [{**group, "question": group["prompt"][start:]} for group in groups_of_page]


def patterns_of_page(run: RunPaths) -> tuple[list[int], list[tuple[str, ...]]] | None:
    """The last logged steps, and the cells of the patterns that pay in them; None if there are none."""
    with suppress(UserError):  # no rollouts, or a file that is cut short
        steps, paid = patterns.patterns_of(run.path)
        return (steps, [patterns.cells(one) for one in paid]) if paid else None
    return None


def _evenly(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, with the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def _group(step: int, group: Sequence[Row]) -> dict[str, Any]:
    """A group for the page: equal completions with the same reward are one, the best first."""
    equal: dict[tuple[str, str, float], list[Row]] = {}
    for row in sorted(group, key=lambda row: row["reward"], reverse=True):
        equal.setdefault((row["text"], row["finish_reason"], row["reward"]), []).append(row)
    rewards = [row["reward"] for row in group]
    return {
        "step": step,
        "prompt": group[0]["prompt"],
        "gold": group[0]["gold"],
        "size": len(group),
        "reward": sum(rewards) / len(rewards),
        "completions": [
            {**rows[0], "count": len(rows), "turn_rewards": turn_rewards(rows[0])} for rows in equal.values()
        ],
    }


def _position(notice: Row) -> str:
    """The stage and step of a notice."""
    if notice["stage"] == START:
        return "start"
    return f"{'SFT' if notice['stage'] == 'sft' else 'training'} step {notice['step']}"


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
