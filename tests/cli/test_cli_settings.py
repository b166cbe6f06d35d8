"""The commands `settings` and `recipes` as users start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from flatpeak.config.load import RECIPES
from flatpeak.config.settings_reference import settings_reference


def flatpeak(*arguments: str, columns: int | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {} if columns is None else {"COLUMNS": str(columns)}
    command = [sys.executable, "-m", "flatpeak", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_setting_is_printed_with_its_default_type_and_meaning() -> None:
    done = flatpeak("settings", "kl.ratio_weighted")
    assert done.returncode == 0
    assert done.stdout == (
        "kl: The penalty for leaving the reference.\n"
        "\n"
        "  kl.ratio_weighted=false\n"
        "    true or false. Multiply the per-token KL in the loss by the importance ratio\n"
        "    (TRL's default), so that the expected gradient of k1 and k3 is that of the\n"
        "    KL; that of k2 is so without it.\n"
    )


def test_output_that_goes_elsewhere_has_eighty_columns_and_a_narrow_terminal_its_own() -> None:
    assert max(map(len, flatpeak("settings", "distributed").stdout.splitlines())) in range(70, 81)
    assert max(map(len, flatpeak("settings", "distributed", columns=50).stdout.splitlines())) in range(45, 51)


def test_the_json_of_a_section_is_one_object() -> None:
    done = flatpeak("settings", "rollout", "--json")
    keys = [setting.key for section in settings_reference("rollout") for setting in section.settings]
    assert [row["key"] for row in json.loads(done.stdout)["settings"]] == keys
    assert "rollout.engine.urls" in keys


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["settings", "optimzer"], "error: unknown setting optimzer: did you mean optimizer"),
        (["settings", "--json", "--markdown"], "error: --json and --markdown are two forms of the same: give one"),
        (
            ["recipes", "dapo"],
            "error: recipe dapo is not shipped with flatpeak: did you mean flatpeak:algorithms/dapo?",
        ),
    ],
)
def test_an_unknown_name_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = flatpeak(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(message)


def test_a_recipe_is_printed_as_it_is_in_its_file() -> None:
    file = (RECIPES / "algorithms/dapo.yaml").read_text(encoding="utf-8")
    note = "\n# flatpeak:algorithms/dapo extends flatpeak:algorithms/grpo.\n"
    assert flatpeak("recipes", "flatpeak:algorithms/dapo").stdout == file + note


@pytest.mark.parametrize("command", ["settings", "recipes"])
def test_neither_command_loads_torch(command: str) -> None:
    code = (
        "import sys\n"
        "from flatpeak.cli.main import main\n"
        f"sys.argv[1:] = ['{command}']\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'rich') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_help_of_train_names_both_commands() -> None:
    words = " ".join(flatpeak("train", "--help").stdout.split())
    assert "`flatpeak recipes` lists them" in words
    assert "`flatpeak settings` explains them" in words
