"""Writes what was measured into RESULTS.md.

    python -m benchmarks.harness.report FOLDER [--into FILE]

FOLDER holds the JSON files of the parts. A part's text stands between two comments that name it; only what is between
them is replaced, so that words written around it stay, as do parts that FOLDER has nothing of.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.tables import PARTS

RESULTS = Path(__file__).parents[1] / "RESULTS.md"
COMMIT_DIGITS = 10


def main() -> None:
    """Render every part that there is a file of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--into", type=Path, default=RESULTS)
    given = parser.parse_args()
    text = given.into.read_text(encoding="utf-8") if given.into.exists() else "# Benchmark results\n"
    for part in PARTS:
        file = given.folder / f"{part}.json"
        if file.exists():
            text = replace_part(text, part, PARTS[part].title, render(json.loads(file.read_text(encoding="utf-8"))))
    given.into.write_text(text, encoding="utf-8")


def render(content: Mapping[str, Any]) -> str:
    """A part's table, with what it was measured on and how to measure it again."""
    part = content["part"]
    pieces = [
        described(part),
        f"```sh\n{command(content['facts']['command'])}\n```",
        PARTS[part].table(content["rows"]),
        measured_on(content),
    ]
    return "\n\n".join(pieces)


def described(part: str) -> str:
    """What a part's own docstring says, without its command."""
    doc = importlib.import_module(f"benchmarks.cpu.{part}").__doc__ or ""
    return "\n\n".join(piece for piece in doc.strip().split("\n\n") if not piece.startswith("    "))


def command(arguments: list[str]) -> str:
    """As a reader would type it; where the result goes is theirs to say."""
    words = list(arguments)
    if "--json" in words:
        place = words.index("--json")
        words[place + 1] = Path(words[place + 1]).name
    return " ".join(f'"{word}"' if " " in word else word for word in words)


def measured_on(content: Mapping[str, Any]) -> str:
    """Day, commit, hardware, threads, versions, and how long it took."""
    facts = content["facts"]
    hardware, versions = facts["hardware"], dict(facts["versions"])
    for row in content["rows"]:
        versions |= {name: value for name, value in row.get("told", {}).items() if name == "vllm"}
    commit = facts["commit"]["flatpeak"] or "unknown"
    named = ", ".join(f"{name} {value}" for name, value in versions.items() if value and name != "safetensors")
    minutes = sum(row["seconds"] for row in content["rows"]) / 60
    dirty = " with changes" if commit.endswith("-dirty") else ""
    return (
        f"{facts['started'][:10]}, commit {commit[:COMMIT_DIGITS]}{dirty}; {hardware['cpu']},\n"
        f"{hardware['cores']} cores, {hardware['memory_gib']:g} GiB, one thread for each contender;\n{named}.\n"
        f"It took {minutes:.0f} minutes. Figures are medians (smallest to largest round); peak memory is above what\n"
        "is resident before the first round."
    )


def replace_part(text: str, part: str, title: str, body: str) -> str:
    """`text` with the part's own piece replaced, or with a new section at its end."""
    opening, closing = f"<!-- bench:{part} -->", f"<!-- /bench:{part} -->"
    piece = f"{opening}\n{body.strip()}\n{closing}"
    pattern = re.compile(re.escape(opening) + r".*?" + re.escape(closing), flags=re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda _: piece, text, count=1)
    return f"{text.rstrip()}\n\n## {title}\n\n{piece}\n"


if __name__ == "__main__":
    main()
