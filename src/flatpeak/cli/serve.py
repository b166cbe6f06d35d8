"""The command `serve`: starts a vLLM server that a recipe can use."""

from __future__ import annotations

import json
import signal
from types import FrameType
from typing import Annotated, Literal

import typer

from flatpeak.cli.common import AsJson

Python = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="A Python with vLLM. Default: FLATPEAK_VLLM_PYTHON, .venv-vllm, this one."),
]
Transfer = Annotated[
    Literal["sockets", "nccl"],
    typer.Option(help="The transport of weights from the trainer's memory, for rollout.engine.sync=endpoint."),
]


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
