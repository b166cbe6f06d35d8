"""The command `push`: uploads a run's model to the Hugging Face Hub, with a card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatpeak.cli.common import AsJson

if TYPE_CHECKING:
    from flatpeak.apps.publish.push import FolderFile


def push(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or the directory of one of its checkpoints.")],
    repo: Annotated[str, typer.Option(metavar="OWNER/NAME", help="The model repository, created if it is missing.")],
    checkpoint: Annotated[str, typer.Option(metavar="best|last|sft|STEP", help="The checkpoint of the run.")] = "best",
    extras: Annotated[
        str, typer.Option("--with", metavar="rollouts,report", help="Further files to upload with the model.")
    ] = "",
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    base_model: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="The base on the Hub, if the recipe names a directory.")
    ] = None,
    license: Annotated[str, typer.Option(help="The Hub's field `license`, such as apache-2.0.")] = "unknown",
    dry_run: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Write exactly this folder and upload nothing; needs no token."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a run's model to the Hugging Face Hub, with a model card made from the run's files.

    Uses the token of HF_TOKEN or of hf auth login. Repeating the command continues an interrupted upload.
    """
    from flatpeak.apps.publish.hub_upload import check_repository_name, hub_token

    check_repository_name(repo)  # before torch is loaded
    if dry_run is None:
        hub_token()
    from flatpeak.apps.publish.push import push as push_model

    where = f"in {dry_run}" if dry_run is not None else f"to {repo}"
    result = push_model(
        run,
        repo=repo,
        checkpoint=checkpoint,
        extras=[name.strip() for name in extras.split(",") if name.strip()],
        private=private,
        base_model=base_model,
        license=license,
        dry_run=dry_run,
        announce=lambda files: None if as_json else _list_files(files, where),
    )
    if as_json:
        typer.echo(json.dumps(asdict(result), default=str))
    else:
        if result.local:
            keys = ", ".join(result.local)
            typer.echo(f"push: recipe.yaml names local files, which are not uploaded ({keys}); the card says so")
        typer.echo(f"push: {result.source} -> {result.address or result.directory}")


def _list_files(files: Sequence[FolderFile], where: str) -> None:
    typer.echo(f"push: {len(files)} files, {size_text(sum(file.size for file in files))}, {where}")
    for file in files:
        typer.echo(f"  {size_text(file.size):>9}  {file.name}")


def size_text(size: int) -> str:
    """A number of bytes in the largest decimal unit in which it is at least 1, as on the Hub."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
