"""The commands that pass a model on: `export`, `push`, and `serve`, which starts a vLLM server for a recipe."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flatpeak.cli.common import AsJson

if TYPE_CHECKING:
    from flatpeak.apps.publish.push import FolderFile

Python = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="A Python with vLLM. Default: FLATPEAK_VLLM_PYTHON, .venv-vllm, this one."),
]
Transfer = Annotated[
    Literal["sockets", "nccl"],
    typer.Option(help="The transport of weights from the trainer's memory, for rollout.engine.sync=endpoint."),
]


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


def serve(
    model: Annotated[str, typer.Argument(metavar="RUN-OR-MODEL", help="A run, a directory, or a model on the Hub.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- VLLM-ARGUMENTS]", help="Further arguments of vLLM's server.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: a free one.")] = 8000,
    python: Python = None,
    dtype: Annotated[str | None, typer.Option(help="The type of the weights. Default: the run's.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Most tokens of prompt and completion.")] = None,
    lora_rank: Annotated[int | None, typer.Option(min=1, help="Accept adapters up to this rank.")] = None,
    sleep: Annotated[
        bool, typer.Option("--sleep", help="Share one GPU with the trainer: sleep between rollouts.")
    ] = False,
    transfer: Transfer = "sockets",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that the start may take.")] = 1800.0,
    as_json: AsJson = False,
) -> None:
    """Start a vLLM server for rollouts, and print what to put into the recipe."""
    from flatpeak.apps.serve import ServeConfig, ServerProcess
    from flatpeak.rollout.vllm.vllm_python import find_python

    config = ServeConfig(
        model=model,
        host=host,
        port=port,
        dtype=dtype,
        max_model_len=max_model_len,
        lora_rank=lora_rank,
        sleep=sleep,
        transfer=transfer,
        arguments=tuple(arguments or ()),
    )
    program = find_python(python)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, _interrupt)
    with ServerProcess(config, python=program) as server:
        typer.echo(f"serve: starting vLLM for {model} (pid {server.pid})", err=as_json)
        server.wait_until_healthy(timeout=timeout)
        if as_json:
            typer.echo(json.dumps({"url": server.url, "pid": server.pid}))
        else:
            typer.echo(f"serve: ready at {server.url}; in the recipe, or on the command line:")
            typer.echo(f"rollout.engine.type=vllm rollout.engine.urls='[{server.url}]'")
        code = server.wait()
        typer.echo(f"serve: vLLM ended with exit code {code}; its last words:\n{server.log_tail()}", err=True)
    raise typer.Exit(1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the server as Ctrl-C does."""
    raise KeyboardInterrupt
