"""The line that a command prints at once: before torch is imported."""

from __future__ import annotations

import pytest
import yaml

from flatpeak import __version__
from support.commands import Done, without

KEY = "hf_" + 20 * "a"
COMMANDS = {
    "train": "train flatpeak:laptop model.path=there/Tiny run.name=one",
    "sft": "sft flatpeak:laptop model.path=org/Tiny run.name=one",
    "demo": "demo run.name=one",
    "reward-model": "reward-model flatpeak:reward_model_from_scratch run.directory=runs run.name=one",
    "json": "train flatpeak:laptop --json",
    "secrets": f"train flatpeak:laptop model.path=org/{KEY} run.directory={KEY}",
    "fork": "fork runs/base 1 --name two",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """How these commands end where torch cannot be imported."""
    folder = tmp_path_factory.mktemp("first_line")
    base = folder / "runs" / "base"
    base.mkdir(parents=True)
    (base / "config.yaml").write_text(yaml.safe_dump({"extends": "flatpeak:laptop", "run": {"name": "base"}}))
    (base / "manifest.json").write_text("{}")
    ended = without("torch", commands=[words.split() for words in COMMANDS.values()], cwd=folder)
    return dict(zip(COMMANDS, ended, strict=True))


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("train", "Tiny on numbers, run directory runs/one"),
        ("sft", "Tiny on numbers, run directory runs/one"),
        ("demo", "a new gpt2 on arithmetic, run directory runs/one"),
        ("reward-model", "a new llama on preferences, run directory runs/one"),
        ("secrets", "[redacted] on numbers, run directory [redacted]/laptop"),
        ("fork", "SmolLM2-135M-Instruct on numbers, run directory runs/two"),
    ],
)
def test_a_command_says_what_it_trains_before_torch_is_imported(ends: dict[str, Done], command: str, line: str) -> None:
    assert ends[command].stdout == f"flatpeak {__version__}: {line}\n"
    assert ends[command].returncode == 1
    assert "torch" in ends[command].stderr


def test_the_json_object_has_standard_output_to_itself(ends: dict[str, Done]) -> None:
    assert ends["json"].stdout == ""
    assert f"flatpeak {__version__}: SmolLM2-135M-Instruct on numbers" in ends["json"].stderr
