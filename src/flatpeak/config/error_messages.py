"""Error messages for pydantic's errors in a recipe, worded with the recipe's keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_origin

from pydantic import BaseModel

from flatpeak.config.foreign_names import HERE, translate, translate_value
from flatpeak.config.run_config import RunConfig
from flatpeak.config.schema_types import alternatives, elements, literals, models_of, tagged_models
from flatpeak.errors import nearest

_LONGEST_VALUE = 60
_MOST_PROBLEMS = 3
_PLAIN_TYPES = (bool, int, float, str)
_MUST_BE = ": must be "
_EXPECTED = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
}
"""Pydantic's kinds of wrong values, worded for recipes."""


def describe_errors(
    problems: Sequence[Mapping[str, Any]], *, schema: type[BaseModel] = RunConfig, kind: str = "a recipe"
) -> str:
    """Describe pydantic's errors in one line: for each the dotted key, the value, and a valid value.

    `schema` is the model of the whole file; `kind` is the word for such a file.
    """
    expected: dict[str, list[str]] = {}  # a setting of several types has an error for each
    for problem in problems:
        if not _is_consequence(problem, problems):
            text, _, what = _describe_error(problem, schema, kind).partition(_MUST_BE)
            expected.setdefault(text, []).append(what)
    texts = [text + _MUST_BE * any(whats) + " or ".join(whats) for text, whats in expected.items()]
    more = [f"and {len(texts) - _MOST_PROBLEMS} more"] if len(texts) > _MOST_PROBLEMS else []
    return "; ".join([*texts[:_MOST_PROBLEMS], *more])


def _is_consequence(problem: Mapping[str, Any], problems: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an error only follows from another: a list is too short because its bad elements are left out."""
    own = problem["loc"]
    deeper = (other["loc"] for other in problems if len(other["loc"]) > len(own))
    return problem["type"] == "too_short" and any(location[: len(own)] == own for location in deeper)


def _describe_error(problem: Mapping[str, Any], schema: type[BaseModel], kind: str) -> str:
    path, annotation = _locate(problem["loc"], schema)
    key, context = ".".join(path), problem.get("ctx", {})
    foreign = translate_value(path, problem["input"]) if schema is RunConfig else None
    match problem["type"]:
        case "extra_forbidden" | "invalid_key":
            text = _unknown_keys(path, problem["input"], annotation, schema, kind)
        case "missing" if isinstance(problem["loc"][-1], int):
            text = f"{'.'.join(path[:-1])}={_shortened(problem['input'])}: element {problem['loc'][-1]} is missing"
        case "missing":
            text = f"{key} is missing: give it in {kind.replace('a ', 'the ', 1)} or as an override"
        case "union_tag_not_found":
            text = f"{key}.type is missing: give one of {', '.join(tagged_models(annotation))}"
        case "union_tag_invalid":
            text = _not_allowed(f"{key}.type", context["tag"], list(tagged_models(annotation)))
        case "literal_error" | "value_error" if foreign is not None:
            text = f"{key}={problem['input']}: {foreign}"
        case "literal_error":
            text = _not_allowed(key, problem["input"], literals(annotation))
        case "value_error" | "assertion_error":
            # Validators name the keys in their messages themselves.
            text = problem["msg"].partition(", ")[2]
        case "model_type" | "dict_type" | "model_attributes_type":
            text = f"{key}={_shortened(problem['input'])}: must be a section with keys of its own"
        case "tuple_type" | "list_type":
            value = _shortened(problem["input"])
            hint = "; its brackets do not match" if value.startswith(("[", "{")) else f", such as [{value}]"
            hint = f"; its first element is {key}.0" if isinstance(problem["input"], Mapping) else hint
            hint = ", such as []" if problem["input"] is None else hint
            text = f"{key}={value}: must be a list{hint}"
        case "string_type":
            text = f"{key}={_shortened(problem['input'])}: must be a text{_quoted(key, problem['input'])}"
        case "too_short":
            text = f"{key}={_shortened(problem['input'])}: give at least {context['min_length']}"
        case wrong if wrong in _EXPECTED:
            text = f"{key}={_shortened(problem['input'])}: {_EXPECTED[wrong]}"
        case _:
            message = problem["msg"]
            text = f"{key}={_shortened(problem['input'])}: {message[0].lower()}{message[1:]}"
    return text


def _quoted(key: str, value: Any) -> str:
    """The hint to add quotes, for a value that is not a text only because it lacks them."""
    if value is None or isinstance(value, Mapping | Sequence):
        return ""
    return f""": "{value}" in a file, '{key}="{value}"' on the command line"""


def known_keys(annotation: Any = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key that a recipe can have, with `<name>` for names that the user chooses."""
    for model in models_of(annotation):
        for name, field in model.model_fields.items():
            yield f"{prefix}{name}"
            yield from known_keys(field.annotation, f"{prefix}{name}.")
    for element, inner in elements(annotation):
        yield from known_keys(inner, f"{prefix}{element}.")


def _unknown_keys(path: Sequence[str], value: Any, model: Any, schema: type[BaseModel], kind: str) -> str:
    """The unknown keys, each with the right key; `path` ends at the first unknown part, and `value` is below it."""
    known = list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
    leaves = list(_leaves(path, value))
    translated = [_translated(path, typed, leaf, known, schema) for typed, leaf in leaves]
    moved = _in_another_section(path, leaves[0][0], known, schema) if len(leaves) == 1 else None
    texts = [text or moved or _unknown_key(path, known, model, schema, kind) for text in translated]
    return "; ".join(dict.fromkeys(texts))


def _leaves(path: Sequence[str], value: Any) -> Iterator[tuple[Sequence[str], Any]]:
    """The values at and below a path, each with its whole path."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves((*path, str(name)), inner)
    else:
        yield path, value


def _translated(
    path: Sequence[str], typed: Sequence[str], value: Any, known: Sequence[str], schema: type[BaseModel]
) -> str | None:
    foreign = (translate(typed, value) or translate(path)) if schema is RunConfig else None
    if foreign is None:
        return None
    text = _in_its_section(foreign, path[:-1], known) if len(typed) == len(path) else foreign
    return f"unknown key {'.'.join(typed)}: {text}"


def _in_its_section(foreign: str, section: Sequence[str], known: Sequence[str]) -> str:
    """A translation to the section's own key of that name; sft.optimizer, for example, has a learning rate."""
    setting, keys = foreign.removeprefix(HERE), set(known_keys())
    if not section or setting not in keys:
        return foreign
    last, inner = setting.rpartition(".")[2], ".".join((*section, setting))
    if last in known:
        return f"{HERE}{'.'.join((*section, last))}"
    return f"{HERE}{inner}" if inner in keys else foreign


def _in_another_section(
    path: Sequence[str], typed: Sequence[str], known: Sequence[str], schema: type[BaseModel]
) -> str | None:
    """The hint at known keys with the same end as a path whose section is unknown; None if there are none."""
    if len(typed) == len(path):
        return None
    keys, whole = list(known_keys(schema)), ".".join(typed)
    near = [".".join((*path[:-1], close, *typed[len(path) :])) for close in nearest(path[-1], known)]
    ends = [key for key in keys if "." in key and whole.endswith(f".{key}")]
    meant = [key for key in near if key in keys] or ends or _keys_named(typed[-1], schema)
    return _did_you_mean(whole, meant) if meant else None


def _keys_named(name: str, schema: type[BaseModel]) -> list[str]:
    """Known keys by their last word, the least nested first, because keys of a curriculum are seldom meant."""
    named = (key for key in known_keys(schema) if key.rpartition(".")[2] == name)
    return sorted(named, key=lambda key: key.count("."))


def _did_you_mean(dotted: str, keys: Sequence[str]) -> str:
    return f"unknown key {dotted}: did you mean {' or '.join(list(dict.fromkeys(keys))[:3])}?"


def _unknown_key(path: Sequence[str], known: Sequence[str], model: Any, schema: type[BaseModel], kind: str) -> str:
    dotted, name, section = ".".join(path), path[-1], ".".join(path[:-1])
    close = nearest(name, known) or [field for field in known if name in field.split("_")]
    near = [".".join((*path[:-1], field)) for field in close]
    elsewhere = _keys_named(name, schema)
    if not near and any(_matches(key, path) for key in elsewhere):
        own = [field for field in known if field != "type"]
        which = f"{section}.type={model.model_fields['type'].default}" if "type" in known else section
        return f"unknown key {dotted}: {which} has no {name}, but {', '.join(own)}"
    other = [key for key in elsewhere if not _matches(key, path)]  # without this key, which another type may have
    if near or other:
        return _did_you_mean(dotted, near + other)
    where = f"the keys of {section} are" if section else f"the sections of {kind} are"
    return (
        f"unknown key {dotted}: {where} {', '.join(known)}{_reference(section, model) if schema is RunConfig else ''}"
    )


def _reference(section: str, model: Any) -> str:
    """The command that explains the keys of a section, or of its type if the section has several."""
    types_ = literals(model.model_fields["type"].annotation) if "type" in model.model_fields else []
    command = f"flatpeak settings {section}.type={types_[0]}" if len(types_) == 1 else f"flatpeak settings {section}"
    return f" ({command.rstrip()} explains them)"


def _matches(key: str, path: Sequence[str]) -> bool:
    """Whether a known key is the path, apart from names that the user chooses."""
    parts = key.split(".")
    return len(parts) == len(path) and all(a in (b, "<name>", "0") for a, b in zip(parts, path, strict=True))


def _not_allowed(key: str, value: Any, allowed: Sequence[Any]) -> str:
    near = nearest(str(value), [str(choice) for choice in allowed])
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{key}={_shortened(value)}: {hint}allowed values are {', '.join(str(choice) for choice in allowed)}"


def _locate(location: Sequence[str | int], schema: type[BaseModel]) -> tuple[list[str], Any]:
    """The dotted path of an error, and its annotation; for a key that does not exist, the annotation of its model.

    pydantic puts the tag or the type of a union's member into the location (task, gsm8k, path); recipes do not have it.
    """
    path: list[str] = []
    annotation: Any = schema
    for step in location:
        members = _union_members(annotation)
        if members and step in members:
            annotation = members[str(step)]
            continue
        if step in {kind.__name__ for kind in alternatives(annotation) if kind in _PLAIN_TYPES}:
            continue
        path.append(str(step))
        models = list(models_of(annotation))
        if models and str(step) in models[0].model_fields:
            annotation = models[0].model_fields[str(step)].annotation
        elif models:
            return path, models[0]
        else:
            annotation = next((inner for _, inner in elements(annotation)), None)
    return path, annotation


def _union_members(annotation: Any) -> dict[str, Any]:
    """The members of a union by pydantic's tags: models by their `type`, and names next to a model."""
    tagged: dict[str, Any] = dict(tagged_models(annotation))
    models, names = list(models_of(annotation)), [k for k in alternatives(annotation) if get_origin(k) is Literal]
    if len(models) == 1 and names and "type" in models[0].model_fields:
        tagged = {"name": names[0]}
        tagged |= dict.fromkeys(literals(models[0].model_fields["type"].annotation), models[0])
    return tagged


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
