"""Words per sentence of the pages: `python tests/support/sentences.py [PAGE...]` prints a row per page, longest first.

Prose counts: paragraphs and items of lists. Code, tables, headings and links' addresses do not.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import mean
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_ABBREVIATIONS: Final = re.compile(r"\b(?:e\.g|i\.e|cf|vs|et al|etc|Eq|Fig|Sec|Dr|No)\.")
_END: Final = re.compile(r"(?<=[.!?])[)\"'*_`]*\s+(?=[\"'(*_`\[]*[A-Z0-9])|:\n|\n\n")


def prose(markdown: str) -> str:
    """The text of a page without code blocks, tables, headings, pictures and addresses; items become paragraphs."""
    text = re.sub(r"(?ms)^( *)```.*?^\1```", "\n\n", markdown)
    text = re.sub(r"(?m)^(?:#.*|\s*\|.*|<.*|!\[.*|\$\$.*|---)$", "\n", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`(?:[^`\n]|\n(?!\n))+`", "code", text)  # never over the end of a paragraph
    text = _ABBREVIATIONS.sub(lambda match: match[0][:-1], text)
    return re.sub(r"(?m)^\s*(?:[-*]|\d+\.)\s+", "\n\n", text)


def sentences(markdown: str) -> list[int]:
    """The number of words of each sentence, without fragments of one or two words."""
    lengths = (len(re.findall(r"[\w'’.,/%-]*\w[\w'’.,/%-]*", part)) for part in _END.split(prose(markdown)))
    return [length for length in lengths if length > 2]


def pages() -> list[Path]:
    """README, CONTRIBUTING and every page under docs but the generated reference."""
    named = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [*named, *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "settings.md")]


if __name__ == "__main__":
    chosen = [Path(name) for name in sys.argv[1:]] or pages()
    counted = {path: sentences(path.read_text()) for path in chosen}
    for path, lengths in sorted(counted.items(), key=lambda item: -mean(item[1] or [0])):
        long = sum(length > 25 for length in lengths)
        print(f"{path.name:32} {mean(lengths or [0]):5.1f} words, {long:3} of {len(lengths)} over 25")
