"""Jobs of ranks beyond whole updates: updates that break off, stale copies, refusals, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from flatpeak.errors import UserError
from flatpeak.gradreg import perturbation
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.guard import Report
from flatpeak.gradreg.parameters import choose_parameters, plain_name
from flatpeak.gradreg.regularizer import GradientRegularizer
from flatpeak.gradreg.shards import pairwise_dots
from support.distributed import (
    TASKS,
    Case,
    Losses,
    Outcome,
    Way,
    build,
    build_optimizer,
    gradients,
    parameters,
    run,
    same_bits,
    updates,
)

Moment = Literal["forward", "backward"]


class BrokenOffError(RuntimeError):
    """The error of the second pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """The state after an update that broke off in its second pass."""

    intact: bool
    """The parameters, shard for shard, are those of before."""
    gradient: dict[str, Tensor]
    resumed: Outcome | None
    """The updates after it."""


def plain(case: Case, way: Way) -> dict[str, Tensor]:
    """The gradient of one update without a regularizer anywhere."""
    model = build(case, way)
    for loss in Losses(case, way, model)():
        torch.autograd.backward(loss)
    return gradients(model)


def broken(case: Case, way: Way, *, moment: Moment, micro_batch: int, resume: bool) -> Broken:
    """An update whose second pass raises on every rank, in the middle of a micro-batch's forward or backward pass."""
    model = build(case, way)
    regularizer, losses = GradientRegularizer(model, case.config), Losses(case, way, model)
    trap = Trap(TASKS[case.task].parts(model), moment)

    def again() -> Iterator[Tensor]:
        trap.at = losses.drawn + micro_batch
        yield from losses()

    losses.watch = trap.count
    held = parameters(model)
    error: BaseException | None = None
    try:
        regularizer.accumulate(losses, again=again)
    except BrokenOffError as caught:
        error = caught  # kept alive: what it refers to must not hold the model in a half-finished state
    assert error is not None
    intact = all(isinstance(p, DTensor) for p in model.parameters()) if way == "fsdp" else True
    intact = intact and same_bits(parameters(model), held)
    return Broken(
        intact=intact,
        gradient=gradients(model),
        resumed=updates(case, model, regularizer, losses) if resume else None,
    )


class Trap:
    """Raises once, in one micro-batch: before the last part's forward pass, or after that part's backward pass."""

    def __init__(self, parts: list[nn.Module], moment: Moment) -> None:
        self.at, self.drawn = -1, 0
        if moment == "forward":
            parts[-1].register_forward_pre_hook(lambda *_: self.spring())
        else:
            parts[0].register_forward_hook(self.arm)

    def count(self, drawn: int) -> None:
        self.drawn = drawn

    def spring(self) -> None:
        if self.drawn == self.at:
            self.at = -1
            raise BrokenOffError

    def arm(self, module: nn.Module, args: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if value.requires_grad:
            value.register_hook(lambda grad: self.spring())


def gathered(case: Case, how: Literal["backward", "evaluation"], *, reshards: bool) -> Outcome:
    """Updates after whose first pass FSDP2 still holds gathered weights; `reshards=False` leaves them there."""
    model = build(case, "fsdp")
    regularizer, losses, optimizer = (
        GradientRegularizer(model, case.config),
        Losses(case, "fsdp", model),
        build_optimizer(case, model),
    )
    if how == "backward" and isinstance(model, FSDPModule):
        model.set_reshard_after_backward(False)

    def watched() -> Iterator[Tensor]:
        yield from losses()
        if how == "evaluation":  # the root's parameters stay gathered until a backward pass, and none comes
            with torch.no_grad():
                losses.task.loss(model, losses.micro[0])

    outcome = Outcome()
    with nullcontext() if reshards else patch.object(perturbation, "reshard"):
        for _ in range(case.steps):
            optimizer.zero_grad()
            outcome.reports.append(regularizer.accumulate(watched))
            if not reshards:  # before the optimizer, which moves shards
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()
            outcome.gradients.append(gradients(model))
            optimizer.step()
    return outcome


def mixed(case: Case) -> tuple[Report | str, bool, dict[str, Tensor]]:
    """One update with bfloat16 compute over float32 shards: (report or refusal, parameters intact, gradient)."""
    model = build(case, "fsdp", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    regularizer = GradientRegularizer(model, case.config, compute_dtype=torch.bfloat16)
    held = parameters(model)
    result = report_or_error(regularizer, Losses(case, "fsdp", model))
    return result, same_bits(parameters(model), held), gradients(model)


def never_synchronized(case: Case, way: Way, *, odd: float = 1.0) -> Report | str:
    """An update in which every rank keeps its own gradient; rank 1's is `odd` times its own."""
    model = build(case, way)
    losses = Losses(case, way, model, synchronize=False)
    factor = odd if dist.get_rank() == 1 else 1.0
    return report_or_error(GradientRegularizer(model, case.config), lambda: (loss * factor for loss in losses()))


def wrapped_late(case: Case) -> Report | str:
    """An update by a regularizer that was made before the model was sharded."""
    model = build(case, "single")
    regularizer = GradientRegularizer(model, case.config)
    for module in TASKS[case.task].parts(model):
        fully_shard(module)
    fully_shard(model)
    return report_or_error(regularizer, Losses(case, "fsdp", model))


def report_or_error(regularizer: GradientRegularizer, losses: Any) -> Report | str:
    """The report of an update, or the error's message."""
    try:
        return regularizer.accumulate(losses)
    except UserError as error:
        return str(error)


def refused(case: Case, way: Way) -> Report | str:
    model = build(case, way)
    return report_or_error(GradientRegularizer(model, case.config), Losses(case, way, model))


def known_by_some(case: Case, way: Way, *, informative: tuple[bool, ...]) -> tuple[float | None, float]:
    """(consistency, strength) of an update of which every rank says by itself whether it is informative."""
    model = build(case, way)
    regularizer = GradientRegularizer(model, case.config)
    report = regularizer.accumulate(Losses(case, way, model), informative=informative[dist.get_rank()])
    return report.consistency, report.strength


def over_mesh(case: Case, shape: tuple[int, int]) -> Outcome:
    """FSDP2 over replicas of shards (HSDP)."""
    return run(case, "fsdp", mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")))


def squared_norms() -> list[float]:
    """Of a vector whose halves are 1s and 2s, sharded plainly and as FSDP2 does over tensor parallelism."""
    mesh = init_device_mesh("cpu", (2,))
    here = torch.full((3,), dist.get_rank() + 1.0)
    both = [
        DTensor.from_local(here, mesh, [placement], run_check=False)
        for placement in (Shard(0), _StridedShard(0, split_factor=2))
    ]
    return [pairwise_dots([([tensor], [tensor])])[0] for tensor in both]


def chosen(task: str, way: Way, perturbed: Any) -> list[str]:
    """The plain names of the perturbed set."""
    config = GradientRegularizationConfig(perturbed=perturbed)
    model = build(Case(task=task, config=config), way)
    set_ = set(choose_parameters(model, config))
    return [plain_name(name) for name, parameter in model.named_parameters() if parameter in set_]


def remembered(case: Case, way: Way) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The memory's tensors after one update; the next update's gradient; the same of a regularizer that loaded them."""
    model = build(case, way)
    losses = Losses(case, way, model)
    first = GradientRegularizer(model, case.config)
    first.accumulate(losses)
    state, tensors = first.state(), {name: tensor.clone() for name, tensor in first.tensors().items()}
    second = GradientRegularizer(model, case.config)
    second.load(state, tensors)
    results = []
    for regularizer in (first, second):
        model.zero_grad()
        regularizer.accumulate(losses)
        results.append(gradients(model))
    return tensors, results[0], results[1]
