"""The promises of tests/faults/promises.yaml: `python tests/support/faults.py` runs their tests and prints a table."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, TypedDict
from xml.etree import ElementTree

import yaml

TESTS: Final = Path(__file__).parents[1]


class Promise(TypedDict):
    """A row: what happens, what is promised then, and the tests that show it."""

    fault: str
    promise: str
    tests: list[str]


def promises() -> list[Promise]:
    """All rows, in their order."""
    rows: list[Promise] = yaml.safe_load((TESTS / "faults" / "promises.yaml").read_text())
    return rows


def outcomes(report: Path) -> dict[str, bool]:
    """Whether each test of a JUnit report passed, by `file.py::name`; a skipped one did not, a parametrized one as a
    whole."""
    passed: dict[str, bool] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].removeprefix("tests.").replace(".", "/") + ".py"
        name = f"{file}::{case.attrib['name'].partition('[')[0]}"
        passed[name] = passed.get(name, True) and not len(case)
    return passed


def keeps(row: Promise, passed: dict[str, bool]) -> bool:
    """Whether there are tests for each entry of a row, and all of them passed."""
    chosen = [
        [ok for name, ok in passed.items() if name == test or name.startswith(f"{test}::")] for test in row["tests"]
    ]
    return all(oks and all(oks) for oks in chosen)


def main() -> None:
    """Run the tests in one go, print a line per promise and how many hold; exit code 1 if one does not."""
    rows = promises()
    names = sorted({str(TESTS / test) for row in rows for test in row["tests"]})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "--dist",
            "loadfile",
            "-m",
            "not exhaustive",
            f"--junitxml={report}",
        ]
        subprocess.run([sys.executable, *command, *names], check=False, cwd=TESTS.parent)
        passed = outcomes(report)
    held = [keeps(row, passed) for row in rows]
    for row, holds in zip(rows, held, strict=True):
        print(f"{'holds ' if holds else 'BROKEN'}  {row['fault']}: {row['promise']}")
    print(f"{sum(held)} of {len(rows)}")
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
