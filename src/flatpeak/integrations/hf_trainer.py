"""Gradient regularization for transformers.Trainer and trainers derived from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from flatpeak.errors import UserError
from flatpeak.integrations.arguments import GradientRegularizationArguments
from flatpeak.integrations.second_pass import autocasts, path_of, sharded_dtype
from flatpeak.integrations.session import Session

STOCK_TRAINING_STEPS = {
    "transformers.trainer.Trainer",
    "trl.trainer.grpo_trainer.GRPOTrainer",
    "trl.trainer.rloo_trainer.RLOOTrainer",
    "trl.trainer.dpo_trainer.DPOTrainer",
    "trl.trainer.kto_trainer.KTOTrainer",
    "trl.trainer.reward_trainer.RewardTrainer",
    "trl.trainer.sft_trainer.SFTTrainer",
}
"""Classes whose training_step differs from transformers' only in timing, counting and activation placement."""
LOOP_METHODS = ("train", "_inner_training_loop", "_run_epoch")
DISTRIBUTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")
FUSED_OPTIMIZERS = ("lomo", "adalomo", "layerwise")
"""Substrings of the names of optimizers that step during the backward pass."""


def check_arguments(trainer: Trainer) -> GradientRegularizationArguments:
    """The trainer's arguments; UserError if they lack the gradient-regularization arguments."""
    if not isinstance(trainer.args, GradientRegularizationArguments):
        raise UserError(
            f"{type(trainer).__name__}: args={type(trainer.args).__name__} has no grad_reg_ arguments; give "
            "GradientRegularizedGRPOConfig, or mix GradientRegularizationArguments into the trainer's config: "
            f"@dataclass class Config(GradientRegularizationArguments, {type(trainer.args).__name__})"
        )
    return trainer.args


def check_trainer(trainer: Trainer, mixin: type) -> None:
    """Raise UserError with the first reason, if any, why regularization of this trainer would be wrong."""
    for reason in (*_class_reasons(trainer, mixin), *_distribution_reasons(trainer), *_arithmetic_reasons(trainer)):
        raise UserError(f"gradient regularization of {type(trainer).__name__}: {reason}")


def _class_reasons(trainer: Trainer, mixin: type) -> Iterator[str]:
    kinds = [kind for kind in type(trainer).__mro__ if kind not in (mixin, Trainer, object)]
    for kind in kinds:
        for name in LOOP_METHODS:
            if issubclass(kind, Trainer) and name in vars(kind):
                yield (
                    f"{kind.__name__} overrides {name}, so its steps would not be regularized; use a trainer "
                    "that keeps transformers' loop"
                )
    trusted = getattr(trainer, "grad_reg_trust_training_step", False)
    for kind in kinds:
        if "training_step" in vars(kind) and path_of(kind) not in STOCK_TRAINING_STEPS and not trusted:
            yield (
                f"{kind.__name__} overrides training_step, but the second pass runs transformers' training_step; if "
                "both compute the same gradient, set grad_reg_trust_training_step = True in the "
                "class"
            )


def _distribution_reasons(trainer: Trainer) -> Iterator[str]:
    accelerator = trainer.accelerator
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed does not give access to gradients and master weights; use DDP or FSDP2"
    if trainer.is_fsdp_enabled and getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        yield "FSDP1 flattens all parameters into one; use FSDP2 (fsdp_config={'version': 2})"
    if trainer.args.n_gpu > 1:
        yield (
            "several GPUs in one process use nn.DataParallel; start one process per GPU (accelerate launch), or make "
            "only one visible (CUDA_VISIBLE_DEVICES=0)"
        )
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind not in DISTRIBUTED and not trainer.is_deepspeed_enabled:
        yield f"{kind} is untested; use one process, DDP or FSDP2"
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled or parallelism.tp_enabled):
        yield (
            "context, sequence and tensor parallelism split what the second pass must replay; remove parallelism_config"
        )


def _arithmetic_reasons(trainer: Trainer) -> Iterator[str]:
    args = trainer.args
    if args.fp16 or trainer.accelerator.mixed_precision not in ("no", "bf16"):
        yield "float16 scales gradients and float8 rounds them; use bf16=True or neither"
    cast = sharded_dtype(trainer)
    if args.grad_reg_precision == "float32" and cast is not None and str(cast) != "torch.float32":
        yield (
            f"FSDP2 casts weights to {str(cast)[6:]}, which rounds the perturbation away; set bf16=False, or "
            "grad_reg_precision=autocast to measure what remains"
        )
    if args.grad_reg_precision == "float32" and autocasts(trainer) and args.torch_compile:
        yield "a compiled forward pass always uses autocast; set bf16=False, torch_compile=False or " + (
            "grad_reg_precision=autocast"
        )
    liger = args.liger_kernel_config or {}
    if args.use_liger_kernel and liger.get("fused_linear_cross_entropy") is not False:
        yield (
            "Liger's fused loss computes its gradient in the forward pass; set "
            "liger_kernel_config={'fused_linear_cross_entropy': False}"
        )
    if getattr(args, "use_liger_loss", False):
        yield "Liger's loss hides the log-probabilities; set use_liger_loss=False"
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(name in optimizer for name in FUSED_OPTIMIZERS):
        yield f"optim={optimizer} steps during the first backward pass, before the second pass; use adamw_torch"


class GradientRegularizationMixin(Trainer):
    """A mixin that makes a trainer descend L + strength / 2 * ||grad L||^2 (arXiv 2602.18037). Name it first:

    ```
    @dataclass
    class Config(GradientRegularizationArguments, DPOConfig): ...

    class MyTrainer(GradientRegularizationMixin, DPOTrainer): ...
    ```

    After the last micro-batch of an update, all micro-batches of the update run again at weights a small step up the
    gradient. L is the whole loss of the update. For trainers other than GRPO and RLOO, the second pass evaluates the
    loss again in every ratio mode; a loss that draws a hard mask from the weights would need special treatment. At
    strength 0, and during grad_reg_warmup, the trainer behaves exactly as without the mixin.
    """

    grad_reg_trust_training_step = False
    """Set this to True in a class whose training_step computes the same gradient as transformers' training_step."""
    _grad_reg: Session | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError if a trainer precedes the mixin: it would hide the mixin's methods."""
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[1 : cls.__mro__.index(GradientRegularizationMixin)]
        for kind in before:
            if issubclass(kind, Trainer) and not issubclass(kind, GradientRegularizationMixin):
                raise TypeError(
                    f"{cls.__name__}: put the mixin first, "
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
        """Whether a second pass is running; a loss that keeps records should keep none then."""
        return self._grad_reg is not None and self._grad_reg.replaying is not None

    @property
    def grad_reg_skipped_updates(self) -> int:
        """The number of updates without their penalty, plus updates dropped because of a gradient that is not
        finite."""
        return 0 if self._grad_reg is None else self._grad_reg.metrics.skipped

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run the trainer's step and, after the last micro-batch of an update, the second pass."""
        stock = super().training_step
        if self._grad_reg is None:
            return stock(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        return self._grad_reg.training_step(stock, model, inputs, num_items_in_batch)

    def _prepare_inputs(self, inputs: Any) -> Any:
        stock = super()._prepare_inputs
        return stock(inputs) if self._grad_reg is None else self._grad_reg.prepare_inputs(stock, inputs)

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the trainer's loss or, in the second pass, the loss to differentiate."""
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
        """Compute TRL's mask, once per micro-batch of a regularized step."""
        stock = partial(super().get_high_entropy_mask, *args, **kwargs)
        return stock() if self._grad_reg is None else self._grad_reg.mask("high_entropy", stock)

    def get_off_policy_mask(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute TRL's mask, once per micro-batch of a regularized step."""
        stock = partial(super().get_off_policy_mask, *args, **kwargs)
        return stock() if self._grad_reg is None else self._grad_reg.mask("off_policy", stock)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log training metrics and the `gradreg/` metrics."""
        if self._grad_reg is not None and "loss" in logs:
            logs.update(self._grad_reg.metrics.pop_means())
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
    """transformers' TrainingArguments with the arguments of gradient regularization."""


class GradientRegularizedTrainer(GradientRegularizationMixin):
    """transformers' Trainer with gradient regularization."""
