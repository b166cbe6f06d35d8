"""`flatpeak eval`."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from flatpeak.errors import UserError

Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL|KEY=VALUE", help="Runs, checkpoints or Hub names, and settings to change."),
]


def evaluate(
    models: Models,
    recipe: Annotated[str | None, typer.Option(help="Ask and judge as this recipe does.")] = None,
    stages: Annotated[
        bool, typer.Option("--stages", help="Compare each run's model before training, after SFT, best and last.")
    ] = False,
    rows: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write every answer there, a JSON object a line.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Evaluate a model, or compare several on the same questions."""
    paths, overrides = split_arguments(models)
    if not paths:
        raise UserError("eval needs a model: a run, a checkpoint directory or a Hub name")
    if rows is not None and not Path(rows).absolute().parent.is_dir():
        raise UserError(f"--rows {rows}: no directory {Path(rows).parent}; make it first, or choose another")
    from flatpeak.cli.progress import open_progress
    from flatpeak.pipeline.compare import compare_checkpoints
    from flatpeak.runs.files import write_atomic
    from flatpeak.runs.summary import finite

    # What a reward function prints in this process is no part of the result.
    with redirect_stdout(sys.stderr), open_progress(sys.stderr) as progress:
        comparison = compare_checkpoints(paths, overrides, recipe=recipe, stages=stages, progress=progress)
    if rows is not None:
        write_atomic(Path(rows), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in comparison.rows()))
    typer.echo(json.dumps(finite(comparison.as_dict()), allow_nan=False) if as_json else comparison.render())


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Models and overrides: an argument with `=` is an override unless a file or directory has that name."""
    overrides = [argument for argument in arguments if "=" in argument and not Path(argument).exists()]
    return [argument for argument in arguments if argument not in overrides], overrides
