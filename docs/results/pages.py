"""Pages of results and their figures, written from committed tables or checked against them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """What every report takes."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--check", action="store_true", help="write nothing; fail where a file would change")
    return made


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])


def filled(page: str, parts: Sequence[str], *, name: str = "study") -> str:
    """A page with new paragraphs between the two marks of a name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    assert rest and after, f"the page lacks the marks {begin} and {end}"
    return "\n\n".join([before + begin, *parts, end + after])


def update(files: Mapping[Path, str], *, check: bool) -> int:
    """Write the files that differ from these texts, or with `check` only name them; the exit code."""
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(("stale: " if check else "written: ") + path.relative_to(ROOT).as_posix())
        if not check:
            path.write_text(files[path], encoding="utf-8")
    return int(check and bool(stale))
