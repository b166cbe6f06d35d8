"""Whole sweeps of tiny runs in real worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatpeak.errors import UserError
from flatpeak.experiments.sweep import SweepResult, run_sweep
from flatpeak.experiments.table import SweepTable, read_table
from flatpeak.runs.metrics import read_metrics
from support.resumes import TIMES
from support.sweeps import write_sweep

PREFIX = {
    "data": {"call": "functions.py:write_rows", "arguments": {"count": 3}},
    "sft": {"sft": "recipe.yaml", "settings": {"sft.steps": 2, "sft.batch_size": 4}},
}
START = {"model.new": None, "model.path": "${prefix}/sft/checkpoints/sft/last"}


def sweep(path: Path, **options: Any) -> tuple[SweepResult, list[str]]:
    lines: list[str] = []
    return run_sweep(path, processes=2, notice=lines.append, command=["flatpeak", "sweep", path.name], **options), lines


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run without its times."""
    rows = read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SweepResult, list[str]]:
    """A sweep of two arms, one of which crashes, after a prefix."""
    directory = tmp_path_factory.mktemp("finished")
    functions = directory / "functions.py"
    path = write_sweep(
        directory,
        settings={
            **START,
            "rewards": {"letters": {"type": "function", "function": f"{functions}:first_letters"}},
            "evaluation.accuracy": None,
            "evaluation.metric": "reward",
        },
        prefix=PREFIX,
        arms={
            "none": {},
            "broken": {"settings": {"rewards.letters.function": f"{functions}:broken"}},
            "kl": {"settings": {"kl.coefficient": 0.3}},
        },
        table={"window": 2, "metrics": ["reward/mean"], "first": {"reward/mean": {"above": -1}}},
        curves={"metrics": ["reward/mean"], "every": 2},
    )
    result, lines = sweep(path)
    return path, result, lines


def test_a_failed_run_stops_no_other_and_its_row_says_why(finished: tuple[Path, SweepResult, list[str]]) -> None:
    _, result, lines = finished
    assert (result.done, result.failed, result.exit_code) == (4, 2, 1)
    table = read_table(result.table)
    assert table.column("arm") == ["none", "none", "broken", "broken", "kl", "kl"]
    assert table.column("seed") == [1, 2] * 3
    assert table.column("status") == ["done"] * 2 + ["failed"] * 2 + ["done"] * 2
    assert table.column("steps")[:2] == [3, 3]
    assert "no score today" in table.column("reason")[2]
    assert sum("failed" in line and "no score today" in line for line in lines) == 2


def test_the_numbers_of_a_row_are_those_of_the_runs_own_metrics(finished: tuple[Path, SweepResult, list[str]]) -> None:
    _, result, _ = finished
    rows = [row for row in rows_of(result.path / "runs" / "kl" / "seed-2") if row["stage"] == "train"]
    values = [row["reward/mean"] for row in rows]
    row = read_table(result.table).rows[-1]
    assert row["reward/mean.last"] == values[-1]
    assert row["reward/mean.final"] == pytest.approx((values[1] + values[2]) / 2, abs=1e-15)
    assert row["reward/mean.auc"] == pytest.approx((values[0] / 2 + values[1] + values[2] / 2) / 2, abs=1e-15)
    assert row["reward/mean.first"] == 1
    curves = read_table(result.path / "curves.csv")
    assert curves.rows[-2]["reward/mean"] == pytest.approx((values[0] + values[1]) / 2, abs=1e-15)
    assert (curves.rows[-1]["step"], curves.rows[-1]["reward/mean"]) == (4, values[2])


def test_the_same_command_again_runs_only_what_failed_and_gives_the_same_table(
    finished: tuple[Path, SweepResult, list[str]],
) -> None:
    path, result, _ = finished
    before = read_table(result.table)
    again, lines = sweep(path)
    assert [line for line in lines if " done in " in line] == []
    assert again.failed == 2
    assert read_table(result.table) == before
    skipped, lines = sweep(path, skip_failed=True)
    assert len(lines) == 1
    assert (skipped.failed, skipped.exit_code) == (2, 1)
    assert read_table(result.table) == before


def test_a_run_of_a_sweep_has_the_bits_of_the_same_run_alone(
    finished: tuple[Path, SweepResult, list[str]], tmp_path: Path, one_thread: None
) -> None:
    import flatpeak

    _, result, _ = finished
    for name in ("none/seed-1", "kl/seed-2"):
        run = result.path / "runs" / name
        settings = {"run.directory": str(tmp_path), "run.name": name}
        alone = flatpeak.train(run / "config.yaml", settings=settings, progress=False)
        assert rows_of(alone.path) == rows_of(run)
        weights = [one.path if hasattr(one, "path") else one for one in (alone.path, run)]
        first, second = ((one / "checkpoints" / "last" / "model.safetensors").read_bytes() for one in weights)
        assert first == second


def test_changed_settings_are_refused_with_run_and_key_and_rerun_with_overwrite(
    finished: tuple[Path, SweepResult, list[str]], tmp_path: Path
) -> None:
    path = write_sweep(tmp_path, arms={"a": {"settings": {"kl.coefficient": 0.1}}, "b": {}}, seeds=1)
    sweep(path)
    table = read_table(tmp_path / "sweeps" / "tiny" / "table.csv")
    path = write_sweep(tmp_path, arms={"a": {"settings": {"kl.coefficient": 0.2}}, "b": {}}, seeds=1)
    with pytest.raises(UserError, match=r"tiny: a/seed-1 was made with other settings \(kl\.coefficient: 0\.1 -> 0\.2"):
        sweep(path)
    assert read_table(tmp_path / "sweeps" / "tiny" / "table.csv") == table
    _, lines = sweep(path, overwrite=True)
    assert [line.split("] ")[1].split()[0] for line in lines if " done in " in line] == ["a/seed-1"]
    assert read_table(tmp_path / "sweeps" / "tiny" / "table.csv").column("kl.coefficient") == [0.2, 0.0]


def test_a_failed_prefix_fails_the_runs_of_its_seed_with_its_reason(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, prefix={"rows": {"call": "functions.py:fail"}}, arms={"a": {}, "b": {}}, seeds=[4])
    result, _ = sweep(path)
    table: SweepTable = read_table(result.table)
    assert table.column("status") == ["failed", "failed"]
    assert table.column("reason") == ["prefix step rows failed: ValueError: no rows for seed 4"] * 2
