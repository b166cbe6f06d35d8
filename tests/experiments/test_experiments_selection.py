"""A setting is chosen on tuning seeds alone, and results are reported on others."""

from __future__ import annotations

import math
from typing import Any

import pytest

from flatpeak.errors import UserError
from flatpeak.experiments import check_disjoint, select_best


def rows(values: dict[float, dict[int, float | None]]) -> list[dict[str, Any]]:
    return [
        {"arm": f"kl-{strength}", "strength": strength, "seed": seed, "reward/gold.final": gold}
        for strength, by_seed in values.items()
        for seed, gold in by_seed.items()
    ]


TUNING = rows(
    {
        0.1: {20: 0.1, 21: 0.3, 100: 9.0},
        0.2: {20: 0.5, 21: 0.7, 100: 0.0},
        0.3: {20: 0.7, 21: 0.5, 100: 0.0},
        0.4: {20: 5.0, 21: None, 100: 5.0},
        0.5: {20: 5.0, 100: 5.0},
    }
)


def choose(**changes: Any) -> Any:
    arguments = {"setting": "strength", "metric": "reward/gold.final", "seeds": [21, 20], "reporting_seeds": [100, 101]}
    return select_best(TUNING, **{**arguments, **changes})


def test_the_best_mean_over_tuning_seeds_is_chosen_and_reporting_seeds_are_not_read() -> None:
    result = choose()
    # 0.2 and 0.3 have the same mean: the first of the rows stays first.
    assert (result.chosen, result.seeds) == (0.2, (20, 21))
    assert {key: value.estimate for key, value in result.candidates.items()} == {
        0.2: pytest.approx(0.6),
        0.3: pytest.approx(0.6),
        0.1: pytest.approx(0.2),
    }
    assert list(result.candidates) == [0.2, 0.3, 0.1]
    assert choose(largest=False).chosen == 0.1


def test_a_candidate_that_lacks_a_seed_is_named_and_not_eligible() -> None:
    assert choose().incomplete == {0.4: (21,), 0.5: (21,)}
    with pytest.raises(UserError, match=r"no strength has reward/gold.final on all tuning seeds \[22\]"):
        choose(seeds=[22])


def test_seeds_that_are_tuned_and_reported_on_are_refused() -> None:
    with pytest.raises(UserError, match="seeds 21, 100 are both tuned and reported on"):
        check_disjoint([20, 21, 100], [100, 101, 21])
    with pytest.raises(UserError, match="seeds 20 are both tuned and reported on"):
        choose(reporting_seeds=range(20, 21))
    check_disjoint(range(20, 25), range(100, 120))


def test_two_rows_of_one_seed_and_no_seeds_are_refused() -> None:
    again = [{"strength": 0.1, "seed": 20, "reward/gold.final": math.pi}]
    with pytest.raises(UserError, match=r"strength=0\.1 has two rows of seed 20"):
        select_best([*TUNING, *again], setting="strength", metric="x", seeds=[20], reporting_seeds=[])
    with pytest.raises(UserError, match="no tuning seeds"):
        choose(seeds=[])
    # Two rows of a seed that chooses nothing are none of its business.
    assert choose(seeds=[20], reporting_seeds=[]).seeds == (20,)
    again[0] |= {"seed": 100}
    arguments = {"setting": "strength", "metric": "reward/gold.final", "seeds": [20], "reporting_seeds": [100]}
    assert select_best([*TUNING, *again], **arguments).chosen == 0.4
