"""`flatpeak report` of a sweep: the comparison on standard output, its files beside the table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flatpeak.cli.main import app
from flatpeak.errors import UserError
from support.sweep_tables import write_sweep


@pytest.fixture
def sweep(tmp_path: Path) -> str:
    return str(write_sweep(tmp_path / "sharp"))


def report(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["report", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.slow
def test_a_sweep_is_compared_and_its_files_are_written(sweep: str) -> None:
    text = report(sweep, "--baseline", "kl", "--metric", "reward/gold", "--at-least", "reward/exploit.final=0.5")
    assert "## reward/gold.final" in text
    assert "minus kl" in text
    assert "## reward/exploit.final >= 0.5" in text
    assert "reward/exploit.first" not in text
    assert text.endswith(f"written: {sweep}/comparison.md, comparison.json and plots/\n")
    assert (Path(sweep) / "comparison.md").read_text().startswith("# Arms compared")
    assert report(f"{sweep}/table.csv", "--alpha", "0.01").startswith("# Arms compared")


@pytest.mark.slow
def test_json_is_one_object_and_that_of_the_file(sweep: str) -> None:
    text = report(sweep, "--json")
    assert json.loads(text)["baseline"] == "none"
    assert text == (Path(sweep) / "comparison.json").read_text()


def test_the_example_of_the_documents_prints_what_they_show(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")
    content, shown = re.findall(r"```text\n((?:arm,seed|\| arm ).*?)```", page, flags=re.DOTALL)
    (tmp_path / "pilot.csv").write_text(content)
    options = re.search(r"`flatpeak report pilot\.csv (.*?)`", page)
    assert options is not None
    text = report(str(tmp_path / "pilot.csv"), *options[1].split())
    assert [line for line in shown.splitlines() if line not in text] == []
    assert len(shown.splitlines()) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{sweep}", "--csv"], "leave out --csv"),
        (["{sweep}", "--at-least", "0.5"], "--at-least 0.5: write METRIC=VALUE"),
        (
            ["{sweep}", "--at-least", "reward/gold=0.3", "--at-least", "reward/gold=0.5"],
            "--at-least reward/gold=...: two values for one metric",
        ),
        (["{sweep}", "--baseline", "no"], "baseline 'no' is not an arm"),
        (["runs/demo", "--json"], "are for a sweep, and runs/demo is not a sweep"),
        (["{sweep}", "{sweep}", "--baseline", "kl"], "are for a sweep"),
        (["nowhere.csv"], "nowhere.csv: cannot be read"),
    ],
)
def test_options_that_do_not_belong_are_refused(sweep: str, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        report(*(argument.format(sweep=sweep) for argument in arguments))
