"""`flatpeak chat`."""

from __future__ import annotations

from typing import Annotated

import typer


def chat(
    path: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a checkpoint directory or a Hub name.")],
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    system: Annotated[str | None, typer.Option(help="A system message, for models with a chat template.")] = None,
) -> None:
    """Ask a model questions; an empty line or Ctrl-D ends."""
    from flatpeak.evaluation.chat import chat_loop

    chat_loop(path, temperature=temperature, max_new_tokens=max_new_tokens, system=system)
