"""The settings reference as text for terminals, as Markdown, as JSON and as a JSON schema for editors."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from pydantic import BaseModel

from flatpeak.config.run_config import RunConfig
from flatpeak.config.schema_types import elements, models_of
from flatpeak.config.settings_reference import Section, Setting, as_value, field_docstrings

COMMAND = "flatpeak settings --markdown > docs/settings.md"
"""The command that writes the documentation page."""
_INDENT = "    "
_SHARED = "The keys that several types of this section have."
_INTRODUCTION = f"""\
# Settings

Every setting of a recipe, with its key, type, default and meaning. On the command line, `flatpeak settings` prints the
settings that most recipes change, `flatpeak settings --all` all of them, `flatpeak settings rollout` one section,
`flatpeak settings task.type=rows` one type of a section, and `flatpeak settings optimizer.learning_rate` one setting;
`--json` is for scripts. [recipes.md](recipes.md) explains how to write, extend and change a recipe.

`<name>` stands for a name of your choice, `0` for the index of a list's element. If a section is null by default, its
settings have an effect once you set any of them. `{COMMAND}` writes this page.
"""


def listed_once(sections: Sequence[Section]) -> list[Section]:
    """The sections, in which a setting that is the same for several types of a section is one row with their names."""
    same: dict[tuple[str, ...], list[tuple[Setting, str]]] = {}
    types: dict[str, list[str]] = {}
    for section in sections:
        if section.variants:
            type_ = section.variants[-1].partition("=")[2]
            types.setdefault(section.key, []).append(type_)
            for setting in section.settings:
                same.setdefault(_identity(setting), []).append((setting, type_))
    repeated = {identity: listings for identity, listings in same.items() if len(listings) > 1}
    result: list[Section] = []
    for section in sections:
        if section.key in types:
            shared = tuple(
                _of_types(listings[0][0], [type_ for _, type_ in listings], all_types=types[section.key])
                for (key, *_), listings in repeated.items()
                if key.rpartition(".")[0] == section.key
            )
            del types[section.key]
            if not section.variants:
                section = replace(section, settings=section.settings + shared)
            elif shared:
                result.append(Section(key=section.key, variants=(), description=_SHARED, settings=shared))
        own = tuple(one for one in section.settings if not section.variants or _identity(one) not in repeated)
        if own:
            result.append(replace(section, settings=own))
    return result


def _identity(setting: Setting) -> tuple[str, ...]:
    """All that a row says about a setting; the key first."""
    return setting.key, setting.type, as_value(setting.default), str(setting.required), setting.description


def _of_types(setting: Setting, types: Sequence[str], *, all_types: Sequence[str]) -> Setting:
    names = "all" if len(types) == len(all_types) else ", ".join(types)
    return replace(setting, description=f"{setting.description} Types: {names}.")


def to_text(sections: Sequence[Section], *, width: int) -> str:
    """The sections as paragraphs of at most `width` columns; only longer words exceed it."""
    return "\n\n".join("\n\n".join(_paragraphs(section, width)) for section in sections)


def to_summary(sections: Sequence[Section], *, left_out: int, width: int) -> str:
    """Each setting with its default, and its values or the first sentence of its meaning; then where there is more."""
    blocks = []
    for section in sections:
        lines = []
        for setting in section.settings:
            about = setting.type if setting.values else _first_sentence(setting.description)
            assignment = setting.key if isinstance(setting.default, dict) else setting.assignment
            lines += [_wrapped(assignment, width, below=_INDENT), _wrapped(about, width, first=_INDENT, below=_INDENT)]
        blocks.append("\n".join(lines))
    more = (
        f"{left_out} more: `flatpeak settings --all` prints all, `flatpeak settings rollout` a section, "
        "`flatpeak settings task.type=rows` one of its types, `flatpeak settings kl.estimator` all about one."
    )
    return "\n\n".join([*blocks, _wrapped(more, width, below="")])


def to_json(sections: Sequence[Section]) -> str:
    """One JSON object, `{"settings": [...]}`: each setting with its section's key and variants."""
    settings = []
    for section in sections:
        for setting in section.settings:
            fields = asdict(setting)
            if setting.required:
                del fields["default"]
            settings.append({**fields, "section": section.key, "variants": section.variants})
    return json.dumps({"settings": settings}, ensure_ascii=False)


def to_markdown(sections: Sequence[Section]) -> str:
    """A page with a table for each section; types of a section have headings below it."""
    lines = [_INTRODUCTION]
    for section in sections:
        level = "###" if section.variants or "." in section.key else "##"
        rows = [
            f"| `{setting.key}` | {_cell(setting.type)} | {_default_cell(setting)} | {_cell(_description(setting))} |"
            for setting in section.settings
        ]
        lines += [f"{level} {_title(section, mark='`')}", "", _prose(_about(section)), ""]
        lines += ["| Setting | Type | Default | Meaning |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines).rstrip("\n")


def _paragraphs(section: Section, width: int) -> Iterator[str]:
    yield _wrapped(f"{_title(section)}: {_about(section)}", width, below="")
    for setting in section.settings:
        head = f"{setting.assignment}{' (required)' if setting.required else ''}"
        below = f"{_type(setting)}. {_description(setting)}"
        lines = [_wrapped(head, width, first="  ", below=_INDENT), _wrapped(below, width, first=_INDENT, below=_INDENT)]
        yield "\n".join(lines)


def _about(section: Section) -> str:
    others = "" if section.others_as is None else f" Other keys as in {section.others_as}."
    return f"{section.description}{others}"


def _title(section: Section, *, mark: str = "") -> str:
    """The key, or the type that chooses the section, and the types of the sections around it."""
    own = [variant for variant in section.variants if variant.startswith(f"{section.key}.type=")]
    around = " and ".join(f"{mark}{variant}{mark}" for variant in section.variants if variant not in own)
    name = f"{mark}{own[0] if own else section.key}{mark}"
    return f"{name} with {around}" if around else name


def _wrapped(text: str, width: int, *, below: str, first: str = "") -> str:
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=below, break_long_words=False, break_on_hyphens=False
    )


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.;]) (?=[^\d])", text, maxsplit=1)[0].rstrip(";.") + "."


def _description(setting: Setting) -> str:
    return setting.description if setting.same_as is None else f"{setting.description} Keys as in {setting.same_as}."


def _type(setting: Setting) -> str:
    """The type as the beginning of a sentence; a type that begins with a value stays as written in recipes."""
    first = setting.type.split()[0].rstrip(",")
    words = ("whole", "number", "text", "list", "non-empty", "mapping", "section", "path")
    return setting.type[0].upper() + setting.type[1:] if first in words and not setting.values else setting.type


def _default_cell(setting: Setting) -> str:
    return "required" if setting.required else f"`{as_value(setting.default)}`".replace("|", r"\|")


def _cell(text: str) -> str:
    return _prose(text).replace("|", r"\|")


def _prose(text: str) -> str:
    """Text in which everything that Markdown would read as HTML or emphasis is escaped, except in code."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"([<*])", r"\\\1", piece) for piece in pieces)


def to_schema() -> str:
    """The JSON schema of recipes, for editors.

    Nothing is required in it, because a recipe may inherit any key from those it extends.
    """
    schema = RunConfig.model_json_schema()
    models = {model.__name__: model for model in _models(RunConfig)}
    for name, section in {**schema["$defs"], "RunConfig": schema}.items():
        described = field_docstrings(models[name]) if name in models else {}
        for key, property in section.get("properties", {}).items():
            if key in described:
                property["description"] = described[key]
    name = {"type": "string", "description": "A recipe to start from: a file, or flatpeak:NAME. Also a list of them."}
    schema["properties"]["extends"] = {"anyOf": [name, {"type": "array", "items": name}]}
    schema["title"] = "A recipe of flatpeak"
    return json.dumps(_lenient(schema), indent=1, ensure_ascii=False)


def _models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A configuration and all those within it."""
    yield model
    for field in model.model_fields.values():
        for annotation in (field.annotation, *(inner for _, inner in elements(field.annotation))):
            for inner in models_of(annotation):
                yield from _models(inner)


def _lenient(schema: Any) -> Any:
    """The schema without required keys; a section without its `type` may be any of its alternatives."""
    if isinstance(schema, list):
        return [_lenient(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}
    return {key: _lenient(value) for key, value in renamed.items() if key not in ("required", "discriminator")}
