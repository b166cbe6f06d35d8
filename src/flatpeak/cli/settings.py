"""The command `settings`: what a recipe can say."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from flatpeak.errors import UserError

_NARROWEST, _WIDEST = 40, 120
"""Columns of the text: a narrower terminal breaks lines itself, and longer lines are hard to read."""


def settings(
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="PREFIX",
            help="A section or key (rollout, optimizer.learning_rate), or a type (task.type=rows). Default: all.",
            show_default=False,
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the settings as one JSON object.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print them as the page docs/settings.md.")] = False,
) -> None:
    """Explain the settings of a recipe: key and default, type, meaning."""
    from flatpeak.config import settings_rendering
    from flatpeak.config.settings_reference import settings_reference

    if as_json and markdown:
        raise UserError("--json and --markdown are two forms of the same: give one of them")
    sections = settings_reference(prefix)
    if as_json:
        typer.echo(settings_rendering.to_json(sections))
    elif markdown:
        typer.echo(settings_rendering.to_markdown(sections))
    else:
        typer.echo(settings_rendering.to_text(sections, width=_width()))


def _width() -> int:
    """The columns of the terminal, or COLUMNS; 80 of output that goes elsewhere."""
    return min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size().columns))
