"""The command `doctor`: whether flatpeak works on this machine, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list of objects.")] = False,
) -> None:
    """Check this machine and installation, and name a fix for each problem.

    Changes and downloads nothing. The exit code is 1 if there is a problem, else 0.
    """
    from flatpeak.apps.doctor.checks import report

    raise typer.Exit(report(as_json=as_json))


def run_directly(arguments: Sequence[str]) -> int | None:
    """Run the doctor without typer's parsing of arguments, which needs pydantic; None for another command."""
    if list(arguments) not in (["doctor"], ["doctor", "--json"]):
        return None
    from flatpeak.apps.doctor.checks import main

    return main(as_json="--json" in arguments)
