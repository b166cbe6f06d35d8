"""The second pass of TRL's policy-gradient trainers (GRPO, RLOO), by ratio mode.

Both write their loss in the log-probabilities that `_get_per_token_logps_and_entropies` returns. Answering that call
with recorded numbers evaluates the stock loss without the model, for every loss type and normalization there is.
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


Scores = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probabilities [B, T], entropies [B, T], the auxiliary loss of a mixture of experts."""
Inputs = Mapping[str, Any]
StockLoss = Callable[[Inputs], Tensor]

GRPO = "trl.trainer.grpo_trainer.GRPOTrainer"
RLOO = "trl.trainer.rloo_trainer.RLOOTrainer"
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo")
"""Loss types with a hard clip or cap. The others (sapo, vespo) are smooth and need nothing frozen but old log-probs."""


def path_of(kind: type) -> str:
    """The class's full name."""
    return f"{kind.__module__}.{kind.__qualname__}"


class PolicyLoss:
    """What one trainer's second pass differentiates in place of its loss."""

    def __init__(self, trainer: Trainer, mode: RatioMode, *, stock: str) -> None:
        """`stock`: the path of the TRL trainer that it is."""
        self.trainer = trainer
        self.mode = mode
        self.stock = stock
        self._answer: Callable[[Callable[[], Scores]], Scores] | None = None

    @classmethod
    def of(cls, trainer: Trainer, mode: RatioMode) -> PolicyLoss | None:
        """None for a trainer whose loss is a plain function of its inputs: that is evaluated again in every mode."""
        for kind in type(trainer).__mro__:
            if path_of(kind) in (GRPO, RLOO):
                return cls(trainer, mode, stock=path_of(kind))
        return None

    @property
    def evaluated_again(self) -> bool:
        """Whether the second pass is the stock loss with its old log-probabilities frozen, and nothing else."""
        if self.mode != "importance":
            return self.mode == "importance_clipped"
        owner = next(path_of(kind) for kind in type(self.trainer).__mro__ if "_compute_loss" in vars(kind))
        return owner != self.stock or (self.stock == GRPO and self.trainer.loss_type not in CLIPPED)

    def score(self, compute: Callable[[], Scores]) -> Scores:
        """Stands for the trainer's own scoring while a loss is evaluated."""
        return compute() if self._answer is None else self._answer(compute)

    def first(self, stock: StockLoss, inputs: Inputs, micro: MicroBatch) -> Tensor:
        """The first pass's loss; keeps its scores."""

        def keep(compute: Callable[[], Scores]) -> Scores:
            logprobs_BT, entropies_BT, aux = scores = compute()
            micro.scores = (
                logprobs_BT.detach(),
                None if entropies_BT is None else entropies_BT.detach(),
                None if aux is None else aux.detach(),
            )
            return scores

        with self._answering(keep):
            loss = stock(inputs)
        if micro.scores is None:
            raise UserError(
                f"{type(self.trainer).__name__} computes its loss without _get_per_token_logps_and_entropies, which "
                "gradient regularization records; install trl==1.16.0, or set grad_reg_strength=0"
            )
        return loss

    def again(self, stock: StockLoss, inputs: Inputs, micro: MicroBatch) -> Tensor:
        """The second pass's loss: its gradient at the first pass's weights is the first pass's gradient."""
        inputs = self._with_old(inputs, micro)
        if self.evaluated_again:
            return self._evaluate(stock, inputs, micro)
        without_policy = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        if micro.coefficients is None:
            micro.coefficients = self._coefficients(stock, inputs, without_policy, micro)
        here: list[Tensor] = []

        def note(compute: Callable[[], Scores]) -> Scores:
            scores = compute()
            here.append(scores[0])
            return scores

        with self._answering(note):  # advantages of 0 leave KL, entropy and auxiliary terms, as they are written
            others = self._evaluate(stock, without_policy, micro)
        weights_BT = micro.coefficients * self._ratio(here[0].detach(), inputs, micro)
        # The ratio is detached: c r grad log p is the gradient of c r for a token's own ratio, and of r times a
        # completion's common c for a completion's; the form stays right where the c of one completion differ.
        return others + frozen_policy_loss(here[0], weights_BT).sum()

    def _coefficients(self, stock: StockLoss, inputs: Inputs, without_policy: Inputs, micro: MicroBatch) -> Tensor:
        """d policy loss / d log-probability of each token, normalization included."""
        scores = first_scores(micro)

        def gradient(inputs: Inputs) -> Tensor:
            leaf_BT = scores[0].clone().requires_grad_()
            with torch.enable_grad(), self._answering(lambda compute: (leaf_BT, *scores[1:])):
                loss = self._evaluate(stock, inputs, micro)
                found: Tensor = torch.autograd.grad(loss, leaf_BT, materialize_grads=True)[0]
            return found

        return gradient(inputs) - gradient(without_policy)

    def _ratio(self, logprobs_BT: Tensor, inputs: Inputs, micro: MicroBatch) -> Tensor:
        """p / p of the first pass, by the trainer's own level; 1 where the mode or CISPO's cap freezes it."""
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
        if self.stock == GRPO:  # GSPO's geometric mean; RLOO's ratio is that of whole completions
            difference = difference / mask_BT.sum(1, keepdim=True).clamp(min=1)
        ratio: Tensor = difference.exp()
        return ratio

    def _with_old(self, inputs: Inputs, micro: MicroBatch) -> Inputs:
        """On-policy TRL stores no old log-probabilities and takes the current ones: in a second pass, the first's."""
        if self.stock == RLOO or inputs.get("old_per_token_logps") is not None:
            return inputs
        return {**inputs, "old_per_token_logps": first_scores(micro)[0]}

    def _evaluate(self, stock: StockLoss, inputs: Inputs, micro: MicroBatch) -> Tensor:
        micro.rewind(self.trainer)
        return stock(inputs)

    @contextmanager
    def _answering(self, answer: Callable[[Callable[[], Scores]], Scores]) -> Iterator[None]:
        before, self._answer = self._answer, answer
        try:
            yield
        finally:
            self._answer = before


def first_scores(micro: MicroBatch) -> Scores:
    """What the first pass left."""
    assert micro.scores is not None  # `first` ran before any replay, or raised
    return micro.scores
