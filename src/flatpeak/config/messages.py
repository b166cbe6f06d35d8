"""What pydantic found wrong with a recipe, in the words of the recipe."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import nearest

_LONGEST_VALUE = 60


def describe(problems: Sequence[Mapping[str, Any]]) -> str:
    """pydantic's errors as one line: for each the dotted key, the value, and what would be right."""
    return "; ".join(_describe(problem) for problem in problems if not _follows(problem, problems))


def _follows(problem: Mapping[str, Any], problems: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it is only the consequence of another one: a list is too short once its bad elements are left out."""
    place = problem["loc"]
    deeper = (other["loc"] for other in problems if len(other["loc"]) > len(place))
    return problem["type"] == "too_short" and any(location[: len(place)] == place for location in deeper)


def _describe(problem: Mapping[str, Any]) -> str:
    path, annotation = _locate(problem["loc"])
    key, context = ".".join(path), problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden" | "invalid_key":
            text = _unknown_key(path, annotation)
        case "missing":
            text = f"{key} is missing: give it in the recipe or as an override"
        case "union_tag_not_found":
            text = f"{key}.type is missing: give one of {', '.join(_members(annotation))}"
        case "union_tag_invalid":
            text = _not_allowed(f"{key}.type", context["tag"], list(_members(annotation)))
        case "literal_error":
            text = _not_allowed(key, problem["input"], _literals(annotation))
        case "value_error" | "assertion_error":
            # Validators name the keys they speak of.
            text = problem["msg"].partition(", ")[2]
        case "model_type" | "dict_type" | "model_attributes_type":
            text = f"{key}={_short(problem['input'])}: must be a section with keys of its own"
        case "tuple_type" | "list_type":
            text = f"{key}={_short(problem['input'])}: must be a list, such as [{_short(problem['input'])}]"
        case _:
            message = problem["msg"]
            text = f"{key}={_short(problem['input'])}: {message[0].lower()}{message[1:]}"
    return text


def known_keys(annotation: Any = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key a recipe can have, `<name>` standing for names of the user's choice."""
    for model in _models(annotation):
        for name, field in model.model_fields.items():
            yield f"{prefix}{name}"
            yield from known_keys(field.annotation, f"{prefix}{name}.")
    for element, inner in _elements(annotation):
        yield from known_keys(inner, f"{prefix}{element}.")


def _unknown_key(path: Sequence[str], model: Any) -> str:
    dotted, name, section = ".".join(path), path[-1], ".".join(path[:-1])
    known = list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
    near = [".".join((*path[:-1], close)) for close in nearest(name, known)]
    # The least nested first: a key that every reward of every curriculum may have is seldom meant.
    elsewhere = sorted((key for key in known_keys() if key.rpartition(".")[2] == name), key=lambda key: key.count("."))
    if not near and any(_stands_for(key, path) for key in elsewhere):
        own = [field for field in known if field != "type"]
        type_ = model.model_fields["type"].default
        return f"unknown key {dotted}: {section}.type={type_} has no {name}, but {', '.join(own)}"
    if near or elsewhere:
        return f"unknown key {dotted}: did you mean {' or '.join(list(dict.fromkeys(near + elsewhere))[:3])}?"
    where = f"the keys of {section} are" if section else "the sections of a recipe are"
    return f"unknown key {dotted}: {where} {', '.join(known)}"


def _stands_for(key: str, path: Sequence[str]) -> bool:
    """Whether a known key is the path, names of the user's choice aside."""
    parts = key.split(".")
    return len(parts) == len(path) and all(a in (b, "<name>", "0") for a, b in zip(parts, path, strict=True))


def _not_allowed(key: str, value: Any, allowed: Sequence[Any]) -> str:
    near = nearest(str(value), [str(choice) for choice in allowed])
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{key}={_short(value)}: {hint}allowed values are {', '.join(str(choice) for choice in allowed)}"


def _locate(location: Sequence[str | int]) -> tuple[list[str], Any]:
    """The dotted path of an error, and the annotation there; for a key that does not exist, its model's.

    pydantic puts the tag of a union's member into the location (task, gsm8k, path), which no recipe has.
    """
    path: list[str] = []
    annotation: Any = RunConfig
    for step in location:
        members = _members(annotation)
        if members and step in members:
            annotation = members[str(step)]
            continue
        path.append(str(step))
        models = list(_models(annotation))
        if models and str(step) in models[0].model_fields:
            annotation = models[0].model_fields[str(step)].annotation
        elif models:
            return path, models[0]
        else:
            annotation = next((inner for _, inner in _elements(annotation)), None)
    return path, annotation


def _plain(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation, without Annotated and None."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _plain(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(part for member in get_args(annotation) for part in _plain(member) if part is not type(None))
    return (annotation,)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    for part in _plain(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield part


def _members(annotation: Any) -> dict[str, type[BaseModel]]:
    """The models of a discriminated union by their `type`; empty where the annotation is none."""
    models = list(_models(annotation))
    if len(models) < 2:
        return {}
    return {tag: model for model in models for tag in _literals(model.model_fields["type"].annotation)}


def _elements(annotation: Any) -> Iterator[tuple[str, Any]]:
    """What a list or mapping holds, with how an element is named in a path."""
    for part in _plain(annotation):
        arguments = get_args(part)
        if get_origin(part) in (tuple, list):
            yield "0", arguments[0]
        elif get_origin(part) is dict:
            yield "<name>", arguments[1]


def _literals(annotation: Any) -> list[Any]:
    return [value for part in _plain(annotation) if get_origin(part) is Literal for value in get_args(part)]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
