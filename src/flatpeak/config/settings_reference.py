"""The reference of all settings of a recipe, read from the configurations: key, type, default, description.

Descriptions are the docstrings below the fields, read from the source when the reference is requested. pydantic's
`use_attribute_docstrings` would read them whenever a recipe is loaded, in 0.37 s instead of 0.29.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flatpeak.config.error_messages import known_keys
from flatpeak.config.foreign_names import translate
from flatpeak.config.load import parse_value
from flatpeak.config.run_config import RunConfig
from flatpeak.config.schema_types import admits_none, alternatives, elements, literals, models_of, type_in_words
from flatpeak.errors import UserError, nearest

COMMON: Final = (
    "run.name", "run.directory", "run.seed", "run.checkpoint_every",
    "model.path", "model.device", "model.dtype", "model.lora", "model.lora.rank", "model.quantization",
    "task.type", "prompt.template", "prompt.system", "prompt.user",
    "rollout.prompts_per_step", "rollout.group_size", "rollout.temperature", "rollout.top_p", "rollout.max_new_tokens",
    "rollout.engine", "rollout.staleness",
    "rewards", "rewards.<name>.type",
    "advantage.baseline", "advantage.scale",
    "objective.loss", "objective.ratio", "objective.normalization", "objective.clip_low", "objective.clip_high",
    "objective.entropy_coefficient", "objective.truncated",
    "kl.coefficient", "kl.estimator", "reference.reset_every",
    "gradient_regularization.strength", "gradient_regularization.ratio_mode", "gradient_regularization.step",
    "gradient_regularization.perturbed", "gradient_regularization.every",
    "optimizer.name", "optimizer.learning_rate", "optimizer.weight_decay", "optimizer.max_grad_norm",
    "optimizer.schedule", "optimizer.warmup_steps",
    "training.steps", "training.epochs_per_rollout", "training.minibatches", "training.micro_batch_tokens",
    "training.activation_checkpointing", "training.stop_at", "training.dynamic_sampling.max_resamples",
    "sft.steps", "sft.batch_size", "sft.optimizer.learning_rate",
    "evaluation.every", "evaluation.size", "evaluation.samples", "evaluation.sharpness",
    "tracking.wandb", "tracking.tensorboard", "distributed.processes", "distributed.strategy",
)  # fmt: skip
"""The settings that most recipes change, in the order of the sections."""
_TYPE_DESCRIPTION: Final = "The section's type, which decides its other keys. Another type replaces the whole section."
_NO_SECTION: Final = "A key of the recipe itself, without a section."
_REQUIRED: Final = object()
"""Stands for a missing default."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A key of a recipe that has a value."""

    key: str
    """Dotted; `<name>` stands for a name that the user chooses, `0` for the index of a list's element."""
    type: str
    """The type in words, with its values and bounds."""
    values: tuple[Any, ...]
    """All possible values; empty if others are possible, or there are too many."""
    required: bool
    """Whether a section with this key must set it."""
    default: Any
    """The default in the types of JSON and YAML; None if the setting is required."""
    description: str
    """One or more sentences."""
    same_as: str | None = None
    """The place where the keys of this section are listed, if not here: a key, and its variant."""

    @property
    def assignment(self) -> str:
        """`key=default`, as on the command line; only the key if there is no default."""
        return self.key if self.required else f"{self.key}={as_value(self.default)}"


@dataclass(frozen=True, kw_only=True)
class Section:
    """The settings of a section, or of one of its variants."""

    key: str
    """Dotted, with `<name>` and `0` as in a setting's key."""
    variants: tuple[str, ...]
    """The types that a recipe must choose to use these settings, the outermost first: `task.type=rows`."""
    description: str
    """A description of the section in one or more sentences."""
    settings: tuple[Setting, ...]
    """Settings of the section itself, without those of sections within it."""
    others_as: str | None = None
    """The section that lists the keys that are not here, because they and their defaults are the same there."""


def settings_reference(prefix: str = "") -> list[Section]:
    """All sections with settings; or the part at and below a key; or one variant of a section, `task.type=rows`.

    For a key within a list or a free mapping, such as `model.new.config.hidden_size`, it is the list or mapping. A
    section that occurs in several places is listed at the first place and at the requested place. UserError for an
    unknown key, with the nearest known key.
    """
    wanted, _, value = prefix.strip().strip(".").partition("=")
    if value and wanted.endswith(".type"):
        sections = settings_reference(wanted.removesuffix(".type"))
        chosen = [(section, type_) for section in sections for type_ in _types(section, wanted)]
        if chosen:
            types = list(dict.fromkeys(type_ for _, type_ in chosen))
            if value not in types:
                hint = "".join(f"did you mean {close}? " for close in nearest(value, types))
                raise UserError(f"{wanted}={value}: {hint}allowed values are {', '.join(types)}")
            return [section for section, type_ in chosen if type_ == value]
    listed = _all_sections(wanted)
    for is_asked_for in (_is_within, _is_element):
        sections = [
            replace(section, settings=tuple(one for one in section.settings if not wanted or is_asked_for(one, wanted)))
            for section in listed
        ]
        if any(section.settings for section in sections):
            return [section for section in sections if section.settings]
    raise UserError(_unknown(wanted))


def common_settings() -> list[Section]:
    """The sections of the `COMMON` settings, with these alone."""
    sections = [
        replace(section, settings=tuple(one for one in section.settings if one.key in COMMON))
        for section in settings_reference()
        if not section.variants
    ]
    return [section for section in sections if section.settings]


def _types(section: Section, key: str) -> Iterator[str]:
    """The type by which the setting at `key` chooses a section, if any. `rewards.type` is the type of any reward."""
    for variant in section.variants:
        chosen_by, _, type_ = variant.partition("=")
        if any(_matches(key.split("."), one.split(".")) for one in (chosen_by, chosen_by.replace(".<name>.", "."))):
            yield type_


def as_value(value: Any) -> str:
    """A value in YAML, as on the command line."""
    if isinstance(value, str) and value and value == value.strip() and parse_value(value) == value:
        return value
    if isinstance(value, float):
        return f"{value!r}"
    return json.dumps(value, ensure_ascii=False)


def _all_sections(wanted: str) -> list[Section]:
    walker, defaults = _Walker(wanted), RunConfig()
    result: list[Section] = []
    for name, field in RunConfig.model_fields.items():
        about = field_docstrings(RunConfig).get(name, "")
        setting, sections = walker.field(name, field, about, variants=(), default=getattr(defaults, name))
        if setting is not None:  # a section that may be null or has elements by name, or a key without a section
            first, *rest = sections or [Section(key=name, variants=(), description=_NO_SECTION, settings=())]
            sections = [replace(first, key=name, settings=(setting, *first.settings)), *rest]
        result += sections
    return result


class _Walker:
    """A walk over configurations that lists the keys of each section once, and again at the wanted key."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._listed: dict[tuple[type[BaseModel], ...], tuple[str, str]] = {}

    def field(
        self, key: str, field: FieldInfo, about: str, *, variants: tuple[str, ...], default: Any
    ) -> tuple[Setting | None, list[Section]]:
        """The field as a setting, unless it is a section that always exists, and the sections at and below it."""
        inside = [(key, field.annotation), *((f"{key}.{name}", inner) for name, inner in elements(field.annotation))]
        inside = [(path, annotation) for path, annotation in inside if any(models_of(annotation))]
        sections: list[Section] = []
        same_as = None
        for path, annotation in inside:
            members = tuple(models_of(annotation))
            same_as = self._listed_at(members, path, variants)
            if same_as is None:
                given = default if isinstance(default, BaseModel) else None
                sections += self._sections(path, members, about, variants=variants, given=given)
        members = tuple(models_of(field.annotation))
        always = len(members) == len(alternatives(field.annotation)) and not admits_none(field.annotation)
        if always and sections:
            return None, sections
        description = about or (_class_description(members[0]) if len(members) == 1 else "")
        setting = _setting(key, field, description=description, default=default, same_as=same_as)
        return setting, sections

    def _listed_at(self, members: tuple[type[BaseModel], ...], key: str, variants: tuple[str, ...]) -> str | None:
        """The place where the keys of these models are listed; None if they should be listed here."""
        place = f"{key} of {variants[-1]}" if variants else key
        first, listed = self._listed.setdefault(members, (key, place))
        if listed != place and first != key and _leads_to(key, self._wanted):
            self._listed[members] = (key, place)
            return None
        return None if listed == place else listed

    def _sections(
        self, key: str, members: tuple[type[BaseModel], ...], about: str, *, variants: tuple[str, ...], given: Any
    ) -> Iterator[Section]:
        """The sections of one model, or of a union: first its `type`, then each of its members."""
        if len(members) > 1:
            tags = tuple(tag for model in members if (tag := _tag(model)) is not None)
            yield Section(key=key, variants=variants, description=about, settings=(_type_setting(key, tags, given),))
        for model in members:
            tag = _tag(model)
            chosen = variants if tag is None else (*variants, f"{key}.type={tag}")
            instance = given if isinstance(given, model) else None
            yield from self._model(model, key, alone=len(members) == 1, variants=chosen, instance=instance)

    def _model(
        self, model: type[BaseModel], key: str, *, alone: bool, variants: tuple[str, ...], instance: BaseModel | None
    ) -> Iterator[Section]:
        """The settings of a model as a section, then the sections within it."""
        tag = _tag(model)
        own = [_type_setting(key, (tag,), instance)] if tag is not None and alone else []
        inner: list[Section] = []
        _, others_as = self._listed.get((model.__mro__[1],), (None, None))
        if _leads_to(key, self._wanted):
            others_as = None
        for name, field in model.model_fields.items():
            is_elsewhere = others_as is not None and name not in model.__annotations__
            if (name != "type" or tag is None) and not is_elsewhere:
                about = field_docstrings(model).get(name, "")
                default = _default(field) if instance is None else getattr(instance, name)
                setting, sections = self.field(f"{key}.{name}", field, about, variants=variants, default=default)
                if setting is not None:
                    own.append(setting)
                inner += sections
        description = _class_description(model)
        yield Section(key=key, variants=variants, description=description, settings=tuple(own), others_as=others_as)
        yield from inner


def _setting(key: str, field: FieldInfo, *, description: str, default: Any, same_as: str | None) -> Setting:
    kinds = alternatives(field.annotation)
    named = literals(field.annotation) if all(get_origin(kind) is Literal for kind in kinds) else []
    named = [True, False] if kinds == (bool,) else named
    return Setting(
        key=key,
        type=type_in_words(field.annotation, field.metadata),
        values=(*named, None) if named and admits_none(field.annotation) else tuple(named),
        required=default is _REQUIRED,
        default=None if default is _REQUIRED else _plain(default),
        description=description,
        same_as=same_as,
    )


def _type_setting(key: str, tags: tuple[str, ...], given: BaseModel | None) -> Setting:
    return Setting(
        key=f"{key}.type",
        type=type_in_words(Literal[tags]),
        values=tags,
        required=given is None,
        default=None if given is None else _tag(type(given)),
        description=_TYPE_DESCRIPTION,
    )


def _tag(model: type[BaseModel]) -> str | None:
    """The value of `type` that chooses this model; None if no `type` does."""
    field = model.model_fields.get("type")
    tags = literals(field.annotation) if field is not None else []
    return tags[0] if len(tags) == 1 else None


def _default(field: FieldInfo) -> Any:
    return _REQUIRED if field.is_required() else field.get_default(call_default_factory=True)


def _plain(value: Any) -> Any:
    """A default in the types of JSON and YAML."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _class_description(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


@cache
def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstrings below the fields of a configuration and its base classes, each on one line."""
    result: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            result |= _module_docstrings(base.__module__).get(base.__name__, {})
    return result


@cache
def _module_docstrings(module: str) -> dict[str, dict[str, str]]:
    """The docstrings below the fields of all classes of a module, by class and field."""
    source = Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8")
    result: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            result[node.name] = {
                field.target.id: " ".join(below.value.value.split())
                for field, below in pairwise(node.body)
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            }
    return result


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches a pattern, in which `<name>` is any name and `0` any index."""
    return len(path) == len(pattern) and all(
        step == name or name == "<name>" or (name == "0" and step.isdecimal())
        for step, name in zip(path, pattern, strict=True)
    )


def _is_within(setting: Setting, wanted: str) -> bool:
    """Whether a setting's key is the wanted key or below it."""
    path = wanted.split(".")
    return _matches(path, setting.key.split(".")[: len(path)])


def _is_element(setting: Setting, wanted: str) -> bool:
    """Whether the wanted key is a list's element or within a mapping, which are not listed separately."""
    if "sections" in setting.type or not _leads_to(setting.key, wanted):
        return False
    below = wanted.split(".")[setting.key.count(".") + 1 :]
    return "mapping" in setting.type or ("list of" in setting.type and len(below) == 1 and below[0].isdecimal())


def _leads_to(key: str, wanted: str) -> bool:
    """Whether the wanted key is a section's key or below it."""
    pattern = key.split(".")
    return _matches(wanted.split(".")[: len(pattern)], pattern)


def _unknown(wanted: str) -> str:
    """The error for an unknown key: the setting that another tool has under this name, or the nearest keys."""
    foreign = translate(wanted.split("."))
    if foreign is not None:
        return f"unknown setting {wanted}: {foreign}"
    known = list(dict.fromkeys(known_keys()))
    name = wanted.rpartition(".")[2]
    # The least nested first: keys of every reward of every curriculum are seldom meant.
    known.sort(key=lambda key: key.count("."))
    close = nearest(name, [key.rpartition(".")[2] for key in known])
    similar = [key for key in known if key.rpartition(".")[2] in close]
    near = nearest(wanted, known, count=2)
    if suggestions := list(dict.fromkeys(near + similar if "." in wanted else similar + near))[:3]:
        return f"unknown setting {wanted}: did you mean {' or '.join(suggestions)}?"
    return f"unknown setting {wanted}: the sections are {', '.join(RunConfig.model_fields)}"
