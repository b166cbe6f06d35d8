"""Random perturbations of weights at relative radii, and measurements under them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from flatpeak.gradreg.parameters import plain_name
from flatpeak.gradreg.perturbation import Perturbation, PerturbationFidelity
from flatpeak.gradreg.shards import DotAccumulator, distribute_like

Measured = TypeVar("Measured")


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisyMeasurement(Generic[Measured]):
    """A measurement at perturbed weights."""

    radius: float
    """The norm of each tensor's perturbation divided by the norm of the tensor."""
    draw: int
    """The index of the direction, the same at every radius."""
    value: Measured
    fidelity: PerturbationFidelity
    """The agreement of the rounded with the intended perturbation."""


def relative_noise(perturbation: Perturbation, *, seed: int, draw: int) -> dict[nn.Parameter, Tensor]:
    """The direction of radius 1: Gaussian noise, scaled for each parameter to the parameter's Frobenius norm.

    A tensor's direction depends only on (seed, draw, its name and shape), not on its values. Models of the same shape
    move in the same directions, scaled by their own norms (Li et al. 2018, arXiv 1712.09913, normalize by filter).
    """
    names = {parameter: plain_name(name) for name, parameter in perturbation.model.named_parameters()}
    noise = [_standard_normal(p, seed=seed, draw=draw, name=names[p]) for p in perturbation.parameters]
    count = len(noise)
    squares = DotAccumulator(2 * count)
    for index, (parameter, drawn) in enumerate(zip(perturbation.parameters, noise, strict=True)):
        weight = perturbation.master(parameter)
        squares.add(index, weight, weight)
        squares.add(count + index, drawn, drawn)
    totals = squares.totals()
    # max: the norm of a tensor without elements is 0.
    scales = [
        (square / max(drawn, 1e-300)) ** 0.5 for square, drawn in zip(totals[:count], totals[count:], strict=True)
    ]
    return {p: z.mul_(scale) for p, z, scale in zip(perturbation.parameters, noise, scales, strict=True)}


def measure_under_noise(
    perturbation: Perturbation,
    measure: Callable[[], Measured],
    *,
    radii: Sequence[float],
    draws: int,
    seed: int,
) -> Iterator[NoisyMeasurement[Measured]]:
    """Call `measure` with each draw's noise at each radius, and restore all weights and buffers bit for bit after each.

    They are restored even if `measure` raises. torch's generators do not change.
    """
    for draw in range(draws):
        direction = relative_noise(perturbation, seed=seed, draw=draw)
        for radius in radii:
            with perturbation.applied(direction, step=radius) as fidelity:
                value = measure()
            yield NoisyMeasurement(radius=radius, draw=draw, value=value, fidelity=fidelity)


def falls(
    perturbation: Perturbation,
    measure: Callable[[], float],
    *,
    radii: Sequence[float],
    draws: int,
    seed: int,
) -> dict[float, float]:
    """By radius: the value of `measure` at the unperturbed weights, minus its mean over draws.

    A flat maximum has small falls. Each call of `measure` must draw the same random numbers, so that only the weights
    make a difference.
    """
    clean = measure()
    noisy = list(measure_under_noise(perturbation, measure, radii=radii, draws=draws, seed=seed))
    return {radius: clean - sum(one.value for one in noisy if one.radius == radius) / draws for radius in radii}


def _standard_normal(parameter: nn.Parameter, *, seed: int, draw: int, name: str) -> Tensor:
    """Standard normal numbers of the parameter's shape, drawn on the CPU, in at least float32."""
    digest = blake2b(f"{seed}/{draw}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    drawn = torch.randn(parameter.shape, generator=generator)
    return distribute_like(drawn, parameter).to(torch.promote_types(parameter.dtype, torch.float32))
