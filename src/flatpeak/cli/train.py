"""The commands that train: `demo`, `sft`, `train`, `fork`, `reward-model` and `sweep`."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import flatpeak
from flatpeak.cli.common import (
    AsJson,
    Overrides,
    Overwrite,
    PrintConfig,
    RecipeArgument,
    Resume,
    RunOutput,
    check_start,
    command_line,
    format_metric,
    last_line,
    print_config,
    read_config,
    start_processes,
)
from flatpeak.distributed.launch import check_alone
from flatpeak.errors import UserError

if TYPE_CHECKING:
    from flatpeak.config.run_config import RunConfig
    from flatpeak.experiments.plan import SweepPlan
    from flatpeak.experiments.sweep import SweepResult
    from flatpeak.runs.summary import RunSummary

DEMO = "flatpeak:demo"
_NO_SCIPY = 'flatpeak report needs SciPy to compare the arms: pip install "flatpeak[experiments]"'


def demo(overrides: Overrides = None, resume: Resume = False) -> None:
    """Make a small model, train it with SFT and GRPO, and report.

    Starts from nothing, on a CPU: SFT until the model is half right, GRPO until it is right, evaluated on held-out
    problems before and after. Overwrites an earlier run of the demo, unless you resume it.
    """
    config = read_config(DEMO, overrides)
    overwrite = not resume
    if overwrite:
        _check_made_by_demo(config)
    check_start(config, resume=resume, overwrite=overwrite)
    start_processes(config)
    output = RunOutput(label="demo", resumed_by=["demo", *(overrides or ())])
    with output.progress(config) as progress:
        result = flatpeak.train(config, progress=progress, resume=resume, overwrite=overwrite, command=command_line())
    output.finish(result, last_line("demo", result.summary, since="sft", report=result.report))


def _check_made_by_demo(config: RunConfig) -> None:
    """UserError if the demo would overwrite a run that another command or recipe has made."""
    from flatpeak.runs.directory import RunPaths
    from flatpeak.runs.manifest import read_starts

    run = RunPaths(Path(config.run.directory) / config.run.name)
    made_by_demo = any(start.get("command", [])[1:2] == ["demo"] for start in read_starts(run.manifest)[:1])
    if run.is_run() and not made_by_demo and not run.failed_before_first_step():
        raise UserError(f"{run.path} is a run that the demo did not make: choose another run.name, or delete it first")


def sft(
    recipe: RecipeArgument,
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
    check_start(config, resume=resume, overwrite=overwrite)
    start_processes(config)
    resumed_by = ["sft", recipe, *(overrides or ())]
    output = RunOutput(label="sft", as_json=as_json, resumed_by=resumed_by)
    with output.progress(config) as progress:
        result = flatpeak.sft(config, progress=progress, resume=resume, overwrite=overwrite, command=command_line())
    output.finish(result, last_line("sft", result.summary, since="start", report=result.report))


def train(
    recipe: RecipeArgument,
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
    check_start(config, resume=resume, overwrite=overwrite)
    start_processes(config)
    resumed_by = ["train", recipe, *(overrides or ())]
    output = RunOutput(label="train", as_json=as_json, resumed_by=resumed_by)
    with output.progress(config) as progress:
        result = flatpeak.train(config, progress=progress, resume=resume, overwrite=overwrite, command=command_line())
    output.finish(result, last_line("train", result.summary, since="start", report=result.report))


def fork(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or the name of a run in runs/.")],
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="A step of RL that has a checkpoint.")],
    name: Annotated[str, typer.Option(help="The name of the new run.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train a new run from a checkpoint of another run, with changed settings."""
    from flatpeak.apps.fork.forked_recipe import forked_recipe, source_run

    _, config = forked_recipe(source_run(run), name, overrides or ())
    output = RunOutput(label="fork", as_json=as_json)
    with output.progress(config) as progress:
        result = flatpeak.fork(
            run, step, name=name, settings=overrides or [], progress=progress, command=command_line()
        )
    output.finish(result, last_line("fork", result.summary, since="start", report=result.report))


def reward_model(
    recipe: RecipeArgument,
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
    check_alone(config.distributed, "reward models")  # before torch is loaded
    check_start(config, resume=resume, overwrite=overwrite)
    resumed_by = ["reward-model", recipe, *(overrides or ())]
    output = RunOutput(label="reward-model", as_json=as_json, resumed_by=resumed_by, trains_policy=False)
    with output.progress(config) as progress:
        result = flatpeak.train_reward_model(
            config, progress=progress, resume=resume, overwrite=overwrite, command=command_line()
        )
    output.finish(result, reward_model_line(result.summary, report=result.report))


def reward_model_line(summary: RunSummary, *, report: Path) -> str:
    """`reward-model: held-out accuracy 0.49 -> 0.81 [0.77, 0.85] (longer wins 0.62) in 30 s, report: ...`.

    The accuracy of always preferring the longer answer is next to it: a model that beats chance but not this may have
    learned nothing else.
    """
    first, last = summary.evaluation("start"), summary.evaluation("train") or summary.evaluation("start")
    before = format_metric(first.metrics if first else {}, "accuracy")
    metrics = last.metrics if last else {}
    interval = last.intervals.get("accuracy") if last else None
    bounds = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    return (
        f"reward-model: held-out accuracy {before} -> {format_metric(metrics, 'accuracy')}{bounds} "
        f"(longer wins {format_metric(metrics, 'longer_wins')}) in {summary.wall_seconds:.0f} s, report: {report}"
    )


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A sweep file, see docs/sweeps.md.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of the sweep file to change, such as seeds=20-24."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Worker processes. Default: one per visible GPU, else by the cores.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the sweep, print its runs, and stop.")] = False,
    arms: Annotated[
        list[str] | None, typer.Option("--arm", metavar="NAME", help="Run this arm alone; repeat it for more.")
    ] = None,
    skip_failed: Annotated[bool, typer.Option("--skip-failed", help="Do not repeat failed runs.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete and rerun the runs whose settings have changed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run arms, axes and seeds in parallel, or continue them, and write one table."""
    from flatpeak.experiments.config import only_arms, read_sweep
    from flatpeak.experiments.plan import build_plan

    config = read_sweep(file, overrides or ())
    config = only_arms(config, arms) if arms else config
    if dry_run:
        plan = build_plan(config, processes=processes)
        _print_plan(plan, as_json=as_json)
        return
    from flatpeak.experiments.records import refuse_lost_rows
    from flatpeak.experiments.sweep import run_sweep

    if arms:
        refuse_lost_rows(config)
    if find_spec("scipy") is None:
        typer.echo(f"sweep: {_NO_SCIPY}", err=as_json)

    stream = sys.stderr if as_json else sys.stdout
    with redirect_stdout(stream):
        result = run_sweep(
            config,
            processes=processes,
            skip_failed=skip_failed,
            overwrite=overwrite,
            notice=lambda text: typer.echo(text, err=as_json),
            command=command_line(),
        )
    _print_sweep(result, as_json=as_json)


def _print_sweep(result: SweepResult, *, as_json: bool) -> None:
    """Print the outcome of a sweep, and exit by its code."""
    if as_json:
        typer.echo(json.dumps(asdict(result), default=str))
    else:
        typer.echo(f"sweep: {_counts(result.done, result.failed, result.stopped + result.missing)}, {result.table}")
    if result.exit_code >= 128:
        arguments = [argument for argument in command_line() if argument != "--overwrite"]
        typer.echo(f"sweep: stopped by a signal; go on with\n{shlex.join(arguments)}", err=as_json)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _print_plan(plan: SweepPlan, *, as_json: bool) -> None:
    if as_json:
        typer.echo(
            json.dumps([{"run": run.name, "arm": run.arm, "seed": run.seed, **run.settings} for run in plan.runs])
        )
        return
    for line in (*plan.choices, *(cell.label for cell in plan.by_seed)):
        typer.echo(line)
    typer.echo(f"{len(plan.runs)} runs and {len(plan.steps)} prefix steps in {plan.directory}")


def _counts(done: int, failed: int, left: int) -> str:
    texts = [
        "1 run done" if done == 1 else f"{done} runs done",
        *([f"{failed} failed"] if failed else []),
        *([f"{left} left"] if left else []),
    ]
    return ", ".join(texts)
