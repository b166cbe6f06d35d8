"""`flatpeak report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    csv: Annotated[bool, typer.Option("--csv", help="Print one table of all runs instead.")] = False,
) -> None:
    """Write report.html anew, or print one table of several runs."""
    if csv:
        from flatpeak.experiments.table import run_table

        typer.echo(run_table(runs), nl=False)
        return
    from flatpeak.experiments.report import write_report

    for run in runs:
        typer.echo(write_report(run))
