"""What a regularized step remembers of its micro-batches, and running them again as the trainer ran them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer

from flatpeak.gradreg.gradients import RandomState

PLAIN = (bool, int, float, str, Tensor, type(None))
METRICS = ("_metrics", "_stored_metrics")
"""Where trainers collect what they log."""


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """One micro-batch, as its first pass found it and left it."""

    model: nn.Module
    num_items: Any
    inputs: Any = None
    """As the trainer prepared them."""
    random: RandomState | None = None
    """When they had been prepared: generating completions draws numbers too."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """The trainer's plain attributes at that time, such as an entropy coefficient that the loss adapts."""
    scores: tuple[Tensor, Tensor | None, Tensor | None] | None = None
    """The first pass's log-probabilities, entropies and auxiliary loss, detached."""
    coefficients: Tensor | None = None
    """d policy loss / d log-probability."""
    masks: dict[str, Tensor] = field(default_factory=dict)
    """Masks that the loss drew from the first pass's values: drawn anew, they could differ between the passes."""

    def prepared(self, trainer: Trainer, inputs: Any) -> None:
        """Record the moment between preparing the inputs and the loss."""
        self.inputs = inputs
        self.random = RandomState.now()
        self.attributes = plain_attributes(trainer)

    def inputs_again(self) -> Any:
        """A shallow copy: losses take entries out and put others in."""
        return copy.copy(self.inputs)

    def rewind(self, trainer: Trainer) -> None:
        """Put the trainer's plain attributes back to where the loss found them."""
        vars(trainer).update(self.attributes)


def has_signal(inputs: Any) -> bool:
    """Whether a micro-batch has an advantage that is not 0; inputs without advantages, as of a preference loss, do."""
    advantages = inputs.get("advantages") if isinstance(inputs, Mapping) else None
    return bool(advantages.any()) if isinstance(advantages, Tensor) else True


def plain_attributes(trainer: Trainer) -> dict[str, Any]:
    """Numbers, texts and tensors, by reference: what a loss replaces, not what it changes in place."""
    return {name: value for name, value in vars(trainer).items() if isinstance(value, PLAIN)}


@contextmanager
def unchanged(trainer: Trainer) -> Iterator[None]:
    """Keep whatever the trainer's loss changes as it was, metrics included, whatever happens inside."""
    attributes = plain_attributes(trainer)
    metrics = [(held, copied(held)) for held in (getattr(trainer, name, None) for name in METRICS) if held is not None]
    synchronized = trainer.accelerator.sync_gradients
    try:
        yield
    finally:
        vars(trainer).update(attributes)
        for held, before in metrics:
            put_back(held, before)
        trainer.accelerator.gradient_state._set_sync_gradients(synchronized)


def copied(metrics: Any) -> Any:
    """A copy of nested dictionaries and lists; the numbers in them are shared."""
    if isinstance(metrics, Mapping):
        return {name: copied(value) for name, value in metrics.items()}
    return list(metrics) if isinstance(metrics, list) else metrics


def put_back(held: Any, before: Any) -> None:
    """Make `held` equal its copy, dictionaries in place: others hold references to them, some have defaults."""
    for name in [name for name in held if name not in before]:
        del held[name]
    for name, value in before.items():
        if isinstance(value, Mapping) and isinstance(held.get(name), Mapping):
            put_back(held[name], value)
        else:
            held[name] = value


def run_again(trainer: Trainer, micro: MicroBatch, *, last: bool) -> None:
    """The micro-batch's forward and backward pass, in the plain trainer's way: TRL's own counts generations."""
    trainer.accelerator.gradient_state._set_sync_gradients(last)
    offload = getattr(trainer, "maybe_activation_offload_context", nullcontext())
    with synchronization(trainer, micro.model, last=last), offload:
        Trainer.training_step(trainer, micro.model, micro.inputs_again(), micro.num_items)


def synchronization(trainer: Trainer, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Gradients meet across ranks in the last micro-batch, as in the trainer's own loop."""
    accelerator = trainer.accelerator
    if last or accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        return nullcontext()
    if getattr(trainer, "is_distributed_loading_by_transformers", False) and isinstance(model, FSDPModule):
        return trainer._defer_fsdp_gradient_reduction()  # type: ignore[no-any-return]
    return accelerator.no_sync(model=model)  # type: ignore[no-any-return]
