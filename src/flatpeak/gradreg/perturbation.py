"""Moving parameters along a direction and back, bit for bit, and measuring how much of the move was real."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatpeak.gradreg.distributed import Gradients, InnerProducts, abandon, reshard
from flatpeak.gradreg.gradients import Buffers
from flatpeak.gradreg.parameters import are_adapters, coarsest, held_type


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """How much of an intended perturbation survived rounding."""

    cosine: float
    """Of the realized with the intended perturbation."""
    norm: float
    """Realized norm over intended norm."""

    @property
    def along(self) -> float:
        """The part of the realized perturbation along the intended one, over the latter's length."""
        return self.cosine * self.norm


class Perturbation:
    """Moves a set of parameters. Where a parameter has a float32 master, what moves is the master's rounded copy."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        masters: Mapping[nn.Parameter, Tensor] | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.masters = masters or {}
        self.compute_dtype = compute_dtype
        """What autocast or a sharding policy rounds weights to; the guard measures after it."""
        self.through = coarsest({held_type(model), compute_dtype or torch.float64})
        """The coarsest type on the way through the model, as far as it is known: frozen weights round as well."""
        self.adapters = are_adapters(model, parameters)
        """Whether what moves is a small part of a frozen model."""

    def master(self, parameter: nn.Parameter) -> Tensor:
        """The precise value of a parameter: its master, or itself."""
        return self.masters.get(parameter, parameter).detach()

    @contextmanager
    def moved(self, direction: Gradients, *, step: float, start: Buffers | None = None) -> Iterator[Kept]:
        """theta + step * direction inside, theta bit for bit after, whatever happens inside. Buffers are kept too.

        `start`: the buffers that the inside begins with, where these are not the present ones. Gives what rounding to
        the weights' own type, and to the type they are computed in, left of the move.
        """
        with torch.no_grad():
            saved = [(p, p.detach().clone()) for p in self.parameters]
        with self.buffers_kept(saved, start=start):
            try:
                with torch.no_grad():
                    kept = self._move(saved, direction, step)
                self._forget_copies()
                yield kept
            except BaseException:
                abandon(self.model)
                raise

    @contextmanager
    def buffers_kept(
        self, saved: Sequence[tuple[Tensor, Tensor]] = (), *, start: Buffers | None = None
    ) -> Iterator[None]:
        """Buffers, such as running statistics, as they were: a batch is not to be counted twice. So too what is in
        `saved`, tensors with their values."""
        buffers = Buffers(self.model)
        try:
            if start is not None:
                start.restore()
            yield
        finally:
            self._restore(saved, buffers)

    def _move(self, saved: Sequence[tuple[nn.Parameter, Tensor]], direction: Gradients, step: float) -> Kept:
        sums = InnerProducts(3)
        for parameter, before in saved:
            toward = direction[parameter]
            parameter.copy_(torch.add(self.master(parameter), toward, alpha=step))
            realized = self._computed(parameter.detach()) - self._computed(before)
            sums.add(0, realized, realized)
            sums.add(1, toward, toward)
            sums.add(2, realized, toward)
        real, meant, both = sums.totals()
        if real == 0 or meant == 0:
            return Kept(cosine=0.0, norm=0.0)
        return Kept(
            cosine=both / (real * meant) ** 0.5 * (1 if step > 0 else -1), norm=(real / meant) ** 0.5 / abs(step)
        )

    def _computed(self, value: Tensor) -> Tensor:
        """A weight as the forward pass sees it, in a type precise enough to subtract."""
        if self.compute_dtype is not None:
            value = value.to(self.compute_dtype)
        return value if value.dtype == torch.float64 else value.float()

    def _restore(self, saved: Sequence[tuple[Tensor, Tensor]], buffers: Buffers) -> None:
        try:
            buffers.rebind()
            copy_back([*saved, *buffers.values])
        except BaseException:  # a signal may land right here: finish, then let it through
            buffers.rebind()
            copy_back([*saved, *buffers.values])
            raise
        finally:
            self._forget_copies()

    def _forget_copies(self) -> None:
        """Autocast caches cast weights, FSDP2 may keep gathered ones: neither may outlive a move."""
        torch.clear_autocast_cache()
        reshard(self.model)


@torch.no_grad()
def copy_back(saved: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copied, never subtracted: theta + d - d is not theta."""
    for held, value in saved:
        held.copy_(value)
