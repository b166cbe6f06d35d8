"""The state of runs on disk, and which settings count as changed."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatpeak.errors import RunError
from flatpeak.experiments.config import read_sweep
from flatpeak.experiments.plan import PlannedRun, build_plan
from flatpeak.experiments.records import CellRecord, cell_state, changed_keys, remove_cell, write_record
from support.sweeps import PREFIX, write_sweep


def run_of(tmp_path: Path, **settings: Any) -> PlannedRun:
    return build_plan(read_sweep(write_sweep(tmp_path, seeds=[1], settings=settings)), processes=2).runs[0]


def write_config(run: PlannedRun, **changes: Any) -> None:
    content = run.recipe.model_dump(mode="json")
    for key, value in changes.items():
        section, name = key.split("__")
        if value is ...:
            del content[section][name]
        else:
            content[section][name] = value
    run.path.mkdir(parents=True, exist_ok=True)
    (run.path / "config.yaml").write_text(yaml.safe_dump(content))


@pytest.mark.parametrize(
    ("on_disk", "now", "changed"),
    [
        ({}, {}, None),
        ({"training__steps": 120}, {}, "training.steps: 120 -> 3"),
        ({"run__seed": 2}, {}, "run.seed: 2 -> 1"),
        ({"run__threads": 4, "run__checkpoint_every": 7, "run__directory": "moved"}, {}, None),
        # A key that an earlier version did not know.
        ({"kl__coefficient": ...}, {}, None),
        ({"kl__coefficient": ...}, {"kl.coefficient": 0.5}, "kl.coefficient: (absent) -> 0.5"),
    ],
)
def test_only_settings_that_can_change_a_result_count(
    tmp_path: Path, on_disk: dict[str, Any], now: dict[str, Any], changed: str | None
) -> None:
    run = run_of(tmp_path, **now)
    write_config(run, **on_disk)
    assert changed_keys(run) == changed


def test_a_run_that_started_from_another_prefix_has_changed(tmp_path: Path) -> None:
    plan = build_plan(read_sweep(write_sweep(tmp_path, seeds=[1], prefix=PREFIX)), processes=2)
    (run,) = plan.runs
    write_record(run, CellRecord(status="done", prefix=run.prefix))
    assert changed_keys(run) is None
    write_record(run, CellRecord(status="done", prefix="another"))
    assert changed_keys(run) == "its prefix"


def test_the_state_of_a_run_follows_from_its_record_and_summary(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert cell_state(run).status == "missing"
    write_record(run, CellRecord(status="started"))
    assert cell_state(run).status == "stopped"
    write_record(run, CellRecord(status="failed", reason="no score"))
    assert (cell_state(run).status, cell_state(run).reason) == ("failed", "no score")
    remove_cell(run)
    assert cell_state(run).status == "missing"
    assert list(run.path.parent.iterdir()) == []


def test_a_prefix_step_is_done_only_while_its_directory_is_there(tmp_path: Path) -> None:
    plan = build_plan(read_sweep(write_sweep(tmp_path, seeds=[1], prefix=PREFIX)), processes=2)
    step = plan.steps[0]
    write_record(step, CellRecord(status="done", prefix=step.fingerprint))
    assert cell_state(step).status == "stopped"
    step.path.mkdir(parents=True)
    assert cell_state(step).status == "done"


def test_a_full_disk_is_told_in_one_line_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("flatpeak.experiments.records.write_atomic", full)
    with pytest.raises(RunError, match="No space left on device; what is finished stays: make room and give the same"):
        write_record(run_of(tmp_path), CellRecord(status="done", prefix=None))
