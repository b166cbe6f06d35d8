"""One regularized update: the gradient, the same gradient a step further, and their difference as a penalty."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatpeak.errors import UserError
from flatpeak.gradreg.config import CORRECTED, GradientRegularizationConfig, PublishedBehavior
from flatpeak.gradreg.directions import (
    Direction,
    central_difference,
    default_step,
    exact_curvature,
    forward_difference,
    gradient_direction,
    random_direction,
    relative_step,
    step_consistency,
    step_size,
)
from flatpeak.gradreg.gradients import add_gradients, backward, clip_to_norm, combine, take_gradients
from flatpeak.gradreg.guard import Guard, Report
from flatpeak.gradreg.guard_messages import is_meaningful
from flatpeak.gradreg.parameters import (
    check_not_sparse,
    choose_parameters,
    coarsest,
    is_coarser,
    observe_precision,
)
from flatpeak.gradreg.perturbation import Buffers, Perturbation, PerturbationFidelity, RandomState
from flatpeak.gradreg.schedule import PenaltyMemory, StrengthSchedule
from flatpeak.gradreg.shards import check_replicas_agree, collective_device, lowest_over_ranks, pairwise_dots

Losses = Callable[[], Iterable[Tensor]]
"""The losses of all micro-batches of an update; each is backpropagated before the next is drawn."""


class GradientRegularizer:
    """Turns the gradient of L into that of L + strength / 2 * ||grad L||^2 (arXiv 2602.18037), unclipped.

    ```
    regularizer = GradientRegularizer(model, GradientRegularizationConfig(strength="calibrated:3"))
    optimizer.zero_grad()
    regularizer.accumulate(lambda: (loss_of(micro) for micro in micro_batches))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    ```
    """

    def __init__(
        self,
        model: nn.Module,
        config: GradientRegularizationConfig,
        *,
        masters: Mapping[nn.Parameter, Tensor] | None = None,
        compute_dtype: torch.dtype | None = None,
        seed: int = 0,
        notice: Callable[[str], None] = warnings.warn,
        average: Callable[[Iterable[Tensor]], None] | None = None,
        behavior: PublishedBehavior = CORRECTED,
    ) -> None:
        """Choose the parameters to perturb; UserError if there are none.

        `masters`: the float32 values of parameters in a lower precision. `compute_dtype`: the type to which the forward
        pass rounds weights (autocast, a sharding policy); by default the first pass observes it. `seed`: the seed of
        random directions, the same on every rank. `average` replaces tensors by their means over the ranks, for callers
        who average gradients without a wrapper; exact curvature on several ranks needs it. `behavior`: deviations of
        published code, for comparisons.
        """
        if config.difference == "exact" and behavior != CORRECTED:
            raise UserError("difference=exact has no second gradient: do not give behavior")
        self.config = config
        self.behavior = behavior
        self.seed = seed
        self.average = average
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.parameters = choose_parameters(model, config)
        self.perturbation = Perturbation(model, self.parameters, masters=masters, compute_dtype=compute_dtype)
        self.schedule = StrengthSchedule(config=config)
        self.memory = PenaltyMemory(self.parameters)
        self.guard = Guard(config, notice=notice)
        self.precision_known = compute_dtype is not None
        """Whether the caller gave the type or a first pass has observed it."""

    def accumulate(
        self,
        losses: Losses,
        *,
        again: Losses | None = None,
        rest: Losses | None = None,
        scale: float = 1.0,
        informative: bool = True,
    ) -> Report:
        """Run one update's passes and leave the regularized gradient in `.grad`, unclipped.

        `again` gives the losses of the second pass if they are not computed as in the first; they must have the same
        gradient at theta. `rest` are micro-batches of the first pass only: the penalty is then that of `scale` times
        the gradient of `losses`, an estimate for the whole update. If an update is not `informative`, for example
        because all advantages are 0, it does not move a tracked strength, and the guard does not check it.
        """
        self.schedule.begin()
        if not self.schedule.active:
            backward(losses())
            backward(rest() if rest is not None else ())
            return Report()
        previous = take_gradients(self.trainable)
        try:
            return self._regularized_update(losses, again or losses, rest, scale, informative)
        finally:
            add_gradients(previous)

    def regularize(
        self, replay: Callable[[], object], *, start: Buffers | None = None, informative: bool = True
    ) -> Report:
        """Run the second pass of an update whose first gradient is in `.grad`; `replay` adds the second's to it.

        `replay` must repeat the first pass's random numbers. `start` is `buffers()` from before the first pass; only
        models whose passes change buffers that they use need it.
        """
        self.schedule.begin()
        if not self.schedule.active:
            return Report()
        return self._regularize(_Replay(run=replay, start=start, informative=informative), base=None)

    def buffers(self) -> Buffers:
        """Take a snapshot of the model's buffers."""
        return Buffers(self.perturbation.model)

    def state(self) -> dict[str, Any]:
        """The state that the next update depends on, apart from `tensors`."""
        computed = self.perturbation.compute_dtype
        return {
            **self.schedule.state(),
            "memory_grad_norm": self.memory.grad_norm,
            "precision_known": self.precision_known,
            "compute_dtype": None if computed is None else str(computed).removeprefix("torch."),
            "through": str(self.perturbation.coarsest_dtype).removeprefix("torch."),
            **self.guard.state(),
        }

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the next update needs if `every` is above 1."""
        return self.memory.tensors()

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore `state` and `tensors`."""
        self.schedule.load(state)
        self.guard.load(state)
        self.memory.load(tensors, grad_norm=state["memory_grad_norm"])
        if state["precision_known"] and not self.precision_known:
            computed = state["compute_dtype"]
            self.perturbation.compute_dtype = None if computed is None else getattr(torch, computed)
            self.perturbation.coarsest_dtype = getattr(torch, state["through"])
            self.precision_known = True

    def _first_pass(self, losses: Losses) -> int:
        """Run the first pass; the first time, observe the model's precision, on which step and guard depend."""
        perturbation = self.perturbation
        if self.precision_known:
            return backward(losses())
        with observe_precision(perturbation.model, self.parameters) as observed:
            count = backward(losses())
        stored, computed = coarsest(p.dtype for p in self.parameters), coarsest(observed.weights)
        perturbation.compute_dtype = computed if is_coarser(computed, stored) else None
        perturbation.coarsest_dtype = coarsest({perturbation.coarsest_dtype, *observed.anywhere})
        self.precision_known = True
        return count

    def _regularized_update(
        self, losses: Losses, again: Losses, rest: Losses | None, scale: float, informative: bool
    ) -> Report:
        before, start = RandomState.now(), self.buffers()
        count = self._first_pass(losses)
        if count and all(p.grad is None for p in self.parameters):
            raise UserError(
                "gradient regularization: no perturbed parameter has a gradient after the first pass: create the "
                "regularizer after wrapping the model (fully_shard replaces parameters), and synchronize gradients "
                "in the last micro-batch"
            )
        base = None
        if rest is not None:
            base = {p: scale * p.grad for p in self.trainable if p.grad is not None}
            backward(rest())

        def replayed() -> Iterator[Tensor]:
            if self.behavior.replay_randomness:
                before.restore()
            drawn = 0
            for drawn, loss in enumerate(again(), start=1):  # noqa: B007
                yield loss
            if drawn != count:
                raise UserError(
                    f"the first pass drew {count} losses and the second {drawn}: losses must return all losses "
                    "each time it is called"
                )

        after = RandomState.now()
        try:
            second = _Replay(
                run=lambda: backward(replayed()), losses=replayed, start=start, scale=scale, informative=informative
            )
            return self._regularize(second, base=base)
        finally:
            after.restore()

    def _regularize(self, replay: _Replay, *, base: dict[nn.Parameter, Tensor] | None) -> Report:
        started = time.perf_counter()
        final = total = take_gradients(self.trainable)
        try:
            check_not_sparse(self.perturbation.model, {p: total[p] for p in self.parameters if p in total})
            total = clip_to_norm(total, self.behavior.g1_clip)
            base = total if base is None else clip_to_norm(base, self.behavior.g1_clip)
            g1 = {p: base[p] if p in base else torch.zeros_like(p) for p in self.parameters}
            update = _Update(self, g1, replay)
            report = update.run()
            final = combine(total, update.penalty, strength=report.strength, outside=update.outside)
        finally:
            for parameter in self.trainable:
                parameter.grad = final.get(parameter)
        return replace(report, seconds=time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Replay:
    """The means to repeat the first pass of an update."""

    run: Callable[[], object]
    """Adds the gradient of a pass to `.grad`."""
    losses: Losses | None = None
    start: Buffers | None = None
    """The buffers before the first pass."""
    scale: float = 1.0
    informative: bool = True


class _Update:
    """The second pass of one update, and its penalty."""

    def __init__(self, owner: GradientRegularizer, g1: dict[nn.Parameter, Tensor], replay: _Replay) -> None:
        self.owner, self.g1, self.replay = owner, g1, replay
        self.penalty: dict[nn.Parameter, Tensor] = {}
        """The penalty's gradient at strength 1; empty without a penalty."""
        self.outside: dict[nn.Parameter, Tensor] = {}
        """The gradient g2 of the parameters outside the perturbed set, if it replaces their g1."""
        self.kept: PerturbationFidelity | None = None
        self.consistency: float | None = None
        self.step = math.nan
        self.pass_count = 0

    def run(self) -> Report:
        """Compute the penalty; if a value is not finite, g1 stays unchanged."""
        owner = self.owner
        direction = gradient_direction(self.g1)
        g1_norm = direction.norm
        informative = check_replicas_agree(g1_norm, device=self.device, informative=self.replay.informative)
        if not math.isfinite(g1_norm) or direction.norm == 0:
            return Report(skipped="g1 is zero" if direction.norm == 0 else "g1 is not finite", g1_norm=g1_norm)
        if owner.config.direction == "random":
            direction = random_direction(direction, seed=owner.seed, update=owner.schedule.updates)
        reused = owner.memory.reuse(grad_norm=g1_norm) if owner.schedule.reuses else None
        penalty = reused or self._curvature(direction, check=informative and owner.guard.is_due(owner.schedule.updates))
        size, along, outside = pairwise_dots(
            [
                (a.values(), b.values())
                for a, b in ((penalty, penalty), (penalty, self.g1), (self.outside, self.outside))
            ]
        )
        if not math.isfinite(size + outside):
            self.outside = {}
            owner.guard.report_lost_penalty(update=owner.schedule.updates)
            return Report(
                skipped="the second pass is not finite", g1_norm=g1_norm, pass_count=self.pass_count, kept=self.kept
            )
        if reused is None and owner.config.every > 1:
            owner.memory.store(penalty, self.g1, along=along, grad_norm=g1_norm)
        size **= 0.5
        track = reused is None and informative
        strength = owner.schedule.strength(grad_norm=g1_norm, penalty_norm=size, track=track)
        self.penalty = penalty
        return Report(
            pass_count=self.pass_count,
            strength=strength,
            g1_norm=g1_norm,
            penalty_ratio=strength * size / g1_norm,
            cosine=along / (size * g1_norm) if size else math.nan,
            kept=self.kept,
            consistency=self.consistency,
            step=self.step,
        )

    @property
    def device(self) -> torch.device:
        """The device for collectives."""
        return collective_device(next(iter(self.g1)))

    def _curvature(self, direction: Direction, *, check: bool) -> dict[nn.Parameter, Tensor]:
        """The penalty's gradient H d, or H d / ||d||."""
        config = self.owner.config
        penalty = self._exact(direction) if config.difference == "exact" else self._difference(direction, check=check)
        if config.penalty == "norm":
            for gradient in penalty.values():
                gradient.mul_(1.0 / direction.norm)
        return penalty

    def _difference(self, direction: Direction, *, check: bool) -> dict[nn.Parameter, Tensor]:
        """H d by a difference of gradients; a check adds the pass that otherwise only `central` needs."""
        owner, central = self.owner, self.owner.config.difference == "central"
        factor = owner.guard.factor
        h = factor * step_size(direction, owner.perturbation, owner.config)
        self.step = factor * (owner.config.step or default_step(owner.perturbation))
        start = RandomState.now()
        ahead, kept = self._gradient_at(h, direction)
        self.kept = kept
        if not central and not check:
            return forward_difference(self.g1, ahead, step=h)
        random = RandomState.now()
        behind, kept_behind = self._gradient_at(-h, direction)
        if check:
            self.consistency = self._agreement(ahead, behind)
            others = owner.guard.needs_other_steps(self.consistency, kept)
            if others:
                del ahead, behind  # so that the other steps need no more memory
            self.consistency = owner.guard.check_consistency(
                self.consistency,
                kept,
                measure=lambda factor: self._agreement_at(factor, h, direction),
                update=owner.schedule.updates,
                size=relative_step(h, direction, owner.perturbation),
                perturbation=owner.perturbation,
            )
            if others:
                start.restore()
                return self._difference(direction, check=False)
        if central:
            self.kept = kept_behind
            return central_difference(ahead, behind, step=h)
        random.restore()  # the check changes no generator, even if a pass draws numbers
        return forward_difference(self.g1, ahead, step=h)

    def _agreement(self, ahead: dict[nn.Parameter, Tensor], behind: dict[nn.Parameter, Tensor]) -> float:
        return lowest_over_ranks(step_consistency(self.g1, ahead, behind), device=self.device)

    def _agreement_at(self, factor: float, h: float, direction: Direction) -> float:
        """The consistency at `factor` times the step; NaN if rounding of the weights spoils that step."""
        ahead, kept = self._gradient_at(factor * h, direction, other=True)
        behind, _ = self._gradient_at(-factor * h, direction, other=True)
        consistency, perturbation = self._agreement(ahead, behind), self.owner.perturbation
        size = relative_step(factor * h, direction, perturbation)
        meaningful = factor > 1 or is_meaningful(kept, size=size, perturbation=perturbation)
        return consistency if meaningful and kept.cosine >= self.owner.guard.minimum else math.nan

    def _gradient_at(
        self, h: float, direction: Direction, *, other: bool = False
    ) -> tuple[dict[nn.Parameter, Tensor], PerturbationFidelity]:
        """The gradient at a step, and the share that rounding keeps, which is checked unless it is an `other` step."""
        owner, second = self.owner, self.replay
        with owner.perturbation.applied(direction.vector, step=h, start=second.start) as kept:
            if not other:
                owner.guard.check_rounding(kept, owner.perturbation)
            second.run()
            self.pass_count += 1
            grads = take_gradients(owner.trainable)
        if not self.g1.keys() & grads.keys():
            raise UserError("the second pass left no gradient: replay must run backward on all losses of the update")
        if second.scale != 1:
            grads = {p: grad * second.scale for p, grad in grads.items()}
        if owner.behavior.outside == "g2" and h > 0:
            self.outside = {p: grad for p, grad in grads.items() if p not in self.g1}
        grads = clip_to_norm(grads, owner.behavior.g2_clip)
        return {p: grads[p] if p in grads else torch.zeros_like(p) for p in self.g1}, kept

    def _exact(self, direction: Direction) -> dict[nn.Parameter, Tensor]:
        if self.replay.losses is None:
            raise UserError("difference=exact needs the losses: use accumulate, or difference=central")
        average = self.owner.average
        if average is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise UserError(
                "difference=exact: the model's wrapper does not average second derivatives over ranks: use forward or "
                "central, or one process"
            )
        self.pass_count += 1
        with self.owner.perturbation.restored_buffers(start=self.replay.start):
            curvature = exact_curvature(self.replay.losses, self.owner.parameters, direction.vector)
            if average is not None:
                average(curvature.values())
        return {p: product.mul_(self.replay.scale) for p, product in curvature.items()}
