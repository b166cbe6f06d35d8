"""`flatpeak reward-model`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flatpeak.cli.running import (
    AsJson,
    Overrides,
    Overwrite,
    PrintConfig,
    Recipe,
    Resume,
    print_config,
    read_config,
    run_and_tell,
)

if TYPE_CHECKING:
    from flatpeak.runs.summary import RunSummary


def reward_model(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    show_config: PrintConfig = False,
) -> None:
    """Train a reward model on preference pairs."""
    config = read_config(recipe, overrides)
    if show_config:
        print_config(config)
        return
    run_and_tell(
        "train_reward_model",
        config,
        resume=resume,
        overwrite=overwrite,
        as_json=as_json,
        label="reward-model",
        line=last_line,
        again=["reward-model", recipe, *(overrides or ())],
    )


def last_line(summary: RunSummary, *, report: Path) -> str:
    """`reward-model: held-out accuracy 0.49 -> 0.81 [0.77, 0.85] (longer wins 0.62) in 30 s, report: ...`.

    The accuracy of always preferring the longer answer stands beside it: a model that beats chance and not that may
    have learned nothing else.
    """
    first, last = summary.evaluation("start"), summary.evaluation("train") or summary.evaluation("start")
    before = _figure(first.metrics if first else {}, "accuracy")
    metrics = last.metrics if last else {}
    interval = last.intervals.get("accuracy") if last else None
    sure = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    return (
        f"reward-model: held-out accuracy {before} -> {_figure(metrics, 'accuracy')}{sure} "
        f"(longer wins {_figure(metrics, 'longer_wins')}) in {summary.wall_seconds:.0f} s, report: {report}"
    )


def _figure(metrics: Mapping[str, float | None], name: str) -> str:
    value = metrics.get(name)
    return "unknown" if value is None else f"{value:.2f}"
