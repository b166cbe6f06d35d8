"""The commands `settings` and `recipes` as users start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatpeak.config.load import RECIPES
from flatpeak.config.settings_reference import settings_reference
from support.commands import command, without


def test_a_setting_is_printed_with_its_default_type_and_meaning() -> None:
    done = command("settings", "kl.ratio_weighted")
    assert done.returncode == 0
    assert done.stdout == (
        "kl: The penalty for leaving the reference.\n"
        "\n"
        "  kl.ratio_weighted=false\n"
        "    true or false. Multiply the per-token KL in the loss by the importance ratio\n"
        "    (TRL's default), so that the expected gradient of k1 and k3 is that of the\n"
        "    KL; that of k2 is so without it.\n"
    )


@pytest.mark.parametrize(("columns", "widths"), [(None, range(70, 81)), ("50", range(45, 51))])
def test_output_that_goes_elsewhere_has_eighty_columns_and_a_narrow_terminal_its_own(
    columns: str | None, widths: range
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {} if columns is None else {"COLUMNS": columns}
    start = [sys.executable, "-m", "flatpeak", "settings", "distributed"]
    done = subprocess.run(start, capture_output=True, text=True, env=environment)
    assert max(map(len, done.stdout.splitlines())) in widths


def test_the_json_of_a_section_is_one_object() -> None:
    done = command("settings", "rollout", "--json")
    keys = [setting.key for section in settings_reference("rollout") for setting in section.settings]
    assert [row["key"] for row in json.loads(done.stdout)["settings"]] == keys
    assert "rollout.engine.urls" in keys


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["settings", "optimzer"], "error: unknown setting optimzer: did you mean optimizer"),
        (
            ["settings", "--json", "--markdown"],
            "error: --json, --markdown and --schema are forms of the same",
        ),
        (
            ["recipes", "dapo"],
            "error: recipe dapo is not shipped with flatpeak: did you mean flatpeak:algorithms/dapo?",
        ),
        (
            ["recipes", "tasks", "--paper", "2503.14476"],
            "error: tasks with --paper 2503.14476: give a recipe's name or a paper's number",
        ),
    ],
)
def test_an_unknown_name_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = command(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(message)


def test_a_recipe_is_printed_as_it_is_in_its_file() -> None:
    file = (RECIPES / "algorithms/dapo.yaml").read_text(encoding="utf-8")
    note = "\n# flatpeak:algorithms/dapo extends flatpeak:algorithms/grpo.\n"
    assert command("recipes", "flatpeak:algorithms/dapo").stdout == file + note


def test_neither_command_loads_torch(tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "numpy", "rich")
    ends = without(*heavy, commands=[["settings"], ["recipes"]], cwd=tmp_path)
    assert [(done.returncode, done.stderr) for done in ends] == [(0, "")] * 2


def test_the_help_of_train_names_both_commands() -> None:
    words = " ".join(command("train", "--help").stdout.split())
    assert "`flatpeak recipes` lists them" in words
    assert "`flatpeak settings` explains them" in words
