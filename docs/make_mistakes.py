"""Write the page of common mistakes: `python docs/make_mistakes.py > docs/mistakes.md`.

Its rows are those of tests/mistakes.yaml, each of which tests/test_mistakes.py makes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

FILE: Final = Path(__file__).parents[1] / "tests" / "mistakes.yaml"
HEAD: Final = """
# Common mistakes

What flatpeak prints for a mistake: one line that says what to change. The exit code is 2 if nothing has begun, and 1 if
the run has started. A run that has started keeps its last checkpoint. `…` stands for text that varies.

The tests make each of these mistakes. If you meet an error that does not say what to do,
[report it](../CONTRIBUTING.md#reporting-a-bug).
"""
PYTHON: Final = "The exception is a `flatpeak.UserError`, which is a `ValueError`."


def page() -> str:
    """The page: a table per part of flatpeak."""
    parts = [HEAD.strip()]
    for title, rows in yaml.safe_load(FILE.read_text(encoding="utf-8"))["tables"].items():
        heading = [f"## {title}", ""] + ([PYTHON, ""] if "python" in rows[0] else [])
        parts.append("\n".join([*heading, *table(rows)]))
    return "\n\n".join(parts) + "\n"


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A row per mistake: in words, as typed, and what it prints."""
    yield from ("| Mistake | For example | What flatpeak prints |", "|---|---|---|")
    for row in rows:
        begun = " (in the run: exit code 1)" if row.get("in the run") else ""
        begun = f" (exit code {row['exit code']})" if "exit code" in row else begun
        typed, said = (code(text) for text in (row.get("command") or row["python"], row["says"]))
        yield f"| {row['mistake']} | {typed} | {said}{begun} |"


def code(text: str) -> str:
    """A text as code in a cell of a table; text with backticks between double ones."""
    escaped = text.removeprefix("error: ").replace("|", "\\|")
    return f"`` {escaped} ``" if "`" in escaped else f"`{escaped}`"


if __name__ == "__main__":
    sys.stdout.write(page())
