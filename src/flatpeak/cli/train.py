"""The commands that train: `demo`, `sft`, `train`, `fork` and `reward-model`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatpeak.cli.common import (
    AsJson,
    Overrides,
    Overwrite,
    PrintConfig,
    Recipe,
    Resume,
    last_line,
    print_config,
    read_config,
    run_and_tell,
    show_run,
)

if TYPE_CHECKING:
    from flatpeak.pipeline.lifecycle import RunResult
    from flatpeak.protocols import Progress
    from flatpeak.runs.summary import RunSummary


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    show_config: PrintConfig = False,
) -> None:
    """Train by reinforcement learning, after SFT if the recipe has it."""
    config = read_config(recipe, overrides)
    if show_config:
        print_config(config)
        return
    line = partial(last_line, "train", since="start")
    run_and_tell(
        "train",
        config,
        resume=resume,
        overwrite=overwrite,
        as_json=as_json,
        label="train",
        line=line,
        again=["train", recipe, *(overrides or ())],
    )


def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    show_config: PrintConfig = False,
) -> None:
    """Fine-tune on the task's rationales, and stop there."""
    config = read_config(recipe, overrides)
    if show_config:
        print_config(config)
        return
    line = partial(last_line, "sft", since="start")
    run_and_tell(
        "sft",
        config,
        resume=resume,
        overwrite=overwrite,
        as_json=as_json,
        label="sft",
        line=line,
        again=["sft", recipe, *(overrides or ())],
    )


DEMO = "flatpeak:demo"


def demo(overrides: Overrides = None, resume: Resume = False) -> None:
    """Make a small model, train it with SFT and GRPO, and report.

    From nothing, on a CPU: SFT until the model is half right, GRPO until it is right, evaluated on held-out problems
    before and after. An earlier run of the demo is overwritten, unless it is to be resumed.
    """
    config = read_config(DEMO, overrides)
    line = partial(last_line, "demo", since="sft")
    again = ["demo", *(overrides or ())]
    run_and_tell("train", config, resume=resume, overwrite=not resume, label="demo", line=line, again=again)


def fork(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or the name of a run in runs/.")],
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="A step of RL that has a checkpoint.")],
    name: Annotated[str, typer.Option(help="What the new run is called.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train a new run on from a checkpoint of another one, with changed settings."""
    import flatpeak
    from flatpeak.pipeline.fork import metric_of

    def start(progress: Progress) -> RunResult:
        command = ["flatpeak", *sys.argv[1:]]
        return flatpeak.fork(run, step, name=name, settings=overrides or [], progress=progress, command=command)

    line = partial(last_line, "fork", since="start")
    show_run(start, metric=metric_of(run), as_json=as_json, label="fork", line=line)


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
        line=reward_model_line,
        again=["reward-model", recipe, *(overrides or ())],
    )


def reward_model_line(summary: RunSummary, *, report: Path) -> str:
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
