"""One line of the doctor's report, and the words that such lines share: paths, versions, commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from flatpeak.utils.redaction import redact

Status = Literal["ok", "note", "problem"]
GIB: Final = 2**30
_CHECK_WIDTH: Final = 14


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check."""

    check: str
    """The name of what was looked at, such as `torch`."""
    status: Status
    """problem: something that flatpeak needs does not work. note: something is slower, missing, or as it was set."""
    text: str
    fix: str | None = None
    """A command that mends it, or a sentence where no command does; every problem has one."""


def ok(check: str, text: str) -> Finding:
    """A finding that all is well."""
    return Finding(check=check, status="ok", text=text)


def note(check: str, text: str, fix: str | None = None) -> Finding:
    """A finding that keeps nothing from working."""
    return Finding(check=check, status="note", text=text, fix=fix)


def problem(check: str, text: str, fix: str) -> Finding:
    """A finding that keeps something from working."""
    return Finding(check=check, status="problem", text=text, fix=fix)


def lines(finding: Finding) -> list[str]:
    """The finding as one or two lines of text; the second has the fix."""
    first = f"{finding.status:<8} {finding.check:<{_CHECK_WIDTH}} {finding.text}"
    return [first] if finding.fix is None else [first, f"{'':<8} {'':<{_CHECK_WIDTH}} fix: {finding.fix}"]


def presentable(finding: Finding) -> Finding:
    """The finding on single lines, without secrets, and with `~` for the user's home."""
    return replace(
        finding,
        text=_presentable(finding.text),
        fix=None if finding.fix is None else _presentable(finding.fix),
    )


def _presentable(text: str) -> str:
    text = str(redact(" ".join(text.split())))
    for home in _homes():
        text = re.sub(rf"(?<![\w.~-]){re.escape(home)}(?![\w-]|\.\w)", "~", text)
    return text


def _homes() -> list[str]:
    """The paths of the home directory, the longest first; none for a user without one, or with `/`."""
    try:
        home = Path.home()
        paths = {str(home), str(home.resolve())}
    except (OSError, RuntimeError):
        return []
    return sorted((path for path in paths if len(Path(path).parts) > 1), key=len, reverse=True)


def shell_path(path: Path | str) -> str:
    """The path as a word of a command line; `~` stands for the home directory, outside of any quotes."""
    for home in _homes():
        if str(path).startswith(f"{home}/"):
            return f"~/{shlex.quote(str(path)[len(home) + 1 :])}"
    return shlex.quote(str(path))


def gib(count: float) -> str:
    """A number of bytes in GiB: 0.06, 3.5, 240."""
    value = count / GIB
    return f"{value:.2f} GiB" if value < 1 else f"{value:.1f} GiB" if value < 100 else f"{value:.0f} GiB"
