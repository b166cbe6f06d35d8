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
"""A named set of parameters, or patterns of their names."""
RatioMode = Literal["importance", "reuse", "importance_clipped"]


@dataclass(frozen=True, kw_only=True)
class PublishedBehavior:
    """Deviations of published code from the penalty it describes, to measure what they do; the defaults have none."""

    g1_clip: float | None = None
    """Clip g1, the plain gradient, to this norm before the difference is taken."""
    g2_clip: float | None = None
    """Clip g2, the gradient at the perturbed weights, to this norm before the difference is taken."""
    outside: Literal["g1", "g2"] = "g1"
    """The gradient of parameters that are not perturbed."""
    replay_randomness: bool = True
    """Whether the second pass repeats the first pass's dropout masks."""


CORRECTED = PublishedBehavior()
"""The penalty as it is described."""


class GradientRegularizationConfig(StrictConfig):
    """The penalty strength / 2 * ||grad L||^2, added to the loss L of every optimizer update.

    L is the whole loss of the update: its KL and entropy terms take part, unless `kl_in_penalty` is false.
    """

    strength: float | str = 0.0
    """A number (0: off, and no second pass), or `ratio:0.3`: the penalty's gradient has 0.3 times the norm of the
    plain one (of the chosen groups', where `group_fraction` is below 1), tracked slowly; or `calibrated:0.3`: tracked
    like that over the first 20 updates with advantages, and from then on the number that this came to."""
    penalty: Literal["squared_norm", "norm"] = "squared_norm"
    """squared_norm: strength / 2 * ||grad L||^2. norm: strength * ||grad L|| (Zhao et al. 2022, arXiv 2202.03599);
    with step_scale=radius and strength equal to step that is SAM (Foret et al. 2021, arXiv 2010.01412)."""
    ratio_mode: RatioMode = "importance"
    """The second pass's policy loss. importance: ratios to the frozen old log-probabilities, with the first pass's clip
    mask. reuse: every token's d loss / d log-probability frozen, which leaves the score function's own part out of the
    curvature (on a softmax bandit with centred advantages nothing remains). importance_clipped: the loss evaluated
    again, clipping included."""
    kl_in_penalty: bool = True
    """Whether L in the penalty includes the KL and entropy terms. False costs one more pass wherever there are any."""
    perturbed: PerturbedSet = "blocks"
    """The parameters whose gradient is penalized. blocks: those of the repeated blocks. all: all trainable ones.
    adapters: adapters alone. last_layer: the output layer. last_block: the last block. A list: those whose names match
    one of its patterns (`*.mlp.*`). All others keep g1."""
    step: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The size of the perturbation, in the unit of `step_scale`; null: relative, 3e-5 where everything on the way
    through the model is float32; where anything is in half precision 3e-4, and 3e-3 if adapters are perturbed. A check
    (`check_every`) that finds this default inconsistent tries shorter and longer steps and keeps the best. A step that
    is set is never changed."""
    step_scale: Literal["relative", "radius", "absolute"] = "relative"
    """relative: step * ||theta|| is how far the perturbed parameters move. radius: step itself is (SAM). absolute: step
    multiplies the gradient (the paper's epsilon)."""
    direction: Literal["gradient", "random"] = "gradient"
    """gradient: perturb along the gradient, whose norm is penalized. random: along a Gaussian direction z of its
    norm, drawn anew in every update, which adds H z: the control, which flattens without regard to the gradient."""
    difference: Literal["forward", "central", "exact"] = "forward"
    """forward: error O(step), one more pass. central: O(step^2), two more. exact: double backward through the plain
    model, slow and large; the reference the others are held against."""
    every: Annotated[int, Field(ge=1)] = 1
    """Run the second pass in every n-th update; in between the penalty's component orthogonal to g1 is used again,
    scaled to the norm of the present g1 (LookSAM, Liu et al. 2022, arXiv 2203.02714). 1: in all."""
    group_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share of a minibatch's groups that the second pass repeats; its g1 is that of the same groups. A minibatch of
    completions is split by prompt too."""
    delay_updates: Annotated[int, Field(ge=0)] = 0
    """The number of updates at the start of RL without regularization."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates over which the strength rises linearly from 0, after those of `delay_updates`; 0: none."""
    min_perturbation_kept: Annotated[float, Field(ge=0, le=1)] = 0.3
    """The least cosine of the perturbation, as rounding leaves it, with the intended one. Below it a run is refused at
    its start if `step` is set, and another step is looked for if it is null; later there is a notice, once."""
    check_every: Annotated[int, Field(ge=0)] = 100
    """Updates between checks that the penalty at the step agrees with that at the opposite step, by their cosine; the
    first is made at the first update with advantages. A cosine below 0.9 starts a search for another step where `step`
    is null. If the cosine is then below 0.5, the first check ends the run; otherwise one below 0.9 gives a notice. A
    check costs one more pass with difference=forward, and none with central; a search costs two passes for every step
    that it tries, at most nine, and those of the update again; exact needs no check. 0: never, for a step that is meant
    to be long, as SAM's."""

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
            raise ValueError(f"gradient_regularization.strength={value}: a penalty needs a strength of at least 0")
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
                "direction=random draws anew in every update, which leaves nothing to use again: set every=1"
            )
        if self.perturbed == ():
            raise ValueError("perturbed is an empty list: name a pattern, or use blocks or all")
        return self

    @property
    def enabled(self) -> bool:
        """Whether the penalty has a strength other than 0."""
        return self.strength != 0

    @property
    def finds_step(self) -> bool:
        """Whether a check that finds the step inconsistent looks for another."""
        return self.step is None and self.check_every > 0

    @property
    def ratio(self) -> float | None:
        """The wanted penalty ratio, tracked for good or to calibrate; None where the strength is a number."""
        if not isinstance(self.strength, str):
            return None
        return float(self.strength.removeprefix(RATIO).removeprefix(CALIBRATED))

    @property
    def calibrated(self) -> bool:
        """Whether the strength is tracked for a while only, and then frozen."""
        return str(self.strength).startswith(CALIBRATED)

    @classmethod
    def paper(cls, *, gamma: float = 1e-3, eps: float = 1e-3) -> GradientRegularizationConfig:
        """The penalty of arXiv 2602.18037, whose code descends L + gamma / 2 * ||grad L||^2, so strength = gamma."""
        return cls(strength=gamma, step=eps, step_scale="absolute", ratio_mode="reuse")

    @classmethod
    def from_scratch_dr_grpo(cls, *, gamma: float = 1e-2, eps: float = 1e-2) -> GradientRegularizationConfig:
        """The penalty of a from-scratch Dr. GRPO, g + gamma / 2 * (g' - g) / eps, so strength = gamma / 2."""
        return cls(strength=gamma / 2, step=eps, step_scale="absolute", ratio_mode="reuse")


def read_perturbed(value: object, *, key: str) -> object:
    """Check a perturbed set as a recipe writes it under `key`, and return lists of patterns as tuples."""
    if isinstance(value, str) and value not in NAMED_SETS:
        raise ValueError(
            f"{key}={value}: give 'blocks', 'all', 'adapters', 'last_layer' or 'last_block', or a list of patterns "
            "such as ['*.mlp.*']"
        )
    return tuple(value) if isinstance(value, list) else value
