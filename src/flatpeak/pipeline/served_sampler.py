"""The sampler over vLLM servers within a run: made of a policy, stopped with the run, closed at its end."""

from __future__ import annotations

from collections.abc import Callable

from flatpeak.distributed.ranks import Ranks
from flatpeak.distributed.served_rollouts import ServedAheadSampler, ServedSampler
from flatpeak.errors import UserError
from flatpeak.policy.model import Policy
from flatpeak.protocols import AheadSampler, Sampler
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


def served_to_all(make: Callable[[], Sampler], policy: Policy, ranks: Ranks, *, ahead: bool) -> Sampler:
    """A sampler that only the first rank makes, and that draws for all ranks; `ahead` says whether it draws ahead."""
    policy.kernels.idle = True
    own = make() if ranks.is_first else None
    if not ahead:
        return ServedSampler(own, ranks, weights=policy.whole)
    assert own is None or isinstance(own, AheadSampler)
    return ServedAheadSampler(own, ranks, weights=policy.whole)


def stop_waiting(sampler: Sampler, stopping: Callable[[], bool]) -> None:
    """Let a sampler that waits for servers raise StoppedError once `stopping()`."""
    own, drawing = _own(sampler), drawing_sampler(sampler)
    if isinstance(drawing, VLLMSampler):
        drawing.stop_when(stopping)
    if isinstance(own, RolloutsAhead) and isinstance(own.background, DrawingThread):
        own.background.stop_when(stopping)


def close_sampler(sampler: Sampler) -> None:
    """End a sampler's second process or thread; delete what it has written for servers or for that process."""
    own, drawing = _own(sampler), drawing_sampler(sampler)
    if isinstance(own, RolloutsAhead):
        own.close()
    if isinstance(drawing, VLLMSampler):
        drawing.close()


def drawing_sampler(sampler: Sampler) -> Sampler | None:
    """The sampler itself, or the one that rollouts ahead are made of; None where another rank has it."""
    own = _own(sampler)
    return own.sampler if isinstance(own, RolloutsAhead) else own


def _own(sampler: Sampler) -> Sampler | None:
    """This rank's sampler, where the first one has it for all."""
    return sampler.own if isinstance(sampler, ServedSampler) else sampler


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
