"""`flatpeak.evaluate` and `RunResult.chat`: a model asked from a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

import flatpeak
from flatpeak.errors import UserError
from flatpeak.tasks.dataset import held_out_task
from flatpeak.types import Example
from support.runs import Finished, Train, Watcher

ROWS = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(3) for b in range(3)]


class Sums:
    """A task with two questions."""

    name = "sums"
    train = (Example(id="1", question="1+1=", gold="2"),)
    test = (Example(id="2", question="2+2=", gold="4"), Example(id="3", question="2+3=", gold="5"))


def small(completion: str, gold: str) -> float:
    """1 for the three golds of 0 and 1, whatever the answer."""
    return float(int(gold) < 2)


def short(completions: list[str]) -> list[float]:
    return [1 - len(text) / 100 for text in completions]


def test_rows_give_the_known_accuracy_of_a_model_by_its_name(base: Path) -> None:
    result = flatpeak.evaluate(base, ROWS, small, settings={"rollout.max_new_tokens": 4}, progress=False)
    assert result.metrics["accuracy"] == pytest.approx(3 / 9)
    assert repr(result).startswith("EvaluationResult(9 questions: accuracy 0.3333 [0.1206, 0.6458], reward ")
    answers = result.answers
    assert list(answers["question"]) == [row["prompt"] for row in ROWS]
    assert isinstance(answers, pandas.DataFrame)


def test_a_model_object_is_asked_and_given_back_as_it_was(make_tiny_model: Any) -> None:
    model, tokenizer = make_tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = {"train": ROWS, "test": ROWS[:2]}
    settings = {"rollout.max_new_tokens": 4}
    result = flatpeak.evaluate(model, rows, {"a": small, "b": short}, tokenizer=tokenizer, settings=settings)
    assert (result.evaluation.size, "accuracy" in result.metrics) == (2, False)
    assert result.metrics["reward"] == pytest.approx(result.metrics["a"] + result.metrics["b"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_run_is_asked_as_in_its_training(finished: Finished) -> None:
    run = flatpeak.load_run(finished())
    own = flatpeak.evaluate(run, progress=False)
    assert own.evaluation.size == 6
    best = {one.step: one.metrics["accuracy"] for one in run.summary.evaluations}[run.summary.best_step]
    assert own.metrics["accuracy"] == pytest.approx(best)
    asked = flatpeak.evaluate(run.path, ROWS, small, settings={"evaluation.size": 4}, progress=False)
    assert (asked.evaluation.size, asked.metrics["accuracy"]) == (4, pytest.approx(3 / 4))


def test_a_reward_alone_says_what_is_right_also_of_a_run_that_was_trained_by_several(
    base: Path, train: Train, tmp_path: Path
) -> None:
    settings = {"training.steps": 0, "rollout.max_new_tokens": 4, "run.directory": str(tmp_path)}
    run = train(None, model=str(base), dataset=ROWS, reward={"a": small, "b": short}, settings=settings, progress=False)
    assert "accuracy" not in run.summary.evaluations[-1].metrics
    assert flatpeak.evaluate(run, ROWS, small, progress=False).metrics["accuracy"] == pytest.approx(3 / 9)


def test_scores_other_than_0_and_1_are_no_accuracy(base: Path) -> None:
    shown = Watcher()
    result = flatpeak.evaluate(base, ["1+1=", "1+2="], short, settings={"rollout.max_new_tokens": 4}, progress=shown)
    assert "accuracy" not in result.metrics
    assert any("gives scores other than 0 and 1" in text for text in shown.notices)


def test_a_run_from_python_says_what_to_give_again(base: Path, train: Train, tmp_path: Path) -> None:
    settings = {"run.directory": str(tmp_path), "training.steps": 1, "rollout.max_new_tokens": 4, "evaluation.size": 2}
    settings |= {"rollout.prompts_per_step": 2, "rollout.group_size": 2, "model.path": str(base)}
    run = train(None, dataset=ROWS, reward=small, settings=settings, progress=False)
    with pytest.raises(UserError, match="was trained with a dataset from Python: give it again, dataset="):
        flatpeak.evaluate(run)
    with pytest.raises(UserError, match="was trained with a reward from Python: give it again, reward="):
        flatpeak.evaluate(run, ROWS)
    assert flatpeak.evaluate(run, ROWS, small, progress=False).metrics["accuracy"] == pytest.approx(3 / 9)


def test_all_rows_of_a_data_set_are_asked() -> None:
    assert [example.question for example in held_out_task(ROWS).test] == [row["prompt"] for row in ROWS]
    assert [example.gold for example in held_out_task({"train": ROWS, "validation": ROWS[:1]}).test] == ["0"]
    assert held_out_task(Sums()).test is Sums.test


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"dataset": {"train": ROWS}}, "dataset has the parts 'train': name the one to ask 'test', or give its rows"),
        ({"dataset": []}, "dataset has no rows"),
        ({"dataset": ["1+1="]}, "dataset has no column with gold answers, which the reward asks for, in its held"),
        ({"dataset": ["1+1="], "reward": small}, "dataset has no column with gold answers"),
        ({}, r"belongs to no run with a task: give a data set, flatpeak\.evaluate\('.*', rows\)"),
    ],
)
def test_an_evaluation_that_lacks_something_says_what(base: Path, call: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        flatpeak.evaluate(base, **call)


def test_a_model_object_without_a_data_set_or_a_tokenizer_is_refused(make_tiny_model: Any) -> None:
    model, tokenizer = make_tiny_model()
    with pytest.raises(UserError, match=r"evaluate\(model\) needs a data set"):
        flatpeak.evaluate(model, tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"a model that is an object needs tokenizer=\.\.\. too"):
        flatpeak.evaluate(model, ROWS)


def test_a_result_answers_with_its_best_checkpoint_as_in_evaluations(finished: Finished) -> None:
    run = flatpeak.load_run(finished(evaluation={"every": 1}))
    answers = flatpeak.evaluate(run, progress=False).answers
    assert [run.chat(question) for question in answers["question"]] == list(answers["text"])
    loaded = run._chat_model
    assert len(run.chat("1+1=", max_new_tokens=1)) <= 1
    assert run.chat("1+1=", temperature=1.0, seed=3) == run.chat("1+1=", temperature=1.0, seed=3)
    assert run._chat_model is loaded
    with pytest.raises(UserError, match="makes an empty prompt"):
        run.chat("")
    with pytest.raises(UserError, match=r"the question is list \[.*: ask with a text"):
        run.chat([{"role": "user", "content": "1+1="}])  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"the question has \d+ tokens and the model's context"):
        run.chat("1+" * 500)
