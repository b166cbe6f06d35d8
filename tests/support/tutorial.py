"""The tutorial's page: its blocks, run chapter by chapter, and the comparison of what they print with what it shows."""

from __future__ import annotations

import contextlib
import re
import runpy
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "docs" / "make_tutorial.py"))
PAGE = TOOL["PAGE"].read_text(encoding="utf-8")
BLOCKS = TOOL["read_blocks"](PAGE)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def run_chapters(
    chapters: Collection[int], folder: Path, names: dict[str, Any], *, model: str = ""
) -> Iterator[tuple[str, str]]:
    """Pairs (shown, printed) of the chapters' blocks, which run in `names` with `folder` as working directory."""
    with contextlib.chdir(folder):
        for block in BLOCKS:
            if block.chapter in chapters:
                printed = TOOL["run_block"](block, names, model=model)
                yield block.output or "", printed


def trimmed(text: str) -> list[str]:
    """The lines without spaces at their ends."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def differences(shown: str, printed: str, *, tolerance: float) -> list[str]:
    """What of a printed text is not as shown: other words, or numbers further off than `tolerance`."""
    words, numbers = ([_NUMBER.sub("#", line) for line in trimmed(text)] for text in (shown, printed))
    if words != numbers:
        return [f"{printed!r} has other words than {shown!r}"]
    pairs = zip(_NUMBER.findall(shown), _NUMBER.findall(printed), strict=True)
    return [f"{new} in place of {old}" for old, new in pairs if abs(float(old) - float(new)) > tolerance]
