"""The command `flatpeak fork`: a new run from a checkpoint of another one."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from flatpeak.cli.running import AsJson, Overrides, last_line, show_run

if TYPE_CHECKING:
    from flatpeak.pipeline.train import RunResult
    from flatpeak.protocols import Progress


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
