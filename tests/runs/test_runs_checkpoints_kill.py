"""A trainer killed before any file operation of a save leaves a checkpoint that loads, the old one or the new."""

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch  # noqa: F401 (imported in the child, its files would count as file operations)
import torch

from flatpeak.runs.checkpoints import (
    CheckpointError,
    checkpoint_name,
    checkpoint_steps,
    link_checkpoint,
    newest_valid,
    prune,
    read_checkpoint,
    remove_leftovers,
    write_checkpoint,
)

pytestmark = pytest.mark.slow

# What Python tells an audit hook of; fsync is not among it and is counted by a wrapper.
WATCHED = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.symlink", "open", "shutil.rmtree"}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """A killed process loses nothing that the kernel has; only the order of the calls is under test."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked process; its exit status, negative for the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 1
        # OpenMP's threads do not survive a fork: a parallel region in the child would wait for them forever.
        torch.set_num_threads(1)
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(point_of_death: int) -> None:
    """Arrange for this process to be killed just before its n-th file operation."""
    count = 0

    def tick() -> None:
        nonlocal count
        if count == point_of_death:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        tick()
        real_fsync(descriptor)

    os.fsync = fsync
    sys.addaudithook(lambda event, _: tick() if event in WATCHED else None)


def save_step(parent: Path, step: int, value: float) -> None:
    def save_model(directory: Path) -> None:
        (directory / "model.safetensors").write_text(str(value))

    path = write_checkpoint(
        parent, step, save_model=save_model, tensors={"value": torch.tensor(value)}, state={"value": value}
    )
    link_checkpoint(parent, "last", path)
    prune(parent, keep=1)


def killed_at_every_point(directory: Path, *, before: list[int], step: int) -> int:
    """Save `step` (value 2) after the steps before (value 1), killed at each point in turn; how many points."""
    for deaths in range(200):
        parent = directory / f"{deaths}"
        for old in before:
            save_step(parent, old, 1.0)

        def work(parent: Path = parent, deaths: int = deaths) -> None:
            kill_at(deaths)
            save_step(parent, step, 2.0)

        status = in_child(work)
        remove_leftovers(parent)
        # Every directory that goes by a checkpoint's name is whole, not only the newest.
        loaded = [read_checkpoint(parent / checkpoint_name(one)) for one in checkpoint_steps(parent)][-1]
        result = newest_valid(parent)
        assert result == loaded.path
        value = loaded.state["value"]
        assert loaded.tensors["value"].item() == value
        assert (result / "model.safetensors").read_text() == str(value)
        assert (parent / "last").exists()
        assert (loaded.step, value) in {(before[-1], 1.0), (step, 2.0)}
        assert not list(parent.glob(".*"))
        if status == 0:
            assert (loaded.step, value) == (step, 2.0)
            return deaths
        assert status == -signal.SIGKILL
        # The run goes on where it was killed.
        save_step(parent, step, 2.0)
        assert newest_valid(parent) == parent / f"step_{step:06d}"
    return 200


def test_a_kill_at_any_point_of_a_save_leaves_a_valid_checkpoint(tmp_path):
    # Three older ones, so that pruning has something to delete.
    points = killed_at_every_point(tmp_path, before=[0, 1, 2, 3], step=4)
    assert 20 < points < 200


def test_a_kill_while_a_checkpoint_is_replaced_keeps_the_old_or_the_new(tmp_path):
    points = killed_at_every_point(tmp_path, before=[0, 4], step=4)
    assert 20 < points < 200


def test_a_file_system_that_takes_no_more_bytes_costs_only_the_new_checkpoint(tmp_path):
    save_step(tmp_path, 1, 1.0)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(CheckpointError, match="step_000002: not written"):
            write_checkpoint(
                tmp_path, 2, save_model=lambda directory: None, tensors={"big": torch.zeros(50_000)}, state={}
            )

    assert in_child(work) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step_000001"]
    assert read_checkpoint(tmp_path / "last").state == {"value": 1.0}
