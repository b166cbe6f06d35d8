"""`flatpeak eval` and `flatpeak chat`: any checkpoint, on the same questions, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flatpeak.comparison import compare_checkpoints
from flatpeak.errors import UserError
from flatpeak.evaluation.chat import chat_loop
from flatpeak.evaluation.locate import locate_model


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose RL teaches a model that knows nothing to say one digit, which some sums are equal to."""
    from flatpeak.api import train
    from run_parts import tiny_recipe

    recipe = tiny_recipe(
        tmp_path_factory.mktemp("runs"),
        task={"test_size": 20},
        rollout={"max_new_tokens": 2},
        sft={"steps": 30, "batch_size": 16, "optimizer": {"learning_rate": 1e-2}},
        evaluation={"samples": 2, "k": [1, 2]},
    )
    return train(recipe).path


def test_stages_are_compared_on_the_same_questions_with_paired_intervals(finished: Path) -> None:
    names = [str(finished / "checkpoints" / "step_000000"), str(finished)]
    comparison = compare_checkpoints(names)
    first, last = comparison.evaluations
    assert list(first.ids) == list(last.ids)
    assert first.size == 20
    figures = comparison.as_dict()
    assert [model["metrics"]["accuracy"] for model in figures["models"]] == [
        first.mean("accuracy"),
        last.mean("accuracy"),
    ]
    change = figures["differences"][0]["metrics"]["accuracy"]
    assert change["difference"] == pytest.approx(last.mean("accuracy") - first.mean("accuracy"))
    assert change["low"] <= change["difference"] <= change["high"]
    table = comparison.render()
    assert "pass@2" in table
    assert "maj@2" in table


def test_the_step_0_figures_are_those_the_run_wrote_down(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    after_sft = next(row for row in summary["evaluations"] if row["stage"] == "sft")
    comparison = compare_checkpoints([str(finished / "checkpoints" / "step_000000")])
    assert comparison.evaluations[0].metrics() == pytest.approx(after_sft["metrics"])


def test_a_model_compared_with_itself_does_not_differ(finished: Path) -> None:
    comparison = compare_checkpoints([str(finished), str(finished)])
    for change in comparison.as_dict()["differences"][0]["metrics"].values():
        assert change == {"difference": 0.0, "low": 0.0, "high": 0.0}


def test_overrides_change_what_is_evaluated(finished: Path) -> None:
    comparison = compare_checkpoints([str(finished)], ["evaluation.size=5", "evaluation.samples=0", "evaluation.k=[1]"])
    assert comparison.evaluations[0].size == 5
    assert "pass@1" not in comparison.evaluations[0].values


def test_a_model_without_a_run_needs_to_be_told_the_task(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(finished / "checkpoints" / "best")
    with pytest.raises(UserError, match="the task is unknown"):
        compare_checkpoints([str(tmp_path / "model")])


def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run or model directory"):
        locate_model(str(tmp_path / "nothing"))
    assert locate_model("some/model").path == "some/model"


def test_a_run_stands_for_its_best_checkpoint(finished: Path) -> None:
    located = locate_model(str(finished))
    assert Path(located.path) == finished / "checkpoints" / "best"
    assert located.recipe == finished / "config.yaml"
    assert locate_model(str(finished / "checkpoints" / "step_000000")).recipe == finished.absolute() / "config.yaml"


def test_chat_answers_every_line_until_an_empty_one(finished: Path) -> None:
    asked = iter(["1+2=", "3+4=", ""])
    answers: list[Any] = []

    def read(prompt: str) -> str:
        return next(asked)

    chat_loop(str(finished), temperature=0.0, max_new_tokens=3, read=read, write=answers.append)
    assert len(answers) == 2
    assert all(isinstance(answer, str) and len(answer) <= 3 for answer in answers)
    with pytest.raises(StopIteration):
        next(asked)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rich measures the terminal; tests have none."""
    monkeypatch.setenv("COLUMNS", "200")
    yield
