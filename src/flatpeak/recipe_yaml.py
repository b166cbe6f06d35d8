"""YAML as people expect it: `1e-5` is a number, `no` is a word, a key given twice is an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from flatpeak.errors import UserError


class _Loader(yaml.SafeLoader):
    """The scalars of YAML 1.2 instead of 1.1, where `1e-5` is text, `no` is false and `2026-01-01` is a date."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own layout)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse a key that is given twice, where PyYAML silently keeps the last."""
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key != "<<" and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


def parse_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UserError with the line where it is broken."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: broken YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: a recipe is a mapping of sections, this is a {type(content).__name__}")
    return content


def parse_value(text: str) -> Any:
    """One value of the command line: a list, a mapping, a quotation, or a scalar whatever its colons and hashes.

    Text that only looks like a mapping, `{a}+{b}=` or `{answer}`, is text.
    """
    text = text.strip()
    if text[:1] in ('"', "'"):
        return yaml.load(text, Loader=_Loader)
    if text[:1] == "[" or text == "{}" or (text[:1] == "{" and ":" in text):
        try:
            return yaml.load(text, Loader=_Loader)
        except yaml.YAMLError:
            return text
    loader = _Loader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))
        return loader.construct_object(yaml.ScalarNode(tag, text))
    finally:
        loader.dispose()
