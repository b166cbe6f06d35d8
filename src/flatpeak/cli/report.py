"""`flatpeak report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    csv: Annotated[
        bool, typer.Option("--csv", help="Print the table of runs as CSV, for a spreadsheet, and write nothing.")
    ] = False,
) -> None:
    """Rebuild each run's report.html and print its path; of several runs, also print a table that compares them."""
    from flatpeak.report.report import compared_runs, run_table

    if csv:
        typer.echo(run_table(runs), nl=False)
        return
    from flatpeak.report.report import write_report

    for run in runs:
        typer.echo(write_report(run))
    if len(runs) > 1:
        typer.echo(f"\n{compared_runs(runs)}")
