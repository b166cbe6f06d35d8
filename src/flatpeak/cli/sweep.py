"""The command `sweep`: many runs from one file."""

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

from flatpeak.cli.common import AsJson, command_line

if TYPE_CHECKING:
    from flatpeak.experiments.plan import SweepPlan


_NO_SCIPY = 'flatpeak report needs SciPy to compare the arms: pip install "flatpeak[experiments]"'


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
    skip_failed: Annotated[bool, typer.Option("--skip-failed", help="Do not repeat failed runs.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete and rerun the runs whose settings have changed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run arms, axes and seeds in parallel, or continue them, and write one table."""
    from flatpeak.experiments.config import read_sweep
    from flatpeak.experiments.plan import build_plan

    config = read_sweep(file, overrides or ())
    if dry_run:
        plan = build_plan(config, processes=processes)
        _print_plan(plan, as_json=as_json)
        return
    from flatpeak.experiments.sweep import run_sweep

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
