"""One regularized update: the gradient, the same gradient a step further up, and their difference as a penalty."""

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
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.directions import (
    Direction,
    central_difference,
    direction,
    exact_curvature,
    forward_difference,
    offset,
    step_consistency,
)
from flatpeak.gradreg.distributed import check_agreement, device_of, inner_products, lowest_cosine
from flatpeak.gradreg.gradients import Buffers, RandomState, add_gradients, backward, clipped, take_gradients
from flatpeak.gradreg.guard import Guard
from flatpeak.gradreg.parameters import check_not_sparse, choose_parameters, coarser, coarsest, depth_factors, watched
from flatpeak.gradreg.perturbation import Kept, Perturbation
from flatpeak.gradreg.schedule import PenaltyMemory, Schedule
from flatpeak.gradreg.statistics import Report

Losses = Callable[[], Iterable[Tensor]]
"""Gives the losses of all micro-batches of an update, each of which is backpropagated before the next is drawn."""


class GradientRegularizer:
    """Turns the gradient of L into that of L + strength / 2 * ||grad L||^2 (arXiv 2602.18037), before any clipping.

    ```
    regularizer = GradientRegularizer(model, GradientRegularizationConfig(strength="ratio:0.3"))
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
        notice: Callable[[str], None] = warnings.warn,
    ) -> None:
        """`masters`: the float32 values behind parameters of a lower precision. `compute_dtype`: what the forward pass
        rounds weights to (autocast, a sharding policy), where it is not to be found out in the first pass. UserError
        where nothing can be perturbed."""
        self.config = config
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.parameters = choose_parameters(model, config)
        self.perturbation = Perturbation(model, self.parameters, masters=masters, compute_dtype=compute_dtype)
        self.schedule = Schedule(config=config)
        self.memory = PenaltyMemory(self.parameters)
        self.factors = depth_factors(model, config.depth_scale) if config.depth_scale != (1.0, 1.0) else {}
        self.guard = Guard(config, notice=notice)
        self.precision_known = compute_dtype is not None
        """Whether it was given, or seen in a first pass."""

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

        `again` gives the losses of the second pass where they are not written as the first's; they must have the same
        gradient at theta. `rest` are micro-batches that only the first pass sees: then `scale` times the gradient of
        `losses` stands for that of the whole update. An update that is not `informative`, such as one whose advantages
        are all 0, tells neither the strength of a wanted ratio nor the guard anything.
        """
        self.schedule.begin()
        if not self.schedule.active:
            backward(losses())
            backward(rest() if rest is not None else ())
            return Report()
        previous = take_gradients(self.trainable)
        try:
            return self._both_passes(losses, again or losses, rest, scale, informative)
        finally:
            add_gradients(previous)

    def regularize(
        self, replay: Callable[[], object], *, start: Buffers | None = None, informative: bool = True
    ) -> Report:
        """The same where `.grad` holds the whole first gradient already and `replay` adds the second's to it.

        `replay` sees to its own random numbers: it has to draw those of the first pass. `start` is `buffers()` from
        before the first pass; only a model whose passes change buffers that they use needs it.
        """
        self.schedule.begin()
        if not self.schedule.active:
            return Report()
        return self._regularize(_Passes(replay=replay, start=start, informative=informative), base=None)

    def buffers(self) -> Buffers:
        """The model's buffers as they are."""
        return Buffers(self.perturbation.model)

    def state(self) -> dict[str, Any]:
        """What the next update depends on, besides `tensors`."""
        computed = self.perturbation.compute_dtype
        return {
            "updates": self.schedule.updates,
            "log_strength": self.schedule.log_strength,
            "memory_grad_norm": self.memory.grad_norm,
            "precision_known": self.precision_known,
            "compute_dtype": None if computed is None else str(computed).removeprefix("torch."),
            "through": str(self.perturbation.through).removeprefix("torch."),
            **self.guard.state(),
        }

    def tensors(self) -> dict[str, Tensor]:
        """What `every` above 1 remembers."""
        return self.memory.tensors()

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` and `tensors` gave."""
        self.schedule.updates, self.schedule.log_strength = state["updates"], state["log_strength"]
        self.guard.load(state)
        self.memory.load(tensors, grad_norm=state["memory_grad_norm"])
        if state.get("precision_known") and not self.precision_known:
            computed = state["compute_dtype"]
            self.perturbation.compute_dtype = None if computed is None else getattr(torch, computed)
            self.perturbation.through = getattr(torch, state["through"])
            self.precision_known = True

    def _first_pass(self, losses: Losses) -> int:
        """The first time, see what rounds on the way through the model: step and guard have to know."""
        perturbation = self.perturbation
        if self.precision_known:
            return backward(losses())
        with watched(perturbation.model, self.parameters) as seen:
            count = backward(losses())
        own, found = coarsest(p.dtype for p in self.parameters), coarsest(seen.weights)
        perturbation.compute_dtype = found if coarser(found, own) else None
        perturbation.through = coarsest({perturbation.through, *seen.anywhere})
        self.precision_known = True
        return count

    def _both_passes(
        self, losses: Losses, again: Losses, rest: Losses | None, scale: float, informative: bool
    ) -> Report:
        before, start = RandomState.now(), self.buffers()
        count = self._first_pass(losses)
        if count and all(p.grad is None for p in self.parameters):
            raise UserError(
                "gradient regularization: no perturbed parameter has a gradient after the first pass: make the "
                "regularizer after the model is wrapped (fully_shard replaces parameters), and synchronize gradients "
                "in the last micro-batch"
            )
        base = None
        if rest is not None:
            base = {p: scale * p.grad for p in self.trainable if p.grad is not None}
            backward(rest())

        def replayed() -> Iterator[Tensor]:
            if self.config.replay_randomness:
                before.restore()
            found = 0
            for found, loss in enumerate(again(), start=1):  # noqa: B007
                yield loss
            if found != count:
                raise UserError(
                    f"the first pass drew {count} losses and the second {found}: losses has to give all of them anew "
                    "each time it is called"
                )

        after = RandomState.now()
        try:
            passes = _Passes(
                replay=lambda: backward(replayed()), losses=replayed, start=start, scale=scale, informative=informative
            )
            return self._regularize(passes, base=base)
        finally:
            after.restore()

    def _regularize(self, passes: _Passes, *, base: dict[nn.Parameter, Tensor] | None) -> Report:
        started = time.perf_counter()
        final = total = take_gradients(self.trainable)
        try:
            check_not_sparse(self.perturbation.model, {p: total[p] for p in self.parameters if p in total})
            total = clipped(total, self.config.g1_clip)
            base = total if base is None else clipped(base, self.config.g1_clip)
            g1 = {p: base[p] if p in base else torch.zeros_like(p) for p in self.parameters}
            update = _Update(self, g1, passes)
            report = update.run()
            final = combined(total, update, strength=report.strength)
        finally:
            for parameter in self.trainable:
                parameter.grad = final.get(parameter)
        return replace(report, seconds=time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Passes:
    """Inputs of the passes after the first one of an update."""

    replay: Callable[[], object]
    """Adds a pass's gradient to `.grad`."""
    losses: Losses | None = None
    start: Buffers | None = None
    """The buffers that the first pass began with."""
    scale: float = 1.0
    informative: bool = True


class _Update:
    """The second pass of one update, and the penalty it finds."""

    def __init__(self, owner: GradientRegularizer, g1: dict[nn.Parameter, Tensor], passes: _Passes) -> None:
        self.owner, self.g1, self.given = owner, g1, passes
        self.penalty: dict[nn.Parameter, Tensor] = {}
        """Its gradient at strength 1; empty where there is none."""
        self.outside: dict[nn.Parameter, Tensor] = {}
        """g2 of the parameters that are not perturbed, where it takes the place of g1."""
        self.kept: Kept | None = None
        self.consistency: float | None = None
        self.passes = 0

    def run(self) -> Report:
        """Find the penalty; anything not finite leaves g1 as it is."""
        owner = self.owner
        way = direction(self.g1, owner.perturbation, scaling=owner.config.scaling)
        g1_norm = way.grad_norm
        informative = check_agreement(g1_norm, device=self.device, informative=self.given.informative)
        if not math.isfinite(g1_norm) or way.norm == 0:
            return Report(skipped="g1 is zero" if way.norm == 0 else "g1 is not finite", g1_norm=g1_norm)
        reused = owner.memory.recall(grad_norm=g1_norm) if owner.schedule.reuses else None
        penalty = reused or self._curvature(way, check=informative and owner.guard.due(owner.schedule.updates))
        size, along, outside = inner_products(
            [
                (a.values(), b.values())
                for a, b in ((penalty, penalty), (penalty, self.g1), (self.outside, self.outside))
            ]
        )
        if not math.isfinite(size + outside):
            self.outside = {}
            return Report(skipped="the second pass is not finite", g1_norm=g1_norm, passes=self.passes, kept=self.kept)
        if reused is None and owner.config.every > 1:
            owner.memory.keep(penalty, self.g1, along=along, grad_norm=g1_norm)
        size **= 0.5
        track = reused is None and informative
        strength = owner.schedule.strength(grad_norm=g1_norm, penalty_norm=size, track=track)
        self.penalty = penalty
        return Report(
            passes=self.passes,
            strength=strength,
            g1_norm=g1_norm,
            penalty_ratio=strength * size / g1_norm,
            cosine=along / (size * g1_norm) if size else math.nan,
            kept=self.kept,
            consistency=self.consistency,
        )

    @property
    def device(self) -> torch.device:
        """Device on which ranks exchange tensors."""
        return device_of(next(iter(self.g1)))

    def _curvature(self, way: Direction, *, check: bool) -> dict[nn.Parameter, Tensor]:
        """H d, or H d / ||T g||, by depth."""
        config = self.owner.config
        penalty = self._exact(way) if config.difference == "exact" else self._difference(way, check=check)
        for parameter, found in penalty.items():
            factor = self.owner.factors.get(parameter, 1.0) / (way.scaled_norm if config.penalty == "norm" else 1.0)
            if factor != 1.0:
                found.mul_(factor)
        return penalty

    def _difference(self, way: Direction, *, check: bool) -> dict[nn.Parameter, Tensor]:
        """H d by a difference of gradients; where it is checked, the pass that only `central` needs runs besides."""
        owner, central = self.owner, self.owner.config.difference == "central"
        h = owner.schedule.step_factor * offset(way, owner.perturbation, owner.config)
        ahead, kept = self._gradient_at(h, way)
        self.kept = kept
        if not central and not check:
            return forward_difference(self.g1, ahead, step=h)
        random = RandomState.now()
        behind, other = self._gradient_at(-h, way)
        if check:
            found = step_consistency(self.g1, ahead, behind)
            self.consistency = lowest_cosine(found, device=self.device)
            owner.guard.judge(
                self.consistency, kept, update=owner.schedule.updates, h=h, way=way, perturbation=owner.perturbation
            )
        if central:
            self.kept = other
            return central_difference(ahead, behind, step=h)
        random.restore()  # the check leaves no trace, also where a pass draws numbers of its own
        return forward_difference(self.g1, ahead, step=h)

    def _gradient_at(self, h: float, way: Direction) -> tuple[dict[nn.Parameter, Tensor], Kept]:
        owner, given = self.owner, self.given
        with owner.perturbation.moved(way.vector, step=h, start=given.start) as kept:
            owner.guard.check(kept, owner.perturbation)
            given.replay()
            self.passes += 1
            found = take_gradients(owner.trainable)
        if not self.g1.keys() & found.keys():
            raise UserError("the second pass left no gradient: replay has to run all losses of the update backward")
        if given.scale != 1:
            found = {p: grad * given.scale for p, grad in found.items()}
        if owner.config.outside == "g2" and h > 0:
            self.outside = {p: grad for p, grad in found.items() if p not in self.g1}
        found = clipped(found, owner.config.g2_clip)
        return {p: found[p] if p in found else torch.zeros_like(p) for p in self.g1}, kept

    def _exact(self, way: Direction) -> dict[nn.Parameter, Tensor]:
        if self.given.losses is None:
            raise UserError("difference=exact needs the losses themselves: use accumulate, or difference=central")
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise UserError("difference=exact does not average over ranks: use forward or central, or one process")
        self.passes += 1
        with self.owner.perturbation.buffers_kept(start=self.given.start):
            found = exact_curvature(self.given.losses, self.owner.parameters, way.vector)
        return {p: part.mul_(self.given.scale) for p, part in found.items()}


def combined(total: dict[nn.Parameter, Tensor], update: _Update, *, strength: float) -> dict[nn.Parameter, Tensor]:
    """g1 + strength * penalty; a parameter that neither pass used stays without a gradient."""
    final = {**total, **update.outside}
    for parameter, penalty in update.penalty.items():
        if parameter in total:
            final[parameter] = torch.add(total[parameter], penalty, alpha=strength)
        elif penalty.any():
            final[parameter] = strength * penalty
    return final
