"""The command `doctor`: whether flatpeak can work on this machine, line by line."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list of objects.")] = False,
) -> None:
    """Check this machine and installation, and name the command that mends each problem.

    Nothing is changed or downloaded. Exit code 1 where there is a problem; notes are none.
    """
    from flatpeak.pipeline.doctor.checkup import examine
    from flatpeak.pipeline.doctor.findings import lines

    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            for line in lines(finding):
                typer.echo(_printable(line))
    problems, notes = (sum(one.status == status for one in findings) for status in ("problem", "note"))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        typer.echo(f"doctor: {_count(problems, 'problem')}, {_count(notes, 'note')}")
    raise typer.Exit(1 if problems else 0)


def _count(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def _printable(text: str) -> str:
    """The text in the terminal's encoding, which may lack characters of paths."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
