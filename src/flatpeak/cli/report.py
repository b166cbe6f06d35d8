"""The commands that read finished runs: `report` and `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flatpeak.errors import UserError

UNLIMITED = 100_000
"""Columns of output that goes to a file or another program."""


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, or one sweep: its directory or table.csv.")
    ],
    csv: Annotated[
        bool, typer.Option("--csv", help="Print the table of runs as CSV, for a spreadsheet, and write nothing.")
    ] = False,
    baseline: Annotated[
        str | None, typer.Option(help="Sweep: the arm to compare the others with. Default: the first.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Sweep: a column of its table, or a pattern. Default: every .final and .first column."),
    ] = None,
    at_least: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC=VALUE", help="Sweep: compare the shares of runs whose metric is at least this value."
        ),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Sweep: the significance level for the number of seeds needed.")] = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="Sweep: print the comparison as one JSON object.")] = False,
) -> None:
    """Rebuild each run's report.html and print its path; for several runs, also print a table that compares them.

    For a sweep, compare the arms over seeds: print the tables, and write comparison.md, comparison.json and plots/.
    """
    from flatpeak.experiments.comparison_report import table_path

    table = table_path(runs[0]) if len(runs) == 1 else None
    if table is not None:
        if csv:
            raise UserError(f"the table of a sweep is CSV already: {table}; leave out --csv")
        _compare_arms(table, baseline=baseline, metrics=metric, at_least=at_least, alpha=alpha, as_json=as_json)
        return
    if baseline is not None or metric or at_least or alpha != 0.05 or as_json:
        raise UserError(
            f"--baseline, --metric, --at-least, --alpha and --json are for a sweep, and {runs[0]} is not a sweep: give "
            "its directory or its table.csv alone"
        )
    from flatpeak.report.page import write_report
    from flatpeak.report.run_tables import compared_runs, run_table

    if csv:
        typer.echo(run_table(runs), nl=False)
        return
    for run in runs:
        typer.echo(write_report(run))
    if len(runs) > 1:
        typer.echo(f"\n{compared_runs(runs)}")


def _compare_arms(
    table: Path,
    *,
    baseline: str | None,
    metrics: Sequence[str] | None,
    at_least: Sequence[str] | None,
    alpha: float,
    as_json: bool,
) -> None:
    from flatpeak.experiments.comparison_report import to_json, to_markdown, write_comparison

    thresholds: dict[str, float] = {}
    for name, value in map(_threshold, at_least or ()):
        if thresholds.setdefault(name, value) != value:
            raise UserError(f"--at-least {name}=...: two values for one metric; give the report one of them")
    comparison = write_comparison(table, baseline=baseline, metrics=metrics or (), at_least=thresholds, alpha=alpha)
    if as_json:
        typer.echo(to_json(comparison), nl=False)
        return
    typer.echo(to_markdown(comparison))
    typer.echo(f"written: {table.with_name('comparison.md')}, comparison.json and plots/")


def _threshold(text: str) -> tuple[str, float]:
    """The metric and value of `METRIC=VALUE`."""
    name, _, value = text.rpartition("=")
    try:
        if name:
            return name, float(value)
    except ValueError:
        pass
    raise UserError(f"--at-least {text}: write METRIC=VALUE, such as reward/exploit.final=0.5")


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    step: Annotated[int | None, typer.Option(help="A step whose rollouts were logged. Default: the newest.")] = None,
    group: Annotated[str | None, typer.Option(help="A group's id. Default: the most different rewards.")] = None,
) -> None:
    """Show one group of a step as the algorithm saw it: rewards, advantages, tokens."""
    from rich.console import Console

    from flatpeak.report.explain_group import explain, render

    console = Console()
    width = console.width if console.is_terminal else UNLIMITED
    Console(width=width).print(render(explain(run, step=step, group=group), width=width))


def patterns(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    step: Annotated[int | None, typer.Option(help="Up to this logged step. Default: the newest.")] = None,
) -> None:
    """Show what the reward pays for in any prompt: words, phrases and lengths that earn more within their groups."""
    from rich.console import Console

    from flatpeak.report.patterns import patterns_of, reason_for_none, render_patterns

    steps, paid = patterns_of(run, step=step)
    typer.echo(f"steps {', '.join(map(str, steps))}")
    if not paid:
        typer.echo(reason_for_none(run, step=step))
        return
    console = Console()
    Console(width=console.width if console.is_terminal else UNLIMITED).print(render_patterns(paid))
