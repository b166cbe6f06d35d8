"""Sharpness: how much the reward falls under random perturbations of the weights, and the loss's largest curvature."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from flatpeak.errors import DivergedError, StoppedError, UserError
from flatpeak.evaluation.config import SharpnessConfig
from flatpeak.evaluation.estimates import Estimate, estimate
from flatpeak.functional.curvature import Eigenvalue, top_eigenvalue
from flatpeak.gradreg.directions import exact_curvature, weight_norm
from flatpeak.gradreg.perturbation import Perturbation
from flatpeak.gradreg.weight_noise import NoisyMeasurement, measure_under_noise
from flatpeak.protocols import Sampler
from flatpeak.rewards.reward_set import RewardSet
from flatpeak.types import Group, Prompt, SamplingParams, Score, Scores

Losses = Callable[[], Iterable[Tensor]]
"""A function that computes the loss of each micro-batch of one fixed batch, with the current weights."""
MakeLosses = Callable[[Sequence[Group], Scores], Losses | None]
"""Makes such a function from scored groups; None if none of their completions has an advantage."""
Values = dict[str, list[float | None]]
"""By reward part ("" is the total), the mean over the samples of each question; None if all are missing."""
TOTAL = ""
CONSIDERABLE, CERTAIN = 0.01, 0.01
"""From the first radius on, noise must change log-probabilities, except those above minus the second."""


@dataclass(frozen=True, kw_only=True)
class Sharpness:
    """The reward of a policy under perturbed weights, compared with its unperturbed reward."""

    clean: Values
    falls: Mapping[float, Values]
    """By radius: the decrease from `clean`, as a mean over the draws."""
    weight_norm: float
    """||theta|| of the perturbed parameters."""
    kept: float
    """The lowest cosine between a perturbation after rounding and the intended one; NaN if there was none."""
    eigenvalue: Eigenvalue | None = None

    @cached_property
    def values(self) -> dict[str, list[float | None]]:
        """By metric, the value of each question used."""
        named = {_metric("sharpness/clean", name): values for name, values in self.clean.items()}
        for radius, components in self.falls.items():
            named |= {_metric(f"sharpness/fall_{radius:g}", name): values for name, values in components.items()}
        return named

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """The estimate of every metric; undefined metrics are left out."""
        estimates = {metric: estimate(values, metric=metric) for metric, values in self.values.items()}
        single = {f"sharpness/relative_fall_{radius:g}": self.relative_fall(radius) for radius in self.falls}
        single |= {"sharpness/weight_norm": self.weight_norm, "sharpness/perturbation_kept": self.kept}
        if self.eigenvalue is not None:
            single |= {
                "sharpness/top_eigenvalue": self.eigenvalue.value,
                "sharpness/eigenvalue_residual": self.eigenvalue.residual,
            }
        count = len(self.clean[TOTAL])
        return estimates | {
            metric: Estimate(mean=value, questions=count, interval=None, method=None)
            for metric, value in single.items()
            if math.isfinite(value)
        }

    def relative_fall(self, radius: float) -> float:
        """The fall of the total reward over its clean value, on the same questions; NaN unless that is positive."""
        pairs = [
            (fall, clean)
            for fall, clean in zip(self.falls[radius][TOTAL], self.clean[TOTAL], strict=True)
            if fall is not None and clean is not None
        ]
        clean = sum(clean for _, clean in pairs)
        return sum(fall for fall, _ in pairs) / clean if clean > 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class SharpnessProbe:
    """The measurement of a policy's sharpness; it restores weights, sampler and random state."""

    config: SharpnessConfig
    perturbation: Perturbation
    """The parameters to perturb. Weights in half precision are changed directly, and not an optimizer's masters, so
    that a run and an evaluation of its checkpoint agree."""
    make_losses: MakeLosses
    """The policy loss for the curvature that `config.eigenvalue` requests."""
    stopping: Callable[[], bool] = lambda: False
    """Whether a signal asks to stop, which leaves no time for this many completions."""

    def measure(
        self,
        prompts: Sequence[Prompt],
        *,
        sampler: Sampler,
        reward: RewardSet,
        sampling: SamplingParams,
        seed: int,
    ) -> Sharpness:
        """Measure on the first `config.size` prompts, with the same random numbers for every state of the weights.

        Raises StoppedError midway once `stopping()` is true; a resumed run measures again.
        """
        config, asked = self.config, prompts[: self.config.size]
        ask = partial(_answers, asked, sampler, reward, config.samples, sampling, seed)
        with _unchanged_state(sampler):
            clean = ask()
            noisy = []
            for one in self._under_noise(ask, seed=seed):
                if sampler.foreign and not self._has_zeros:
                    _check_reads_weights(clean, one)
                noisy.append(_reduced(one))
                self._check_stop()
            eigenvalue = self._top_eigenvalue(clean, seed=seed) if config.eigenvalue else None
        values = _by_question(clean.scores)
        return Sharpness(
            clean=values,
            falls={
                radius: _falls(values, [one.value for one in noisy if one.radius == radius]) for radius in config.radii
            },
            weight_norm=weight_norm(self.perturbation),
            kept=min((one.fidelity.cosine for one in noisy), default=math.nan),
            eigenvalue=eigenvalue,
        )

    def _under_noise(self, ask: Callable[[], _Answers], *, seed: int) -> Iterator[NoisyMeasurement[_Answers]]:
        """The answers under every draw's noise at every radius. UserError if the noise is too strong for the model."""
        radii, draws = self.config.radii, self.config.draws
        try:
            yield from measure_under_noise(self.perturbation, ask, radii=radii, draws=draws, seed=seed)
        except DivergedError as error:  # due to the noise: the unperturbed weights have given answers
            raise UserError(
                f"evaluation.sharpness.radii={list(radii)}: under noise of one of these radii the model's logits are "
                "NaN or infinite; the weights themselves are intact: name smaller radii"
            ) from error

    def _check_stop(self) -> None:
        if self.stopping():
            raise StoppedError("a signal came while sharpness was measured")

    @property
    def _has_zeros(self) -> bool:
        """Whether a perturbed tensor is 0 and stays 0, as in new adapters, whose other matrix then has no effect."""
        return any(not bool(parameter.any()) for parameter in self.perturbation.parameters)

    def _top_eigenvalue(self, answers: _Answers, *, seed: int) -> Eigenvalue | None:
        """The largest eigenvalue of the loss of these completions; None if there is no curvature to measure."""
        losses = self.make_losses(answers.groups, answers.scores)
        if losses is None:
            return None
        parameters = self.perturbation.parameters

        def product(vector: Sequence[Tensor]) -> Sequence[Tensor]:
            self._check_stop()
            with torch.enable_grad(), self.perturbation.restored_buffers():
                curvature = exact_curvature(losses, parameters, dict(zip(parameters, vector, strict=True)))
            return [curvature[p] for p in parameters]

        return top_eigenvalue(
            product, parameters, iterations=self.config.iterations, tolerance=self.config.tolerance, seed=seed
        )


@dataclass(frozen=True, kw_only=True)
class _Answers:
    """Completions for one state of the weights, and their scores."""

    groups: Sequence[Group]
    scores: Scores


def _answers(
    prompts: Sequence[Prompt], sampler: Sampler, reward: RewardSet, samples: int, sampling: SamplingParams, seed: int
) -> _Answers:
    groups = sampler.generate(prompts, group_size=samples, sampling=sampling, seed=seed)
    return _Answers(groups=groups, scores=reward(groups))


@contextmanager
def _unchanged_state(sampler: Sampler) -> Iterator[None]:
    """A context that restores the state of a sampler and of the random generators of Python and NumPy.

    The evaluation restores torch's generators. A reward may draw from any of them.
    """
    drawn = random.getstate(), np.random.get_state()
    state = sampler.state()
    try:
        yield
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        sampler.load(state)


def _reduced(one: NoisyMeasurement[_Answers]) -> NoisyMeasurement[Values]:
    """The measurement without its completions."""
    return NoisyMeasurement(
        radius=one.radius, draw=one.draw, value=_by_question(one.value.scores), fidelity=one.fidelity
    )


def _check_reads_weights(clean: _Answers, noisy: NoisyMeasurement[_Answers]) -> None:
    """UserError if completions under considerable noise have bit-identical log-probabilities to those without noise.

    Log-probabilities near 0 are no evidence: a policy that is certain stays certain.
    """
    logprobs = _logprobs(clean)
    uncertain = any(logprob < -CERTAIN for row in logprobs for logprob in row)
    if noisy.radius >= CONSIDERABLE and uncertain and _logprobs(noisy.value) == logprobs:
        raise UserError(
            f"evaluation.sharpness: with weights perturbed by {noisy.radius:g} of their norm the sampler's "
            "log-probabilities are the same to the last bit, so it does not read the policy's weights: give train a "
            "factory, sampler=lambda policy: MySampler(NativeEngine(policy)), or set evaluation.sharpness=null"
        )


def _logprobs(answers: _Answers) -> list[tuple[float, ...]]:
    return [completion.logprobs for group in answers.groups for completion in group.completions]


def _by_question(scores: Scores) -> Values:
    parts = {TOTAL: scores.total, **scores.parts}
    return {name: [_mean(row) for row in rows] for name, rows in parts.items()}


def _falls(clean: Values, perturbed: Sequence[Values]) -> Values:
    """By part and question: the clean value minus the mean over the draws that have a value."""
    falls: Values = {}
    for name, values in clean.items():
        means = [_mean([draw[name][index] for draw in perturbed]) for index in range(len(values))]
        falls[name] = [
            None if before is None or after is None else before - after
            for before, after in zip(values, means, strict=True)
        ]
    return falls


def _mean(values: Sequence[Score]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _metric(metric: str, component: str) -> str:
    return metric if component == TOTAL else f"{metric}/{component}"
