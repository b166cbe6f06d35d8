"""The analysis of the reward-hacking study: its rules on tables made by hand, and the page from the committed ones."""

import importlib.util
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flatpeak.experiments.config import only_arms, read_sweep
from flatpeak.experiments.plan import build_plan
from flatpeak.experiments.table import SweepTable

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "docs" / "results" / "reward_hacking"
FALL = "eval/signatures/sharpness/relative_fall_0.6.last"


def loaded(name: str) -> ModuleType:
    for folder in (STUDY.parent, STUDY):  # the study's modules import each other, and what all pages share
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
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


def curve(*points: tuple[float, float, float]) -> list[dict[str, float]]:
    """The rows of a run: gold, exploit rate and KL of every 10 steps."""
    names = ("reward/gold", "reward/exploit", "rollout/kl_sequence")
    return [{"step": 10 * index, **dict(zip(names, point, strict=True))} for index, point in enumerate(points, start=1)]


def test_a_run_is_stopped_where_the_other_seeds_have_the_most_gold() -> None:
    stopping = loaded("early_stopping")
    curves = {
        1: curve((0.5, 0.0, 0.2), (0.9, 0.1, 1.0), (0.1, 0.8, 4.0)),
        2: curve((0.6, 0.0, 0.1), (0.7, 0.0, 0.4), (0.8, 0.2, 2.0)),
        3: curve((0.4, 0.0, 1.5), (0.3, 0.9, 6.0)),  # hacked and ended at step 20: it stays at 0.3
    }
    stop = stopping.stopped(curves, stopping.at_step, (10, 20, 30))
    # Sums of the others. Seed 1: 1.0, 1.0, 1.1; seed 2: 0.9, 1.2, 0.4; seed 3: 1.1, 1.6, 0.9.
    assert stop.thresholds == {1: 30, 2: 20, 3: 20}
    assert stop.values("reward/gold") == [0.1, 0.7, 0.3]
    assert stop.values("reward/exploit") == [0.8, 0.0, 0.9]
    assert stopping.at_step(curves[3], 30) is curves[3][1]


def test_a_budget_stops_a_run_at_the_first_steps_whose_kl_reaches_it_or_never() -> None:
    stopping = loaded("early_stopping")
    run = curve((0.5, 0.0, 0.2), (0.9, 0.1, 1.0), (0.1, 0.8, 0.7))
    assert [stopping.at_budget(run, nats)["step"] for nats in (0.1, 0.2, 0.3, 1.0, 1.1)] == [10, 10, 20, 20, 30]
    assert stopping.best_gold({1: run}) == [0.9]
    assert stopping.first_gold({1: run}) == [0.5]


def test_stops_are_paired_with_kl_to_the_end_of_the_same_seed() -> None:
    stopping = loaded("early_stopping")
    finals = table(*(row("kl", seed, hacked=False, gold=0.5 + 0.1 * seed, step=None) for seed in (1, 2)))
    curves = {"none": {1: curve((0.7, 0.0, 1.0), (0.1, 0.9, 9.0)), 2: curve((0.9, 0.2, 1.0), (0.1, 0.9, 9.0))}}
    kl, step, budget = stopping.bed_rows("flat", finals, curves)
    assert kl == ["flat", "kl", "the end", "0.65 ± 0.64", "", "0.000 (0.000)", "0.600"]
    # Differences 0.1 and 0.2; t of one degree of freedom is 12.706: 0.15 -+ 12.706 * 0.05.
    assert step == ["flat", "none", "step 10", "0.8 ± 1.3", "+0.150 [-0.485, +0.785]", "0.100 (0.200)", "0.700"]
    assert budget[2:] == ["0.062 nat", *step[3:]]


def test_no_hacked_seed_is_shown_with_its_exact_bound() -> None:
    estimates = loaded("estimates")
    assert estimates.count([False] * 10) == f"0 (≤ {1 - 0.025 ** (1 / 10):.0%})" == "0 (≤ 31%)"
    assert estimates.upper_end_of_zero(20) == pytest.approx(1 - 0.025 ** (1 / 20), rel=1e-9)
    assert estimates.count([True, False, True]) == "2"


def test_values_that_differ_by_rounding_are_tied_in_rank_correlations() -> None:
    estimates = loaded("estimates")
    # Average ranks 1.5, 1.5, 3, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5).
    assert estimates.spearman([0.3, 0.1 + 0.2, 0.5, 0.6], [1, 2, 3, 4]) == pytest.approx(math.sqrt(0.9), rel=1e-12)
    # Squared differences of ranks add up to 8, so that rho is 0.6: tanh(0.6931 -+ 1.95996 sqrt(1.18 / 2)).
    assert estimates.spearman_with_interval([1, 2, 3, 4, 5], [2, 3, 1, 5, 4]) == "+0.60 [-0.67, +0.98]"


def test_a_chosen_strength_at_the_edge_of_its_grid_is_named_beside_its_gold_on_other_seeds() -> None:
    report = loaded("make_report")
    golds = {"kl": {0.1: 0.2, 0.2: 0.6, 0.3: 0.5}, "resets": {0.1: 0.2, 0.2: 0.3, 0.3: 0.7}}
    tuning = [
        {**row(arm, seed, hacked=gold < 0.3, gold=gold, step=None), "kl.coefficient": strength}
        for arm, grid in golds.items()
        for strength, gold in grid.items()
        for seed in (20, 21)
    ]
    results = [row("kl", 100, hacked=True, gold=0.1, step=9), row("kl", 101, hacked=False, gold=0.3, step=None)]
    lines = report.tuning_table("tuning", table(*tuning), table(*results)).splitlines()
    kl = next(line for line in lines if line.startswith("| kl |"))
    assert kl == "| kl | 0.1: 0.200 | **0.2: 0.600** | 0.3: 0.500 | 0.6 (0 of 2) | 0.2 ± 1.3 (1 of 2) |"
    assert lines[-1] == "At an edge of its grid: resets 0.3."


def test_hacked_runs_are_compared_with_honest_ones_of_their_arm() -> None:
    sharpness = loaded("sharpness_and_cheating")
    runs = loaded("hypotheses").runs_of(
        table(*(row("none", seed, hacked=seed < 3, gold=0.1, step=None) for seed in (1, 2, 3, 4))), "none"
    )
    falls = sharpness.by_outcome({1: 0.1, 2: 0.3, 3: 0.5, 4: 0.7}, runs.hacked())
    assert falls == {True: [0.1, 0.3], False: [0.5, 0.7]}
    # Welch's t of equal variances 0.02 has two degrees of freedom here: -0.4 -+ 4.3027 sqrt(0.02).
    assert sharpness.less(falls) == "-0.400 [-1.008, +0.208]"
    assert sharpness.less({True: [0.1], False: [0.5, 0.7]}) == ""
    curves = {
        seed: [
            {"step": 10 * index, "reward/exploit": exploit, sharpness.SHARE: fall}
            for index, (exploit, fall) in enumerate(points)
        ]
        for seed, points in {
            1: [(None, 0.4), (0.04, 0.3), (0.2, 0.25), (0.6, 0.1)],
            2: [(None, 0.5), (0.05, 0.4)],
            3: [(None, 0.4), (0.0, 0.38), (0.0, 0.36), (0.0, 0.34)],
            4: [(None, 0.4), (0.0, 0.34), (0.0, 0.3), (0.0, 0.3)],
        }.items()
    }
    # Seed 1 ends at step 30 beside 0.34 and 0.3, seed 2 at step 10 beside 0.38 and 0.34.
    assert sharpness.at_equal_steps(runs, curves, sharpness.SHARE) == pytest.approx([0.1 - 0.32, 0.4 - 0.36])
    phases = [sharpness.in_phase(curves[1], sharpness.SHARE, *ends) for ends in sharpness.PHASES.values()]
    assert phases == [[0.4, 0.3], [0.25], [0.1]]


def test_commands_of_the_page_name_sweeps_that_can_be_planned() -> None:
    page = (STUDY.parent / "reward_hacking.md").read_text(encoding="utf-8")
    commands = re.findall(r"flatpeak sweep (studies/[^`\n]+)", page)
    assert len(commands) == 13
    for words in map(shlex.split, commands):
        arms = [words[index + 1] for index, word in enumerate(words) if word == "--arm"]
        config = read_sweep(ROOT / words[0], [word for word in words[1:] if "=" in word])
        plan = build_plan(only_arms(config, arms) if arms else config, processes=1)
        assert len(plan.runs) == (1 if arms else len(plan.runs)) > 0
