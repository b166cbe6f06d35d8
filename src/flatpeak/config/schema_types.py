"""The types of settings: which models, elements and values an annotation admits, and the type in plain words."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation, without Annotated and None."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(kind for member in get_args(annotation) for kind in alternatives(member) if kind is not type(None))
    return (annotation,)


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The configurations that an annotation admits as a section."""
    for kind in alternatives(annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind


def tagged_models(annotation: Any) -> dict[str, type[BaseModel]]:
    """The models of a discriminated union by their `type`; empty if the annotation is not a union."""
    members = list(models_of(annotation))
    if len(members) < 2:
        return {}
    return {tag: model for model in members for tag in literals(model.model_fields["type"].annotation)}


def elements(annotation: Any) -> Iterator[tuple[str, Any]]:
    """The annotations of the elements of a list or mapping, each with the element's name in a path."""
    for kind in alternatives(annotation):
        arguments = get_args(kind)
        if get_origin(kind) in (tuple, list):
            yield "0", arguments[0]
        elif get_origin(kind) is dict:
            yield "<name>", arguments[1]


def literals(annotation: Any) -> list[Any]:
    """The values that an annotation lists."""
    return [value for kind in alternatives(annotation) if get_origin(kind) is Literal for value in get_args(kind)]


def admits_none(annotation: Any) -> bool:
    """Whether the value may be null."""
    if get_origin(annotation) is Annotated:
        return admits_none(get_args(annotation)[0])
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return type(None) in members or (len(members) > 1 and any(admits_none(member) for member in members))


def type_in_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The type in plain words, such as `number above 0, or null`; `metadata` has the bounds that a field adds to it."""
    words = list(dict.fromkeys(_words(annotation, metadata)))
    if admits_none(annotation):
        words.append("null")
    if len(words) < 2:
        return "".join(words)
    comma = "," if any(" " in word for word in words) else ""
    return f"{', '.join(words[:-1])}{comma} or {words[-1]}"


def _words(annotation: Any, metadata: Sequence[Any]) -> Iterator[str]:
    """The alternatives of a type, one by one; each listed value is an alternative."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _words(arguments[0], [*metadata, *_flat(arguments[1:])])
    elif origin in (Union, types.UnionType):
        for member in arguments:
            yield from _words(member, metadata)
    elif origin is Literal:
        yield from map(str, arguments)
    elif origin in (tuple, list):
        yield _list_in_words(arguments, metadata)
    elif origin is dict:
        value = arguments[1]
        yield "mapping" if value is Any else f"mapping of names to {_plural(value)}"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "section"
    elif annotation is not type(None):
        yield f"{_WORDS[annotation]}{_bounds(metadata)}"


def _list_in_words(arguments: tuple[Any, ...], metadata: Sequence[Any]) -> str:
    inner = arguments[0]
    if arguments[-1] is not Ellipsis:
        return f"list of {len(arguments)} {_plural(inner)}"
    shortest = next((item.min_length for item in metadata if hasattr(item, "min_length")), 0)
    return f"{'non-empty ' if shortest else ''}list of {_plural(inner)}"


def _plural(annotation: Any) -> str:
    """The plural of a type, in words."""
    if named := literals(annotation):
        return f"any of {', '.join(map(str, named))}"
    if any(True for _ in models_of(annotation)):
        return "sections"
    if get_origin(annotation) is dict:
        return "mappings"
    kinds = [_WORDS[kind] for kind in alternatives(annotation) if kind is not bool]
    metadata = _flat(get_args(annotation)[1:]) if get_origin(annotation) is Annotated else []
    return f"{' or '.join(f'{kind}s' for kind in kinds)}{_bounds(metadata)}"


def _flat(metadata: Iterable[Any]) -> list[Any]:
    """The constraints of an Annotated type, including those inside its pydantic Field."""
    constraints: list[Any] = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            constraints += item.metadata
        else:
            constraints.append(item)
    return constraints


def _bounds(metadata: Sequence[Any]) -> str:
    """` above 0 and at most 1`, ` of 1 to 200 characters`; empty without bounds."""
    bounds = {name: getattr(item, name) for name in _BOUNDS for item in metadata if hasattr(item, name)}
    if bounds.keys() == {"ge", "le"}:
        return f" from {_number(bounds['ge'])} to {_number(bounds['le'])}"
    if bounds:
        text = " and ".join(
            f"{_BOUNDS[name]} {_number(bounds[name])}" for name in ("ge", "gt", "le", "lt") if name in bounds
        )
        return f" of {text}" if "ge" in bounds or "gt" not in bounds else f" {text}"
    lengths = {
        name: getattr(item, name) for item in metadata for name in ("min_length", "max_length") if hasattr(item, name)
    }
    if lengths.get("max_length") is not None:
        return f" of {lengths.get('min_length') or 0} to {lengths['max_length']} characters"
    return ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
