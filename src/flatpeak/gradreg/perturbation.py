"""The perturbation of parameters and its exact restoration: snapshots of weights, buffers and random generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatpeak.gradreg.parameters import are_adapters, coarsest, weight_dtype
from flatpeak.gradreg.shards import DotAccumulator, Gradients, reset_fsdp_state, reshard


@dataclass(frozen=True, kw_only=True, slots=True)
class PerturbationFidelity:
    """The agreement of a rounded perturbation with the intended perturbation."""

    cosine: float
    """Cosine between the realized and the intended perturbation."""
    norm: float
    """Realized norm divided by intended norm."""

    @property
    def along(self) -> float:
        """The component of the realized perturbation along the intended one, divided by the latter's norm."""
        return self.cosine * self.norm


class Buffers:
    """A snapshot of a model's buffers, both tensors and values: a forward pass may write into a buffer or rebind it."""

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._slots = [(module, name, held) for module in model.modules() for name, held in module._buffers.items()]
        self.values: list[tuple[Tensor, Tensor]] = [
            (held, held.clone()) for _, _, held in self._slots if held is not None
        ]
        """Each tensor with a copy of its value."""

    def rebind(self) -> None:
        """Bind the same tensors again, with their current values."""
        for module, name, held in self._slots:
            module._buffers[name] = held

    @torch.no_grad()
    def restore(self) -> None:
        """Bind the same tensors again, with the values of the snapshot."""
        self.rebind()
        for held, value in self.values:
            held.copy_(value)


@dataclass(frozen=True, slots=True)
class RandomState:
    """A snapshot of the random generators of the CPU and of every CUDA device in use."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> RandomState:
        """Take a snapshot of the current state."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(cpu=torch.get_rng_state(), cuda=tuple(cuda))

    def restore(self) -> None:
        """Restore the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))


class Perturbation:
    """A set of parameters that can be perturbed; if a parameter has a float32 master, its rounded copy moves."""

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
        """The type to which autocast or a sharding policy rounds weights; fidelity is measured after this rounding."""
        self.coarsest_dtype = coarsest({weight_dtype(model), compute_dtype or torch.float64})
        """The coarsest known type in the forward pass, including frozen weights, which round as well."""
        self.adapters = are_adapters(model, parameters)
        """Whether the set is a small part of a frozen model."""

    def master(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's precise value on its device: its master, or the parameter."""
        return self.masters.get(parameter, parameter).detach().to(parameter.device)

    @contextmanager
    def applied(
        self, direction: Gradients, *, step: float, start: Buffers | None = None
    ) -> Iterator[PerturbationFidelity]:
        """Set theta + step * direction in this context; afterwards restore theta and all buffers bit for bit, always.

        `start`: the buffers at the start of the context, if they differ from the current ones. Yields the fidelity of
        the move after rounding to the weights' type and to the type of the computation.
        """
        with torch.no_grad():
            saved = [(p, p.detach().clone()) for p in self.parameters]
        with self.restored_buffers(saved, start=start):
            try:
                with torch.no_grad():
                    kept = self._move(saved, direction, step)
                self._clear_weight_caches()
                yield kept
            except BaseException:
                reset_fsdp_state(self.model)
                raise

    @contextmanager
    def restored_buffers(
        self, saved: Sequence[tuple[Tensor, Tensor]] = (), *, start: Buffers | None = None
    ) -> Iterator[None]:
        """Restore buffers, such as running statistics, and `saved` tensors on exit: no batch may count twice."""
        buffers = Buffers(self.model)
        try:
            if start is not None:
                start.restore()
            yield
        finally:
            self._restore(saved, buffers)

    def _move(
        self, saved: Sequence[tuple[nn.Parameter, Tensor]], direction: Gradients, step: float
    ) -> PerturbationFidelity:
        sums = DotAccumulator(3)
        for parameter, before in saved:
            change = direction[parameter]
            parameter.copy_(torch.add(self.master(parameter), change, alpha=step))
            realized = self._computed(parameter.detach()) - self._computed(before)
            sums.add(0, realized, realized)
            sums.add(1, change, change)
            sums.add(2, realized, change)
        realized_square, intended_square, dot = sums.totals()
        if realized_square == 0 or intended_square == 0:
            return PerturbationFidelity(cosine=0.0, norm=0.0)
        return PerturbationFidelity(
            cosine=dot / (realized_square * intended_square) ** 0.5 * (1 if step > 0 else -1),
            norm=(realized_square / intended_square) ** 0.5 / abs(step),
        )

    def _computed(self, value: Tensor) -> Tensor:
        """A weight as the forward pass uses it, in a type precise enough to subtract."""
        if self.compute_dtype is not None:
            value = value.to(self.compute_dtype)
        return value if value.dtype == torch.float64 else value.float()

    def _restore(self, saved: Sequence[tuple[Tensor, Tensor]], buffers: Buffers) -> None:
        try:
            buffers.rebind()
            copy_back([*saved, *buffers.values])
        except BaseException:  # a signal may arrive here: finish the restoration, then raise
            buffers.rebind()
            copy_back([*saved, *buffers.values])
            raise
        finally:
            self._clear_weight_caches()

    def _clear_weight_caches(self) -> None:
        """Drop weights that autocast has cast or FSDP2 has gathered: they are stale after a move."""
        torch.clear_autocast_cache()
        reshard(self.model)


@torch.no_grad()
def copy_back(saved: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy saved values back into their tensors, because theta + d - d is not exactly theta."""
    for held, value in saved:
        held.copy_(value)
