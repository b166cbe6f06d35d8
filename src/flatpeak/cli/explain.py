"""`flatpeak explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    step: Annotated[int, typer.Option(help="A step whose rollouts were logged.")],
    group: Annotated[str | None, typer.Option(help="A group's id; else the one whose rewards differ most.")] = None,
) -> None:
    """Tell one group of a step as the algorithm saw it."""
    from rich.console import Console

    from flatpeak.experiments.explain import explain, render

    Console().print(render(explain(run, step=step, group=group)))
