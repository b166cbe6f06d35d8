"""The command `sweep`; tests/end_to_end/test_sweeps.py has its signals and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flatpeak.cli.main import app
from flatpeak.errors import UserError
from support.sweeps import PREFIX, use_local_workers, write_sweep


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


def test_a_dry_run_prints_every_step_and_run_and_makes_nothing(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, prefix=PREFIX, axes={"kl.coefficient": [0.1, 0.2]}, seeds=[1])
    result = invoke(path, "--dry-run", "seeds=7", "name=other")
    assert result.output.splitlines() == [
        "prefix/seed-7/data",
        "prefix/seed-7/sft",
        "base,coefficient=0.1/seed-7",
        "base,coefficient=0.2/seed-7",
        f"2 runs and 2 prefix steps in {tmp_path / 'sweeps' / 'other'}",
    ]
    rows = json.loads(invoke(path, "--dry-run", "--json").output)
    assert rows[1] == {"run": "base,coefficient=0.2/seed-1", "arm": "base", "seed": 1, "kl.coefficient": 0.2}
    assert not (tmp_path / "sweeps").exists()


def test_an_arm_is_run_alone_and_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, arms={"none": {}, "kl": {"settings": {"kl.coefficient": 0.1}}}, seeds=[1, 2])
    rows = json.loads(invoke(path, "--dry-run", "--json", "--arm", "kl", "seeds=2").output)
    assert rows == [{"run": "kl/seed-2", "arm": "kl", "seed": 2}]
    error = invoke(path, "--arm", "kll").exception
    assert isinstance(error, UserError)
    assert str(error) == "--arm kll: the sweep has no such arm, did you mean 'kl'?; its arms are none, kl"


def test_an_arm_alone_takes_no_rows_from_the_table_of_others(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, arms={"none": {}, "kl": {"settings": {"kl.coefficient": 0.1}}}, seeds=[1])
    made = tmp_path / "sweeps" / yaml.safe_load(path.read_text()).get("name", path.stem)
    made.mkdir(parents=True)
    (made / "sweep.yaml").write_text("{arms: {none: {}, kl: {}}, seeds: [1, 3, 2]}")
    error = invoke(path, "--arm", "kl").exception
    assert isinstance(error, UserError)
    lost = "arms none; seeds 2, 3"
    assert str(error).startswith(f"--arm: the table of {made} would lose its rows of {lost}: give another name=")


def test_a_bad_sweep_is_refused_before_torch_is_needed(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, arms={"a": {"settings": {"optimizer.lerning_rate": 1}}})
    error = invoke(path).exception
    assert isinstance(error, UserError)
    assert str(error) == "a/seed-1: unknown key optimizer.lerning_rate: did you mean optimizer.learning_rate?"


@pytest.mark.parametrize(("as_json", "scipy"), [(False, True), (False, False), (True, True)])
def test_the_last_line_counts_the_runs_and_the_first_says_that_the_report_will_need_scipy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool, scipy: bool
) -> None:
    use_local_workers(monkeypatch)
    monkeypatch.setattr("flatpeak.cli.train.find_spec", lambda name: name if scipy else None)
    path = write_sweep(tmp_path, seeds=[1], settings={"training.steps": 1})
    result = invoke(path, *(["--json"] if as_json else []))
    assert result.exit_code == 0
    table = tmp_path / "sweeps" / "tiny" / "table.csv"
    assert table.exists()
    first, last = result.stdout.splitlines()[0], result.stdout.splitlines()[-1]
    if as_json:
        counts = {"done": 1, "failed": 0, "stopped": 0, "missing": 0, "exit_code": 0}
        assert json.loads(last) == {"path": str(table.parent), "table": str(table), **counts}
    else:
        assert last == f"sweep: 1 run done, {table}"
    needed = 'sweep: flatpeak report needs SciPy to compare the arms: pip install "flatpeak[experiments]"'
    assert (first == needed) != scipy
    assert ("SciPy" in result.stdout) != scipy
