"""The engines that draw rollouts: the recipe's own, trials of the native one, and a second process that draws ahead.

Weights travel to that process as a safetensors file, in memory where the system has such a file system, and lie there
only while both processes live.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import RunError, UserError, brief
from flatpeak.kernels.gpu_kernels import kernel_notices
from flatpeak.policy.kernel_verdicts import remembered
from flatpeak.policy.loading import load_policy, resumed_source
from flatpeak.policy.model import Policy
from flatpeak.protocols import Progress, Sampler, WrappedSampler
from flatpeak.rollout.ahead import Background, answer_request
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.engine import NativeEngine
from flatpeak.rollout.hf_generate import GenerateEngine
from flatpeak.rollout.vllm.sampler import VLLMSampler
from flatpeak.types import Group, Prompt, SamplingParams
from flatpeak.utils.child_process import ChildProcess, Parent, ending
from flatpeak.utils.scratch import ScratchDirectory

MEMORY: Final = Path("/dev/shm")
WEIGHTS: Final = "weights.safetensors"
_LAST_LINES: Final = 2
_FIX: Final = "go on with --resume, with rollout.staleness=0 if it fails again"


def build_sampler(policy: Policy, config: RunConfig, *, trains: bool = True) -> Sampler:
    """The recipe's servers, else the native engine or `generate`; `trains`: whether log-probabilities are needed."""
    configure_policy(policy, config)
    engine = config.rollout.engine
    if isinstance(engine, VLLMConfig):
        policy.kernels.idle = True
        return served_sampler(policy, config, trains=trains)
    if engine == "native" and not policy.native:
        raise UserError(f"rollout.engine=native: {policy.notice}; use rollout.engine=auto or generate")
    if engine == "generate" or not policy.native:
        return PlainSampler(policy, max_rows=config.rollout.max_rows)
    return NativeEngine(policy, max_rows=config.rollout.max_rows)


def served_sampler(policy: Policy, config: RunConfig, *, trains: bool = True) -> VLLMSampler:
    """The sampler over the recipe's servers; UserError where one is not there, or cannot sample for this policy."""
    assert isinstance(config.rollout.engine, VLLMConfig)
    if config.model.quantization is not None:
        raise UserError(
            f"model.quantization={config.model.quantization} with rollout.engine.type=vllm: servers would sample from "
            "the base as it was before; leave model.quantization out, or use rollout.engine=auto"
        )
    if policy.adapted:
        _check_served_adapter(policy.model.active_peft_config)
    sampling = config.rollout.sampling() if trains else SamplingParams()
    return VLLMSampler(policy, config.rollout.engine, sampling=sampling)


def _check_served_adapter(adapter: Any) -> None:
    """UserError for an adapter that vLLM does not load as it is."""
    for name in ("rank_pattern", "alpha_pattern"):
        if getattr(adapter, name, None):
            raise UserError(
                f"the adapter of model.lora.adapter has a {name}, which vLLM ignores, so that it would scale those "
                "layers otherwise: use another adapter, or rollout.engine=auto"
            )
    for name, value in (("dora", adapter.use_dora), ("modules_to_save", adapter.modules_to_save)):
        if value:
            raise UserError(
                f"model.lora.{name} with rollout.engine.type=vllm: vLLM loads low-rank matrices alone; leave "
                f"model.lora.{name} out, or use rollout.engine=auto"
            )


def configure_policy(policy: Policy, config: RunConfig) -> None:
    """Let a policy decode and train as the recipe says; UserError where it cannot."""
    policy.batch_invariant = config.rollout.batch_invariant
    policy.kernels.choose(config.rollout.kernels, unserved=policy.notice)


class PlainSampler(WrappedSampler):
    """transformers' `generate` on a policy, under the model's own attention."""

    def __init__(self, policy: Policy, *, max_rows: int) -> None:
        engine = GenerateEngine(policy.model, policy.tokenizer, eos_token_ids=policy.eos_token_ids, max_rows=max_rows)
        super().__init__(engine)
        self.decoder = "generate"
        self.policy = policy

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in order."""
        with self.policy.plain_attention():
            return self.sampler.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)


def announce_decoding(policy: Policy, prompts: Sequence[Prompt], progress: Progress, *, max_new_tokens: int) -> None:
    """Try the native engine on prompts, with notices where the batch decides bits or a kernel is not the fastest."""
    if not policy.native:
        return
    engine, tried = NativeEngine(policy), prompts[:3]
    trial = partial(batch_invariant, engine, tried, max_new_tokens=min(16, max_new_tokens))
    facts = policy.decoded_with, policy.batch_invariant, [len(each.token_ids) for each in tried], trial.keywords
    invariant = remembered(f"invariance {facts}", policy, trial)
    if policy.batch_invariant and not invariant:
        progress.notice(
            "on this machine a completion's log-probabilities depend on the batch in their last bits, so a token may "
            "rarely differ with other batch settings"
        )
    for reason in (*engine.notices, *kernel_notices()):
        progress.notice(reason)


def batch_invariant(
    engine: NativeEngine, prompts: Sequence[Prompt], *, group_size: int = 4, max_new_tokens: int = 16, seed: int = 0
) -> bool:
    """Whether prompts decoded alone and together give the same tokens and bitwise the same log-probs.

    True is evidence and not proof: a matrix product may round differently at a shape that was not tried. Each prompt is
    sampled alone (one row), as a group alone, and among all of them; give prompts of different lengths.
    """
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens)
        together = engine.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
        for prompt, group in zip(prompts, together, strict=True):
            for size in (1, group_size):
                (alone,) = engine.generate([prompt], group_size=size, sampling=sampling, seed=seed)
                if alone.completions != group.completions[:size]:
                    return False
    return True


class RolloutProcess(Background):
    """The background of `RolloutsAhead`: one process with a copy of the policy, started at the first request."""

    def __init__(self, policy: Policy, config: RunConfig) -> None:
        self._policy = policy
        self._config = config
        self._scratch: ScratchDirectory | None = None
        self._child: ChildProcess | None = None

    def begin(self, request: dict[str, Any]) -> None:
        """Write the weights of now, and send the request."""
        directory = (self._scratch or self._start()).path
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
        if self._scratch is not None:
            self._scratch.close()
        self._child = self._scratch = None

    def _start(self) -> ScratchDirectory:
        self._scratch = ScratchDirectory("rollouts", MEMORY if os.access(MEMORY, os.W_OK) else None)
        directory = self._scratch.path
        self._policy.save(directory)
        with (directory / "output.txt").open("wb") as output:
            self._child = ChildProcess(serve, stdout=output)
        self._send({"config": self._config.model_dump(mode="json"), "directory": str(directory)})
        return self._scratch

    def _send(self, message: dict[str, Any]) -> None:
        assert self._child is not None
        try:
            self._child.send(message)
        except OSError:
            raise self._lost() from None

    def _lost(self) -> RunError:
        assert self._child is not None
        assert self._scratch is not None
        end = ending(self._child.end(1.0))
        printed = (self._scratch.path / "output.txt").read_text(encoding="utf-8", errors="replace").split("\n")
        last = "; ".join([line.strip() for line in printed if line.strip()][-_LAST_LINES:])
        return RunError(f"the process that draws rollouts ahead died: {end}{f' ({last})' if last else ''}; {_FIX}")


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
            config = RunConfig.model_validate(start["config"])
            torch.set_num_threads(config.run.threads or 1)
            policy = load_policy(resumed_source(config.model, directory), texts=(), seed=0)
            for file in directory.glob("*model*.safetensors"):
                file.unlink()  # they lie in memory, and are read
            sampler = build_sampler(policy, config)
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


@torch.no_grad()
def _copy(values: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    if not values.keys() <= weights.keys():
        raise RunError("the copy of the policy has other weights than the policy")
    for name, value in values.items():  # the copy may also train what the policy has frozen
        weights[name].copy_(value)
