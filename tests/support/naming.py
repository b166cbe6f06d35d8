"""The names and sentences of the package: `python tests/support/naming.py [PATH...]` prints what breaks their rules.

A name is judged where it is defined: modules, classes, functions, arguments, variables and fields. Recipe keys, columns
and metrics keep their names (`rows`, `gold`, `rollout.max_rows`), and English words in sentences are free.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "flatpeak"

BANNED_WORDS: Final = frozenset(
    {
        *("serving", "stated", "layout", "shown", "tally", "wire", "forms", "ledger", "examiner", "breaker", "journal"),
        *("shaping", "passes", "products", "workspace", "spans", "figures", "seal", "running", "rounds"),
        *("told", "heed", "nobody", "places", "found"),
    }
)
"""Words that no name contains, because a reader who knows the field cannot guess what they stand for."""
BANNED_NAMES: Final = frozenset({"part", "held_out", "Given", "Parts", "Part", "Saved", "Silence", "Kept", "Frozen"})
"""Whole names that are banned; as parts of longer names they are ordinary words."""
EXEMPT: Final = frozenset({"CircuitBreaker"})
"""Names that the field uses itself."""
FEWEST_WORDS: Final = 4
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_RIDDLE: Final = re.compile(r"(What|Which|How|Who|Whose|Where|When|Why|So|As|Back)\b")
_PERSON: Final = re.compile(
    r"\b(heeds?|heeded|hears?|heard|tells?|told|forgets?|forgot|nobody|somebody|whoever|everybody)\b", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True, order=True)
class Finding:
    """A name or sentence that breaks a rule."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def words(name: str) -> list[str]:
    """`StepFigures` and `step_figures` are `step`, `figures`."""
    return [word.lower() for word in _WORD.findall(name)]


def is_banned(name: str) -> bool:
    """Whether a name is banned as a whole or contains a banned word."""
    return name not in EXEMPT and (name.strip("_") in BANNED_NAMES or not BANNED_WORDS.isdisjoint(words(name)))


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a file defines, but for the fields of `...Config` classes: recipe keys."""
    keys = {
        id(field.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
        for field in node.body
        if isinstance(field, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if id(node) in keys:
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield getattr(node, "lineno", 0), node.asname
        elif isinstance(node, ast.MatchAs | ast.MatchStar | ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


def bad_sentence(docstring: str, *, fewest_words: int = FEWEST_WORDS) -> str | None:
    """The rule that a docstring's first sentence breaks: a fragment, a riddle, or words that are for people."""
    first = docstring.strip().splitlines()[0] if docstring.strip() else ""
    if len(first.split()) < fewest_words:
        return f"a fragment: {first!r}"
    if _RIDDLE.match(first):
        return f"neither a noun phrase nor an imperative: {first!r}"
    person = _PERSON.search(docstring)
    return f"{person[0]!r} is for people: {first!r}" if person else None


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it stands under a field or constant) of every docstring."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is not None:
            yield node.body[0].lineno, text, False
        for before, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(before, ast.Assign | ast.AnnAssign) and (under := _string(after)) is not None:
                yield after.lineno, under, True


def _string(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None


def findings(path: Path, root: Path = ROOT) -> list[Finding]:
    """Everything in one file that breaks a rule."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at = str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
    out = [Finding(path=at, line=1, text=f"module name {path.stem!r}")] if is_banned(path.stem) else []
    out += [Finding(path=at, line=n, text=f"name {name!r}") for n, name in set(defined_names(tree)) if is_banned(name)]
    for line, text, under_field in docstrings(tree):
        rule = bad_sentence(text, fewest_words=1 if under_field else FEWEST_WORDS)
        if rule is not None:
            out.append(Finding(path=at, line=line, text=rule))
    return sorted(out)


def main() -> None:
    """Print the findings of the given files and folders, or of the whole package."""
    given = [Path(one).resolve() for one in sys.argv[1:]] or [PACKAGE]
    files = [file for one in given for file in (sorted(one.rglob("*.py")) if one.is_dir() else [one])]
    listed = [finding for file in files for finding in findings(file)]
    for finding in listed:
        print(finding)
    print(f"{len(listed)} findings")


if __name__ == "__main__":
    main()
