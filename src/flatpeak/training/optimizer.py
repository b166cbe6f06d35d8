"""The update that all training shares: optimizer, learning rate, masters, clipping, and their state as tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flatpeak.errors import DIVERGED, DivergedError, UserError
from flatpeak.gradreg.perturbation import RandomState
from flatpeak.gradreg.shards import distribute_like, full_tensor, gathered
from flatpeak.protocols import SavesModel
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.master_weights import BLOCK, PREFIX, SMALLEST_QUANTIZED, LocalShard, MasterWeights
from flatpeak.utils.buckets import in_buckets
from flatpeak.utils.host_memory import HostMemory
from flatpeak.utils.out_of_memory import MemoryBound

_Value = TypeVar("_Value")
BUCKET_SIZE = 2**25
"""Weights whose states `optimizer.offload` has on the device at a time; a larger weight is a bucket by itself."""
SMALLEST_OFFLOADED = 4096
"""Bytes below which a state stays on the device: step counts, and the tables that all 8-bit states share."""


def build_optimizer(
    parameters: Sequence[Tensor], config: OptimizerConfig, shards: Mapping[int, LocalShard] | None = None
) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable parameters, or the masters of those in a lower precision.

    `shards`: those of which a parameter is a part, by its position.
    """
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    if config.name == "adamw_8bit":
        return adamw_8bit(parameters, config, shards or {})
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def adamw_8bit(
    parameters: Sequence[Tensor], config: OptimizerConfig, shards: Mapping[int, LocalShard]
) -> torch.optim.Optimizer:
    """AdamW with blockwise quantized moments (Dettmers et al. 2022, arXiv 2110.02861); tensors of fewer than 4,096
    elements keep theirs in float32. `shards` are those of the parameters that are parts, by position."""
    try:
        from bitsandbytes.optim import AdamW8bit  # here, because bitsandbytes is an extra
    except ImportError as error:
        raise UserError("optimizer.name=adamw_8bit needs bitsandbytes: pip install bitsandbytes") from error

    class ShardAdamW8bit(AdamW8bit):
        """It quantizes a part if the whole weight is large, and skips a rank's empty part."""

        def get_config(self, gindex: int, pindex: int, group: Any) -> dict[str, Any]:
            settings: dict[str, Any] = super().get_config(gindex, pindex, group)
            quantized = shards[pindex].weight.numel() >= SMALLEST_QUANTIZED if pindex in shards else None
            return settings if quantized is None else settings | {"min_8bit_size": 0 if quantized else math.inf}

        def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            if p.numel():
                super().update_step(group, p, gindex, pindex)
            else:
                self.state[p]["step"] += 1

    kind = ShardAdamW8bit if shards else AdamW8bit
    optimizer: torch.optim.Optimizer = kind(
        parameters, lr=config.learning_rate, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    return optimizer


def check_blocks(weights: Mapping[str, nn.Parameter], config: OptimizerConfig, *, where: str) -> None:
    """UserError for 8-bit moments of a weight that is cut within a block: they would depend on the number of parts."""
    if config.name != "adamw_8bit":
        return
    for name, weight in weights.items():
        if not (isinstance(weight, DTensor) and weight.requires_grad and weight.numel() >= SMALLEST_QUANTIZED):
            continue
        if not LocalShard(weight).begins_blocks:
            raise UserError(
                f"{where}.name=adamw_8bit: {name} of {' x '.join(map(str, weight.shape))} is cut within a block of "
                f"{BLOCK} elements with one scale: shard over another number of processes, or use {where}.name=adamw"
            )


def learning_rate(config: OptimizerConfig, *, step: int, total_steps: int) -> float:
    """The rate of step 1, 2, ...: a linear warm-up, then constant, or down to final_fraction at the last step."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = (step - 1 - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
    remaining = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[config.schedule]
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * remaining)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use this rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, shards: Mapping[int, LocalShard] | None = None
) -> dict[str, Tensor]:
    """The optimizer's state by "<parameter index>.<name>", whole: with shards every rank has to call it."""
    parts = shards or {}
    return {
        f"{index}.{name}": parts[index].whole(name, value) if index in parts else gathered(torch.as_tensor(value))
        for index, parameter in enumerate(_parameters(optimizer))
        for name, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    *,
    host: HostMemory | None = None,
    shards: Mapping[int, LocalShard] | None = None,
) -> None:
    """Put back the state that `optimizer_tensors` returned, with `host` into the memory that `step_in_buckets` uses."""
    state: dict[int, dict[str, Tensor]] = {}
    parameters, parts = list(_parameters(optimizer)), shards or {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        parameter = parameters[int(index)]
        if int(index) in parts:
            value = parts[int(index)].local(name, value)
        alike = value.shape == parameter.shape and name != "step"
        state.setdefault(int(index), {})[name] = (
            value if host else distribute_like(value, parameter) if alike else value.clone()
        )
    torchs_own = isinstance(optimizer, torch.optim.AdamW | torch.optim.SGD)
    if torchs_own and host is None:
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return
    # bitsandbytes counts steps in an int, and its own load_state_dict would cast quantized moments.
    for position, parameter in enumerate(_parameters(optimizer)):
        for name, value in state.get(position, {}).items():
            if name == "step" and not torchs_own:
                optimizer.state[parameter][name] = int(value)
            elif host is None:
                optimizer.state[parameter][name] = value.to(parameter.device)
            else:
                optimizer.state[parameter][name] = host.store(value) if is_offloaded(value) else host.fetch(value)
    if host is not None:
        host.wait()


def is_offloaded(value: object) -> bool:
    """Whether an entry of an optimizer's state is a tensor that `optimizer.offload` moves."""
    return isinstance(value, Tensor) and value.nbytes >= SMALLEST_OFFLOADED


def step_in_buckets(
    optimizer: torch.optim.Optimizer, masters: MasterWeights, host: HostMemory, *, size: int = BUCKET_SIZE
) -> None:
    """Step an optimizer whose states, and masters, lie in host memory: of so many weights at a time on the device.

    Every optimizer here computes element by element, so that the result is that of one step for all. Weights without
    a gradient are left out, as the optimizer would.
    """
    (group,) = optimizer.param_groups
    try:
        weights = zip(masters.weights, masters.stepped, strict=True)
        counts = {index: own.numel() for index, (weight, own) in enumerate(weights) if weight.grad is not None}
        for bucket in in_buckets(counts, counts.__getitem__, most=size):
            group["params"] = [masters.stepped[index] for index in bucket]
            with masters.on_device(bucket), _states_on_device(optimizer, group["params"], host):
                masters.take_gradients(bucket)
                optimizer.step()
                masters.write(bucket)
    finally:
        group["params"] = masters.stepped
    host.wait()


@contextmanager
def _states_on_device(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], host: HostMemory
) -> Iterator[None]:
    """A context with these parameters' states on the device; those that a first step makes end on the host too."""
    hosts = [dict(optimizer.state.get(parameter, {})) for parameter in parameters]
    for parameter, held in zip(parameters, hosts, strict=True):
        fetched = {name: host.fetch(value) for name, value in held.items() if is_offloaded(value)}
        if fetched:
            optimizer.state[parameter].update(fetched)
    yield
    for parameter, held in zip(parameters, hosts, strict=True):
        state = optimizer.state[parameter]
        for name in [name for name, value in state.items() if is_offloaded(value)]:
            state[name] = host.store(state[name], into=held.get(name))


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@dataclass(kw_only=True, slots=True)
class UpdateStatistics:
    """Loss and gradient of one update, over all its micro-batches."""

    loss: float = 0.0
    grad_norm: float = 0.0
    """Norm of the gradient before clipping."""
    skipped: bool = False
    """Whether the gradient was not finite, so that the weights were left as they were."""


Data = TypeVar("Data")
Statistics = TypeVar("Statistics", bound=UpdateStatistics)


class BaseLearner(ABC, Generic[Data, Statistics]):
    """An optimizer over a model's weights; `update` accumulates the gradient of a loss, clips it once and steps."""

    def __init__(
        self,
        masters: Mapping[nn.Parameter, Tensor],
        config: OptimizerConfig,
        *,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """Build masters and optimizer; `compute_dtype` is that of MasterWeights."""
        self.config = config
        self.host = HostMemory.beside(next(iter(masters)).device) if config.offload else None
        """The memory of optimizer states and masters between updates, where it is not the device's own."""
        by_rank = config.name == "adamw_8bit" or self.host is not None
        self.masters = MasterWeights(masters, host=self.host, compute_dtype=compute_dtype, by_rank=by_rank)
        self.optimizer = build_optimizer(self.masters.stepped, config, self.masters.shards)
        self.updates = 0
        """Number of updates that have begun to change weights and optimizer."""
        self.before_pass: Callable[[], None] = lambda: None
        """Called before every pass over a micro-batch; it may raise StoppedError."""
        self.layers: Sequence[nn.Module] = ()
        """The model's layers, as far as transformers marks them."""
        self.updating = False
        """Whether an update is under way, or was left by an error."""
        self.bound: MemoryBound
        """`training.micro_batch_tokens`, halved where memory runs out; set by the subclass."""

    @property
    def computed_by(self) -> dict[str, Any]:
        """Whether the model is trained packed, and the kernels of its passes; None where there is no choice."""
        return {"native": None, "kernels": None}

    @property
    def micro_batch_tokens(self) -> int:
        """The most tokens of a micro-batch."""
        return self.bound.value

    @abstractmethod
    def micro_batch_count(self, tokens: int, *batches: Data) -> int:
        """The number of micro-batches of an update, for micro-batches of at most so many tokens."""

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Undo passes whose gradient is computed again; `state` is the learner's from before them."""
        self.zero_grad()

    @abstractmethod
    def accumulate_gradients(self, *batches: Data) -> Statistics:
        """Add the gradient of the loss to `.grad`, one micro-batch at a time."""

    @contextmanager
    def checked_layers(self) -> Iterator[None]:
        """A context in which each layer's part of a pass, forward or backward, begins with `before_pass` too.

        It may not enclose sampling: the hooks would keep native kernels from decoding.
        """
        hooks = [layer.register_forward_pre_hook(self._before_layer) for layer in self.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before_layer(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.before_pass()
        hidden = inputs[0] if inputs else None
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.before_pass())

    def check(self, statistics: Statistics) -> None:
        """Raise RunError for an update that is to change nothing, judged by its passes."""

    @abstractmethod
    def save_model(self, directory: Path) -> None:
        """Write the model in Hugging Face format."""

    @contextmanager
    def whole(self) -> Iterator[SavesModel]:
        """A context with the means to save the model; of a sharded one all ranks have to enter it."""
        yield self.save_model

    def update(self, *batches: Data, rate: float) -> Statistics:
        """Step the optimizer once, with the gradient of all the batches together.

        If memory runs out, the gradient is computed again from zero, in smaller micro-batches.
        A gradient that is not finite changes nothing and is reported as skipped.
        """
        self.updating = True
        set_learning_rate(self.optimizer, rate)
        self.zero_grad()
        start, state = RandomState.now(), self.state()

        def again() -> None:
            start.restore()
            self.rewind(state)

        for attempt in self.bound.attempts(lambda tokens: self.micro_batch_count(tokens, *batches), again=again):
            with attempt, self.checked_layers():
                statistics = self.accumulate_gradients(*batches)
        self.check(statistics)
        grad_norm = self.clip_gradients(*batches)
        statistics.grad_norm = float(grad_norm)
        statistics.skipped = not bool(torch.isfinite(grad_norm))
        if not statistics.skipped:
            self.updates += 1
            if self.host is not None:
                step_in_buckets(self.optimizer, self.masters, self.host)
            else:
                self.masters.take_gradients()
                self.optimizer.step()
                self.masters.write()
        self.updating = False
        return statistics

    def clip_gradients(self, *batches: Data) -> Tensor:
        """Clip the gradient of an update to `max_grad_norm`, once; its norm before that."""
        return full_tensor(torch.nn.utils.clip_grad_norm_(self.masters.weights, self.largest_norm))

    @property
    def largest_norm(self) -> float:
        """The norm to which gradients are clipped, which may be infinite."""
        return self.config.max_grad_norm or float("inf")

    def zero_grad(self) -> None:
        """Clear all gradients, the weights' and the masters'."""
        self.optimizer.zero_grad()
        self.masters.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """The state in tensors, for a checkpoint."""
        return optimizer_tensors(self.optimizer, self.masters.shards) | with_prefix(PREFIX, self.masters.tensors())

    def state(self) -> dict[str, Any]:
        """The rest of the state, as JSON."""
        return {}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue from a saved `state` and `tensors`."""
        masters, others = split_prefix(PREFIX, tensors)
        self.masters.load(masters)
        # A fork may have left gradient regularization, whose tensors have names of their own.
        own = {name: tensor for name, tensor in others.items() if name[0].isdecimal()}
        load_optimizer_tensors(self.optimizer, own, host=self.host, shards=self.masters.shards)


def check_finite(weights: Iterable[Tensor], *, step: int) -> None:
    """Raise DivergedError where a trained weight is NaN or infinite: such a checkpoint could not be trained on."""
    if not all(bool(full_tensor(torch.isfinite(weight).all())) for weight in weights):
        raise DivergedError(f"the weights are NaN or infinite after step {step} and are not saved: {DIVERGED}")


def with_prefix(prefix: str, tensors: Mapping[str, _Value]) -> dict[str, _Value]:
    """Put a prefix before every name."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def split_prefix(prefix: str, tensors: Mapping[str, _Value]) -> tuple[dict[str, _Value], dict[str, _Value]]:
    """Split off the tensors under a prefix, named without it, from all others."""
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return own, {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
