"""The command `export`: a run's model as one plain directory."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from flatpeak.cli.common import AsJson


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or the directory of a checkpoint.")],
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="The directory to write, new or empty.")],
    checkpoint: Annotated[str, typer.Option(metavar="best|last|sft|STEP", help="The checkpoint of the run.")] = "best",
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="The type of the weights. Default: the run's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's model as one Hugging Face directory, adapters merged into their base."""
    from flatpeak.apps.publish.export import export as export_model

    result = export_model(run, directory, checkpoint=checkpoint, dtype=dtype)
    if as_json:
        typer.echo(json.dumps(asdict(result), default=str))
        return
    weights = "copied" if result.dtype is None else f"in {result.dtype}"
    lost = "" if result.lost is None else f", adapters merged ({result.lost:.1%} of their part lost to rounding)"
    typer.echo(f"export: {result.source} -> {result.path}, weights {weights}{lost}")
