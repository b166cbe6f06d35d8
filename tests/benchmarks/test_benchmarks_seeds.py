"""The demo on ten seeds, and accuracy by steps: what stands in their tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cpu.accuracy_worker import second_set
from benchmarks.cpu.demo_seeds import read_summary
from benchmarks.cpu.demo_seeds import table as demo_table
from benchmarks.cpu.steps_to_accuracy import averages, interval, noise, table

from flatpeak.config.load import load_recipe, parse_config
from flatpeak.tasks.config import build_task


def demo_row(kind: str, seed: int, **changed: float) -> dict[str, Any]:
    row = {"after_sft": 0.5, "after_grpo": 0.98, "step": 120, "wall": 60.4, "cpu": 90.0}
    return {"kind": kind, "seed": seed, **row, **changed}


def test_the_demos_table_has_both_kinds_side_by_side_and_the_worst_of_each() -> None:
    rows = [demo_row("plain", 1), demo_row("plain", 0, after_grpo=0.96, wall=80), demo_row("regularized", 1, cpu=130)]
    assert demo_table(rows).splitlines()[2:] == [
        "| 0 | 0.500 | 0.960 | 120 | 80 | 90 |  |  |  |  |  |",
        "| 1 | 0.500 | 0.980 | 120 | 60 | 90 | 0.500 | 0.980 | 120 | 60 | 130 |",
        "| worst | 0.500 to 0.500 | 0.960 | 120 | 80 | 90 | 0.500 to 0.500 | 0.980 | 120 | 60 | 130 |",
    ]


def test_the_demos_results_are_the_last_of_each_stage(tmp_path: Path) -> None:
    stages = [("start", 0, 0.0), ("sft", 400, 0.55), ("train", 20, 0.8), ("train", 40, 0.99)]
    evaluations = [{"stage": stage, "step": step, "metrics": {"accuracy": share}} for stage, step, share in stages]
    file = tmp_path / "summary.json"
    file.write_text(json.dumps({"evaluations": evaluations, "wall_seconds": 12.5}), encoding="utf-8")
    assert read_summary(file) == {"after_sft": 0.55, "after_grpo": 0.99, "step": 40, "training_wall": 12.5}


def measurements(*accuracies: float, gap: float = 0.0) -> list[dict[str, float]]:
    return [{"step": 10.0 * n, "accuracy": a, "second": a - gap} for n, a in enumerate(accuracies)]


def test_an_average_leaves_out_the_start_and_takes_both_sets() -> None:
    assert averages(measurements(0.1, 0.8, 0.9, gap=0.1)) == pytest.approx(0.8)


def test_the_interval_of_a_paired_difference() -> None:
    # mean 0.02, standard deviation 0.01, three pairs: 4.303 * 0.01 / sqrt(3) to either side.
    middle, low, high = interval([0.01, 0.02, 0.03])
    assert (middle, low, high) == pytest.approx((0.02, 0.02 - 0.024843, 0.02 + 0.024843), abs=1e-6)


def test_the_table_by_steps_compares_seed_by_seed() -> None:
    rows = [
        {"contenders": {"groups": measurements(0.5, 0.8, 0.8), "TRL": measurements(0.5, 0.85, 0.91)}},
        {"contenders": {"groups": measurements(0.5, 0.9, 0.9), "TRL": measurements(0.5, 0.9, 0.9)}},
    ]
    assert table(rows, against="groups").splitlines()[2:] == [
        "| groups | 2 | 0.850 ± 0.071 |  | none, 10 | 0.850 |",
        "| TRL | 2 | 0.890 ± 0.014 | +0.040 [-0.468, +0.548] | 20, 10 | 0.905 |",
    ]


def test_noise_is_that_of_one_set() -> None:
    one = [{"contenders": {"a": [{"accuracy": 0.5, "second": 0.5}, {"accuracy": 0.6, "second": 0.5}]}}]
    assert noise(one) == pytest.approx(0.1 / 2)


def test_the_second_set_shares_no_problem_with_the_others() -> None:
    config = parse_config(load_recipe("flatpeak:demo", []))
    task = build_task(config.task)
    second = {example.id for example in second_set(task, config)}
    assert len(second) == len(task.test) == 500
    assert not second & {example.id for example in (*task.train, *task.test)}
