"""A second process that draws rollouts with a copy of the policy, and the code that runs in it.

Weights travel as a safetensors file, in memory where the system has such a file system, and lie there only while both
processes live.
"""

from __future__ import annotations

import os
import shutil
import tempfile
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
from flatpeak.utils.child_process import ChildProcess, Parent, ending

MEMORY: Final = Path("/dev/shm")
WEIGHTS: Final = "weights.safetensors"
_LAST_LINES: Final = 2


class RolloutProcess(Background):
    """The background of `RolloutsAhead`: one process with a copy of the policy, started at the first request."""

    def __init__(self, policy: Policy, config: RunConfig) -> None:
        self._policy = policy
        self._config = config
        self._directory: Path | None = None
        self._child: ChildProcess | None = None

    def begin(self, request: dict[str, Any]) -> None:
        """Write the weights of now, and send the request."""
        directory = self._directory or self._start()
        weights = {name: weight.detach().contiguous() for name, weight in trained(self._policy).items()}
        save_file(weights, directory / WEIGHTS)
        self._send(request)

    def result(self) -> dict[str, Any]:
        """Wait for the answer. RunError where the process has failed or is gone."""
        assert self._child is not None
        try:
            answer: dict[str, Any] = self._child.receive()
        except (EOFError, OSError):
            raise self._lost() from None
        if "error" in answer:
            raise RunError(f"the process that draws rollouts ahead failed: {answer['error']}; {_FIX}")
        return answer

    def close(self) -> None:
        """Kill the process and delete its files."""
        if self._child is not None:
            self._child.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._child = self._directory = None

    def _start(self) -> Path:
        parent = MEMORY if os.access(MEMORY, os.W_OK) else None
        self._directory = directory = Path(tempfile.mkdtemp(prefix="flatpeak-rollouts-", dir=parent))
        self._policy.save(directory)
        with (directory / "output.txt").open("wb") as output:
            self._child = ChildProcess(serve, stdout=output)
        self._send({"config": self._config.model_dump(mode="json"), "directory": str(directory)})
        return directory

    def _send(self, message: dict[str, Any]) -> None:
        assert self._child is not None
        try:
            self._child.send(message)
        except OSError:
            raise self._lost() from None

    def _lost(self) -> RunError:
        assert self._child is not None
        assert self._directory is not None
        end = ending(self._child.end(1.0))
        printed = (self._directory / "output.txt").read_text(encoding="utf-8", errors="replace").split("\n")
        last = "; ".join([line.strip() for line in printed if line.strip()][-_LAST_LINES:])
        return RunError(f"the process that draws rollouts ahead died: {end}{f' ({last})' if last else ''}; {_FIX}")


_FIX: Final = "go on with --resume, with rollout.staleness=0 if it fails again"


def trained(policy: Policy) -> dict[str, Tensor]:
    """The weights that training changes, by name, tied ones once."""
    return {name: weight for name, weight in policy.model.named_parameters() if weight.requires_grad}


def serve(parent: Parent) -> None:
    """Answer one request after another until the trainer is gone."""
    try:
        start = parent.receive()
        directory = Path(start["directory"])
        parent.end_with(lambda: shutil.rmtree(directory, ignore_errors=True))
        try:
            policy, sampler = _load(start["config"], directory)
            weights = dict(policy.model.named_parameters())
        except Exception as error:
            parent.send({"error": brief(error)})
            return
        while True:
            request = parent.receive()
            try:
                _copy(load_file(directory / WEIGHTS), weights)
                answer = answer_request(sampler, request)
            except Exception as error:  # reported by the trainer, which ends
                answer = {"error": brief(error)}
            parent.send(answer)
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
