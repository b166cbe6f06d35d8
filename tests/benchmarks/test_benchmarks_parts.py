from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cpu import engine, step
from benchmarks.cpu.accuracy_worker import WatchedReward
from benchmarks.cpu.step_worker import TurnReward
from benchmarks.harness import runner as part
from benchmarks.harness.runner import Run
from benchmarks.harness.targets import engine_target, memory_target, step_target, training_pass_target


class Recorded:
    """Stands for both the link to the parent and the meter."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.events: list[str] = []

    def tell(self, **facts: Any) -> None:
        self.told.append(facts)
        self.events.append("tell")

    def wait(self) -> dict[str, Any]:
        self.events.append("wait")
        return {}

    def start(self) -> None:
        self.events.append("start")

    def stop(self) -> dict[str, float]:
        self.events.append("stop")
        return {"cpu": 2.0, "wall": 3.0, "peak_mib": 4.0}


def test_a_step_counts_the_mean_of_the_two_rollouts_it_touches() -> None:
    told = Recorded()
    reward = TurnReward(told, told, completions=2)  # type: ignore[arg-type]
    reward(["", ""], [[5] * 10, [5] * 20])
    reward([""], [[5] * 1000])
    reward(["", ""], [[5] * 40, [5] * 10])
    assert [found["tokens"] for found in told.told] == [15.0, 40.0]
    assert told.events == ["stop", "tell", "wait", "start"] * 2


def test_completions_of_a_step_have_different_rewards() -> None:
    told = Recorded()
    reward = TurnReward(told, told, completions=2)  # type: ignore[arg-type]
    assert reward(["", ""], [[50, 60], [3]]) == [13 / 97, 3 / 97]


def test_the_clock_stands_still_while_accuracy_is_measured() -> None:
    told = Recorded()
    found = iter([0.5, 0.75])

    def accuracies() -> dict[str, float]:
        told.events.append("evaluate")
        return {"accuracy": next(found)}

    reward = WatchedReward(told, told, accuracies, completions=2)  # type: ignore[arg-type]
    for _ in range(11):
        assert reward(["7", " 8 "], ["8", "8"]) == [0.0, 1.0]
    reward(["7"], ["8"])
    assert [(found["step"], found["accuracy"], found["cpu"], found["wall"]) for found in told.told] == [
        (0, 0.5, 2.0, 3.0),
        (10, 0.75, 4.0, 6.0),
    ]
    assert told.events == ["stop", "evaluate", "tell", "wait", "start"] * 2


@pytest.mark.parametrize(
    ("arguments", "rows", "rounds"),
    [
        ([], ["a", "b"], 5),
        (["--quick"], ["b"], 2),
        (["--row", "c", "--rounds", "7"], ["c"], 7),
    ],
)
def test_a_part_measures_the_rows_asked_for_and_writes_them(
    arguments: list[str], rows: list[str], rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(run: Run, name: str) -> dict[str, Any]:
        assert run.scratch.is_dir()
        return {"contenders": {}, "rounds": run.rounds}

    file = tmp_path / "new" / "out.json"
    monkeypatch.setattr(sys, "argv", ["some", "--json", str(file), *arguments])
    part.main("engine", "", rows=["a", "b", "c"], quick=["b"], rounds=5, measure=measure, left_out=["c"])
    content = json.loads(file.read_text(encoding="utf-8"))
    assert [(row["name"], row["rounds"]) for row in content["rows"]] == [(row, rounds) for row in rows]
    assert content["facts"]["command"][1:3] == ["-m", "benchmarks.cpu.engine"]
    assert content["facts"]["versions"].keys() >= {"flatpeak", "torch", "transformers", "trl"}
    assert list(file.parent.iterdir()) == [file]


def test_every_row_of_the_comparisons_has_its_target() -> None:
    assert [getattr(engine_target(f"{size}, skewed", "vLLM"), "must", None) for size in ("1M", "7M", "45M")] == [
        1.0,
        0.8,
        None,
    ]
    generate = {row: engine_target(row, "transformers generate") for row in engine.ROWS}
    assert {row: (target.must, target.aim) for row, target in generate.items() if target} == {
        row: (3, 5) if row.endswith("skewed") else (1.2, 1.5) for row in engine.ROWS
    }
    steps = {row: step_target(row, "TRL generate") for row in step.ROWS}
    assert len(steps) == 9
    assert {row: (target.must, target.aim) for row, target in steps.items() if target and row.startswith("1M")} == {
        "1M, skewed": (3, 5),
        "1M, uniform, long prompts": (1.5, 2.5),
        "1M, uniform, short prompts": (1.0, 1.5),
    }
    assert training_pass_target("1M, prompt 256 and short answers", "packed") is None
    memory = memory_target("7M, vocabulary 32k", "TRL, one piece")
    assert memory is not None
    assert (memory.must, memory.aim, memory.lower) == (0.6, 0.4, True)


def test_a_python_with_vllm_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLATPEAK_VLLM_PYTHON", str(tmp_path / "python"))
    with pytest.raises(SystemExit, match="no such file"):
        engine.vllm_python()
    (tmp_path / "python").touch()
    assert engine.vllm_python() == tmp_path / "python"
