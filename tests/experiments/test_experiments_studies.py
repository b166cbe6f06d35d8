"""The sweeps of the studies can be planned as they stand, with the tables that their strengths are tuned on."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flatpeak.experiments.config import read_sweep
from flatpeak.experiments.plan import build_plan

ROOT = Path(__file__).parents[2]
SWEEPS = [
    path
    for path in sorted(ROOT.glob("studies/*/*.yaml"))
    if {"name", "seeds"} <= (keys := yaml.safe_load(path.read_text()).keys()) and keys & {"recipe", "extends"}
]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_sweep_of_a_study_has_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert build_plan(read_sweep(path), processes=1).runs
