"""Configuration of gradient regularization: the penalty, the perturbed parameters, and the estimate of its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from flatpeak.utils.schema import StrictConfig

RATIO, CALIBRATED = "ratio:", "calibrated:"
STRENGTHS = "a number, ratio:0.3 or calibrated:0.3"

NAMED_SETS = ("blocks", "all", "adapters", "last_layer", "last_block")
PerturbedSet = Literal["blocks", "all", "adapters", "last_layer", "last_block"] | tuple[str, ...]
"""A named set of parameters, or patterns for their names."""
RatioMode = Literal["importance", "reuse", "importance_clipped"]


@dataclass(frozen=True, kw_only=True)
class PublishedBehavior:
    """Deviations of published code from the penalty it describes, to measure their effect; by default there are
    none."""

    g1_clip: float | None = None
    """Clip g1, the plain gradient, to this norm before taking the difference."""
    g2_clip: float | None = None
    """Clip g2, the gradient at the perturbed weights, to this norm before taking the difference."""
    outside: Literal["g1", "g2"] = "g1"
    """The gradient of the parameters outside the perturbed set."""
    replay_randomness: bool = True
    """Whether the second pass repeats the first pass's dropout masks."""


CORRECTED = PublishedBehavior()
"""The penalty as published papers describe it."""


class GradientRegularizationConfig(StrictConfig):
    """The penalty strength / 2 * ||grad L||^2, added to the loss L of every optimizer update.

    L is the whole loss of the update, including its KL and entropy terms unless `kl_in_penalty` is false.
    """

    strength: float | str = 0.0
    """A number (0: off, without a second pass), or `ratio:0.3`: adapt the strength slowly, so that the norm of the
    penalty's gradient is 0.3 times that of the plain gradient (of the chosen groups, if `group_fraction` is below 1).
    `calibrated:0.3`: adapt like that over the first 20 updates with advantages, then keep the strength fixed."""
    penalty: Literal["squared_norm", "norm"] = "squared_norm"
    """squared_norm: strength / 2 * ||grad L||^2. norm: strength * ||grad L|| (Zhao et al. 2022, arXiv 2202.03599);
    with step_scale=radius and strength equal to step this is SAM (Foret et al. 2021, arXiv 2010.01412)."""
    ratio_mode: RatioMode = "importance"
    """The policy loss of the second pass. importance: ratios to the frozen old log-probabilities, with the clip mask of
    the first pass. reuse: d loss / d log-probability of each token is frozen, which omits the score function's part of
    the curvature (on a softmax bandit with centred advantages nothing remains). importance_clipped: evaluate the loss
    again, including clipping."""
    kl_in_penalty: bool = True
    """Whether L in the penalty includes the KL and entropy terms. False costs one more pass if the loss has any."""
    perturbed: PerturbedSet = "blocks"
    """The parameters whose gradient is penalized. blocks: those of the repeated blocks. all: all trainable parameters.
    adapters: only adapters. last_layer: the output layer. last_block: the last block. A list: parameters whose names
    match one of its patterns (`*.mlp.*`). All other parameters keep g1."""
    step: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The size of the perturbation, in the unit of `step_scale`. null: a relative step of 3e-5 if the whole forward
    pass is float32, 3e-4 if any part is in half precision, and 3e-3 if adapters are perturbed in half precision. If a
    check (`check_every`) finds this default inconsistent, it tries shorter and longer steps and keeps the best. A step
    that you set never changes."""
    step_scale: Literal["relative", "radius", "absolute"] = "relative"
    """relative: the perturbed parameters move by step * ||theta||. radius: they move by step (SAM). absolute: step
    multiplies the gradient (the paper's epsilon)."""
    direction: Literal["gradient", "random"] = "gradient"
    """gradient: perturb along the gradient, which penalizes its norm. random: perturb along a Gaussian direction z of
    the same norm, drawn in every update, which adds H z. This control flattens without regard to the gradient."""
    difference: Literal["forward", "central", "exact"] = "forward"
    """forward: error O(step), one more pass. central: error O(step^2), two more passes. exact: double backward through
    the plain model, slow and with much memory; a reference for the other two."""
    every: Annotated[int, Field(ge=1)] = 1
    """Run the second pass in every n-th update; 1: in all. The updates in between reuse the penalty's component
    orthogonal to g1, scaled to the norm of the current g1 (LookSAM, Liu et al. 2022, arXiv 2203.02714)."""
    group_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share of a minibatch's groups that the second pass repeats; its g1 is from the same groups. A minibatch of
    completions is split by prompt too."""
    delay_updates: Annotated[int, Field(ge=0)] = 0
    """Updates without regularization at the start of RL."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates over which the strength rises linearly from 0, after `delay_updates`; 0: no warm-up."""
    min_perturbation_kept: Annotated[float, Field(ge=0, le=1)] = 0.3
    """The least cosine between the rounded and the intended perturbation. If it is lower at the start of a run, the run
    is refused if you set `step`; otherwise other steps are tried. Later there is one notice."""
    check_every: Annotated[int, Field(ge=0)] = 100
    """Updates between checks that the penalty agrees with the penalty at the opposite step, by their cosine. The first
    check is at the first update with advantages. If the cosine is below 0.9 and `step` is null, the check searches for
    another step. If the cosine is then below 0.5, the first check ends the run; any cosine below 0.9 gives a notice. A
    check costs one more pass with difference=forward and none with central. A search costs two passes for each step it
    tries (at most nine), and one more run of the update. exact needs no check. 0: no checks, for steps that are long on
    purpose, as in SAM."""

    @field_validator("strength")
    @classmethod
    def _number_or_ratio(cls, value: float | str) -> float | str:
        text = str(value)
        prefix = next((prefix for prefix in (RATIO, CALIBRATED) if text.startswith(prefix)), "")
        try:
            number = float(text.removeprefix(prefix))
        except ValueError as error:
            raise ValueError(f"gradient_regularization.strength={value}: give {STRENGTHS}") from error
        if prefix:
            if not 0 < number < float("inf"):
                raise ValueError(f"gradient_regularization.strength={value}: give {STRENGTHS}, with a number above 0")
            return text
        if not 0 <= number < float("inf"):
            raise ValueError(f"gradient_regularization.strength={value}: give a finite strength of at least 0")
        return number

    @field_validator("perturbed", mode="before")
    @classmethod
    def _patterns(cls, value: object) -> object:
        return read_perturbed(value, key="gradient_regularization.perturbed")

    @model_validator(mode="after")
    def _consistent(self) -> GradientRegularizationConfig:
        if self.step_scale != "relative" and self.step is None:
            raise ValueError(f"step_scale={self.step_scale} has no default step: set gradient_regularization.step")
        if self.direction == "random" and self.every > 1:
            raise ValueError(
                "direction=random draws a direction in every update, so no penalty can be reused: set every=1"
            )
        if self.perturbed == ():
            raise ValueError("perturbed is an empty list: name a pattern, or use blocks or all")
        return self

    @property
    def enabled(self) -> bool:
        """Whether the strength is not 0."""
        return self.strength != 0

    @property
    def finds_step(self) -> bool:
        """Whether a check that finds the step inconsistent searches for another step."""
        return self.step is None and self.check_every > 0

    @property
    def ratio(self) -> float | None:
        """The wanted penalty ratio, tracked throughout or to calibrate; None if the strength is a number."""
        if not isinstance(self.strength, str):
            return None
        return float(self.strength.removeprefix(RATIO).removeprefix(CALIBRATED))

    @property
    def calibrated(self) -> bool:
        """Whether the strength is tracked at first and then frozen."""
        return str(self.strength).startswith(CALIBRATED)

    @classmethod
    def paper(cls, *, gamma: float = 1e-3, eps: float = 1e-3) -> GradientRegularizationConfig:
        """The penalty of arXiv 2602.18037; its code descends L + gamma / 2 * ||grad L||^2, so strength = gamma."""
        return cls(strength=gamma, step=eps, step_scale="absolute", ratio_mode="reuse")

    @classmethod
    def from_scratch_dr_grpo(cls, *, gamma: float = 1e-2, eps: float = 1e-2) -> GradientRegularizationConfig:
        """The penalty of a Dr. GRPO from scratch, g + gamma / 2 * (g' - g) / eps, so strength = gamma / 2."""
        return cls(strength=gamma / 2, step=eps, step_scale="absolute", ratio_mode="reuse")


def read_perturbed(value: object, *, key: str) -> object:
    """Check the value of a perturbed set in a recipe under `key`, and return lists of patterns as tuples."""
    if isinstance(value, str) and value not in NAMED_SETS:
        raise ValueError(
            f"{key}={value}: give 'blocks', 'all', 'adapters', 'last_layer' or 'last_block', or a list of patterns "
            "such as ['*.mlp.*']"
        )
    return tuple(value) if isinstance(value, list) else value
