"""The shipped recipes: a summary of each, its text, and the recipes that it extends."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from flatpeak.config.load import RECIPES, SHIPPED, near_recipes, parse_file, shipped_recipes
from flatpeak.errors import UserError

_COLUMNS = (40, 20, 14)
"""The widths of the columns of names, hardware and time, before the summaries."""
_NARROW = 120
"""Below this number of columns, the rest is printed below the names."""
_RUNS_ON = re.compile(r"^# Runs on: (.+) \| (.+)$", re.MULTILINE)
"""The line of a recipe's file about its hardware and time."""


@dataclass(frozen=True, kw_only=True)
class ShippedRecipe:
    """A recipe shipped with the package."""

    name: str
    """Its name, with the prefix `flatpeak:`."""
    summary: str
    """The first line of its file, a sentence that describes it."""
    hardware: str
    """The processor and memory that a run needs; empty for parts of recipes."""
    time: str
    """The time that a run takes on that hardware; empty if not measured."""
    extends: tuple[str, ...]
    """The recipes that it extends directly; later recipes win over earlier ones."""
    inherits: tuple[str, ...]
    """All recipes that it extends, directly or through its bases, the nearest first."""
    text: str
    """Its file, comments included."""


def all_recipes(folder: str = "") -> list[ShippedRecipe]:
    """All shipped recipes or those of a folder, sorted by name; recipes without a folder come first."""
    names = sorted(shipped_recipes(), key=lambda name: ("/" in name, name))
    return [read(name) for name in names if name.startswith(f"{SHIPPED}{folder}/" if folder else SHIPPED)]


def read(name: str) -> ShippedRecipe:
    """A shipped recipe by its name, with or without `flatpeak:`. UserError for an unknown name, with the nearest."""
    full = SHIPPED + name.removeprefix(SHIPPED).removesuffix(".yaml")
    if full not in shipped_recipes():
        near = near_recipes(full)
        hint = f"did you mean {' or '.join(near)}?" if near else "`flatpeak recipes` lists them"
        raise UserError(f"recipe {name} is not shipped with flatpeak: {hint}")
    path = RECIPES / f"{full.removeprefix(SHIPPED)}.yaml"
    text = path.read_text(encoding="utf-8")
    extends = parse_file(path).get("extends", [])
    bases = (extends,) if isinstance(extends, str) else tuple(extends)
    runs_on = _RUNS_ON.search(text)
    return ShippedRecipe(
        name=full,
        summary=text.partition("\n")[0].removeprefix("# "),
        hardware=runs_on[1] if runs_on else "",
        time=runs_on[2] if runs_on and runs_on[2] != "not measured" else "",
        extends=bases,
        inherits=tuple(dict.fromkeys([*bases, *(above for base in bases for above in read(base).inherits)])),
        text=text,
    )


def select(name: str) -> ShippedRecipe | list[ShippedRecipe]:
    """The recipe with a name; the recipes of a folder (`tasks`); or all without a name."""
    return all_recipes(name.strip().removeprefix(SHIPPED).strip("/")) or read(name.strip())


def of_paper(paper: str) -> list[ShippedRecipe]:
    """The recipes that name a paper by its arXiv number. UserError if none does."""
    recipes = [one for one in all_recipes() if re.search(rf"\b{re.escape(paper.strip())}\b", one.summary)]
    if not recipes or not re.fullmatch(r"\d{4}\.\d{4,5}", paper.strip()):
        raise UserError(
            f"--paper {paper}: no shipped recipe names this paper; give an arXiv number such as 2503.14476, or look "
            "in docs/algorithms.md"
        )
    return recipes


def to_json(selected: ShippedRecipe | Sequence[ShippedRecipe]) -> str:
    """One recipe as a JSON object with its text; several as `{"recipes": [...]}` without their texts."""
    if isinstance(selected, ShippedRecipe):
        return json.dumps(asdict(selected), ensure_ascii=False)
    listed = [{name: value for name, value in asdict(one).items() if name != "text"} for one in selected]
    return json.dumps({"recipes": listed}, ensure_ascii=False)


def to_text(selected: ShippedRecipe | Sequence[ShippedRecipe], *, width: int) -> str:
    """The file of a recipe, followed by a comment about what it extends; several recipes with a line about each."""
    if not isinstance(selected, ShippedRecipe):
        return "".join(f"{line}\n" for one in selected for line in _listed(one, width))
    extended = textwrap.fill(
        f"{selected.name} extends {', '.join(selected.inherits) or 'no other recipe'}.",
        max(width, len(selected.name) + 2),
        initial_indent="# ",
        subsequent_indent="#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{selected.text.rstrip()}\n\n{extended}\n"


def _listed(recipe: ShippedRecipe, width: int) -> Iterator[str]:
    """The lines of a recipe in the list: its name, hardware and time, with its summary beside or below them."""
    cells = (recipe.name, recipe.hardware, recipe.time)
    beside = width >= _NARROW and len(recipe.name) < _COLUMNS[0]
    column = sum(_COLUMNS) if beside else 4
    lines = textwrap.wrap(recipe.summary, width - column, break_long_words=False, break_on_hyphens=False)
    if beside:
        yield "".join(f"{cell:<{size}}" for cell, size in zip(cells, _COLUMNS, strict=True)) + lines.pop(0)
    else:
        yield recipe.name
        if recipe.hardware:
            yield " " * column + ", ".join(filter(None, cells[1:]))
    yield from (" " * column + line for line in lines)
