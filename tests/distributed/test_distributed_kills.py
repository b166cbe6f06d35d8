"""Jobs of two processes that are killed at random moments end at once, say why in a line, and go on bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flatpeak.runs.checkpoints import newest_valid
from support.distributed_runs import completions, largest_gap, recipe, rows, train, trainer_tensors, weights
from support.kills import FAULT, REWARD, Kill, kills, run_and_kill

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")]
SECONDS = 30


def killable(directory: Path, name: str) -> dict:
    job = recipe(directory, name, processes=2)
    (directory / "odd.py").write_text(REWARD.format(variable=FAULT))
    return job


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def whole(directory: Path, ranks) -> Path:
    """The run that nobody kills."""
    assert [one["code"] for one in ranks(train, killable(directory, "whole"))] == [0, 0]
    return directory / "whole"


def check_killed(directory: Path, whole: Path, ranks, kill: Kill, name: str) -> None:
    """Kill a job, look at how it ended and what it left, and let it go on."""
    job, run = killable(directory, name), directory / name
    end = run_and_kill(job, kill)
    assert end.seconds < SECONDS, end
    if kill.way in ("rank killed", "rank raises"):
        assert end.code == 1, end
        (message,) = end.errors
        assert f"rank {kill.rank}" in message, end
    else:  # a signal to stop, or the end of the launcher, is no error once the ranks listen
        assert len(end.errors) <= 1, end
        assert all("was ended by SIGTERM" in message for message in end.errors), end
        if kill.way == "rank terminated":
            assert f"stopped by SIGTERM to rank {kill.rank} " in end.output or f"rank {kill.rank} " in " ".join(
                end.errors
            ), end
        assert end.code in ((-9,) if kill.way == "launcher killed" else (1, 143)), end
    if (run / "checkpoints").exists():
        newest_valid(run / "checkpoints")
    done = ranks(train, job, resume=True)
    assert [one.get("code") for one in done] == [0, 0], (end, done)
    assert completions(run) == completions(whole)
    assert repr(rows(run)) == repr(rows(whole))  # in words, NaN equals itself
    assert largest_gap(weights(run), weights(whole)) == 0
    assert largest_gap(trainer_tensors(run), trainer_tensors(whole)) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("index", range(20))
def test_20_random_kills_leave_a_run_that_ends_the_same(directory, whole, ranks, index):
    kill = kills(20, seed=7)[index]
    check_killed(directory, whole, ranks, kill, f"random_{index}")
