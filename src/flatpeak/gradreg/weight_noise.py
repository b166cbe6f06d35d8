"""Random perturbations of weights at relative radii, and what a measurement becomes under them."""

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
    """A measurement with perturbed weights."""

    radius: float
    """The norm of every tensor's perturbation over the norm of the tensor."""
    draw: int
    """The index of the direction, which is the same at every radius."""
    value: Measured
    fidelity: PerturbationFidelity
    """The agreement of the perturbation, as rounding left it, with the intended one."""


def relative_noise(perturbation: Perturbation, *, seed: int, draw: int) -> dict[nn.Parameter, Tensor]:
    """Gaussian noise for every parameter, of the parameter's own Frobenius norm: the direction of radius 1.

    A tensor's direction depends on (seed, draw, its name and shape) alone, never on its values: models of one shape
    are moved in the same directions, each by its own norms (Li et al. 2018, arXiv 1712.09913, normalize by filter).
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
    # max: of a tensor without elements, whose norms are 0.
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
    """Call `measure` with every draw's noise at every radius; in between, and after, all weights are as before.

    They are restored bit for bit, buffers too, also where `measure` raises. Nothing is drawn from torch's own
    generators.
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
    """By radius, the value of `measure` at the weights as they are, less the mean over draws of perturbed ones.

    A flat maximum has small falls. Every call has to draw the same random numbers: then the difference is the weights'.
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
