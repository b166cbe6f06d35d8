"""The lines of a sweep: counts, reasons, and the time left."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatpeak.errors import duration
from flatpeak.experiments.config import read_sweep
from flatpeak.experiments.plan import build_plan
from flatpeak.experiments.sweep import SweepProgress
from support.sweeps import PREFIX, write_sweep


def test_the_time_left_is_that_of_each_arms_finished_runs_over_the_processes(tmp_path: Path) -> None:
    arms = {"quick": {}, "slow": {"settings": {"kl.coefficient": 1}}, "new": {"settings": {"kl.coefficient": 2}}}
    plan = build_plan(read_sweep(write_sweep(tmp_path, prefix=PREFIX, arms=arms, seeds="1-2")), processes=2)
    lines: list[str] = []
    progress = SweepProgress(plan, notice=lines.append)
    phases = {cell.label: "waiting" for cell in plan.by_seed}
    progress.begin(phases)
    cells = {cell.label: cell for cell in plan.by_seed}

    def finish(label: str, status: str, seconds: float, reason: str | None = None) -> None:
        phases[label] = status
        progress.finish(cells[label], status, reason=reason, seconds=seconds, phases=phases)

    finish("prefix/seed-1/data", "done", 1.0)
    finish("prefix/seed-1/sft", "done", 7.0)
    finish("quick/seed-1", "done", 10.0)
    finish("slow/seed-1", "done", 30.0)
    finish("new/seed-1", "failed", 3.0, "no score")
    # Left for seed 2: data 1, SFT 7, quick 10, slow 30, and new at the mean of the arms, 20; on two processes.
    assert progress.seconds_left(phases) == pytest.approx((1 + 7 + 10 + 30 + 20) / 2)
    assert lines == [
        f"sweep tiny: 6 runs, 2 processes, in {tmp_path / 'sweeps' / 'tiny'}",
        "[0 done, 6 left] prefix/seed-1/data done in 1.0 s",
        "[0 done, 6 left] prefix/seed-1/sft done in 7.0 s",
        # One quick run and four of unknown length, taken for quick ones, and the prefix of seed 2.
        "[1 done, 5 left, about 29 s] quick/seed-1 done in 10.0 s",
        "[2 done, 4 left, about 44 s] slow/seed-1 done in 30.0 s",
        "[2 done, 1 failed, 3 left, about 34 s] new/seed-1 failed: no score",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7100, "118 min"), (7200, "2.0 h")]
)
def test_durations_are_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
