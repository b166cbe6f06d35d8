"""Recipes: YAML files that extend each other, the settings merged into them, and the check that makes a RunConfig.

Nothing here imports torch, so a bad recipe fails at once.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from flatpeak.config.error_messages import describe_errors
from flatpeak.config.run_config import RunConfig
from flatpeak.config.unused_settings import without_superseded
from flatpeak.errors import UserError, check_characters, nearest
from flatpeak.utils.redaction import hide_secrets_of

Settings = Mapping[str, Any] | Sequence[str]
"""Changes to a recipe: a mapping whose keys may be dotted (`{"training.steps": 2, "rollout": {"group_size": 8}}`), or
`key.path=value` strings. In a mapping, a section may be an object: `{"rollout": RolloutConfig(group_size=8)}`."""

SHIPPED = "flatpeak:"
_DEEPEST, _LARGEST = 100, 100_000
"""The most levels and values of a recipe; published recipes have some hundred values on six levels."""
RECIPES = Path(__file__).parents[1] / "recipes"
"""The directory of the shipped recipes."""


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Load a recipe, with everything that it extends, and then merge in the overrides.

    `path_or_name` is a file, or a shipped recipe such as `flatpeak:algorithms/dr_grpo`; `.yaml` may be left out. Each
    override is `key.path=value`, where the value is read as YAML. Raises UserError for anything unreadable.
    """
    recipe = _load(str(path_or_name), directory=Path(), trail=())
    return apply_overrides(recipe, overrides)


def read_recipe(recipe: Mapping[str, Any] | str | Path, settings: Settings = ()) -> dict[str, Any]:
    """Read a recipe of a Python caller (a mapping, path or name) with its bases, and merge the settings into it.

    A mapping may have `extends` as a file may; its relative paths start at the working directory.
    """
    if isinstance(recipe, Mapping):
        resolved = _extend(recipe, directory=Path(), trail=(), where="the recipe")
    elif isinstance(recipe, str | Path):
        resolved = load_recipe(recipe)
    else:
        raise UserError(
            f"the recipe is a {type(recipe).__name__}: give a mapping, a path or a name; model=... names a model"
        )
    return apply_settings(resolved, settings)


def parse_config(recipe: Mapping[str, Any]) -> RunConfig:
    """Check a resolved recipe; from then on `redact` hides its secrets.

    Raises UserError: one line with the dotted key of each problem, and what would be right.
    """
    from pydantic import ValidationError

    hide_secrets_of(recipe)
    _check_texts(recipe, "")
    try:
        return RunConfig.model_validate(recipe)
    except ValidationError as error:
        raise UserError(describe_errors(error.errors(include_url=False))) from None


def _check_texts(value: Any, key: str) -> None:
    """Raise UserError for a key or text that config.yaml or a checkpoint could not store."""
    if isinstance(value, str):
        check_characters(value, where=key)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            check_characters(str(name), where=f"a key of {key or 'the recipe'}")
            _check_texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_texts(item, f"{key}.{index}")


def shipped_recipes() -> list[str]:
    """The names of the recipes in the package, `flatpeak:...`."""
    return sorted(SHIPPED + path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


def merge(base: Mapping[str, Any], delta: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `delta` over `base`: mappings merge key by key, everything else (lists too) is replaced.

    A mapping with a different `type` replaces the base's mapping completely: keys of one type mean nothing in another,
    and `task: {type: gsm8k}` over an arithmetic task must not inherit `max_value`.
    """
    merged = dict(base)
    for key, value in delta.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and not _changes_type(old, value):
            merged[key] = merge(old, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def apply_overrides(recipe: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Merge each `key.path=value` into the recipe; integers in a path index lists.

    Overrides that set a `type` go first, because they replace their section; so the order of arguments does not matter.
    """
    return _apply(recipe, [_parse_override(override) for override in overrides])


def apply_settings(recipe: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Merge settings into the recipe as overrides are merged; the values of a mapping are used unchanged.

    Of a section's object, such as an OptimizerConfig, the fields that were given are merged.
    """
    if isinstance(settings, Mapping):
        given = {key: _as_written(value) for key, value in settings.items()}
        return _apply(recipe, [(_path(key, label=f"setting {key!r}"), value) for key, value in given.items()])
    if not isinstance(settings, str | Sequence):
        raise UserError(f"settings={settings!r}: give a mapping such as {{'training.steps': 100}}")
    return apply_overrides(recipe, [settings] if isinstance(settings, str) else settings)


def _as_written(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value


def _apply(recipe: Mapping[str, Any], split: Sequence[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    resolved = copy.deepcopy(dict(recipe))
    written: dict[str, Any] = {}
    for path, value in sorted(split, key=lambda item: item[0][-1] != "type"):
        resolved = _set(resolved, path, value, done=())
        written = merge(written, _nested(path, value))
    return without_superseded(resolved, written, base=recipe)


def _changes_type(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "type" in old and "type" in new and old["type"] != new["type"]


def _load(name: str, *, directory: Path, trail: tuple[Path, ...]) -> dict[str, Any]:
    path = _find(name, directory=directory, origin=trail[-1] if trail else None)
    if path in trail:
        chain = " -> ".join(str(step) for step in (*trail[trail.index(path) :], path))
        raise UserError(f"recipes extend each other in a circle: {chain}; remove one `extends`")
    return _extend(parse_file(path), directory=path.parent, trail=(*trail, path), where=str(path))


def _extend(recipe: Mapping[str, Any], *, directory: Path, trail: tuple[Path, ...], where: str) -> dict[str, Any]:
    """Merge a recipe over its bases; relative names start at `directory`."""
    content = dict(recipe)
    bases = content.pop("extends", None) or []
    if isinstance(bases, str | Path):
        bases = [bases]
    if not isinstance(bases, list | tuple) or not all(isinstance(base, str | Path) for base in bases):
        raise UserError(f"{where}: extends must be the name of a recipe or a list of names")
    merged: dict[str, Any] = {}
    for base in bases:
        merged = _over_base(merged, _load(str(base), directory=directory, trail=trail))
    return _over_base(merged, content)


def _over_base(base: Mapping[str, Any], delta: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `delta` over its base, without the inherited settings that `delta`'s choices make ineffective."""
    return without_superseded(merge(base, delta), delta, base=base)


def _find(name: str, *, directory: Path, origin: Path | None) -> Path:
    """The file for a recipe's name; a relative name starts at `directory`."""
    exact = RECIPES / name.removeprefix(SHIPPED) if name.startswith(SHIPPED) else directory / Path(name).expanduser()
    for path in (exact, exact.with_name(f"{exact.name}.yaml")) if exact.name else ():
        if path.is_file():
            return path.resolve()
    where = f" (extended by {origin})" if origin else ""
    if not name.strip().removeprefix(SHIPPED):
        raise UserError(
            f"recipe {name!r}{where} has no name: give a YAML file or a shipped recipe, such as flatpeak:demo"
        )
    what = "is a directory, not a recipe" if exact.is_dir() else "not found"
    near = near_recipes(name)
    hint = f"did you mean {' or '.join(near)}?" if near else "give a YAML file or a shipped recipe, flatpeak:NAME"
    raise UserError(f"recipe {name} {what}{where}: {hint}")


def near_recipes(name: str) -> list[str]:
    """Shipped recipes whose name, or its last component, is close to the requested one."""
    path = Path(name.rpartition(":")[2])  # the prefix may be misspelled as well
    wanted = path.with_suffix("") if path.name else path
    by_stem: dict[str, list[str]] = {}
    for shipped in shipped_recipes():
        plain = shipped.removeprefix(SHIPPED)
        for key in {plain, plain.rpartition("/")[2]}:
            by_stem.setdefault(key, []).append(shipped)
    if wanted.name in by_stem:
        return by_stem[wanted.name][:3]
    close = [key for text in (wanted.as_posix(), wanted.name) for key in nearest(text, by_stem, count=2)]
    return list(dict.fromkeys(shipped for key in close for shipped in by_stem[key]))[:3]


def _parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"override {override!r}: write key.path=value, such as optimizer.learning_rate=1e-5")
    path = _path(key.strip(), label=f"override {override!r}")
    try:
        return path, parse_value(text)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: {text!r} is not a YAML value ({_first_line(error)})") from None


def _path(key: Any, *, label: str) -> tuple[str, ...]:
    """The components of a dotted key."""
    path = tuple(key.split(".")) if isinstance(key, str) else ("",)
    if not all(path):
        raise UserError(f"{label}: write key.path=value, such as optimizer.learning_rate=1e-5")
    if path[0] == "extends":
        raise UserError(
            f"{label}: extends belongs in a recipe: write a file with the line `extends: [RECIPE, RECIPE]`, such as "
            "[flatpeak:tasks/gsm8k, flatpeak:algorithms/dr_grpo], and train that"
        )
    return path


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    """The sections around a value; indices of lists stay keys."""
    return {path[0]: _nested(path[1:], value) if path[1:] else value}


def _set(target: Any, path: tuple[str, ...], value: Any, *, done: tuple[str, ...]) -> Any:
    """Replace the value at `path` of `target` (if both are mappings, merge), and return the result."""
    key, rest = path[0], path[1:]
    here = ".".join(done) or "the recipe"
    if target == []:  # treat as missing
        target = None
    if isinstance(target, list):
        if not key.isdecimal() or int(key) >= len(target):
            raise UserError(
                f"{'.'.join((*done, key))}: {here} is a list with elements 0 to {len(target) - 1}; give all of it to "
                f"make it longer, {here}=[...]"
            )
        index = int(key)
        new = _set(target[index], rest, value, done=(*done, key)) if rest else value
        return [*target[:index], new, *target[index + 1 :]]
    if target is None and key == "0":  # the first element creates the list
        return [_set(None, rest, value, done=(*done, key)) if rest else value]
    if target is None or (isinstance(target, str) and path == ("type",)):  # a section replaces a name
        target = {}
    if not isinstance(target, Mapping):
        raise UserError(f"{'.'.join((*done, *path))}: {here} is {target!r}, which has no keys")
    if rest:
        return {**target, key: _set(target.get(key), rest, value, done=(*done, key))}
    delta = {key: value}
    return delta if _changes_type(target, delta) else merge(target, delta)


def _first_line(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error).splitlines()[0]


class _YAMLLoader(yaml.SafeLoader):
    """A loader for the scalars of YAML 1.2; in YAML 1.1 `1e-5` is text, `no` false and `2026-01-01` a date."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own layout)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse a key that is given twice; PyYAML would silently keep the last."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key != "<<" and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return node


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
    _YAMLLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


def parse_file(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file. Raises UserError with the line of a syntax error."""
    try:
        content = _read_yaml(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        kind = "broken YAML" if path.suffix in (".yaml", ".yml") else "not a YAML file"
        raise UserError(f"{path}{line}: {kind}: {error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: a recipe is a mapping of sections, this is a {type(content).__name__}")
    return content


def _read_yaml(text: str) -> Any:
    """The content of a YAML text. Raises YAMLError also for too much depth or multiplied aliases, which would hang."""
    try:
        content = yaml.load(text, Loader=_YAMLLoader)
    except RecursionError:
        raise yaml.YAMLError("lists or mappings are nested too deeply") from None
    except ValueError as error:  # more digits than Python converts
        raise yaml.YAMLError(f"a whole number has too many digits ({error})") from None
    waiting, seen = [(content, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        if depth > _DEEPEST or seen > _LARGEST:
            raise yaml.YAMLError(
                f"lists or mappings are nested more than {_DEEPEST} deep, or hold more than {_LARGEST:,} values once "
                "their aliases (*name) are filled in"
            )
        if isinstance(value, Mapping | list):
            waiting += [(item, depth + 1) for item in (value.values() if isinstance(value, Mapping) else value)]
    return content


def parse_value(text: str) -> Any:
    """Parse a value of the command line: a list, a mapping, a quotation, or a scalar, possibly with colons and hashes.

    Text that only looks like a mapping, such as `{a}+{b}=` or `{answer}`, is text.
    """
    text = text.strip()
    if text[:1] in ('"', "'"):
        return _read_yaml(text)
    if text[:1] == "[" or text == "{}" or (text[:1] == "{" and ":" in text):
        try:
            return _read_yaml(text)
        except yaml.YAMLError:
            return text
    loader = _YAMLLoader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except ValueError:  # more digits than Python converts
        return text
    finally:
        loader.dispose()
