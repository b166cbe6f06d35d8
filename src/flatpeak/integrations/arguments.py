"""The gradient-regularization arguments that extend a trainer's arguments, and the configuration that they give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from flatpeak.errors import UserError
from flatpeak.gradreg.config import CORRECTED, GradientRegularizationConfig, PublishedBehavior
from flatpeak.utils.user_code import load_object

PUBLISHED_EXCLUDE = ("embed", "embedding", "lm_head", "output", "classifier", "score")
"""Published code perturbs every trainable parameter whose name contains none of these words."""
PUBLISHED_EPS = 1e-3
PUBLISHED_CLIP = 10.0
ARGUMENTS = {
    "strength": "grad_reg_strength",
    "step": "grad_reg_eps",
    "delay_updates": "grad_reg_warmup",
    "warmup_updates": "grad_reg_strength_warmup",
    "ratio_mode": "grad_reg_ratio_mode",
    "perturbed": "grad_reg_perturbed",
    "penalty": "grad_reg_penalty",
    "direction": "grad_reg_direction",
    "difference": "grad_reg_difference",
    "every": "grad_reg_every",
    "min_perturbation_kept": "grad_reg_min_perturbation_kept",
    "check_every": "grad_reg_check_every",
}
"""The argument for each field of GradientRegularizationConfig."""
SCHEDULERS = ("grad_reg_scheduler", "gradreg_scheduler")
FIXED_WHEN_PUBLISHED = ("ratio_mode", "perturbed", "penalty", "direction", "difference", "every")

Scheduler = Callable[[int], float]
"""From the number of optimizer steps taken to the strength of the next step."""


def _argument(default: Any, help: str) -> Any:
    """A field with its help text for the command line."""
    return field(default=default, metadata={"help": help})


@dataclass
class GradientRegularizationArguments:
    """A mixin for any `TrainingArguments`: `class Config(GradientRegularizationArguments, DPOConfig)`.

    Some types allow None although the default is another value, so that the command line parses them as text.
    """

    grad_reg_strength: float | str | None = _argument(
        0.0,
        "Strength of the penalty strength / 2 * ||gradient||^2: a number (0: off); ratio:0.3 to hold the penalty's "
        "gradient at 0.3 times the norm of the plain gradient; or calibrated:0.3 to do so over the first 20 steps "
        "with advantages and then keep the resulting strength.",
    )
    grad_reg_eps: float | None = _argument(
        None,
        "Absolute step: the weights move by eps * gradient. Unset: a step relative to the norm of the weights: 3e-5 "
        "in float32, 3e-4 if weights are rounded to bfloat16, 3e-3 for adapters of a bfloat16 model, or another step "
        "that the first check finds (published behavior: 1e-3, absolute).",
    )
    grad_reg_warmup: int = _argument(0, "Optimizer steps without regularization at the start.")
    grad_reg_strength_warmup: int = _argument(0, "Optimizer steps over which the strength then rises linearly.")
    grad_reg_g1_clip: float | None = _argument(
        None,
        "Published behavior: clip the first gradient to this norm before taking the difference (default 10). It has no "
        "effect otherwise.",
    )
    grad_reg_g2_clip: float | None = _argument(None, "The same for the second gradient.")
    grad_reg_ratio_mode: str = _argument(
        "importance",
        "The policy loss of the second pass (GRPO, RLOO). importance: ratios to the frozen old log-probabilities, with "
        "the clip mask of the first pass. reuse: each token's coefficient is frozen. importance_clipped: evaluate the "
        "loss again, including clipping. Other trainers evaluate their loss again in every mode.",
    )
    grad_reg_perturbed: list[str] | str | None = _argument(  # noqa: RUF009
        "blocks",
        "The parameters whose gradient is penalized: blocks, all, adapters, last_layer, last_block, or patterns of "
        "names such as *.mlp.* (several: separated by commas).",
    )
    grad_reg_penalty: str = _argument("squared_norm", "squared_norm: strength / 2 * ||g||^2; norm: strength * ||g||.")
    grad_reg_direction: str = _argument(
        "gradient",
        "gradient: perturb along the gradient. random: along a Gaussian direction of the same norm, as a control, "
        "drawn from the trainer's seed.",
    )
    grad_reg_difference: str = _argument("forward", "forward: one more pass. central: two more, error of second order.")
    grad_reg_every: int = _argument(
        1, "Steps from one second pass to the next; those between reuse the last penalty (LookSAM)."
    )
    grad_reg_min_perturbation_kept: float = _argument(
        0.3, "Refuse to start if rounding leaves the perturbation a smaller cosine than this."
    )
    grad_reg_check_every: int = _argument(
        100,
        "Compare the penalty at the step with that at its opposite in the first regularized step with advantages, and "
        "then every this many steps. If the cosine is below 0.9 and you set no step, the check searches for another "
        "step; below 0.5 the first check fails. 0: never, as in published behavior.",
    )
    grad_reg_behavior: str = _argument(
        "corrected",
        "corrected, or published: an absolute step, both gradients clipped before the difference, the second gradient "
        "kept in parameters outside the perturbed set, parameters chosen by words in their names, dropout not "
        "replayed, and the stock loss in the second pass.",
    )
    grad_reg_precision: str = _argument(
        "float32",
        "float32: regularized steps, including generation, run without autocast. autocast: as configured; refused if "
        "rounding removes the perturbation.",
    )
    grad_reg_scheduler: str | None = _argument(
        None,
        "A function from the number of steps taken to the strength, which overrides grad_reg_strength; on the command "
        "line package.module:function.",
    )
    gradreg_scheduler: str | None = _argument(None, "Published name of grad_reg_scheduler.")
    grad_reg_exclude: list[str] | None = _argument(  # noqa: RUF009
        None, "Published behavior: substrings of the names of excluded parameters."
    )
    fp32_gradreg: bool = _argument(True, "Published name: combine gradients in float32. Only True is supported.")

    def __post_init__(self) -> None:
        """Check all arguments that do not depend on the model."""
        self.grad_reg_config()
        self.grad_reg_schedule()
        following = getattr(super(), "__post_init__", None)
        if following is not None:
            following()

    @property
    def grad_reg_enabled(self) -> bool:
        """Whether any step may be regularized."""
        return self.grad_reg_config().enabled or self.grad_reg_schedule() is not None

    @property
    def grad_reg_published(self) -> bool:
        """Whether published behavior is configured."""
        return self.grad_reg_behavior == "published"

    def grad_reg_config(self) -> GradientRegularizationConfig:
        """The configuration; UserError names a bad argument. Published behavior perturbs all parameters."""
        self._check_choices()
        values: dict[str, Any] = {name: getattr(self, argument) for name, argument in ARGUMENTS.items()}
        values["strength"] = as_strength(self.grad_reg_strength)
        values["perturbed"] = as_perturbed(self.grad_reg_perturbed)
        values["step_scale"] = "relative" if self.grad_reg_eps is None else "absolute"
        if self.grad_reg_published:
            values |= self._published(values)
        return checked_config(values)

    def grad_reg_published_behavior(self) -> PublishedBehavior:
        """The deviations of published code, if published behavior is configured."""
        if not self.grad_reg_published:
            return CORRECTED
        return PublishedBehavior(
            g1_clip=PUBLISHED_CLIP if self.grad_reg_g1_clip is None else self.grad_reg_g1_clip,
            g2_clip=PUBLISHED_CLIP if self.grad_reg_g2_clip is None else self.grad_reg_g2_clip,
            outside="g2",
            replay_randomness=False,
        )

    def grad_reg_schedule(self) -> Scheduler | None:
        """The schedule of the strength; None without one."""
        scheduler: Any = self.grad_reg_scheduler if self.grad_reg_scheduler is not None else self.gradreg_scheduler
        if isinstance(scheduler, str):
            where = f"grad_reg_scheduler={scheduler}"
            scheduler = load_object(scheduler, where=where)
            if not callable(scheduler):
                raise UserError(f"{where} is not a function")
        return scheduler  # type: ignore[no-any-return]

    def to_dict(self) -> dict[str, Any]:
        """The arguments as a dictionary with functions by name, because trackers write it as JSON."""
        return functions_by_name(super().to_dict())  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        """The state with functions by name: every checkpoint pickles the arguments, and lambdas cannot be pickled."""
        return functions_by_name(vars(self))

    def _check_choices(self) -> None:
        for name, allowed in (
            ("grad_reg_behavior", ("corrected", "published")),
            ("grad_reg_precision", ("float32", "autocast")),
            ("grad_reg_difference", ("forward", "central", "exact")),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)}: give one of {', '.join(allowed)}")
        if self.grad_reg_difference == "exact":
            raise UserError(
                "grad_reg_difference=exact: the trainer runs backward, which leaves no graph for second derivatives; "
                "use forward or central (flatpeak.GradientRegularizer.accumulate has exact)"
            )
        for name in SCHEDULERS:
            given = getattr(self, name)
            if given is not None and not callable(given) and not isinstance(given, str):
                raise UserError(f"{name}={given}: give a function of the step, or package.module:function")
        for name in ("grad_reg_g1_clip", "grad_reg_g2_clip"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise UserError(f"{name}={getattr(self, name)}: give a norm above 0")
        if as_perturbed(self.grad_reg_perturbed) == ():
            raise UserError("grad_reg_perturbed is empty: name a pattern, or use blocks or all")
        if self.grad_reg_exclude is not None and not self.grad_reg_published:
            raise UserError("grad_reg_exclude needs grad_reg_behavior=published; use grad_reg_perturbed")
        if not self.fp32_gradreg:
            raise UserError("fp32_gradreg=False: gradients are always combined in float32, or in the weights' type")

    def _published(self, values: dict[str, Any]) -> dict[str, Any]:
        defaults = GradientRegularizationConfig()
        for name in FIXED_WHEN_PUBLISHED:
            if values[name] != getattr(defaults, name):
                raise UserError(f"{ARGUMENTS[name]} needs grad_reg_behavior=corrected: remove it")
        return {
            "step": PUBLISHED_EPS if self.grad_reg_eps is None else self.grad_reg_eps,
            "step_scale": "absolute",
            "perturbed": "all",
            "check_every": 0,  # with clipping and dropout, published code computes no derivative to check
        }


def checked_config(values: dict[str, Any]) -> GradientRegularizationConfig:
    """The configuration, or a UserError about the first fault, with the name of its argument."""
    try:
        return GradientRegularizationConfig(**values)
    except ValidationError as error:
        fault = error.errors()[0]
        name = str(fault["loc"][0]) if fault["loc"] else ""
        message = fault["msg"].removeprefix("Value error, ").removeprefix("gradient_regularization.")
        message = in_argument_names(message.removeprefix(f"{name}={values.get(name)}: "))
        raise UserError(f"{ARGUMENTS.get(name, name)}={values.get(name)}: {message}") from None


def as_strength(value: float | str | None) -> float | str:
    """The strength as a number, even if the command line gave text; a ratio stays text."""
    if value is None:
        return 0.0
    try:
        return float(value)
    except ValueError:
        return value


def as_perturbed(value: Sequence[str] | str | None) -> str | tuple[str, ...]:
    """The perturbed set: a name, or patterns."""
    if value is None:
        return "blocks"
    if not isinstance(value, str):
        return tuple(value)
    is_pattern = any(mark in value for mark in "*?[.,")
    return tuple(pattern.strip() for pattern in value.split(",")) if is_pattern else value


def functions_by_name(values: dict[str, Any]) -> dict[str, Any]:
    """A copy of the arguments with schedule functions as `module:function`."""
    paths = {
        name: f"{values[name].__module__}:{getattr(values[name], '__qualname__', type(values[name]).__name__)}"
        for name in SCHEDULERS
        if callable(values.get(name))
    }
    return {**values, **paths}


def in_argument_names(message: str) -> str:
    """A message of the regularizer with the names of the trainer's arguments."""
    message = message.replace("gradient_regularization.step", "grad_reg_eps")
    return message.replace("gradient_regularization.", "grad_reg_")
