"""A disk that is too small is found before a run starts and before a save, and nothing is left half-written."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from flatpeak.errors import RunError, UserError
from flatpeak.pipeline import run_start
from flatpeak.runs.checkpoints import checkpoint_steps
from flatpeak.runs.notices import read_notices
from support.runs import Recipe, Train


def even(group: Any) -> list[float]:
    return [float(completion.token_ids[0] % 2) for completion in group.completions]


def leave(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Let every file system have so many bytes free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


@pytest.fixture
def size(recipe: Recipe, train: Train, monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes of a checkpoint of the tiny recipe, as the check counts them."""
    seen: list[int] = []
    monkeypatch.setattr(run_start, "check_space", lambda run, *, checkpoint, **others: seen.append(checkpoint))
    train(recipe(run={"name": "measured", "grading_workers": 0}), reward=even, progress=False)
    monkeypatch.undo()
    return seen[0]


def test_the_size_is_that_of_the_tensors_in_the_files(size: int, tmp_path: Path) -> None:
    last = tmp_path / "runs" / "measured" / "checkpoints" / "last"
    tensors = [tensor for file in last.resolve().rglob("*.safetensors") for tensor in load_file(file).values()]
    assert size == sum(tensor.nbytes for tensor in tensors if tensor.ndim)  # without the counts of steps


def test_a_run_does_not_start_where_two_checkpoints_do_not_fit(
    recipe: Recipe, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    leave(monkeypatch, 2 * size - 1)
    with pytest.raises(UserError, match=r"run\.directory") as caught:
        train(recipe(), reward=even, progress=False)
    assert f"{2 * size:,} bytes, and {2 * size - 1:,} are free" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_notice_says_that_not_all_checkpoints_fit(
    recipe: Recipe, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    leave(monkeypatch, 2 * size)
    train(recipe(run={"grading_workers": 0}), reward=even, progress=False)
    texts = [row["text"] for row in read_notices(tmp_path / "runs" / "tiny" / "notices.jsonl")]
    assert sum("lower run.keep_checkpoints" in text for text in texts) == 1


def test_a_save_that_does_not_fit_leaves_the_earlier_checkpoints_and_nothing_else(
    recipe: Recipe, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(run_start, "check_space", lambda *args, **others: None)
    leave(monkeypatch, size // 2)  # more than the first checkpoint needs, which has no moments yet
    with pytest.raises(RunError, match=r"not written \(it needs .* bytes, and .* are free\); free space"):
        train(recipe(run={"grading_workers": 0}), reward=even, progress=False)
    parent = tmp_path / "runs" / "tiny" / "checkpoints"
    assert checkpoint_steps(parent) == [0]
    assert not list(parent.glob(".tmp-*"))
