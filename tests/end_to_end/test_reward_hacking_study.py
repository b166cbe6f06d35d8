"""The analysis of the reward-hacking study: its rules on tables made by hand, and the page from the committed ones."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flatpeak.experiments.table import SweepTable

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "docs" / "results" / "reward_hacking"
FALL = "eval/signatures/sharpness/relative_fall_0.6.last"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"study_{name}", STUDY / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return loaded("hypotheses")


def row(arm: str, seed: int, *, hacked: bool, gold: float, step: int | None, fall: float = 0.2) -> dict[str, Any]:
    return {
        "arm": arm,
        "seed": seed,
        "status": "done",
        "reward/gold.final": gold,
        "reward/exploit.final": 0.97 if hacked else 0.0,
        "reward/exploit.first": step,
        FALL: fall,
    }


def table(*rows: dict[str, Any]) -> SweepTable:
    return SweepTable(header={}, columns=tuple(rows[0]), rows=rows)


def sharp_bed(*, gr_hacked: int) -> dict[str, SweepTable]:
    """Twenty seeds: none is always hacked at step 60 or so, GR reuse in the first `gr_hacked` seeds only."""
    rows = []
    for seed in range(100, 120):
        jitter = seed % 5
        hacked = seed - 100 < gr_hacked
        rows.append(row("none", seed, hacked=True, gold=0.04, step=60 + jitter, fall=0.3 + 0.01 * jitter))
        rows.append(
            row(
                "gr_reuse",
                seed,
                hacked=hacked,
                gold=0.04 if hacked else 0.9,
                step=65 if hacked else None,
                fall=0.2 + 0.002 * jitter,
            )
        )
        rows.append(row("recommended", seed, hacked=True, gold=0.04, step=62 + jitter // 2))
    return {"sharp": table(*rows)}


def results(study: ModuleType, tables: dict[str, SweepTable]) -> dict[str, Any]:
    return {one.name: (estimate, p, verdict) for one, estimate, p, verdict in study.verdicts(study.registered(tables))}


def test_sixteen_hypotheses_are_registered_with_the_names_of_the_document(study: ModuleType) -> None:
    names = [one.name for one in study.registered({})]
    document = (STUDY / "hypotheses.md").read_text(encoding="utf-8")
    listed = [line.split("|")[1].strip() for line in document.splitlines() if line.startswith("| H")]
    assert names == listed
    assert len(names) == 16
    assert "The 16 p-values" in document


def test_the_second_family_is_adjusted_by_itself(study: ModuleType) -> None:
    tables = {bed: sharp_bed(gr_hacked=5)["sharp"] for bed in ("large", "addition")}
    family = study.registered_again(tables)
    assert len(family) == 6
    outcome = {one.name: (estimate, p, verdict) for one, estimate, p, verdict in study.verdicts(family)}
    estimate, p, verdict = outcome["H1a, large"]
    assert p == pytest.approx(6 * estimate.p, rel=1e-12)
    assert verdict == "holds"
    assert outcome["H4, addition"][2] == "not run"


def test_a_hypothesis_without_runs_is_told_and_the_others_are_adjusted_for_all_that_were_registered(
    study: ModuleType,
) -> None:
    outcome = results(study, sharp_bed(gr_hacked=5))
    assert outcome["H4"] == (None, pytest.approx(math.nan, nan_ok=True), "not run")
    estimate, p, verdict = outcome["H1a"]
    # Fifteen discordant seeds, all one way: 2 * 0.5**15.
    assert estimate.p == pytest.approx(2 * 0.5**15, rel=1e-12)
    assert estimate.value == -0.75
    assert 2 * 0.5**15 < p <= 16 * 2 * 0.5**15
    assert verdict == "holds"


def test_an_arm_that_is_hacked_as_often_fails_where_the_interval_leaves_out_a_quarter_of_the_seeds(
    study: ModuleType,
) -> None:
    estimate, p, verdict = results(study, sharp_bed(gr_hacked=20))["H1a"]
    assert (estimate.value, estimate.p) == (0.0, 1.0)
    assert estimate.low > -0.25
    assert (p, verdict) == (1.0, "fails")


def test_an_effect_that_might_be_there_cannot_be_told(study: ModuleType) -> None:
    # Three discordant seeds: exact p 0.25.
    estimate, _, verdict = results(study, sharp_bed(gr_hacked=17))["H1a"]
    assert estimate.p == 0.25
    assert estimate.low < -0.25
    assert verdict == "cannot be told"


def test_a_step_that_is_never_reached_counts_as_the_horizon(study: ModuleType) -> None:
    estimate, _, _ = results(study, sharp_bed(gr_hacked=5))["H1'a"]
    jitter = sum(seed % 5 for seed in range(100, 120)) / 20
    assert estimate.value == pytest.approx((15 * 300 + 5 * 65) / 20 - (60 + jitter))


def test_equivalence_holds_within_its_bound_and_fails_wholly_beyond_it(study: ModuleType) -> None:
    assert results(study, sharp_bed(gr_hacked=5))["H2"][2] == "holds"
    tables = sharp_bed(gr_hacked=5)
    far = [
        {**one, "reward/exploit.first": one["reward/exploit.first"] + 40} if one["arm"] == "recommended" else one
        for one in tables["sharp"].rows
    ]
    assert results(study, {"sharp": table(*far)})["H2"][2] == "fails"


def test_flatness_is_compared_among_seeds_with_equal_outcomes_only(study: ModuleType) -> None:
    estimate, _, verdict = results(study, sharp_bed(gr_hacked=5))["H8a"]
    assert estimate.n == 5
    assert estimate.value == pytest.approx(-0.1 - 0.008 * 2)
    assert verdict == "holds"
    few, p, verdict = results(study, sharp_bed(gr_hacked=2))["H8a"]
    assert few.n == 2 and math.isnan(p)
    assert verdict == "cannot be told"


def test_runs_that_failed_leave_their_pairs_out(study: ModuleType) -> None:
    tables = sharp_bed(gr_hacked=5)
    failed = [{**one, "status": "failed"} if one["seed"] == 119 else one for one in tables["sharp"].rows]
    assert results(study, {"sharp": table(*failed)})["H1a"][0].n == 19


def test_the_page_is_what_the_committed_tables_give() -> None:
    # The figures of one bed: all of them take half a minute of a core.
    done = subprocess.run(
        [sys.executable, str(STUDY / "make_report.py"), "--check", "--figures", "dose-0.01"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_sharpness_is_read_where_the_proxy_reward_first_reaches_a_level() -> None:
    columns = ("arm", "seed", "step", "eval/x/sharpness/clean", "eval/x/sharpness/relative_fall_0.6")
    points = {
        ("none", 100): [(0, 0.5, 0.1), (10, 0.9, 0.3), (20, 0.6, 0.0), (30, 0.8, 0.9), (40, 2.0, 0.6)],
        ("none", 101): [(0, 0.75, 0.2), (10, 0.85, 0.4)],
        ("kl", 100): [(10, 0.85, 0.25), (0, 0.65, 0.05), (20, None, 0.5)],
    }
    rows = tuple(
        dict(zip(columns, (arm, seed, *point), strict=True)) for (arm, seed), own in points.items() for point in own
    )
    matched = loaded("matched_sharpness")
    falls = matched.falls_at_levels(SweepTable(header={}, columns=columns, rows=rows))
    # Seed 101 begins above 0.7, which it never crosses.
    assert falls["none"][0.7] == {100: pytest.approx(0.2)}
    assert falls["none"][0.8] == {100: pytest.approx(0.25), 101: pytest.approx(0.3)}
    # The first crossing of 0.9 ends at step 10; that of 1.2 is on the way from 0.8 to 2.0.
    assert falls["none"][0.9] == {100: pytest.approx(0.3)}
    assert falls["none"][1.2] == {100: pytest.approx(0.8)}
    assert set(falls["kl"]) == {0.7, 0.8}
    assert matched.paired_differences(falls, "kl", "none", 0.8) == [pytest.approx(0.2 - 0.25)]
    assert matched.paired_differences(falls, "kl", "none", 0.9) == []
