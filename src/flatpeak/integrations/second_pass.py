"""The second pass of a Hugging Face trainer: replays micro-batches with the state, precision and loss of the first.

TRL's policy-gradient trainers (GRPO, RLOO) compute their loss from the log-probabilities that
`_get_per_token_logps_and_entropies` returns. If the call returns recorded numbers instead, the stock loss is evaluated
without the model, for every loss type and normalization.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer

from flatpeak.errors import UserError
from flatpeak.functional.losses import frozen_policy_loss, importance_ratio
from flatpeak.gradreg.config import RatioMode
from flatpeak.gradreg.perturbation import RandomState

Scores = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probabilities [B, T], entropies [B, T], the auxiliary loss of a mixture of experts."""
Inputs = Mapping[str, Any]
StockLoss = Callable[[Inputs], Tensor]

GRPO = "trl.trainer.grpo_trainer.GRPOTrainer"
RLOO = "trl.trainer.rloo_trainer.RLOOTrainer"
HARD_CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo")
"""Loss types with a hard clip or cap. sapo and vespo are smooth and need only frozen old log-probabilities."""
PLAIN_TYPES = (bool, int, float, str, Tensor, type(None))
METRICS = ("_metrics", "_stored_metrics")
"""The attributes in which trainers collect metrics for their logs."""
MATMUL = torch.backends.cuda.matmul
IEEE = "ieee"


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """One micro-batch, with the state before its first pass and the results of its first pass."""

    model: nn.Module
    num_items: Any
    inputs: Any = None
    """The inputs as the trainer prepared them."""
    random: RandomState | None = None
    """The state of the generators after the preparation, because generating completions draws numbers too."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """The trainer's plain attributes after the preparation, such as an entropy coefficient that the loss adapts."""
    scores: Scores | None = None
    """The first pass's log-probabilities, entropies and auxiliary loss, detached."""
    coefficients: Tensor | None = None
    """d policy loss / d log-probability of each token."""
    masks: dict[str, Tensor] = field(default_factory=dict)
    """Masks that the loss drew from the first pass's values; masks of the second pass could differ."""

    def rewind(self, trainer: Trainer) -> None:
        """Restore the plain attributes that the trainer had before the loss."""
        vars(trainer).update(self.attributes)


def has_nonzero_advantages(inputs: Any) -> bool:
    """Whether a micro-batch has a nonzero advantage; True for inputs without advantages, as in a preference loss."""
    advantages = inputs.get("advantages") if isinstance(inputs, Mapping) else None
    return bool(advantages.any()) if isinstance(advantages, Tensor) else True


def plain_attributes(trainer: Trainer) -> dict[str, Any]:
    """The attributes that are numbers, texts or tensors, by reference, because losses replace them."""
    return {name: value for name, value in vars(trainer).items() if isinstance(value, PLAIN_TYPES)}


@contextmanager
def preserved_state(trainer: Trainer) -> Iterator[None]:
    """A context that restores everything that the trainer's loss changes, including metrics."""
    attributes = plain_attributes(trainer)
    collected = [getattr(trainer, name) for name in METRICS if getattr(trainer, name, None) is not None]
    metrics = [(values, copy_metrics(values)) for values in collected]
    synchronized = trainer.accelerator.sync_gradients
    try:
        yield
    finally:
        vars(trainer).update(attributes)
        for values, before in metrics:
            restore_metrics(values, before)
        trainer.accelerator.gradient_state._set_sync_gradients(synchronized)


def copy_metrics(metrics: Any) -> Any:
    """A copy of nested dictionaries and lists that shares the numbers."""
    if isinstance(metrics, Mapping):
        return {name: copy_metrics(value) for name, value in metrics.items()}
    return list(metrics) if isinstance(metrics, list) else metrics


def restore_metrics(metrics: Any, before: Any) -> None:
    """Make `metrics` equal to a copy. Dictionaries change in place: other objects refer to them, some have defaults."""
    for name in [name for name in metrics if name not in before]:
        del metrics[name]
    for name, value in before.items():
        if isinstance(value, Mapping) and isinstance(metrics.get(name), Mapping):
            restore_metrics(metrics[name], value)
        else:
            metrics[name] = value


def replay_micro_batch(trainer: Trainer, micro: MicroBatch, *, last: bool) -> None:
    """Rerun a micro-batch forward and backward by transformers' training_step, because TRL's counts generations."""
    trainer.accelerator.gradient_state._set_sync_gradients(last)
    offload = getattr(trainer, "maybe_activation_offload_context", nullcontext())
    with synchronization(trainer, micro.model, last=last), offload:
        Trainer.training_step(trainer, micro.model, copy.copy(micro.inputs), micro.num_items)


def synchronization(trainer: Trainer, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """A context that synchronizes gradients only in the last micro-batch, as in the trainer's loop."""
    accelerator = trainer.accelerator
    if last or accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        return nullcontext()
    if getattr(trainer, "is_distributed_loading_by_transformers", False) and isinstance(model, FSDPModule):
        return trainer._defer_fsdp_gradient_reduction()  # type: ignore[no-any-return]
    return accelerator.no_sync(model=model)  # type: ignore[no-any-return]


def path_of(kind: type) -> str:
    """The full name of a class, including its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


class SecondPassLoss:
    """The loss of the second pass of a policy-gradient trainer, by ratio mode."""

    def __init__(self, trainer: Trainer, mode: RatioMode, *, stock: str) -> None:
        """Wrap the loss of a trainer; `stock` is the path of its TRL base class."""
        self.trainer = trainer
        self.mode = mode
        self.stock = stock
        self._interceptor: Callable[[Callable[[], Scores]], Scores] | None = None

    @classmethod
    def for_trainer(cls, trainer: Trainer, mode: RatioMode) -> SecondPassLoss | None:
        """The loss for a TRL trainer; None for other trainers, which evaluate their loss again in every mode."""
        for kind in type(trainer).__mro__:
            if path_of(kind) in (GRPO, RLOO):
                return cls(trainer, mode, stock=path_of(kind))
        return None

    @property
    def reevaluates_loss(self) -> bool:
        """Whether the second pass evaluates the stock loss with frozen old log-probabilities."""
        if self.mode != "importance":
            return self.mode == "importance_clipped"
        owner = next(path_of(kind) for kind in type(self.trainer).__mro__ if "_compute_loss" in vars(kind))
        return owner != self.stock or (self.stock == GRPO and self.trainer.loss_type not in HARD_CLIPPED_LOSSES)

    def score(self, compute: Callable[[], Scores]) -> Scores:
        """The trainer's scores, computed or replaced during an evaluation of the loss."""
        return compute() if self._interceptor is None else self._interceptor(compute)

    def first(self, stock: StockLoss, inputs: Inputs, micro: MicroBatch) -> Tensor:
        """Evaluate the loss of the first pass and record its scores."""

        def keep(compute: Callable[[], Scores]) -> Scores:
            logprobs_BT, entropies_BT, aux = scores = compute()
            micro.scores = (
                logprobs_BT.detach(),
                None if entropies_BT is None else entropies_BT.detach(),
                None if aux is None else aux.detach(),
            )
            return scores

        with self._intercepting(keep):
            loss = stock(inputs)
        if micro.scores is None:
            raise UserError(
                f"{type(self.trainer).__name__} computes its loss without _get_per_token_logps_and_entropies, which "
                "gradient regularization needs; install trl==1.16.0, or set grad_reg_strength=0"
            )
        return loss

    def second(self, stock: StockLoss, inputs: Inputs, micro: MicroBatch) -> Tensor:
        """Evaluate the loss of the second pass; at the first pass's weights it has the first pass's gradient."""
        inputs = self._with_old(inputs, micro)
        if self.reevaluates_loss:
            return self._evaluate(stock, inputs, micro)
        without_policy = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        if micro.coefficients is None:
            micro.coefficients = self._coefficients(stock, inputs, without_policy, micro)
        logprobs: list[Tensor] = []

        def record(compute: Callable[[], Scores]) -> Scores:
            scores = compute()
            logprobs.append(scores[0])
            return scores

        with self._intercepting(record):  # advantages of 0 leave the KL, entropy and auxiliary terms
            others = self._evaluate(stock, without_policy, micro)
        weights_BT = micro.coefficients * self._ratio(logprobs[0].detach(), inputs, micro)
        # The ratio is detached: c r grad log p is the gradient of c r for a token's ratio. For a completion's ratio it
        # is the gradient of r times a common c, and it holds for different c within a completion too.
        return others + frozen_policy_loss(logprobs[0], weights_BT).sum()

    def _coefficients(self, stock: StockLoss, inputs: Inputs, without_policy: Inputs, micro: MicroBatch) -> Tensor:
        """d policy loss / d log-probability of each token, with normalization."""
        scores = first_scores(micro)

        def gradient(inputs: Inputs) -> Tensor:
            leaf_BT = scores[0].clone().requires_grad_()
            with torch.enable_grad(), self._intercepting(lambda compute: (leaf_BT, *scores[1:])):
                loss = self._evaluate(stock, inputs, micro)
                grad_BT: Tensor = torch.autograd.grad(loss, leaf_BT, materialize_grads=True)[0]
            return grad_BT

        return gradient(inputs) - gradient(without_policy)

    def _ratio(self, logprobs_BT: Tensor, inputs: Inputs, micro: MicroBatch) -> Tensor:
        """The ratio of p to the first pass's p, per token or completion; 1 if the mode or CISPO's cap freezes it."""
        first_BT = first_scores(micro)[0]
        if self.mode == "reuse":
            return torch.ones_like(first_BT)
        ratio = self._level(logprobs_BT, first_BT, inputs)
        if getattr(self.trainer, "loss_type", None) != "cispo":
            return ratio
        capped = self._level(first_BT, inputs["old_per_token_logps"], inputs) > self.trainer.epsilon_high
        return torch.where(capped, torch.ones_like(ratio), ratio)

    def _level(self, logprobs_BT: Tensor, old_logprobs_BT: Tensor, inputs: Inputs) -> Tensor:
        """The importance ratio, per token [B, T] or per completion [B, 1]."""
        level = getattr(self.trainer, "importance_sampling_level", "sequence")
        if level == "token":
            return importance_ratio(logprobs_BT, old_logprobs_BT)
        mask_BT = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask_BT = mask_BT * inputs["tool_mask"]
        difference = ((logprobs_BT - old_logprobs_BT) * mask_BT).sum(1, keepdim=True)
        if self.stock == GRPO:  # GSPO's geometric mean; RLOO uses the ratio of whole completions
            difference = difference / mask_BT.sum(1, keepdim=True).clamp(min=1)
        ratio: Tensor = difference.exp()
        return ratio

    def _with_old(self, inputs: Inputs, micro: MicroBatch) -> Inputs:
        """Add the first pass's log-probabilities as the old ones; TRL stores none on-policy and uses the current
        ones."""
        if self.stock == RLOO or inputs.get("old_per_token_logps") is not None:
            return inputs
        return {**inputs, "old_per_token_logps": first_scores(micro)[0]}

    def _evaluate(self, stock: StockLoss, inputs: Inputs, micro: MicroBatch) -> Tensor:
        micro.rewind(self.trainer)
        return stock(inputs)

    @contextmanager
    def _intercepting(self, answer: Callable[[Callable[[], Scores]], Scores]) -> Iterator[None]:
        before, self._interceptor = self._interceptor, answer
        try:
            yield
        finally:
            self._interceptor = before


def first_scores(micro: MicroBatch) -> Scores:
    """The scores of the first pass."""
    assert micro.scores is not None  # `first` ran before any replay
    return micro.scores


def autocasts(trainer: Trainer) -> bool:
    """Whether accelerate wraps the trainer's forward pass in autocast."""
    return bool(trainer.accelerator.native_amp)


def sharded_dtype(trainer: Trainer) -> torch.dtype | None:
    """The type to which FSDP2 casts weights; None without FSDP2 or a cast."""
    if not trainer.is_fsdp_enabled:
        return None
    policy = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy
    return getattr(policy, "param_dtype", None)


def compute_dtype(trainer: Trainer, precision: str) -> torch.dtype | None:
    """The type to which a regularized forward pass rounds weights, for the guard; None without rounding."""
    if precision == "float32":
        return None
    device = trainer.accelerator.device.type
    ambient = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return sharded_dtype(trainer) or (torch.bfloat16 if autocasts(trainer) else ambient)


@contextmanager
def without_autocast(trainer: Trainer) -> Iterator[None]:
    """A context without autocast, the caller's included, and without TensorFloat-32 in matrix products.

    accelerate wraps `forward` of prepared models in autocast and keeps the original function as an attribute.
    """
    accelerator = trainer.accelerator
    models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
    baked = [(model, vars(model)["forward"]) for model in models if "_original_forward" in vars(model)]
    amp, matmul = accelerator.native_amp, MATMUL.fp32_precision
    for model, _ in baked:
        model.forward = model._original_forward
    accelerator.native_amp = False
    MATMUL.fp32_precision = IEEE
    try:
        with torch.autocast(accelerator.device.type, enabled=False):
            yield
    finally:
        MATMUL.fp32_precision = matmul
        accelerator.native_amp = amp
        for model, forward in baked:
            model.forward = forward
