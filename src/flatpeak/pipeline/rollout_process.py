"""A second process that draws rollouts with a copy of the policy, and the code that runs in it.

The two speak JSON over a socket pair. Weights travel as a safetensors file, in memory where the system has such a file
system, and lie there only while both processes live.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import RunError, brief
from flatpeak.pipeline.rollout_engines import build_sampler
from flatpeak.policy.loading import load_policy, resumed_source
from flatpeak.policy.model import Policy
from flatpeak.protocols import Sampler
from flatpeak.rollout.ahead import Background, answer_request
from flatpeak.utils import child_process

MEMORY: Final = Path("/dev/shm")
WEIGHTS: Final = "weights.safetensors"
_POLL_SECONDS: Final = 0.5
_LAST_LINES: Final = 2


class RolloutProcess(Background):
    """The background of `RolloutsAhead`: one process with a copy of the policy, started at the first request."""

    def __init__(self, policy: Policy, config: RunConfig) -> None:
        self._policy = policy
        self._config = config
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    @property
    def pid(self) -> int | None:
        """The process; None before the first request."""
        return None if self._process is None else self._process.pid

    def begin(self, request: dict[str, Any]) -> None:
        """Write the weights of now, and send the request."""
        directory = self._directory or self._start()
        weights = {name: weight.detach().contiguous() for name, weight in trained(self._policy).items()}
        save_file(weights, directory / WEIGHTS)
        self._send(request)

    def result(self) -> dict[str, Any]:
        """Wait for the answer. RunError where the process has failed or is gone."""
        assert self._pipe is not None
        assert self._process is not None
        try:
            while not self._pipe.poll(_POLL_SECONDS):
                if self._process.poll() is not None:
                    raise EOFError
            answer: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._lost() from None
        if "error" in answer:
            raise RunError(f"the process that draws rollouts ahead failed: {answer['error']}; {_FIX}")
        return answer

    def close(self) -> None:
        """Kill the process and delete its files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._process = self._pipe = self._directory = None

    def _start(self) -> Path:
        parent = MEMORY if os.access(MEMORY, os.W_OK) else None
        self._directory = directory = Path(tempfile.mkdtemp(prefix="flatpeak-rollouts-", dir=parent))
        self._policy.save(directory)
        ours, theirs = socket.socketpair()
        self._pipe = Connection(ours.detach())
        with theirs, (directory / "output.txt").open("wb") as output:
            self._process = child_process.start(serve, channel=theirs, stdout=output, stderr=output)
        self._send({"config": self._config.model_dump(mode="json"), "directory": str(directory), "parent": os.getpid()})
        return directory

    def _send(self, message: dict[str, Any]) -> None:
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(json.dumps(message).encode())
        except OSError:
            raise self._lost() from None

    def _lost(self) -> RunError:
        assert self._process is not None
        assert self._directory is not None
        child_process.wait_for_end(self._process, seconds=1.0)
        end = child_process.ending(self._process.wait())
        printed = (self._directory / "output.txt").read_text(encoding="utf-8", errors="replace").split("\n")
        last = "; ".join([line.strip() for line in printed if line.strip()][-_LAST_LINES:])
        return RunError(f"the process that draws rollouts ahead died: {end}{f' ({last})' if last else ''}; {_FIX}")


_FIX: Final = "go on with --resume, with rollout.staleness=0 if it fails again"


def trained(policy: Policy) -> dict[str, Tensor]:
    """The weights that training changes, by name, tied ones once."""
    return {name: weight for name, weight in policy.model.named_parameters() if weight.requires_grad}


def serve(descriptor: int) -> None:
    """Answer one request after another until the trainer is gone."""
    pipe = Connection(descriptor)
    try:
        start = json.loads(pipe.recv_bytes())
        directory = Path(start["directory"])
        ending = threading.Thread(target=_end_with, args=(start["parent"], directory))
        ending.start()  # no daemon: where the trainer is killed, it deletes the files before this process ends
        try:
            policy, sampler = _load(start["config"], directory)
            weights = dict(policy.model.named_parameters())
        except Exception as error:
            pipe.send_bytes(json.dumps({"error": brief(error)}).encode())
            return
        while True:
            request = json.loads(pipe.recv_bytes())
            try:
                _copy(load_file(directory / WEIGHTS), weights)
                answer = answer_request(sampler, request)
            except Exception as error:  # reported by the trainer, which ends
                answer = {"error": brief(error)}
            pipe.send_bytes(json.dumps(answer).encode())
    except (EOFError, OSError):
        return


def _load(section: dict[str, Any], directory: Path) -> tuple[Policy, Sampler]:
    config = RunConfig.model_validate(section)
    torch.set_num_threads(config.run.threads or 1)
    policy = load_policy(resumed_source(config.model, directory), texts=(), seed=0)
    for file in directory.glob("*model*.safetensors"):
        file.unlink()  # they lie in memory, and are read
    return policy, build_sampler(policy, config)


@torch.no_grad()
def _copy(values: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    if not values.keys() <= weights.keys():
        raise RunError("the copy of the policy has other weights than the policy")
    for name, value in values.items():  # the copy may also train what the policy has frozen
        weights[name].copy_(value)


def _end_with(parent: int, directory: Path) -> None:
    """End this process once the trainer is gone, in the middle of a rollout too, and delete what it has left."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)
