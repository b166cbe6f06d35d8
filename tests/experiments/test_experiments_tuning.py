"""Values of axes chosen on another sweep's table."""

from pathlib import Path
from typing import Any

import pytest

from flatpeak.errors import UserError
from flatpeak.experiments.config import TunedOnConfig, read_sweep
from flatpeak.experiments.plan import build_plan
from flatpeak.experiments.table import SweepTable, write_table
from support.sweeps import write_sweep

KEY = "kl.coefficient"
METRIC = "reward/gold.final"


def row(value: float, seed: int, score: float | None, *, arm: str = "kl", status: str = "done") -> dict[str, Any]:
    return {"arm": arm, KEY: value, "seed": seed, "status": status, METRIC: score}


GOOD = [row(0.1, 20, 0.2), row(0.1, 21, 0.9), row(0.3, 20, 0.5), row(0.3, 21, 0.5), row(0.0, 20, 0.1, arm="none")]


def plan_with(tmp_path: Path, rows: list[dict[str, Any]], **sections: Any) -> Any:
    table = SweepTable(header={}, columns=("arm", KEY, "seed", "status", METRIC), rows=tuple(rows))
    write_table(table, tmp_path / "tuning.csv")
    content: dict[str, Any] = {
        "arms": {"none": {}, "kl": {"axes": {KEY: [0.1, 0.3]}}},
        "tuned_on": {"table": "tuning.csv", "metric": METRIC},
    }
    return build_plan(read_sweep(write_sweep(tmp_path, **content | sections)), processes=2)


def test_an_arm_takes_the_value_whose_mean_over_the_tuning_seeds_is_best(tmp_path: Path) -> None:
    plan = plan_with(tmp_path, GOOD)
    assert [run.name for run in plan.runs] == [
        *("none/seed-1", "none/seed-2", "kl,coefficient=0.1/seed-1", "kl,coefficient=0.1/seed-2"),
    ]
    assert plan.choices == ("arm kl: kl.coefficient=0.1, best of 2 by reward/gold.final (0.55 over 2 tuning seeds)",)
    smallest = plan_with(tmp_path, GOOD, tuned_on={"table": "tuning.csv", "metric": METRIC, "best": "min"})
    assert smallest.runs[-1].name == "kl,coefficient=0.3/seed-2"


def test_of_equal_means_the_first_value_is_taken(tmp_path: Path) -> None:
    rows = [row(value, 20, 0.5) for value in (0.3, 0.1)]
    assert plan_with(tmp_path, rows).runs[-1].axes == {KEY: 0.1}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*GOOD, row(0.1, 1, 0.5)], "seed 1 is in .* too, and values chosen on a seed cannot be reported on it"),
        (GOOD[:2], "no run of arm kl with kl.coefficient=0.3"),
        ([row(0.1, 20, 0.2, arm="k"), row(0.3, 20, 0.2, arm="k")], "no run of arm kl"),
        ([*GOOD[:3], row(0.3, 21, None, status="failed")], "seed 21, is failed"),
        ([*GOOD[:3], row(0.3, 21, None)], r"seed 21, has no reward/gold\.final"),
        (GOOD[:3], "were run with different seeds"),
        ([*GOOD, row(0.1, 20, 0.9)], "has 2 runs of arm kl with kl.coefficient=0.1, seed 20, which differ in settings"),
    ],
)
def test_a_selection_that_would_not_be_one_is_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_with(tmp_path, rows)


def test_an_unknown_metric_or_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no column 'reward/gold\.fina', did you mean 'reward/gold\.final'"):
        plan_with(tmp_path, GOOD, tuned_on={"table": "tuning.csv", "metric": "reward/gold.fina"})
    with pytest.raises(UserError, match=r"none\.csv: cannot be read"):
        plan_with(tmp_path, GOOD, tuned_on={"table": "none.csv", "metric": METRIC})
    assert TunedOnConfig(table="t", metric="m").best == "max"


def test_a_table_without_the_column_status_has_finished_runs_only(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(f"arm,{KEY},seed,{METRIC}\nkl,0.1,20,0.2\nkl,0.3,20,0.5\n")
    plan = plan_with(tmp_path, GOOD, tuned_on={"table": "own.csv", "metric": METRIC})
    assert plan.runs[-1].axes == {KEY: 0.3}


def test_a_table_without_arms_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(f"{KEY},seed,{METRIC}\n0.1,20,0.2\n0.3,20,0.5\n")
    with pytest.raises(UserError, match="the table has no column 'arm'"):
        plan_with(tmp_path, GOOD, tuned_on={"table": "own.csv", "metric": METRIC})
