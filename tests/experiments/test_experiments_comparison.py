"""The comparison of a table's arms: values by hand and SciPy, and no run that drops out unnamed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scipy import stats

from flatpeak.errors import UserError
from flatpeak.experiments import seeds_needed, seeds_needed_mcnemar
from flatpeak.experiments.comparison import Comparison, MetricOfArm, OutcomeOfArm, compare, read_arms
from support.sweep_tables import COLUMNS, ROWS, row, table

GOLD, FIRST, FINAL = "reward/gold.final", "reward/exploit.first", "reward/exploit.final"


def of_arm(comparison: Comparison, column: str, arm: str) -> MetricOfArm:
    return next(one for one in comparison.metrics[column] if one.arm == arm)


def outcome(comparison: Comparison, text: str, arm: str) -> OutcomeOfArm:
    return next(one for one in comparison.outcomes[text] if one.arm == arm)


def test_differences_are_paired_by_seed_and_tested_over_shared_seeds() -> None:
    comparison = compare(table(), alpha=0.01)
    assert comparison.baseline == "none"
    assert list(comparison.metrics) == [GOLD, FINAL, FIRST]
    kl = of_arm(comparison, GOLD, "kl")
    # Seeds 1, 2 and 4; seed 3 failed.
    independent = stats.ttest_rel([0.5, 0.6, 0.9], [0.0, 0.2, 0.1])
    assert kl.mean.n == 3
    assert kl.mean.estimate == pytest.approx(2 / 3)
    assert kl.difference is not None
    assert kl.difference.paired
    assert (kl.difference.n, kl.difference.left_out) == (3, 0)
    assert kl.difference.estimate == pytest.approx(17 / 30)
    assert kl.difference.p == pytest.approx(independent.pvalue, rel=1e-10)
    assert (kl.difference.low, kl.difference.high) == pytest.approx(tuple(independent.confidence_interval()), rel=1e-10)
    assert kl.seeds_needed == seeds_needed(sd=kl.difference.sd, difference=17 / 30, alpha=0.01, power=0.9)
    assert kl.bootstrap is not None
    # The resampled mean of three differences that lies within the smallest and the largest.
    assert 0.4 <= kl.bootstrap.low < 17 / 30 < kl.bootstrap.high < 0.8 + 1e-9
    gr = of_arm(comparison, GOLD, "gr")
    assert gr.difference is not None
    assert (gr.difference.n, gr.difference.left_out, gr.mean.left_out) == (3, 1, 1)
    # Holm over both arms: the smaller p is doubled.
    small, large = sorted((kl.difference.p, gr.difference.p))
    assert sorted((kl.p_holm, gr.p_holm)) == pytest.approx([2 * small, max(2 * small, large)])
    baseline = of_arm(comparison, GOLD, "none")
    assert baseline.difference is None
    assert math.isnan(baseline.p_holm)


def test_a_run_that_never_passed_counts_at_its_last_step() -> None:
    kl = of_arm(compare(table()), FIRST, "kl")
    assert kl.never == 2
    assert kl.mean.estimate == pytest.approx((60 + 60 + 50) / 3)
    assert kl.difference is not None
    assert kl.difference.estimate == pytest.approx((50 + 40 + 10) / 3)
    # The run that never logged the metric is missing: it has not survived.
    gr = of_arm(compare(table()), FIRST, "gr")
    assert (gr.never, gr.mean.n, gr.mean.left_out) == (1, 3, 1)
    assert gr.mean.estimate == pytest.approx((10 + 15 + 60) / 3)


def test_a_run_that_another_condition_ended_before_it_passed_is_missing() -> None:
    rows = [one | {"end": "condition", "steps": 5} if (one["arm"], one["seed"]) == ("kl", 2) else one for one in ROWS]
    kl = of_arm(compare(table(rows)), FIRST, "kl")
    assert (kl.never, kl.mean.n, kl.mean.left_out) == (2, 2, 1)
    assert kl.mean.estimate == (60 + 50) / 2


def test_a_column_whose_name_looks_like_a_pattern_is_chosen_by_its_name() -> None:
    rows = [one | {"acc[hard]": 0.5} for one in ROWS]
    columns = (*COLUMNS[:-1], "acc[hard]", "seconds")
    assert list(compare(table(rows, columns), metrics=["acc[hard]"]).metrics) == ["acc[hard]"]


def test_shares_are_compared_by_mcnemars_test() -> None:
    comparison = compare(table(), at_least={"reward/exploit": 0.9})
    assert list(comparison.outcomes) == [f"{FIRST} reached", f"{FINAL} >= 0.9"]
    kl = outcome(comparison, f"{FIRST} reached", "kl")
    assert (kl.yes, kl.n, kl.left_out) == (1, 3, 0)
    # Wilson, 1 of 3: (1 + z^2 / 2 +- z sqrt(1 2 / 3 + z^2 / 4)) / (3 + z^2).
    z = stats.norm.ppf(0.975)
    half = z * math.sqrt(2 / 3 + z * z / 4)
    assert kl.low == pytest.approx((1 + z * z / 2 - half) / (3 + z * z))
    assert kl.high == pytest.approx((1 + z * z / 2 + half) / (3 + z * z))
    assert kl.mcnemar is not None
    assert (kl.mcnemar.n, kl.mcnemar.only_a, kl.mcnemar.only_baseline, kl.mcnemar.p) == (3, 0, 2, 0.5)
    assert kl.seeds_needed == seeds_needed_mcnemar(only_a=0, only_baseline=2 / 3)
    gr = outcome(comparison, f"{FIRST} reached", "gr")
    assert (gr.yes, gr.n, gr.left_out) == (2, 3, 1)
    assert (kl.p_holm, gr.p_holm) == (1.0, 1.0)
    none = outcome(comparison, f"{FINAL} >= 0.9", "none")
    assert (none.yes, none.n) == (3, 4)
    assert none.mcnemar is None


def test_columns_of_true_and_false_are_outcomes_and_no_means() -> None:
    columns = (*COLUMNS, "hacked.final")
    rows = [{**one, "hacked.final": one["arm"] == "none"} for one in ROWS]
    comparison = compare(table(rows, columns), metrics=["hacked.final"])
    assert comparison.metrics == {}
    kl = outcome(comparison, "hacked.final", "kl")
    assert (kl.yes, kl.n) == (0, 3)
    assert kl.mcnemar is not None
    assert kl.mcnemar.p == 0.25


def test_arms_without_shared_seeds_are_compared_by_welchs_test() -> None:
    rows = [*ROWS[:4], *(row("other", seed, 0.1 * seed, 0.0, None) for seed in (7, 8, 9))]
    comparison = compare(table(rows), metrics=[GOLD, FIRST])
    other = of_arm(comparison, GOLD, "other")
    assert other.difference is not None
    assert not other.difference.paired
    expected = stats.ttest_ind([0.7, 0.8, 0.9], [0.0, 0.2, 0.1, 0.1], equal_var=False).pvalue
    assert other.difference.p == pytest.approx(expected)
    assert other.bootstrap is None
    assert outcome(comparison, f"{FIRST} reached", "other").mcnemar is None


def test_runs_that_are_not_done_are_named() -> None:
    comparison = compare(table())
    (run,) = comparison.unfinished
    assert (run.arm, run.seed, run.status, run.reason) == ("kl", 3, "failed", "RunError: the loss is nan")
    assert {arm.name: (len(arm.done), arm.planned) for arm in comparison.arms} == {
        "none": (4, 4),
        "kl": (3, 4),
        "gr": (4, 4),
    }


def test_an_arm_with_several_settings_is_several_arms() -> None:
    columns = ("arm", "strength.of.gr", "other.rate", *COLUMNS[1:])
    rows = [
        {**row("gr", seed, 0.1, 0.1, 1), "strength.of.gr": strength, "other.rate": 5}
        for strength in (1, "ratio:3")
        for seed in (1, 2)
    ]
    rows += [{**row("none", 1, 0.1, 0.1, 1), "strength.of.gr": None, "other.rate": 7}]
    assert [arm.name for arm in read_arms(table(rows, columns))] == ["gr,gr=1", "gr,gr=ratio:3", "none"]


def test_a_setting_that_follows_from_another_is_no_part_of_an_arms_name() -> None:
    columns = ("arm", "strength", "section", "rate", *COLUMNS[2:])
    rows = [
        {**row("sam", seed, 0.1, 0.1, 1), "strength": strength, "section": {"step": strength}, "rate": rate}
        for strength, rate in ((1, 5), (2, 5), (2, 6))
        for seed in (1, 2)
    ]
    names = [arm.name for arm in read_arms(table(rows, columns))]
    assert names == ["sam,strength=1,rate=5", "sam,strength=2,rate=5", "sam,strength=2,rate=6"]


def test_an_arm_without_any_finished_run_stays_in_the_tables() -> None:
    rows = [one if one["arm"] != "kl" else {**ROWS[6], "seed": one["seed"]} for one in ROWS]
    comparison = compare(table(rows))
    kl = of_arm(comparison, GOLD, "kl")
    assert (kl.mean.n, kl.difference) == (0, None)
    assert len(comparison.unfinished) == 4
    assert outcome(comparison, f"{FIRST} reached", "kl").n == 0
    only_failed = compare(table(rows), baseline="kl")
    assert of_arm(only_failed, GOLD, "none").difference is None


@pytest.mark.parametrize(
    ("patterns", "columns"),
    [
        (["reward/gold"], [GOLD]),
        (["reward/*.final"], [GOLD, FINAL]),
        (["reward/gold*", FIRST], ["reward/gold.best", GOLD, FIRST]),
        (["seconds"], None),
        (["reward/golf"], None),
    ],
)
def test_metrics_are_columns_patterns_or_names_without_statistic(patterns: list[str], columns: Any) -> None:
    if columns is None:
        with pytest.raises(UserError, match=f"no metric '{patterns[0]}' in the table"):
            compare(table(), metrics=patterns)
    else:
        assert list(compare(table(), metrics=patterns).metrics) == columns


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compare(table(), baseline="non"), "baseline 'non' is not an arm of the table, which has none, kl, gr"),
        (
            lambda: compare(
                table([row("gr", 1, 0, 0, 1, **{"kl.coefficient": value}) for value in (0.1, 0.2)]), baseline="gr"
            ),
            "baseline 'gr' has several values, each an arm: choose one of gr,coefficient=0.1, gr,coefficient=0.2",
        ),
        (lambda: compare(table(), alpha=5), "alpha=5, power=0.9: give shares"),
        (lambda: compare(table(()), alpha=0.05), "the table has no rows"),
        (lambda: compare(table([*ROWS, ROWS[0]])), "arm none has 2 rows of seed 1"),
        (lambda: compare(table(columns=COLUMNS[1:])), "the table has no column 'arm'"),
        (lambda: compare(table(), at_least={"reward/x": 1}), "no metric 'reward/x' in the table"),
        (
            lambda: compare(table([row("none", 1, "high", 0, 1)]), metrics=[GOLD]),  # type: ignore[arg-type]
            "column reward/gold.final has 'high'",
        ),
    ],
)
def test_bad_tables_and_names_are_one_line_that_names_the_fix(call: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
