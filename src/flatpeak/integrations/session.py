"""The gradient regularization of a Hugging Face trainer: micro-batches, second passes, metrics, checkpoints."""

from __future__ import annotations

import copy
import json
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from flatpeak.errors import UserError
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.guard import Report
from flatpeak.gradreg.parameters import choose_parameters
from flatpeak.gradreg.perturbation import Buffers, RandomState
from flatpeak.gradreg.regularizer import GradientRegularizer
from flatpeak.gradreg.shards import pairwise_dots
from flatpeak.integrations.arguments import (
    PUBLISHED_EXCLUDE,
    GradientRegularizationArguments,
    checked_config,
    in_argument_names,
)
from flatpeak.integrations.second_pass import (
    MicroBatch,
    SecondPassLoss,
    autocasts,
    compute_dtype,
    has_nonzero_advantages,
    plain_attributes,
    preserved_state,
    replay_micro_batch,
    without_autocast,
)

STATE = "gradient_regularization.json"
MEMORY = "gradient_regularization/memory.safetensors"
"""In a separate folder: vLLM, SGLang and others load every `*.safetensors` file next to config.json as weights."""
StockStep = Callable[[nn.Module, Any, Any], Tensor]
"""The trainer's training_step without the mixin."""


class Session:
    """The state of a regularized trainer for the methods of the mixin."""

    def __init__(self, trainer: Trainer, arguments: GradientRegularizationArguments) -> None:
        """Raise UserError if there are no parameters to perturb."""
        self.trainer = trainer
        self.arguments = arguments
        self.published = arguments.grad_reg_published
        self.schedule = arguments.grad_reg_schedule()
        self.config = arguments.grad_reg_config()
        if self.published:
            self.config = published_parameters(trainer.model, self.config, arguments.grad_reg_exclude)
        with argument_names_in_errors():
            choose_parameters(trainer.model, self.config)
        self.policy_loss = None if self.published else SecondPassLoss.for_trainer(trainer, self.config.ratio_mode)
        self.recording: MicroBatch | None = None
        self.replaying: MicroBatch | None = None
        self.metrics = MetricsAccumulator()
        self._micro_batches: list[MicroBatch] = []
        self._start: Buffers | None = None
        """The model's buffers after preparing the inputs of an update's first micro-batch."""
        self._active: bool | None = None
        self._prepared = False
        self._regularizer: GradientRegularizer | None = None
        self._loaded = False
        self._give_notices()
        trainer.add_callback(SessionCallback(self))

    @property
    def regularizer(self) -> GradientRegularizer:
        """The regularizer, built once the model is ready for training, because sharding replaces parameters."""
        if self._regularizer is None:
            with argument_names_in_errors():
                self._regularizer = GradientRegularizer(
                    self.trainer.model,
                    self.config,
                    compute_dtype=compute_dtype(self.trainer, self.arguments.grad_reg_precision),
                    seed=self.trainer.args.seed,
                    behavior=self.arguments.grad_reg_published_behavior(),
                    notice=lambda message: self.notice(in_argument_names(message)),
                )
        return self._regularizer

    def notice(self, message: str) -> None:
        """Give a notice as a warning on one rank."""
        if self.trainer.is_world_process_zero():
            warnings.warn(message, stacklevel=2)

    def training_step(self, stock: StockStep, model: nn.Module, inputs: Any, num_items: Any) -> Tensor:
        """Run a micro-batch and, after the last of an update, the second pass."""
        started = time.perf_counter()
        if self._active is None:
            self._active = self._begin()
        if self._active:
            micro = MicroBatch(model=model, num_items=num_items)
            self._micro_batches.append(micro)
            self.recording = micro
            try:
                with self._precision():
                    loss = stock(model, inputs, num_items)
            finally:
                self.recording = None
        else:
            loss = stock(model, inputs, num_items)
        if self.trainer.accelerator.sync_gradients:
            self._end_update()
        self.metrics.total_seconds += time.perf_counter() - started
        return loss

    def prepare_inputs(self, stock: Callable[[Any], Any], inputs: Any) -> Any:
        """Prepare and record the inputs in the first pass; return the recorded inputs in the second."""
        if self.replaying is not None:
            self.replaying.rewind(self.trainer)
            if not self.published and self.replaying.random is not None:
                self.replaying.random.restore()
            return copy.copy(self.replaying.inputs)
        prepared = stock(inputs)
        if self.recording is not None:
            self.recording.inputs = copy.copy(prepared)  # losses add and remove entries
            self.recording.random = RandomState.now()
            self.recording.attributes = plain_attributes(self.trainer)
            if self.recording is self._micro_batches[0]:
                self._start = Buffers(self.trainer.model)
        return prepared

    def loss(self, stock: Callable[[Any], Tensor], inputs: Any) -> Tensor:
        """The stock loss in the first pass, and the loss of the ratio mode in the second."""
        if self.policy_loss is not None and self.replaying is not None:
            return self.policy_loss.second(stock, inputs, self.replaying)
        if self.policy_loss is not None and self.recording is not None:
            return self.policy_loss.first(stock, inputs, self.recording)
        return stock(inputs)

    def mask(self, name: str, draw: Callable[[], Tensor]) -> Tensor:
        """The mask that the loss draws from its values in the first pass, which the second pass reuses."""
        micro = self.replaying or self.recording
        if micro is None or self.published:
            return draw()
        if name not in micro.masks:
            micro.masks[name] = draw()
        return micro.masks[name]

    def begin_training(self) -> None:
        """Discard the state of an earlier run."""
        if not self._loaded:
            self._regularizer = None
        self._loaded, self._active, self._prepared = False, None, False
        self._micro_batches.clear()

    def check_prepared(self) -> None:
        """Raise UserError before an update without a `training_step`."""
        if not self._prepared:
            raise UserError(
                f"{type(self.trainer).__name__} is about to update without gradient regularization: its gradient "
                "was computed outside training_step; set grad_reg_strength=0, or keep transformers' training loop"
            )
        self._prepared = False

    def save(self, directory: str) -> None:
        """Write the state that the next update depends on to the checkpoint. All ranks must call it."""
        tensors = {name: tensor.contiguous() for name, tensor in self.regularizer.tensors().items()}
        if not self.trainer.args.should_save:
            return
        state, memory = Path(directory, STATE), Path(directory, MEMORY)
        state.parent.mkdir(parents=True, exist_ok=True)
        if tensors:
            memory.parent.mkdir(exist_ok=True)
            save_file(tensors, memory)
        state.write_text(json.dumps(self.regularizer.state()), encoding="utf-8")

    def load(self, checkpoint: str) -> None:
        """Restore a checkpoint's state; only the number of steps if it was written without regularization."""
        self._regularizer = None
        state, memory = Path(checkpoint, STATE), Path(checkpoint, MEMORY)
        if state.exists():
            tensors = load_file(memory) if memory.exists() else {}
            self.regularizer.load(json.loads(state.read_text(encoding="utf-8")), tensors)
        else:
            self.regularizer.schedule.updates = self.trainer.state.global_step
            self.notice(f"{checkpoint} was written without gradient regularization, which starts now")
        self._loaded = True

    def _begin(self) -> bool:
        """Whether the update that starts has a penalty."""
        schedule = self.regularizer.schedule
        if self.schedule is not None:
            strength = self.schedule(self.trainer.state.global_step)
            try:
                schedule.config = checked_config({**self.config.model_dump(), "strength": strength})
            except UserError as error:
                raise UserError(str(error).replace("grad_reg_strength=", "grad_reg_scheduler gave ")) from None
        return schedule.config.enabled and schedule.updates >= schedule.config.delay_updates

    def _end_update(self) -> None:
        """Run the second pass if the update has a penalty, and prepare for the next update."""
        try:
            if self._active:
                self._collect(self._second_pass())
            else:
                self.regularizer.schedule.begin()
        finally:
            self._micro_batches.clear()
            self._active = self._start = None
        self._prepared = True

    def _second_pass(self) -> Report:
        after = RandomState.now()

        def replay() -> None:
            try:
                for index, micro in enumerate(self._micro_batches):
                    self.replaying = micro
                    replay_micro_batch(self.trainer, micro, last=index == len(self._micro_batches) - 1)
            finally:
                self.replaying = None

        try:
            with argument_names_in_errors(), preserved_state(self.trainer), self._precision():
                informative = any(has_nonzero_advantages(micro.inputs) for micro in self._micro_batches)
                return self.regularizer.regularize(replay, start=self._start, informative=informative)
        finally:
            if not self.published:
                after.restore()

    def _collect(self, report: Report) -> None:
        """Add a report to the metrics, and drop a gradient that would write NaN into the weights."""
        grads = [p.grad for p in self.regularizer.trainable if p.grad is not None]
        finite = math.isfinite(pairwise_dots([(grads, grads)])[0])
        if not finite:
            for parameter in self.regularizer.trainable:
                parameter.grad = None
            self.notice(f"step {self.trainer.state.global_step + 1}: the gradient is not finite; the update is dropped")
        self.metrics.update(report, dropped=not finite)

    def _precision(self) -> AbstractContextManager[None]:
        return without_autocast(self.trainer) if self.arguments.grad_reg_precision == "float32" else nullcontext()

    def _give_notices(self) -> None:
        arguments = self.arguments
        if not self.published and (arguments.grad_reg_g1_clip is not None or arguments.grad_reg_g2_clip is not None):
            self.notice(
                "grad_reg_g1_clip and grad_reg_g2_clip have no effect: the penalty uses unclipped gradients, and "
                "max_grad_norm clips the sum once; grad_reg_behavior=published clips them"
            )
        if arguments.grad_reg_precision == "float32" and autocasts(self.trainer):
            self.notice(
                "regularized steps run in float32 instead of the configured bfloat16 autocast; "
                "grad_reg_precision=autocast keeps it"
            )


class SessionCallback(TrainerCallback):
    """Passes the trainer's events to a session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin training after a checkpoint was loaded."""
        self.session.begin_training()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Check an update after clipping, before the optimizer's step."""
        self.session.check_prepared()


@contextmanager
def argument_names_in_errors() -> Iterator[None]:
    """A context that raises the regularizer's errors with the names of the trainer's arguments."""
    try:
        yield
    except UserError as error:
        raise UserError(in_argument_names(str(error))) from error


def published_parameters(
    model: nn.Module, config: GradientRegularizationConfig, exclude: list[str] | str | None
) -> GradientRegularizationConfig:
    """The configuration with the published set: all parameters whose names contain none of some words."""
    given = [exclude] if isinstance(exclude, str) else exclude
    words = PUBLISHED_EXCLUDE if given is None else given
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    chosen = tuple(name for name in names if not any(word in name for word in words))
    if not chosen:
        raise UserError(f"grad_reg_exclude={list(words)} excludes every trainable parameter")
    return config.model_copy(update={"perturbed": chosen})


class MetricsAccumulator:
    """Means of the reports between two logs, and the total number of skipped updates."""

    def __init__(self) -> None:
        self.skipped = 0
        """Updates without their penalty, plus updates dropped because of a gradient that is not finite."""
        self._values: dict[str, list[float]] = defaultdict(list)
        self._second_pass_seconds = 0.0
        self.total_seconds = 0.0
        """The time of the training steps, including second passes."""

    def update(self, report: Report, *, dropped: bool) -> None:
        """Add an update that had a penalty, or whose penalty was skipped."""
        skipped = dropped or report.skipped is not None
        self.skipped += skipped
        for name, value in {**report.metrics(), "gradreg/skipped": float(skipped)}.items():
            if math.isfinite(value):
                self._values[name].append(value)
        self._second_pass_seconds += report.seconds

    def pop_means(self) -> dict[str, float]:
        """Return the means, named as in docs/metrics.md, and reset; empty if no update was regularized."""
        means = {name: sum(values) / len(values) for name, values in self._values.items()}
        if means and self.total_seconds > 0:
            means["gradreg/time_share"] = self._second_pass_seconds / self.total_seconds
        self._values.clear()
        self._second_pass_seconds = self.total_seconds = 0.0
        return means
