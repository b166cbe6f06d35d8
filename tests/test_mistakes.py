"""Each mistake of mistakes.yaml ends with the one or two lines beside it, and docs/mistakes.md has them all."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flatpeak
from flatpeak.errors import UserError
from flatpeak.training.learner import Learner
from support.commands import command
from support.models import run_model
from support.reward_functions import length
from support.runs import speed_up_runs
from support.tables import read_tables

pytestmark = pytest.mark.usefixtures("one_thread")

CONTENT = read_tables(Path(__file__).with_name("mistakes.yaml"))
ROWS = [row for rows in CONTENT["tables"].values() for row in rows]
DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of all rows, and the finished run that their commands may name."""
    directory = tmp_path_factory.mktemp("mistakes")
    write(directory, CONTENT["files"])
    with pytest.MonkeyPatch.context() as patch:
        speed_up_runs(patch)
        ended = command("train", "sums.yaml", "run.name=done", cwd=directory)
    assert ended.returncode == 0, ended.stderr
    return directory


@pytest.fixture
def here(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that directory, as the working directory."""
    directory = shutil.copytree(done, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(directory)
    speed_up_runs(monkeypatch)
    return directory


def write(directory: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content, encoding="utf-8")


def lack(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what the machine of a row lacks."""
    if what == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    if what == "memory":

        def fails(*args: Any, **settings: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(Learner, "accumulate_gradients", fails)


def is_said(text: str, says: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, says.split("…"))), text) is not None


def cases(kind: str) -> Iterator[Any]:
    return (pytest.param(row, id=row["mistake"]) for row in ROWS if kind in row)


@pytest.mark.parametrize("row", cases("command"))
def test_a_mistake_on_the_command_line_is_told_in_two_lines_at_most(
    row: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here, row.get("files", {}))
    lack(row.get("lacks", "nothing"), monkeypatch)
    if "env" in row:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    before = set(here.rglob("manifest.json"))
    ended = command(*shlex.split(row["command"])[1:], cwd=here)
    text = ended.stderr.rstrip("\n")
    assert is_said(text, row["says"]), text
    assert text.count("\n") < 2
    assert "Traceback" not in ended.stdout
    code = row.get("exit code", 1 if row.get("in the run") else 2)
    assert ended.returncode == code
    assert code != 2 or set(here.rglob("manifest.json")) == before  # no run is left that would stand in the way


@pytest.mark.parametrize("row", cases("python"))
def test_a_mistake_in_python_is_told_in_one_line(row: dict[str, Any], here: Path) -> None:
    model, tokenizer = run_model()
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(9)]
    names = {"flatpeak": flatpeak, "model": model, "tokenizer": tokenizer, "rows": rows, "length": length}
    with pytest.raises(UserError) as error:
        exec(row["python"], names)
    assert is_said(str(error.value), row["says"]), str(error.value)


def test_the_page_is_what_its_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails: `python docs/make_mistakes.py > docs/mistakes.md`."""
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.delitem(sys.modules, "make_mistakes", raising=False)
    import make_mistakes

    assert make_mistakes.page() == (DOCS / "mistakes.md").read_text(encoding="utf-8")
