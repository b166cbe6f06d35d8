"""The sampler over vLLM servers within a run: made of a policy, stopped with the run, closed at its end."""

from __future__ import annotations

from collections.abc import Callable

from flatpeak.errors import UserError
from flatpeak.policy.model import Policy
from flatpeak.protocols import Sampler
from flatpeak.rollout.ahead import RolloutsAhead
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.vllm.drawing_thread import DrawingThread
from flatpeak.rollout.vllm.sampler import VLLMSampler
from flatpeak.types import SamplingParams


def served_sampler(
    policy: Policy, config: VLLMConfig, *, sampling: SamplingParams, quantization: str | None = None
) -> VLLMSampler:
    """A sampler over servers; UserError where they are not there, or cannot sample for this policy."""
    if quantization is not None:
        raise UserError(
            f"model.quantization={quantization} with rollout.engine.type=vllm: servers would sample from the base "
            "as it was before; leave model.quantization out, or use rollout.engine=auto"
        )
    _check_adapters(policy)
    policy.kernels.idle = True
    return VLLMSampler(policy, config, sampling=sampling)


def stop_waiting(sampler: Sampler, stopping: Callable[[], bool]) -> None:
    """Let a sampler that waits for servers raise StoppedError once `stopping()`."""
    drawing = drawing_sampler(sampler)
    if isinstance(drawing, VLLMSampler):
        drawing.stop_when(stopping)
    if isinstance(sampler, RolloutsAhead) and isinstance(sampler.background, DrawingThread):
        sampler.background.stop_when(stopping)


def close_sampler(sampler: Sampler) -> None:
    """End a sampler's second process or thread; delete what it has written for servers or for that process."""
    if isinstance(sampler, RolloutsAhead):
        sampler.close()
    drawing = drawing_sampler(sampler)
    if isinstance(drawing, VLLMSampler):
        drawing.close()


def drawing_sampler(sampler: Sampler) -> Sampler:
    """The sampler itself, or the one that rollouts ahead are made of."""
    return sampler.sampler if isinstance(sampler, RolloutsAhead) else sampler


def _check_adapters(policy: Policy) -> None:
    """UserError for adapters that vLLM does not load as they are."""
    if not policy.adapted:
        return
    adapter = policy.model.active_peft_config
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
