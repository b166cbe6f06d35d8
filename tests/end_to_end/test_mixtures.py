"""Whole runs on a mixture of tasks, with further evaluation sets."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import flatpeak
from flatpeak.errors import UserError
from flatpeak.report.page import evaluations_of, write_report
from flatpeak.runs.checkpoints import read_checkpoint
from flatpeak.tasks.data_files import ExampleTask
from flatpeak.types import Example
from support.runs import Recipe, Train

SUMS = {"type": "arithmetic", "max_value": 9, "train_size": 30, "test_size": 6}
PRODUCTS = {**SUMS, "operators": ["*"], "test_size": 8}
SETS = {"large": {**SUMS, "min_value": 10, "max_value": 19}, "minus": {**SUMS, "operators": ["-"], "test_size": 3}}
ALL = ("mixture", "arithmetic", "products", "large", "minus")


def mixture(recipe: Recipe, **sections: Any) -> dict[str, Any]:
    """Sums and products, 3 to 1, with two evaluation sets."""
    tasks = [{"task": SUMS, "weight": 3}, {"task": PRODUCTS, "name": "products"}]
    evaluation = {"every": 1, "size": 4, "final_size": 7, "sets": SETS}
    return {
        key: value for key, value in recipe(tasks=tasks, evaluation=evaluation, **sections).items() if key != "task"
    }


def short(completion: str, task: str = "") -> float:
    """Sums are to be short, products long."""
    return float((len(completion) < 3) == (task != "products"))


def rows_of(path: Path, stage: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["stage"] == stage]


def test_a_run_measures_each_task_and_each_set(recipe: Recipe, train: Train) -> None:
    result = train(mixture(recipe, sft={"steps": 2, "batch_size": 4}), reward=short)
    start, after_sft, first, last = rows_of(result.path, "eval")
    for row in (start, after_sft, first, last):
        assert dict.fromkeys(name.split("/")[1] for name in row if name.startswith("eval/")) == dict.fromkeys(ALL)
        assert row["eval/mixture/reward"] == pytest.approx(
            0.75 * row["eval/arithmetic/reward"] + 0.25 * row["eval/products/reward"]
        )
    for row in rows_of(result.path, "train"):
        # Three prompts of four are sums.
        assert row["reward/mean"] == pytest.approx(
            0.75 * row["reward/arithmetic/mean"] + 0.25 * row["reward/products/mean"]
        )
    sizes = {name: evaluation.size for name in ALL if (evaluation := result.summary.evaluations[-1].on(name))}
    assert sizes == {"mixture": 13, "arithmetic": 6, "products": 7, "large": 6, "minus": 3}
    assert result.summary.evaluations[2].on("large").size == 4
    answers = (result.path / "evaluations" / "train_000002.minus.jsonl").read_text().splitlines()
    assert all(json.loads(line)["id"].startswith("minus/") for line in answers)
    assert len(answers) == 3


def test_plots_report_and_progress_show_every_task(
    recipe: Recipe, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(mixture(recipe), reward=short)
    last = rows_of(result.path, "eval")[-1]
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("eval at step 2"))
    assert [name for name in ALL[1:] if f"{name} {last[f'eval/{name}/accuracy']:.3f}" in line] == list(ALL[1:])
    for name in ALL:
        (axes,) = result.plot(f"eval/{name}/accuracy").axes
        plotted = [row[f"eval/{name}/accuracy"] for row in rows_of(result.path, "eval")]
        assert list(axes.lines[0].get_ydata()) == plotted
    assert hasattr(result.plot(), "_repr_png_")
    page = write_report(result.path).read_text()
    assert "Held-out results by task" in page
    assert "Reward by task" in page
    assert "<td>minus</td><td>3</td>" in page
    written = evaluations_of([json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()])
    assert written[-1].on("large").metrics == result.summary.evaluations[-1].on("large").metrics


def test_the_weighted_mean_chooses_the_best_checkpoint(recipe: Recipe, train: Train) -> None:
    summary = train(mixture(recipe, training={"steps": 4}), reward=short).summary
    values = {}
    for evaluation in summary.evaluations:
        sums, products = (evaluation.on(name).metrics["accuracy"] for name in ("arithmetic", "products"))
        values[evaluation.step] = 0.75 * sums + 0.25 * products
        assert evaluation.metrics["accuracy"] == pytest.approx(values[evaluation.step])
    assert summary.metric == "accuracy"
    assert summary.best_step in values


def test_a_resumed_mixture_draws_the_same_prompts(recipe: Recipe, train: Train, watch: Any) -> None:
    config = mixture(recipe, training={"steps": 4}, run={"log_rollouts_every": 1})
    whole = train({**config, "run": {**config["run"], "name": "whole"}}, reward=short)
    stopped = train(config, reward=short, progress=watch({("train", 2): lambda: os.kill(os.getpid(), signal.SIGTERM)}))
    assert stopped.summary.last_step == 2
    state = read_checkpoint(stopped.path / "checkpoints" / "step_000002")
    assert state.state["stage"]["cursors"] == [8]
    resumed = train(config, reward=short, resume=True)
    for step in range(1, 5):
        assert resumed.rollouts(step).group.tolist() == whole.rollouts(step).group.tolist()
    assert (
        rows_of(resumed.path, "eval")[-1]["eval/mixture/reward"]
        == rows_of(whole.path, "eval")[-1]["eval/mixture/reward"]
    )


def test_sets_leave_a_run_as_it_is_without_them(recipe: Recipe, train: Train) -> None:
    # The model's tokenizer is made of the texts, so the sets have no characters of their own.
    plain = train(recipe(run={"name": "plain"}, evaluation={"every": 1}))
    sets = train(recipe(run={"name": "sets"}, evaluation={"every": 1, "sets": {"large": SETS["large"]}}))
    for without, beside in zip(rows_of(plain.path, "train"), rows_of(sets.path, "train"), strict=True):
        names = ("reward/mean", "policy/grad_norm", "rollout/length_mean")
        assert [without[name] for name in names] == [beside[name] for name in names]
    for without, beside in zip(rows_of(plain.path, "eval"), rows_of(sets.path, "eval"), strict=True):
        shared = {name: value for name, value in beside.items() if not name.startswith(("eval/large/", "time/"))}
        assert shared == {name: value for name, value in without.items() if not name.startswith("time/")}
    assert sets.summary.best_step == plain.summary.best_step


def test_a_file_with_held_out_rows_alone_is_an_evaluation_set(recipe: Recipe, train: Train, tmp_path: Path) -> None:
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(3)]
    (tmp_path / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    exam = {"type": "rows", "test": [{"path": str(tmp_path / "exam.jsonl")}]}
    result = train(recipe(evaluation={"sets": {"exam": exam}}))
    assert result.summary.evaluations[-1].on("exam").size == 3
    manifest = json.loads((result.path / "manifest.json").read_text())
    assert "evaluation.sets.exam.test.0.path" in json.dumps(manifest)


def test_a_curriculum_may_come_before_a_mixture(recipe: Recipe, train: Train) -> None:
    curriculum = {"task": {**SUMS, "max_value": 4, "train_size": 10}, "steps": 1}
    result = train(mixture(recipe, curriculum=curriculum, run={"log_rollouts_every": 1}), reward=short)
    first, second = rows_of(result.path, "train")
    assert "reward/products/mean" not in first
    assert "reward/products/mean" in second


def test_a_task_from_python_beside_a_mixture_is_refused(recipe: Recipe, train: Train) -> None:
    example = Example(id="1", question="1+1=", gold="2")
    task = ExampleTask(name="own", train=(example,), test=(Example(id="2", question="1+2=", gold="3"),))
    with pytest.raises(UserError, match="a task from Python beside tasks: both are the data to train on"):
        train(mixture(recipe), task=task)


@pytest.mark.parametrize("where", ["tasks.1.task", "evaluation.sets.bad"])
def test_an_error_in_the_data_names_its_task_or_set(recipe: Recipe, train: Train, where: str) -> None:
    config, bad = mixture(recipe), {"type": "rows", "test": [{"path": "nofile.jsonl"}]}
    if where == "tasks.1.task":
        config["tasks"][1]["task"] = bad
    else:
        config["evaluation"]["sets"] = {"bad": bad}
    with pytest.raises(UserError, match=rf"^{where}.test.0.path=nofile.jsonl: does not exist"):
        train(config)


def test_a_set_named_as_the_task_is_refused(recipe: Recipe, train: Train) -> None:
    with pytest.raises(UserError, match="'arithmetic' names two tasks or evaluation sets"):
        train(recipe(evaluation={"sets": {"arithmetic": SUMS}}))


def test_eval_measures_the_tasks_and_sets_of_a_run(recipe: Recipe, train: Train) -> None:
    from flatpeak.apps.compare import compare_checkpoints

    result = train(mixture(recipe))
    comparison = compare_checkpoints([str(result.path / "checkpoints" / "last")])
    (evaluation,) = comparison.evaluations
    assert evaluation.apart.keys() == set(ALL[1:])
    assert evaluation.mean("accuracy") == pytest.approx(result.summary.evaluations[-1].metrics["accuracy"])
    assert "large, 6 questions" in comparison.render()
    large = flatpeak.load_run(result.path).summary.evaluations[-1].on("large")
    assert large is not None
    assert large.metrics == result.summary.evaluations[-1].on("large").metrics
    alone = compare_checkpoints(
        [str(result.path / "checkpoints" / "last")], ["task.type=arithmetic", "evaluation.sets=null"]
    )
    assert alone.evaluations[0].task == "arithmetic"
    assert not alone.evaluations[0].apart
