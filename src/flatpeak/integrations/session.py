"""Gradient regularization of one trainer, between its hooks: which steps, what is recorded, and the second pass."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from flatpeak.errors import UserError
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.distributed import pairwise_dots
from flatpeak.gradreg.parameters import choose_parameters
from flatpeak.gradreg.perturbation import Buffers, RandomState
from flatpeak.gradreg.regularizer import GradientRegularizer, Report
from flatpeak.integrations.arguments import (
    PUBLISHED_EXCLUDE,
    GradientRegularizationArguments,
    LogBook,
    checked_config,
    in_argument_names,
)
from flatpeak.integrations.policy_loss import MicroBatch, PolicyLoss, has_signal, run_again, unchanged

MATMUL = torch.backends.cuda.matmul
IEEE = "ieee"


def autocasts(trainer: Trainer) -> bool:
    """Whether accelerate wraps the trainer's forward pass in autocast."""
    return bool(trainer.accelerator.native_amp)


def sharded_dtype(trainer: Trainer) -> torch.dtype | None:
    """What FSDP2 casts weights to; None where it does not, or is not used."""
    if not trainer.is_fsdp_enabled:
        return None
    policy = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy
    return getattr(policy, "param_dtype", None)


def compute_dtype(trainer: Trainer, precision: str) -> torch.dtype | None:
    """What the weights are rounded to on their way into a regularized forward pass, for the guard."""
    if precision == "float32":
        return None
    return sharded_dtype(trainer) or (torch.bfloat16 if autocasts(trainer) else None)


@contextmanager
def full_precision(trainer: Trainer) -> Iterator[None]:
    """Without autocast, and without TensorFloat-32 in matrix products.

    accelerate bakes autocast into `forward` of the models it prepares and keeps the plain one beside it.
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
        yield
    finally:
        MATMUL.fp32_precision = matmul
        accelerator.native_amp = amp
        for model, forward in baked:
            model.forward = forward


STATE = "gradient_regularization.json"
MEMORY = "gradient_regularization/memory.safetensors"
"""In a folder of its own: vLLM, SGLang and others load every `*.safetensors` file beside config.json as weights."""
FORMER_MEMORY = "gradient_regularization.safetensors"
"""Its place in checkpoints of earlier versions."""


def save_state(regularizer: GradientRegularizer, directory: Path, *, writes: bool) -> None:
    """Write what the next update depends on. Every rank has to come here; the one that `writes` does."""
    tensors = {name: tensor.contiguous() for name, tensor in regularizer.tensors().items()}
    if not writes:
        return
    directory.mkdir(parents=True, exist_ok=True)
    if tensors:
        (directory / MEMORY).parent.mkdir(exist_ok=True)
        save_file(tensors, directory / MEMORY)
    (directory / STATE).write_text(json.dumps(regularizer.state()), encoding="utf-8")


def load_state(regularizer: GradientRegularizer, directory: Path) -> bool:
    """Go on from what a checkpoint holds; False where it holds nothing, having been written without regularization."""
    if not (directory / STATE).exists():
        return False
    memory = next((directory / name for name in (MEMORY, FORMER_MEMORY) if (directory / name).exists()), None)
    tensors = load_file(memory) if memory is not None else {}
    regularizer.load(json.loads((directory / STATE).read_text(encoding="utf-8")), tensors)
    return True


StockStep = Callable[[nn.Module, Any, Any], Tensor]


class Session:
    """What the mixin's methods share."""

    def __init__(self, trainer: Trainer, arguments: GradientRegularizationArguments) -> None:
        """UserError where there is nothing to perturb."""
        self.trainer = trainer
        self.arguments = arguments
        self.published = arguments.grad_reg_published
        self.schedule = arguments.grad_reg_schedule()
        self.config = arguments.grad_reg_config()
        if self.published:
            self.config = published_set(trainer.model, self.config, arguments.grad_reg_exclude)
        with our_names():
            choose_parameters(trainer.model, self.config)
        self.policy_loss = None if self.published else PolicyLoss.of(trainer, self.config.ratio_mode)
        self.recording: MicroBatch | None = None
        self.replaying: MicroBatch | None = None
        self.book = LogBook()
        self._window: list[MicroBatch] = []
        self._start: Buffers | None = None
        """The model's buffers when the inputs of an update's first micro-batch had been prepared."""
        self._active: bool | None = None
        self._prepared = False
        self._regularizer: GradientRegularizer | None = None
        self._loaded = False
        self._announce()
        trainer.add_callback(UpdateWatch(self))

    @property
    def regularizer(self) -> GradientRegularizer:
        """Built when the model is where it will be trained: sharding replaces parameters."""
        if self._regularizer is None:
            with our_names():
                self._regularizer = GradientRegularizer(
                    self.trainer.model,
                    self.config,
                    compute_dtype=compute_dtype(self.trainer, self.arguments.grad_reg_precision),
                    notice=lambda message: self.notice(in_argument_names(message)),
                )
        return self._regularizer

    def notice(self, message: str) -> None:
        """Tell it, on one rank."""
        if self.trainer.is_world_process_zero():
            warnings.warn(message, stacklevel=2)

    def training_step(self, stock: StockStep, model: nn.Module, inputs: Any, num_items: Any) -> Tensor:
        """One micro-batch; after the last of an update, its second pass."""
        started = time.perf_counter()
        if self._active is None:
            self._active = self._begin()
        if self._active:
            micro = MicroBatch(model=model, num_items=num_items)
            self._window.append(micro)
            with self._precision(), self._recording(micro):
                loss = stock(model, inputs, num_items)
        else:
            loss = stock(model, inputs, num_items)
        if self.trainer.accelerator.sync_gradients:
            self._finish()
        self.book.spent(time.perf_counter() - started)
        return loss

    def prepare_inputs(self, stock: Callable[[Any], Any], inputs: Any) -> Any:
        """Recorded in the first pass, given again in the second."""
        if self.replaying is not None:
            self.replaying.rewind(self.trainer)
            if not self.published and self.replaying.random is not None:
                self.replaying.random.restore()
            return self.replaying.inputs_again()
        prepared = stock(inputs)
        if self.recording is not None:
            self.recording.prepared(self.trainer, prepared)
            if self.recording is self._window[0]:
                self._start = Buffers(self.trainer.model)
        return prepared

    def loss(self, stock: Callable[[Any], Tensor], inputs: Any) -> Tensor:
        """The stock loss, or by ratio mode what stands for it in the second pass."""
        if self.policy_loss is not None and self.replaying is not None:
            return self.policy_loss.again(stock, inputs, self.replaying)
        if self.policy_loss is not None and self.recording is not None:
            return self.policy_loss.first(stock, inputs, self.recording)
        return stock(inputs)

    def mask(self, name: str, draw: Callable[[], Tensor]) -> Tensor:
        """A mask that the loss draws from its own values: the second pass keeps the first's."""
        micro = self.replaying or self.recording
        if micro is None or self.published:
            return draw()
        if name not in micro.masks:
            micro.masks[name] = draw()
        return micro.masks[name]

    def train_begins(self) -> None:
        """Forget a run that ended, or broke off, in the middle."""
        if not self._loaded:
            self._regularizer = None
        self._loaded, self._active, self._prepared = False, None, False
        self._window.clear()

    def optimizer_steps(self) -> None:
        """UserError where an update comes that `training_step` did not prepare."""
        if not self._prepared:
            raise UserError(
                f"{type(self.trainer).__name__} is about to update without gradient regularization: something computed "
                "the gradient without training_step; set grad_reg_strength=0, or keep transformers' training loop"
            )
        self._prepared = False

    def save(self, directory: str) -> None:
        """Beside the optimizer."""
        args = self.trainer.args
        save_state(self.regularizer, Path(directory), writes=args.should_save)

    def load(self, checkpoint: str) -> None:
        """Go on from a checkpoint, counting steps from it where it was written without regularization."""
        self._regularizer = None
        if not load_state(self.regularizer, Path(checkpoint)):
            self.regularizer.schedule.updates = self.trainer.state.global_step
            self.notice(f"{checkpoint} was written without gradient regularization: it begins here")
        self._loaded = True

    def _begin(self) -> bool:
        """Whether the update that begins has a penalty."""
        schedule = self.regularizer.schedule
        if self.schedule is not None:
            schedule.config = scheduled(self.config, self.schedule(self.trainer.state.global_step))
        return schedule.config.enabled and schedule.updates >= schedule.config.delay_updates

    def _finish(self) -> None:
        """The second pass, and what becomes of the update's gradient."""
        try:
            if self._active:
                self._settle(self._second_pass())
            else:
                self.regularizer.schedule.begin()
        finally:
            self._window.clear()
            self._active = self._start = None
        self._prepared = True

    def _second_pass(self) -> Report:
        after = RandomState.now()

        def replay() -> None:
            try:
                for index, micro in enumerate(self._window):
                    self.replaying = micro
                    run_again(self.trainer, micro, last=index == len(self._window) - 1)
            finally:
                self.replaying = None

        try:
            with our_names(), unchanged(self.trainer), self._precision():
                informative = any(has_signal(micro.inputs) for micro in self._window)
                return self.regularizer.regularize(replay, start=self._start, informative=informative)
        finally:
            if not self.published:
                after.restore()

    def _settle(self, report: Report) -> None:
        """Collect metrics; drop a gradient that would put NaN into the weights."""
        grads = [p.grad for p in self.regularizer.trainable if p.grad is not None]
        finite = math.isfinite(pairwise_dots([(grads, grads)])[0])
        if not finite:
            for parameter in self.regularizer.trainable:
                parameter.grad = None
            self.notice(f"step {self.trainer.state.global_step + 1}: the gradient is not finite; the update is dropped")
        self.book.update(report, dropped=not finite)

    def _precision(self) -> AbstractContextManager[None]:
        return full_precision(self.trainer) if self.arguments.grad_reg_precision == "float32" else nullcontext()

    @contextmanager
    def _recording(self, micro: MicroBatch) -> Iterator[None]:
        self.recording = micro
        try:
            yield
        finally:
            self.recording = None

    def _announce(self) -> None:
        arguments = self.arguments
        if not self.published and (arguments.grad_reg_g1_clip is not None or arguments.grad_reg_g2_clip is not None):
            self.notice(
                "grad_reg_g1_clip and grad_reg_g2_clip have no effect: the penalty is formed from unclipped gradients, "
                "and the sum is clipped once by max_grad_norm; grad_reg_behavior=published clips them"
            )
        if arguments.grad_reg_precision == "float32" and autocasts(self.trainer):
            self.notice(
                "regularized steps run in float32, without the bfloat16 autocast that is configured; "
                "grad_reg_precision=autocast keeps it"
            )


class UpdateWatch(TrainerCallback):
    """Tells a session when training begins and when an update is about to be made."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Called after a checkpoint was loaded."""
        self.session.train_begins()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Called after clipping."""
        self.session.optimizer_steps()


@contextmanager
def our_names() -> Iterator[None]:
    """Errors of the regularizer in the words of the trainer's arguments."""
    try:
        yield
    except UserError as error:
        raise UserError(in_argument_names(str(error))) from error


def published_set(
    model: nn.Module, config: GradientRegularizationConfig, exclude: list[str] | str | None
) -> GradientRegularizationConfig:
    """The configuration with the published set: parameters whose name contains none of some words."""
    words = PUBLISHED_EXCLUDE if exclude is None else (exclude,) if isinstance(exclude, str) else tuple(exclude)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    chosen = tuple(name for name in names if not any(word in name for word in words))
    if not chosen:
        raise UserError(f"grad_reg_exclude={list(words)} leaves no trainable parameter to perturb")
    return config.model_copy(update={"perturbed": chosen})


def scheduled(config: GradientRegularizationConfig, strength: float) -> GradientRegularizationConfig:
    """The configuration at the strength a schedule gives. UserError that names the argument where it is none."""
    try:
        return checked_config({**config.model_dump(), "strength": strength})
    except UserError as error:
        raise UserError(str(error).replace("grad_reg_strength=", "grad_reg_scheduler gave ")) from None
