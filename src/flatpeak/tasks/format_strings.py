"""Format strings of recipes: `{name}` stands for a value, with no reach into attributes or items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from string import Formatter

from flatpeak.errors import UserError


def field_names(template: str, *, option: str) -> tuple[str, ...]:
    """The names between braces, in order. UserError where braces do not pair up or nothing stands between them."""
    try:
        parts = [(name, conversion) for _, name, _, conversion in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise UserError(f"{option}={template!r}: {error}; write {{{{ or }}}} for a brace in the text") from error
    for name, conversion in parts:
        if not name or conversion:
            raise UserError(f"{option}={template!r}: fields look like {{name}}, write {{{{ or }}}} for a brace")
    return tuple(name for name, _ in parts)


def check_fields(template: str, *, allowed: Iterable[str], required: Iterable[str] = (), option: str) -> None:
    """UserError unless every field of the template is allowed and every required one is there."""
    names = field_names(template, option=option)
    allowed = tuple(allowed)
    listed = ", ".join(f"{{{name}}}" for name in allowed)
    for name in names:
        if name not in allowed:
            raise UserError(
                f"{option}={template!r}: unknown field {{{name}}}{did_you_mean(name, allowed)}; use {listed}"
            )
    for name in required:
        if name not in names:
            raise UserError(
                f"{option}={template!r}: {{{name}}} is missing; without it two problems would read the same"
            )


def fill(template: str, values: Mapping[str, object], *, option: str) -> str:
    """The template with every field replaced by its value; a field's name is looked up whole, dots and all."""
    pieces = []
    for literal, name, spec, _ in Formatter().parse(template):
        pieces.append(literal)
        if name is not None:
            try:
                pieces.append(format(values[name], spec or ""))
            except ValueError as error:
                raise UserError(f"{option}={template!r}: field {{{name}:{spec}}}: {error}") from error
    return "".join(pieces)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` for the nearest known name, letter case aside; empty where none is near."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    nearest = get_close_matches(name.casefold(), by_folded, n=1)
    return f", did you mean {by_folded[nearest[0]]!r}?" if nearest else ""
