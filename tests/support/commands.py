"""The `flatpeak` command in this process: its exit code and what it prints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

_WITHOUT = """
import json, sys
commands, modules = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(modules))  # to import them is an error
from support.commands import several
several(commands)
"""


@dataclass(frozen=True)
class Done:
    """How a command ended, as `subprocess.run` tells it."""

    returncode: int
    stdout: str
    stderr: str


def command(*arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Done:
    """`flatpeak ARGUMENTS` by its entry point."""
    from flatpeak.cli import main as entry

    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["flatpeak", *arguments]),
        patch.dict(os.environ, {"COLUMNS": "80", **(env or {})}),
        patch.object(warnings, "formatwarning", warnings.formatwarning),  # which `main` exchanges
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            entry.main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Done(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def several(commands: Sequence[Sequence[str]]) -> None:
    """Print the ends of these commands, one after the other, as JSON."""
    print(json.dumps([asdict(command(*arguments)) for arguments in commands]))


def without(*modules: str, commands: Sequence[Sequence[str]], cwd: Path) -> Iterator[Done]:
    """Commands in a process in which importing these modules is an error: what does not need them ends as always."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, json.dumps([commands, modules])],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    for ended in json.loads(done.stdout):
        yield Done(**ended)
