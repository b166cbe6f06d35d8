"""Gradient regularization for transformers.Trainer and the trainers that are built on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from flatpeak.integrations.arguments import GradientRegularizationArguments
from flatpeak.integrations.refusals import check_arguments, check_trainer
from flatpeak.integrations.session import Session


class GradientRegularizationMixin(Trainer):
    """Makes a trainer descend L + strength / 2 * ||grad L||^2 (arXiv 2602.18037). Name it first:

    ```
    @dataclass
    class Config(GradientRegularizationArguments, DPOConfig): ...

    class MyTrainer(GradientRegularizationMixin, DPOTrainer): ...
    ```

    After the last micro-batch of an update, all of them are run again at weights a small step further up the gradient.
    L is the whole loss of the update. For trainers other than GRPO and RLOO the second pass evaluates the loss again,
    whatever the ratio mode: a loss that draws a hard mask from the weights would need its own treatment. At strength
    0, and during grad_reg_warmup, the trainer does exactly what it does without the mixin.
    """

    grad_reg_trust_training_step = False
    """Set this in a class whose own training_step computes the gradient of transformers' training_step."""
    _grad_reg: Session | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """TypeError where a trainer comes before the mixin, whose methods would then not be called."""
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[1 : cls.__mro__.index(GradientRegularizationMixin)]
        for kind in before:
            if issubclass(kind, Trainer) and not issubclass(kind, GradientRegularizationMixin):
                raise TypeError(
                    f"{cls.__name__}: name the mixin first, "
                    f"class {cls.__name__}(GradientRegularizationMixin, {kind.__name__})"
                )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        arguments = check_arguments(self)
        if arguments.grad_reg_enabled:
            check_trainer(self, GradientRegularizationMixin)
            self._grad_reg = Session(self, arguments)

    @property
    def grad_reg_replaying(self) -> bool:
        """Whether a second pass is on: a loss that keeps records of its own should keep none then."""
        return self._grad_reg is not None and self._grad_reg.replaying is not None

    @property
    def grad_reg_skipped_updates(self) -> int:
        """Updates without their penalty so far, and those dropped because their gradient was not finite."""
        return 0 if self._grad_reg is None else self._grad_reg.book.skipped

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The trainer's own; the second pass follows an update's last."""
        stock = super().training_step
        if self._grad_reg is None:
            return stock(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        return self._grad_reg.training_step(stock, model, inputs, num_items_in_batch)

    def _prepare_inputs(self, inputs: Any) -> Any:
        stock = super()._prepare_inputs
        return stock(inputs) if self._grad_reg is None else self._grad_reg.prepare_inputs(stock, inputs)

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own, or what its second pass differentiates."""
        stock = super().compute_loss
        if self._grad_reg is None:
            return stock(model, inputs, *args, **kwargs)
        return self._grad_reg.loss(lambda inputs: stock(model, inputs, *args, **kwargs), inputs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        stock = partial(super()._get_per_token_logps_and_entropies, *args, **kwargs)
        if self._grad_reg is None or self._grad_reg.policy_loss is None:
            return stock()
        return self._grad_reg.policy_loss.score(stock)

    def get_high_entropy_mask(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's, drawn once per micro-batch of a regularized step."""
        stock = partial(super().get_high_entropy_mask, *args, **kwargs)
        return stock() if self._grad_reg is None else self._grad_reg.mask("high_entropy", stock)

    def get_off_policy_mask(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's, drawn once per micro-batch of a regularized step."""
        stock = partial(super().get_off_policy_mask, *args, **kwargs)
        return stock() if self._grad_reg is None else self._grad_reg.mask("off_policy", stock)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """With the `gradreg/` metrics in what is logged of training."""
        if self._grad_reg is not None and "loss" in logs:
            logs.update(self._grad_reg.book.take())
        super().log(logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._grad_reg is not None:
            self._grad_reg.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._grad_reg is not None and checkpoint is not None:
            self._grad_reg.load(checkpoint)


@dataclass
class GradientRegularizedTrainingArguments(GradientRegularizationArguments, TrainingArguments):
    """transformers' TrainingArguments, and ours."""


class GradientRegularizedTrainer(GradientRegularizationMixin):
    """transformers.Trainer with gradient regularization."""
