"""`flatpeak chat`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def chat(
    path: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a checkpoint directory or a Hub name.")],
    recipe: Annotated[str | None, typer.Option(help="Ask as this recipe does.")] = None,
    template: Annotated[
        str | None,
        typer.Option(help="Word questions by plain, r1_zero, question_only, chat or a file with {question}."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message, for models with a chat template.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="0 always takes the likeliest token. Default: a run's as in its evaluations, else 1."),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer. Default: a run's as in its evaluations, else 256.")
    ] = None,
) -> None:
    """Ask a model questions; an empty line or Ctrl-D ends.

    A run, or a checkpoint in it, is asked as in its training. Answers go to standard output, everything else to
    standard error.
    """
    from flatpeak.pipeline.chat import Console, chat_loop

    chat_loop(
        path,
        recipe=recipe,
        template=template,
        system=system,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        console=Console(read=_read, write=typer.echo, note=lambda text: typer.echo(text, err=True)),
    )


def _read(prompt: str) -> str:
    """The next line; the prompt is shown to a person only."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return input()
    try:
        return input(prompt)
    except EOFError:
        typer.echo()
        raise
