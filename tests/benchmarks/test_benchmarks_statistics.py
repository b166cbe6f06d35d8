"""The arithmetic behind the published tables: spreads, ratios, verdicts, and their lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.cpu.training_pass import gradient_differences
from benchmarks.harness.statistics import Spread, Target, first_reaching, rates, ratio, spread
from benchmarks.harness.tables import engines, format_number, format_spread, speeds, times
from safetensors.torch import save_file

FASTER = Target(must=1.5, aim=2)
SMALLER = Target(must=0.6, aim=0.4, lower=True)


def measurements(*cpu: float, tokens: float = 100.0) -> list[dict[str, float]]:
    return [{"tokens": tokens, "cpu": seconds, "wall": 2 * seconds, "peak_mib": 10.0} for seconds in cpu]


def test_a_spread_is_the_median_and_the_range() -> None:
    assert spread([3.0, 1.0, 10.0]) == Spread(middle=3.0, low=1.0, high=10.0)


def test_a_rate_is_taken_round_by_round() -> None:
    assert rates(measurements(1.0, 4.0), "cpu") == [100.0, 25.0]
    assert rates(measurements(1.0, 4.0), "wall") == [50.0, 12.5]


def test_a_ratio_is_of_medians_and_its_range_is_of_single_ones() -> None:
    # Medians 4 and 2; the single ratios are 1/2, 4/2 and 8/1.
    assert ratio([1.0, 4.0, 8.0], [2.0, 2.0, 1.0]) == Spread(middle=2.0, low=0.5, high=8.0)


@pytest.mark.parametrize(
    ("target", "measured", "verdict"),
    [
        (FASTER, 2.0, "aim reached"),
        (FASTER, 1.5, "must reached"),
        (FASTER, 1.4, "below must"),
        (FASTER, 0.99, "**loses**"),
        (Target(must=0.8, aim=1.2), 0.9, "**loses**"),
        (SMALLER, 0.4, "aim reached"),
        (SMALLER, 0.5, "must reached"),
        (SMALLER, 0.7, "below must"),
        (SMALLER, 1.1, "**loses**"),
    ],
)
def test_a_verdict_says_what_was_reached_and_what_loses(target: Target, measured: float, verdict: str) -> None:
    assert target.verdict(measured) == verdict


def test_the_goal_is_reached_in_the_first_round_that_has_it() -> None:
    steps = [{"step": 0.0, "accuracy": 0.5}, {"step": 10.0, "accuracy": 0.9}, {"step": 20.0, "accuracy": 0.95}]
    assert first_reaching(steps, 0.9) == steps[1]
    assert first_reaching(steps, 0.99) is None


def test_numbers_keep_three_digits() -> None:
    assert [format_number(value) for value in (0.12345, 12.345, 99.94, 100.4, 12345.6)] == [
        "0.123",
        "12.3",
        "99.9",
        "100",
        "12,346",
    ]
    assert format_spread(Spread(middle=2.0, low=1.5, high=3.25)) == "2 (1.5 to 3.25)"
    assert format_spread(Spread(middle=2.0, low=2.0, high=2.0)) == "2"


def test_a_table_of_speeds_has_a_line_for_each_contender_and_marks_what_loses() -> None:
    row: dict[str, Any] = {
        "name": "1M",
        "contenders": {
            "flatpeak": measurements(1.0, 2.0, 2.0),
            "slow": measurements(4.0, 4.0, 5.0),
            "fast": measurements(1.0, 1.0, 1.0),
        },
        "failures": {"broken": "Traceback\n  ValueError: a | b\n"},
    }
    lines = speeds([row], ours="flatpeak", wanted=lambda row, name: FASTER if name == "slow" else None).splitlines()
    assert lines[2:] == [
        "| 1M | flatpeak | 50 (50 to 100) | 25 | 2 | 4 | 10 |  |  |  |",
        "| 1M | slow | 25 (20 to 25) | 12.5 | 4 | 8 | 10 | 2 (2 to 4) | 1.5 / 2 | aim reached |",
        "| 1M | fast | 100 | 50 | 1 | 2 | 10 | 0.5 (0.5 to 1) |  | **loses** |",
        "| 1M | broken | failed: ValueError: a / b |  |  |  |  |  |  |  |",
    ]


def test_a_table_of_engines_has_the_weight_update_apart() -> None:
    update = {"update_cpu": 0.25, "update_wall": 0.5}
    contenders = {
        "native": [one | dict.fromkeys(update, 0.0) for one in measurements(1.0, 2.0, 4.0)],
        "vLLM over HTTP": [one | update for one in measurements(2.0, 8.0, 8.0)],
    }
    lines = engines([{"name": "1M", "contenders": contenders}], ours="native").splitlines()
    assert lines[2:] == [
        "| 1M | native | 50 (25 to 100) | 25 | 2 | 4 | 0 | 0 |  |",
        "| 1M | vLLM over HTTP | 12.5 (12.5 to 50) | 6.25 | 8 | 16 | 0.25 | 0.5 | 4 (2 to 4) |",
    ]


def test_a_table_of_times_ends_with_the_medians_over_the_starts() -> None:
    def reached(step: float, cpu: float) -> list[dict[str, float]]:
        early = {"step": 0.0, "accuracy": 0.5, "cpu": 0.0, "wall": 0.0, "peak_mib": 30.0}
        return [early, {"step": step, "accuracy": 0.91, "cpu": cpu, "wall": 2 * cpu, "peak_mib": 20.0}]

    contenders = [
        {"flatpeak": reached(10, 1), "TRL": reached(20, 4)},
        {"flatpeak": reached(30, 3), "TRL": reached(20, 4)},
    ]
    seeds = [{"name": f"seed {n}", "goal": 0.9, "limit": 50, "contenders": c} for n, c in enumerate(contenders)]
    lines = times(seeds, ours="flatpeak", wanted=lambda row, name: SMALLER).splitlines()
    assert lines[3] == "| seed 0 | TRL | 20 | 4 | 8 | 30 | 0.25 | 0.6 / 0.4 | aim reached |"
    assert lines[6:] == [
        "| median | flatpeak | 20 | 2 | 4 |  |  |  |  |",
        "| median | TRL | 20 | 4 | 8 |  | 0.5 (0.25 to 0.75) | 0.6 / 0.4 | must reached |",
    ]


def test_a_contender_that_does_not_get_there_has_no_ratio() -> None:
    low = [{"step": 0.0, "accuracy": 0.5, "cpu": 0.0, "wall": 0.0, "peak_mib": 1.0}]
    high = [{"step": 0.0, "accuracy": 0.95, "cpu": 1.0, "wall": 1.0, "peak_mib": 1.0}]
    seed = {"name": "seed 0", "goal": 0.9, "limit": 50, "contenders": {"flatpeak": high, "TRL": low}}
    lines = times([seed], ours="flatpeak", wanted=lambda row, name: SMALLER).splitlines()
    assert lines[3:] == ["| seed 0 | TRL | not within 50 |  |  |  | none | 0.6 / 0.4 |  |"]


def test_gradients_are_compared_by_the_largest_entry_of_the_padded_one(tmp_path: Path) -> None:
    padded = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([2.0])}
    shared = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([1.0])}
    files = {name: tmp_path / f"{name}.safetensors" for name in ("padded", "shared", "packed")}
    save_file(padded, files["padded"])
    save_file(shared, files["shared"])
    save_file(padded, files["packed"])
    assert gradient_differences(files) == {"shared": 0.25, "packed": 0.0}
