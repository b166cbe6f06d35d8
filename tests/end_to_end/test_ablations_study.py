"""docs/results/ablations.md is what its tables give, and its sweeps can be planned, on another model and data too."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from flatpeak.experiments.config import read_sweep
from flatpeak.experiments.plan import SweepPlan, build_plan
from flatpeak.experiments.statistics import paired_t

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "docs/results/ablations"
SWEEPS = ROOT / "studies/ablations"


def planned(name: str, *overrides: str) -> SweepPlan:
    return build_plan(read_sweep(SWEEPS / f"{name}.yaml", overrides), processes=1)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(STUDY))
    spec = spec_from_file_location("ablations_report", STUDY / "make_report.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_committed_tables_give() -> None:
    done = subprocess.run(
        [sys.executable, str(STUDY / "make_report.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_arm_of_the_sweeps_is_on_the_page(report: ModuleType) -> None:
    runs = [run for name in report.SWEEPS for run in planned(name, "seeds=30").runs]
    names = {report.arm_name({"arm": run.arm, **run.settings}) for run in runs}
    compared = [one for ablation in report.ABLATIONS for one in ablation.comparisons]
    assert names == {one.arm for one in compared} | {report.BASE}
    assert {one.base for one in compared} <= names


def test_the_arms_take_the_model_and_data_of_another_recipe() -> None:
    plan = planned("arms", "recipe=flatpeak:math_qwen_80gb", "seeds=0-2", "name=math")
    assert not plan.steps
    for run in plan.runs:
        assert run.recipe.model.path == "Qwen/Qwen2.5-Math-1.5B"
        assert run.recipe.optimizer.learning_rate == 3e-5
        assert run.recipe.rollout.prompts_per_step * run.recipe.rollout.group_size == 256


def test_the_sweeps_that_the_page_shows_can_be_planned() -> None:
    page = (STUDY.parent / "ablations.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^flatpeak sweep .*$", page, re.M)]
    assert len(commands) == 4
    for _, _, path, *overrides in commands:
        assert build_plan(read_sweep(ROOT / path, overrides), processes=1).runs


def test_verdicts_follow_the_interval_and_the_claim(report: ModuleType) -> None:
    def verdict(differences: list[float], expected: int | None, published: str = "") -> str:
        late = paired_t(differences, [0.0] * len(differences))
        one = report.Comparison(arm="a", label="a", expected=expected, published=published)
        return str(report.verdict(report.Result(comparison=one, late=late, whole=late, p=late.p)))

    better, same, wide = [0.09, 0.1, 0.11], [-0.001, 0.0, 0.001], [-0.2, 0.0, 0.2]
    assert verdict(better, 1) == "agrees: better"
    assert verdict(better, -1) == verdict(better, 0) == "disagrees: better"
    assert verdict(better, None) == "better"
    # Student's t with two degrees of freedom: 4.3027 * 0.001 / sqrt(3).
    assert verdict(same, 0) == "agrees: no difference larger than 0.002"
    assert verdict(same, -1, ".687 against .740") == "disagrees: no difference larger than 0.002"
    assert verdict(same, -1, ".739 against .740") == verdict(same, -1) == "no difference larger than 0.002"
    assert verdict([0.0, 0.0], 0) == "agrees: the same" and verdict([0.0, 0.0], None) == "the same"
    assert verdict(wide, 0) == verdict(wide, None) == verdict([0.1], 1) == "undecided"
