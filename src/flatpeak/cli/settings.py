"""The commands that explain recipes: `settings` and `recipes`."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from flatpeak.errors import UserError

_NARROWEST, _WIDEST = 40, 120
"""Limits of text columns: a narrower terminal wraps lines itself, and longer lines are hard to read."""


def settings(
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="PREFIX",
            help="A section or key (rollout, optimizer.learning_rate), or a type (task.type=rows). Default: the common "
            "settings.",
            show_default=False,
        ),
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="Print all settings.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all settings as one JSON object.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all as the page docs/settings.md.")] = False,
) -> None:
    """Explain the settings of a recipe: key and default, type, meaning."""
    from flatpeak.config import settings_rendering
    from flatpeak.config.settings_reference import common_settings, settings_reference

    if as_json and markdown:
        raise UserError("--json and --markdown are two forms of the same: give one of them")
    if as_json:
        typer.echo(settings_rendering.to_json(settings_reference(prefix)))
        return
    sections = settings_rendering.listed_once(settings_reference(prefix))
    if markdown:
        typer.echo(settings_rendering.to_markdown(sections))
    elif not prefix and not everything:
        common = common_settings()
        left_out = sum(len(section.settings) for section in sections) - sum(len(one.settings) for one in common)
        typer.echo(settings_rendering.to_summary(common, left_out=left_out, width=_width()))
    else:
        typer.echo(settings_rendering.to_text(sections, width=_width()))


def recipes(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A recipe to print (flatpeak:demo), or a folder to list (tasks, algorithms). Default: list all.",
            show_default=False,
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the list, or the recipe, as one JSON object.")] = False,
) -> None:
    """List the shipped recipes, or print one of them."""
    from flatpeak.config import shipped_recipes

    selected = shipped_recipes.select(name)
    if as_json:
        typer.echo(shipped_recipes.to_json(selected))
    else:
        typer.echo(shipped_recipes.to_text(selected, width=_width()), nl=False)


def _width() -> int:
    """The columns of the terminal, or COLUMNS; 80 for output that goes elsewhere."""
    return min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size().columns))
