"""The rows that a benchmark measures, and the tokens and seconds that its trainers' reward functions count."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cpu.accuracy_worker import WatchedReward
from benchmarks.cpu.step_worker import StepReward
from benchmarks.harness import runner
from benchmarks.harness.runner import Run


class Recorded:
    """Stands for both the pipe to the parent and the meter."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.events: list[str] = []

    def send(self, **facts: Any) -> None:
        self.sent.append(facts)
        self.events.append("send")

    def receive(self) -> dict[str, Any]:
        self.events.append("receive")
        return {}

    def start(self) -> None:
        self.events.append("start")

    def stop(self) -> dict[str, float]:
        self.events.append("stop")
        return {"cpu": 2.0, "wall": 3.0, "peak_mib": 4.0}


def test_a_step_counts_the_mean_of_the_two_rollouts_it_touches() -> None:
    recorded = Recorded()
    reward = StepReward(recorded, recorded, completions=2)  # type: ignore[arg-type]
    reward(["", ""], [[5] * 10, [5] * 20])
    reward([""], [[5] * 1000])
    reward(["", ""], [[5] * 40, [5] * 10])
    assert [one["tokens"] for one in recorded.sent] == [15.0, 40.0]
    assert recorded.events == ["stop", "send", "receive", "start"] * 2


def test_the_clock_stands_still_while_accuracy_is_measured() -> None:
    recorded = Recorded()
    shares = iter([0.5, 0.75])

    def accuracies() -> dict[str, float]:
        recorded.events.append("evaluate")
        return {"accuracy": next(shares)}

    reward = WatchedReward(recorded, recorded, accuracies, completions=2)  # type: ignore[arg-type]
    for _ in range(11):
        assert reward(["7", " 8 "], ["8", "8"]) == [0.0, 1.0]
    reward(["7"], ["8"])
    assert [(one["step"], one["accuracy"], one["cpu"], one["wall"]) for one in recorded.sent] == [
        (0, 0.5, 2.0, 3.0),
        (10, 0.75, 4.0, 6.0),
    ]
    assert recorded.events == ["stop", "evaluate", "send", "receive", "start"] * 2


@pytest.mark.parametrize(
    ("arguments", "rows", "repeats"),
    [
        ([], ["a", "b"], 5),
        (["--quick"], ["b"], 2),
        (["--row", "c", "--rounds", "7"], ["c"], 7),
    ],
)
def test_a_part_measures_the_rows_asked_for_and_writes_them(
    arguments: list[str], rows: list[str], repeats: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(run: Run, name: str) -> dict[str, Any]:
        assert run.scratch.is_dir()
        return {"contenders": {}, "repeats": run.repeats}

    file = tmp_path / "new" / "out.json"
    monkeypatch.setattr(sys, "argv", ["some", "--json", str(file), *arguments])
    runner.main("engine", "", rows=["a", "b", "c"], quick=["b"], repeats=5, measure=measure, left_out=["c"])
    content = json.loads(file.read_text(encoding="utf-8"))
    assert [(row["name"], row["repeats"]) for row in content["rows"]] == [(row, repeats) for row in rows]
    assert content["facts"]["command"][1:3] == ["-m", "benchmarks.cpu.engine"]
    assert content["facts"]["versions"].keys() >= {"flatpeak", "torch", "transformers", "trl"}
    assert list(file.parent.iterdir()) == [file]
