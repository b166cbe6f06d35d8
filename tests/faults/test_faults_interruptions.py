"""Runs of `flatpeak train` that signals interrupt at random points of their progress leave what whole runs leave."""

from __future__ import annotations

import sys

import pytest

from support.interruptions import interrupt_runs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kill"), [("LoRA", True), ("vLLM server", False)])
def test_an_interrupted_run_leaves_the_files_of_a_whole_one(kind: str, kill: bool) -> None:
    assert_equal([kind], count=1, seed=6, kill=kill)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
def test_runs_of_all_kinds_that_60_signals_interrupt_leave_the_files_of_whole_ones(kill: bool) -> None:
    assert_equal([], count=60, seed=1, kill=kill)


def assert_equal(kinds: list[str], *, count: int, seed: int, kill: bool) -> None:
    """Send so many signals to runs of these kinds, and compare."""
    verdicts = interrupt_runs(kinds, count=count, seed=seed, kill=kill)
    wrong = {kind: [run.wrong for run in runs] for kind, runs in verdicts.items()}
    assert not any(any(runs) for runs in wrong.values()), wrong
