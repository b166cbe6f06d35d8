"""The exact tables of the page of tested claims are what the functions give."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "docs" / "results" / "claims"


@pytest.mark.parametrize(("name", "function"), [("groups", "groups"), ("equal_rewards", "equal")])
def test_tables_of_advantages_are_those_of_the_functions(name: str, function: str) -> None:
    study = runpy.run_path(str(ROOT / "studies" / "claims" / "advantages.py"))
    with (TABLES / f"{name}.csv").open(encoding="utf-8") as file:
        committed = list(csv.DictReader(file))
    measured = study[function]()
    assert len(committed) == len(measured)
    for row, again in zip(committed, measured, strict=True):
        # The rounding of the formula as written depends on the processor.
        exact = {key: value for key, value in again.items() if not key.startswith("formula")}
        assert {key: float(row[key]) for key in exact} == pytest.approx(exact, rel=1e-4)


def test_the_table_of_estimators_of_kl_is_that_of_the_functions() -> None:
    study = runpy.run_path(str(ROOT / "studies" / "claims" / "kl_estimators.py"))
    with (TABLES / "kl_estimators.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["seed"] == "3"]
    assert len(rows) == 18
    for row in rows:
        again = study["measure"](study["ESTIMATORS"][row["estimator"]], 3, float(row["noise"]))
        assert {key: float(row[key]) for key in again} == pytest.approx(again, rel=1e-4, abs=1e-9)
