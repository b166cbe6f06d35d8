"""The report: writes measurements into RESULTS.md.

    python -m benchmarks.harness.report FOLDER [--into FILE]

FOLDER has the benchmarks' JSON files. A benchmark's text is between two comments with its name; only this text is
replaced. Text around it, and benchmarks without a file in FOLDER, do not change.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.tables import BENCHMARKS

RESULTS = Path(__file__).parents[1] / "RESULTS.md"
COMMIT_DIGITS = 10


def main() -> None:
    """Render every benchmark that has a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--into", type=Path, default=RESULTS)
    given = parser.parse_args()
    text = given.into.read_text(encoding="utf-8") if given.into.exists() else "# Benchmark results\n"
    for benchmark in BENCHMARKS:
        file = given.folder / f"{benchmark}.json"
        if file.exists():
            text = replace_section(
                text, benchmark, BENCHMARKS[benchmark].title, render(json.loads(file.read_text(encoding="utf-8")))
            )
    given.into.write_text(text, encoding="utf-8")


def render(content: Mapping[str, Any]) -> str:
    """A benchmark's table, with the conditions of the measurement and the command to repeat it."""
    benchmark = content["part"]
    pieces = [
        described(benchmark),
        f"```sh\n{command(content['facts']['command'])}\n```",
        BENCHMARKS[benchmark].table(content["rows"]),
        measured_on(content),
    ]
    return "\n\n".join(pieces)


def described(benchmark: str) -> str:
    """The docstring of a benchmark, without its command."""
    doc = importlib.import_module(f"benchmarks.cpu.{benchmark}").__doc__ or ""
    return "\n\n".join(piece for piece in doc.strip().split("\n\n") if not piece.startswith("    "))


def command(arguments: list[str]) -> str:
    """The command for readers, without the folders of results and model."""
    words = [Path(word).name if "/" in word else word for word in arguments]
    return " ".join(f'"{word}"' if " " in word else word for word in words)


def measured_on(content: Mapping[str, Any]) -> str:
    """Day, commit, hardware, threads, versions, and duration."""
    facts = content["facts"]
    hardware, versions = facts["hardware"], dict(facts["versions"])
    for row in content["rows"]:
        versions |= {name: value for name, value in row.get("reported", {}).items() if name in ("vllm", "decoder")}
    commit = facts["commit"]["flatpeak"] or "unknown"
    named = ", ".join(f"{name} {value}" for name, value in versions.items() if value and name != "safetensors")
    minutes = sum(row["seconds"] for row in content["rows"]) / 60
    dirty = " with changes" if commit.endswith("-dirty") else ""
    return (
        f"{facts['started'][:10]}, commit {commit[:COMMIT_DIGITS]}{dirty}; {hardware['cpu']},\n"
        f"{hardware['cores']} cores, {hardware['memory_gib']:g} GiB, {BENCHMARKS[content['part']].threads};\n{named}.\n"
        f"It took {minutes:.0f} minutes. Figures are medians (smallest to largest round); peak memory is above what\n"
        "is resident before the first round."
    )


def replace_section(text: str, benchmark: str, title: str, body: str) -> str:
    """Replace the text between a benchmark's comments, or append a new section."""
    opening, closing = f"<!-- bench:{benchmark} -->", f"<!-- /bench:{benchmark} -->"
    piece = f"{opening}\n{body.strip()}\n{closing}"
    pattern = re.compile(re.escape(opening) + r".*?" + re.escape(closing), flags=re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda _: piece, text, count=1)
    return f"{text.rstrip()}\n\n## {title}\n\n{piece}\n"


if __name__ == "__main__":
    main()
