"""Settings that another setting makes ineffective: refused if written, dropped if inherited."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatpeak.training.objective_config import (
    ADVANTAGE_ARGUMENTS,
    LOSS_ARGUMENTS,
    LOSS_SETTINGS,
    TOKEN_WEIGHT_ARGUMENTS,
    is_reference,
)
from flatpeak.utils.schema import StrictConfig
from flatpeak.utils.user_code import FROM_PYTHON

FUNCTIONS = ("objective.loss", "advantage.function", "objective.token_weights.function")
"""The settings that name a function; each has a section `arguments` next to it."""
_ARGUMENTS = LOSS_ARGUMENTS | ADVANTAGE_ARGUMENTS | TOKEN_WEIGHT_ARGUMENTS
_LONGEST_VALUE = 100
"""The most characters of a section or list in an error."""
Get = Callable[[str], Any]
"""The value of a dotted key; None if it is missing."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The settings that have no effect if `applies` is true for the value of `choice`."""

    choice: str
    """Dotted key of the choice."""
    applies: Callable[[Any], bool]
    settings: tuple[str, ...]
    """Dotted keys of the settings that the choice makes ineffective."""
    instead: str
    """The choice with which the settings have an effect."""
    unless: Callable[[Get], bool] = lambda get: False
    """A condition under which the settings still have an effect."""

    def is_unused(self, get: Get) -> bool:
        """Whether the settings have no effect in this recipe."""
        return self.applies(get(self.choice)) and not self.unless(get)


def _optimizer(section: str) -> Rule:
    return Rule(
        choice=f"{section}.name",
        applies=lambda name: name == "sgd",
        settings=(f"{section}.betas", f"{section}.eps"),
        instead=f"{section}.name=adamw",
    )


def _task(section: str) -> tuple[Rule, ...]:
    return (
        Rule(
            choice=f"{section}.split",
            applies=lambda split: split == "official",
            settings=(f"{section}.math500_path",),
            instead=f"{section}.split=math500",
        ),
        Rule(
            choice=f"{section}.source",
            applies=lambda source: source == "published",
            settings=tuple(
                f"{section}.{name}" for name in ("counts", "min_number", "max_number", "min_target", "max_target")
            ),
            instead=f"{section}.source=generated",
        ),
        Rule(
            choice=f"{section}.wording",
            applies=lambda wording: wording == "plain",
            settings=(f"{section}.shots",),
            instead=f"{section}.wording=official",
        ),
        *_own_test_set(section),
        *_preferences(section),
    )


def _own_test_set(section: str) -> tuple[Rule, ...]:
    """The rules for tasks with their own test set, which hold out no fraction of the training rows."""
    return tuple(
        Rule(
            choice=f"{section}.{name}",
            applies=bool,
            settings=(f"{section}.test_fraction",),
            instead=f"{section}.{name}={none}",
        )
        for name, none in (("test", "[]"), ("test_path", "null"), ("test_split", "null"))
    )


def _preferences(section: str) -> tuple[Rule, ...]:
    return (
        Rule(
            choice=f"{section}.path",
            applies=lambda path: path is not None,
            settings=tuple(f"{section}.{name}" for name in ("hub", "hub_file", "hub_config", "split", "test_split")),
            instead=f"{section}.path=null",
            # Other tasks have a `split` next to a path, and read it.
            unless=lambda get: get(f"{section}.type") != "preferences",
        ),
        Rule(
            choice=f"{section}.hub_file",
            applies=lambda file: file is not None,
            settings=(f"{section}.hub_config", f"{section}.split"),
            instead=f"{section}.hub_file=null",
            unless=lambda get: get(f"{section}.path") is not None,
        ),
    )


def _coefficient(setting: str) -> Rule:
    """A coefficient of the objective, which only some losses read; a user's loss may read any coefficient."""
    readers = [loss for loss, settings in LOSS_SETTINGS.items() if setting in settings]
    return Rule(
        choice="objective.loss",
        applies=lambda loss: loss not in readers and not is_reference(str(loss)),
        settings=(f"objective.{setting}",),
        instead=f"objective.loss={' or '.join(readers)}",
    )


_COEFFICIENTS = dict.fromkeys(name for settings in LOSS_SETTINGS.values() for name in settings if name != "ratio")

RULES = (
    *map(_coefficient, _COEFFICIENTS),
    Rule(
        choice="objective.loss",
        applies=lambda loss: "ratio" not in LOSS_SETTINGS.get(str(loss), ("ratio",)),
        settings=("objective.ratio",),
        instead="a loss with an importance ratio",
        unless=lambda get: get("kl.ratio_weighted") is True and get("kl.placement") in (None, "loss"),
    ),
    Rule(
        choice="objective.loss",
        applies=lambda loss: str(loss) in LOSS_SETTINGS.keys() - LOSS_ARGUMENTS.keys(),
        settings=("objective.arguments",),
        instead="objective.loss=file.py:function",
    ),
    Rule(
        choice="objective.sampler_correction.type",
        applies=lambda type_: type_ == "none",
        settings=tuple(f"objective.sampler_correction.{name}" for name in ("level", "cap", "floor", "normalize")),
        instead="objective.sampler_correction.type=truncate",
    ),
    Rule(
        choice="kl.estimator",
        applies=lambda estimator: estimator != "exact",
        settings=("kl.top_k",),
        instead="kl.estimator=exact",
    ),
    Rule(
        choice="kl.placement",
        applies=lambda placement: placement in ("reward", "reward_to_go"),
        settings=("kl.ratio_weighted",),
        instead="kl.placement=loss",
    ),
    Rule(
        choice="kl.placement",
        applies=lambda placement: placement != "loss",
        settings=("kl.groups",),
        instead="kl.placement=loss",
    ),
    Rule(
        choice="kl.placement",
        applies=lambda placement: placement != "reward_to_go",
        settings=("kl.discount",),
        instead="kl.placement=reward_to_go",
    ),
    Rule(
        choice="training.dynamic_sampling.max_resamples",
        applies=lambda count: count == 0,
        settings=("training.dynamic_sampling.pass_rate", "training.dynamic_sampling.min_std"),
        instead="training.dynamic_sampling.max_resamples=3",
    ),
    Rule(
        choice="advantage.baseline",
        applies=lambda baseline: baseline == "none",
        settings=("training.dynamic_sampling.max_resamples",),
        instead="advantage.baseline=mean",
    ),
    Rule(
        choice="advantage.function",
        applies=lambda function: function == "remax",
        settings=("training.dynamic_sampling.max_resamples",),
        instead="advantage.function=null",
    ),
    Rule(
        choice="advantage.function",
        applies=lambda function: function is not None,
        settings=("advantage.baseline", "advantage.scale", "advantage.eps", "advantage.credit"),
        instead="advantage.function=null",
    ),
    Rule(
        choice="advantage.function",
        applies=lambda function: not ADVANTAGE_ARGUMENTS.get(str(function), is_reference(str(function))),
        settings=("advantage.arguments",),
        instead="advantage.function=file.py:function",
    ),
    Rule(
        choice="evaluation.choices",
        applies=lambda choices: choices == "rank",
        settings=("evaluation.max_new_tokens", "evaluation.stop"),
        instead="evaluation.choices=generate",
        unless=lambda get: bool(get("evaluation.samples")),
    ),
    Rule(
        choice="evaluation.sharpness.eigenvalue",
        applies=lambda eigenvalue: eigenvalue is False,
        settings=("evaluation.sharpness.iterations", "evaluation.sharpness.tolerance"),
        instead="evaluation.sharpness.eigenvalue=true",
    ),
    Rule(
        choice="tasks",
        applies=bool,
        settings=("task",),
        instead="tasks=[]",
    ),
    Rule(
        choice="tools",
        applies=lambda tools: not tools,
        settings=("episodes",),
        instead="tools=[file.py:name]",
        unless=lambda get: get("environment") is not None,
    ),
    # RunConfig refuses both in one recipe; these drop what a recipe inherits.
    Rule(choice="tools", applies=bool, settings=("environment",), instead="tools=[]"),
    Rule(
        choice="environment",
        applies=lambda environment: environment is not None,
        settings=("tools",),
        instead="environment=null",
    ),
    *(_optimizer(section) for section in ("optimizer", "sft.optimizer", "reward_model.optimizer")),
    *_task("task"),
    *_task("curriculum.task"),
)


def refuse_unused(config: StrictConfig) -> None:
    """Raise ValueError for a setting that the recipe writes, that is not off, and that has no effect."""
    for rule in RULES:
        if not rule.is_unused(lambda key: _value(config, key)):
            continue
        for setting in rule.settings:
            if _is_explicit(config, setting):
                value, chosen = _value(config, setting), _value(config, rule.choice)
                if value is None or value is False or value == ():  # off, as under the choice
                    continue
                raise ValueError(
                    f"{setting}={_as_yaml(value)} has no effect with {rule.choice}={_as_yaml(chosen)}: remove it, or "
                    f"set {rule.instead}"
                )


def _as_yaml(value: Any) -> str:
    """A value in YAML, as in recipes; a long one is cut."""
    if not isinstance(value, bool | list | tuple | StrictConfig):
        return str(value)
    text = json.dumps(value, default=lambda section: section.model_dump(mode="json", exclude_unset=True))
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def without_superseded(
    merged: Mapping[str, Any], delta: Mapping[str, Any], *, base: Mapping[str, Any]
) -> dict[str, Any]:
    """Drop the settings that `merged` inherits from `base` and that a choice made in `delta` makes ineffective.

    `objective.loss=policy_gradient` over a recipe with `clip_low` means no clip; it is not a contradiction. A function
    that replaces another does not inherit the arguments of the first. A task of a type replaces a mixture.
    """
    kept = dict(merged)
    for choice in FUNCTIONS:
        before, now = (str((_find(recipe, choice) or ("",))[0]) for recipe in (base, delta))
        takes_arguments = is_reference(before) or bool(_ARGUMENTS.get(before))
        if takes_arguments and now not in ("", "None") and not _are_same(before, now):
            path = [*choice.split(".")[:-1], "arguments"]
            kept = _with(kept, path, (_find(delta, ".".join(path)) or ({},))[0])
    if _find(delta, "task.type") is not None and _find(delta, "tasks") is None:
        kept.pop("tasks", None)
    for rule in RULES:
        if _find(delta, rule.choice) is None or not rule.is_unused(lambda key: (_find(merged, key) or (None,))[0]):
            continue
        for setting in rule.settings:
            if _find(delta, setting) is None:
                kept = _without(kept, setting.split("."))
    return kept


def _are_same(before: str, now: str) -> bool:
    """Whether two references name the same function; a caller may pass a Python function instead of naming its file."""
    from_python = any(reference.startswith(FROM_PYTHON) for reference in (before, now))
    return before == now or (from_python and before.rpartition(":")[2] == now.rpartition(":")[2])


def explicit_settings(section: StrictConfig, *names: str) -> Iterator[str]:
    """The settings of a section, among `names`, that the recipe sets explicitly.

    A resolved recipe, as a run keeps it, contains all settings of a section; defaults do not count as explicit there.
    """
    fields = type(section).model_fields
    for name in names:
        value, default = getattr(section, name), fields[name].get_default(call_default_factory=True)
        resolved = _is_resolved(section) or _is_resolved(value)
        if name in section.model_fields_set and not (resolved and value == default):
            yield name


def _is_resolved(value: Any) -> bool:
    """Whether a value is a section with all of its settings."""
    return isinstance(value, StrictConfig) and type(value).model_fields.keys() <= value.model_fields_set


def _is_explicit(config: StrictConfig, key: str) -> bool:
    *sections, name = key.split(".")
    section: Any = config
    for step in sections:
        section = getattr(section, step, None)
    return name in getattr(type(section), "model_fields", {}) and any(explicit_settings(section, name))


def _value(config: Any, key: str) -> Any:
    for step in key.split("."):
        config = getattr(config, step, None)
    return config


def _find(recipe: Mapping[str, Any], key: str) -> tuple[Any] | None:
    """The value of a dotted key of an unchecked recipe, in a tuple; None if the recipe lacks the key."""
    value: Any = recipe
    for step in key.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return None
        value = value[step]
    return (value,)


def _with(recipe: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """The recipe with this value at the path."""
    first, *rest = path
    return {**recipe, first: _with(recipe.get(first, {}), rest, value) if rest else value}


def _without(recipe: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """The recipe without the value at the path; its sections stay, even if they become empty."""
    first, *rest = path
    inner = recipe.get(first)
    if not rest:
        return {key: value for key, value in recipe.items() if key != first}
    return {**recipe, first: _without(inner, rest)} if isinstance(inner, Mapping) else dict(recipe)
