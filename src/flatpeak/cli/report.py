"""The commands that read finished runs: `report` and `explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

UNLIMITED = 100_000
"""Columns of output that goes to a file or another program."""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    csv: Annotated[
        bool, typer.Option("--csv", help="Print the table of runs as CSV, for a spreadsheet, and write nothing.")
    ] = False,
) -> None:
    """Rebuild each run's report.html and print its path; of several runs, also print a table that compares them."""
    from flatpeak.report.page import compared_runs, run_table, write_report

    if csv:
        typer.echo(run_table(runs), nl=False)
        return
    for run in runs:
        typer.echo(write_report(run))
    if len(runs) > 1:
        typer.echo(f"\n{compared_runs(runs)}")


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    step: Annotated[int | None, typer.Option(help="A step whose rollouts were logged. Default: the newest.")] = None,
    group: Annotated[str | None, typer.Option(help="A group's id. Default: the one whose rewards differ most.")] = None,
) -> None:
    """Show one group of a step as the algorithm saw it: rewards, advantages, tokens."""
    from rich.console import Console

    from flatpeak.report.explain_group import explain, render

    console = Console()
    width = console.width if console.is_terminal else UNLIMITED
    Console(width=width).print(render(explain(run, step=step, group=group), width=width))
