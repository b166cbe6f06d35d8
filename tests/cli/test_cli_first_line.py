"""The line that a command prints at once: before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flatpeak import __version__

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from flatpeak.cli.main import main; main()"


def without_torch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command that fails once it imports torch."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, cwd=cwd, env={**os.environ}
    )
    assert "torch" in done.stderr
    assert done.returncode == 1
    return done


@pytest.mark.parametrize(
    ("command", "model", "task"),
    [
        (("train", "flatpeak:laptop", "model.path=there/Tiny"), "Tiny", "numbers"),
        (("sft", "flatpeak:laptop", "model.path=org/Tiny"), "Tiny", "numbers"),
        (("demo",), "a new gpt2", "arithmetic"),
        (("reward-model", "flatpeak:reward_model_from_scratch", "run.directory=runs"), "a new llama", "preferences"),
    ],
)
def test_a_command_says_what_it_trains_before_torch_is_imported(
    command: tuple[str, ...], model: str, task: str, tmp_path: Path
) -> None:
    done = without_torch(*command, "run.name=one", cwd=tmp_path)
    assert done.stdout == f"flatpeak {__version__}: {model} on {task}, run directory runs/one\n"


def test_the_json_object_has_standard_output_to_itself(tmp_path: Path) -> None:
    done = without_torch("train", "flatpeak:laptop", "--json", cwd=tmp_path)
    assert done.stdout == ""
    assert f"flatpeak {__version__}: SmolLM2-135M-Instruct on numbers" in done.stderr


def test_the_first_line_has_no_secrets(tmp_path: Path) -> None:
    key = "hf_" + 20 * "a"
    done = without_torch("train", "flatpeak:laptop", f"model.path=org/{key}", f"run.directory={key}", cwd=tmp_path)
    assert done.stdout.endswith(": [redacted] on numbers, run directory [redacted]/laptop\n")


def test_a_fork_says_what_it_trains_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "config.yaml").write_text(
        yaml.safe_dump({"extends": "flatpeak:laptop", "run": {"name": "one"}})
    )
    (tmp_path / "runs" / "one" / "manifest.json").write_text("{}")
    done = without_torch("fork", "runs/one", "1", "--name", "two", cwd=tmp_path)
    assert done.stdout == f"flatpeak {__version__}: SmolLM2-135M-Instruct on numbers, run directory runs/two\n"
