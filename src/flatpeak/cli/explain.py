"""`flatpeak explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

UNLIMITED = 100_000
"""Columns of output that goes to a file or another program."""


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    step: Annotated[int | None, typer.Option(help="A step whose rollouts were logged. Default: the newest.")] = None,
    group: Annotated[str | None, typer.Option(help="A group's id. Default: the one whose rewards differ most.")] = None,
) -> None:
    """Show one group of a step as the algorithm saw it: rewards, advantages, tokens."""
    from rich.console import Console

    from flatpeak.report.explain import explain, render

    console = Console()
    width = console.width if console.is_terminal else UNLIMITED
    Console(width=width).print(render(explain(run, step=step, group=group), width=width))
