"""`flatpeak eval` and `flatpeak chat`: any checkpoint, on the same questions, side by side."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flatpeak.apps import compare as comparison_module
from flatpeak.apps.chat import Console, chat_loop
from flatpeak.apps.compare import _on_common_questions, compare_checkpoints, evaluated_by
from flatpeak.cli.main import app
from flatpeak.config.load import load_recipe, parse_config
from flatpeak.errors import UserError
from flatpeak.evaluation.result import Evaluation
from flatpeak.evaluation.tables import Comparison
from flatpeak.pipeline.model_source import locate_model, locate_stages
from support.runs import Watcher, quick_train, tiny_recipe


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose RL teaches a model that knows nothing to say one digit, which some sums are equal to."""
    recipe = tiny_recipe(
        tmp_path_factory.mktemp("runs"),
        task={"test_size": 20},
        rollout={"max_new_tokens": 2},
        sft={"steps": 30, "batch_size": 16, "optimizer": {"learning_rate": 1e-2}},
        evaluation={"samples": 2, "k": [1, 2]},
    )
    return quick_train(recipe)


@pytest.mark.slow
def test_stages_are_compared_on_the_same_questions_with_paired_intervals(finished: Path) -> None:
    names = [str(finished / "checkpoints" / "step_000000"), str(finished)]
    comparison = compare_checkpoints(names)
    first, last = comparison.evaluations
    assert list(first.ids) == list(last.ids)
    assert first.size == 20
    values = comparison.as_dict()
    assert [model["metrics"]["accuracy"] for model in values["models"]] == [
        first.mean("accuracy"),
        last.mean("accuracy"),
    ]
    change = values["differences"][0]["metrics"]["accuracy"]
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
        assert change["difference"] == 0.0
        assert change["high"] == -change["low"] <= 0.17  # z^2 / (20 + z^2) of a share, 0 of a mean
        assert change["questions"] == 20


def test_overrides_change_what_is_evaluated(finished: Path) -> None:
    comparison = compare_checkpoints([str(finished)], ["evaluation.size=5", "evaluation.samples=0", "evaluation.k=[1]"])
    assert comparison.evaluations[0].size == 5
    assert "pass@1" not in comparison.evaluations[0].values


def test_models_that_a_function_grades_are_compared_without_accuracy(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "graded.py").write_text("def half(completion):\n    return 0.5\n", encoding="utf-8")
    rewards = ["rewards.correctness.type=function", f"rewards.correctness.function={tmp_path}/graded.py:half"]
    comparison = compare_checkpoints([str(finished)], [*rewards, "evaluation.size=2", "run.grading_workers=0"])
    assert comparison.evaluations[0].mean("reward") == 0.5
    assert not {"accuracy", "extraction_failed"} & comparison.evaluations[0].values.keys()
    assert [notice.partition(":")[0] for notice in comparison.notices] == [
        "reward 'correctness' gives scores other than 0 and 1"
    ]


def test_a_notice_of_an_evaluation_has_no_secret_that_a_reward_was_given(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "leaky.py").write_text("def leak(completion, token):\n    raise ValueError(f'401 for {token}')\n")
    leaky = {"type": "function", "function": f"{tmp_path}/leaky.py:leak", "arguments": {"token": "tok-987-abc"}}
    settings = [f"rewards.leaky={json.dumps(leaky | {'weight': 0})}", "evaluation.size=2", "run.grading_workers=0"]
    progress = Watcher()
    compare_checkpoints([str(finished)], settings, progress=progress)
    assert "ValueError: 401 for [redacted]" in "".join(progress.notices)
    assert "tok-987-abc" not in "".join(progress.notices)


def test_a_size_given_here_counts_for_more_than_the_final_size_of_the_run(finished: Path, tmp_path: Path) -> None:
    run = other_run(finished, tmp_path, evaluation={"size": 2, "final_size": 7})
    sizes = [
        compare_checkpoints([run], overrides).evaluations[0].size
        for overrides in ([], ["evaluation.size=3"], ["evaluation.size=3", "evaluation.final_size=4"])
    ]
    assert sizes == [7, 3, 4]


def test_a_model_without_a_run_needs_to_be_told_the_task(finished: Path, tmp_path: Path) -> None:
    skipped = shutil.ignore_patterns("flatpeak.json", "manifest.json", "trainer")
    shutil.copytree(finished / "checkpoints" / "best", tmp_path / "model", ignore=skipped)
    with pytest.raises(UserError, match="the task is unknown: give"):
        compare_checkpoints([str(tmp_path / "model")])


def test_a_recipe_with_a_task_leaves_nothing_of_how_the_run_was_judged() -> None:
    run = load_recipe("flatpeak:camel_ai_judge")
    config = parse_config(evaluated_by(load_recipe("flatpeak:tasks/mmlu_pro"), run))
    assert list(config.rewards) == ["correctness", "robust"]
    assert (config.evaluation.accuracy_part, config.evaluation.metric) == ("correctness", "accuracy")
    assert (config.prompt.template, config.prompt.chat_template_kwargs) == ("plain", {})
    assert config.rollout.stop == ("Question:",)
    assert config.model.path == "Qwen/Qwen3-4B"


def test_a_recipe_without_a_task_changes_what_it_names() -> None:
    run = load_recipe("flatpeak:tasks/math", ["model.path=x"])
    config = parse_config(evaluated_by({"evaluation": {"temperature": 0.6}}, run))
    assert config.evaluation.temperature == 0.6
    assert config.task.type == "math"
    assert list(config.rewards) == ["correctness", "format"]


def test_a_new_model_is_not_made_again_from_the_text_of_another_task(finished: Path) -> None:
    with pytest.raises(UserError, match=r"base would be made again from the text of another task than its own"):
        compare_checkpoints([str(finished)], ["task.test_size=3"], stages=True)


def test_a_run_is_evaluated_by_another_recipe(finished: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "other.yaml"
    recipe.write_text(
        "task: {type: arithmetic, max_value: 3, train_size: 5, test_size: 4}\n"
        "rewards: {said: {type: number, extraction: whole}}\n"
        "rollout: {max_new_tokens: 2}\n"
        "evaluation: {accuracy: said, final_size: 3}\n"
    )
    evaluation = compare_checkpoints([str(finished)], recipe=str(recipe)).evaluations[0]
    assert evaluation.size == 3
    assert "said" in evaluation.values
    assert not [name for name in evaluation.values if name in ("correctness", "pass@2")]
    assert compare_checkpoints([str(finished)], ["evaluation.size=2"], recipe=str(recipe)).evaluations[0].size == 2


@pytest.mark.slow
def test_one_model_is_gone_before_the_next_is_loaded(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluators: list[weakref.ref[Any]] = []
    alive: list[int] = []
    real = comparison_module.open_evaluation

    @contextmanager
    def opened(*arguments: Any, **options: Any) -> Iterator[Any]:
        gc.collect()
        alive.append(sum(evaluator() is not None for evaluator in evaluators))
        with real(*arguments, **options) as evaluator:
            evaluators.append(weakref.ref(evaluator))
            yield evaluator

    monkeypatch.setattr(comparison_module, "open_evaluation", opened)
    compare_checkpoints([str(finished), str(finished)], ["evaluation.size=2"])
    assert alive == [0, 0]


def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run or model directory"):
        locate_model(str(tmp_path / "nothing"))
    assert locate_model("some/model").path == "some/model"


def test_a_run_stands_for_its_best_checkpoint(finished: Path) -> None:
    located = locate_model(str(finished))
    assert Path(located.path) == finished / "checkpoints" / "best"
    assert located.recipe == finished / "config.yaml"
    assert locate_model(str(finished / "checkpoints" / "step_000000")).recipe == finished.absolute() / "config.yaml"


def test_the_stages_of_a_run_begin_with_the_model_as_it_was(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    comparison = compare_checkpoints([str(finished)], stages=True)
    assert comparison.labels[:2] == ["base", "sft"]
    assert set(" = ".join(comparison.labels[1:]).split(" = ")) == {"sft", "best", "last"}
    by_stage = {row["stage"]: row for row in summary["evaluations"]}
    for label, stage in (("base", "start"), ("sft", "sft"), (comparison.labels[-1], "train")):
        result = comparison.evaluations[list(comparison.labels).index(label)]
        expected = {name: value for name, value in by_stage[stage]["metrics"].items() if name in result.values}
        assert result.metrics() == pytest.approx(expected), label
    assert len(comparison.as_dict()["differences"]) == len(comparison.labels) - 1


def test_stages_of_several_runs_are_told_apart_by_name(finished: Path) -> None:
    comparison = compare_checkpoints([str(finished), str(finished)], ["evaluation.size=3"], stages=True)
    half = len(comparison.labels) // 2
    assert comparison.labels[:half] == comparison.labels[half:]
    assert all(label.endswith(("base", "sft", "best", "last")) and "/" in label for label in comparison.labels)
    with pytest.raises(UserError, match=r"--stages .*step_000000: not a run's directory"):
        compare_checkpoints([str(finished / "checkpoints" / "step_000000")], stages=True)


def test_stages_without_sft_begin_at_step_0(tmp_path: Path) -> None:
    path = quick_train(tiny_recipe(tmp_path, training={"steps": 1}))
    stages = locate_stages(str(path))
    assert next(iter(stages)).startswith("base")
    assert stages[next(iter(stages))].path is not None
    assert "last" in list(stages)[-1]


def other_run(finished: Path, directory: Path, **sections: Any) -> str:
    """A copy of a run whose recipe says something else."""
    copy = directory / "other"
    shutil.copytree(finished, copy, symlinks=True)
    recipe = yaml.safe_load((copy / "config.yaml").read_text())
    for name, content in sections.items():
        recipe[name] = {**recipe[name], **content}
    (copy / "config.yaml").write_text(yaml.safe_dump(recipe))
    return str(copy)


def test_a_run_that_was_asked_otherwise_is_refused_until_somebody_says_how(finished: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.txt"
    template.write_text("0{question}")
    other = other_run(finished, tmp_path, prompt={"template": str(template)})
    with pytest.raises(UserError, match=r"was trained with prompt.template=.*t.txt, but the first model's recipe asks"):
        compare_checkpoints([str(finished), other], ["prompt.max_tokens=50"])  # which says nothing of the template
    comparison = compare_checkpoints([str(finished), other], ["prompt.template=plain", "evaluation.size=3"])
    assert [evaluation.size for evaluation in comparison.evaluations] == [3, 3]
    assert comparison.notices == []


def test_a_run_that_was_judged_otherwise_is_refused_until_somebody_says_how(finished: Path, tmp_path: Path) -> None:
    judged = {"correctness": {"type": "number", "extraction": "last_number"}}
    other = other_run(finished, tmp_path, rewards=judged)
    with pytest.raises(UserError, match=r"another reward correctness .*=last_number.*=whole"):
        compare_checkpoints(
            [str(finished), other], ["evaluation.size=3", "rewards.short={type: length, target: 1, limit: 2}"]
        )
    assert len(compare_checkpoints([str(finished), other], ["rewards.correctness.type=number"]).evaluations) == 2


def test_a_run_on_another_task_is_asked_the_first_ones_questions(finished: Path, tmp_path: Path) -> None:
    other = other_run(finished, tmp_path, task={"seed": 5})
    comparison = compare_checkpoints([str(finished), other], ["evaluation.size=4"])
    assert list(comparison.evaluations[0].ids) == list(comparison.evaluations[1].ids)
    assert len(comparison.notices) == 1
    assert "was trained on another task (arithmetic); it is asked the first one's questions" in comparison.notices[0]
    assert comparison.render().splitlines()[-1].strip()


def test_models_whose_context_holds_fewer_questions_are_compared_on_those(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flatpeak.apps import compare as module

    whole, left_out = module.open_evaluation, iter([slice(0, 8), slice(2, 10)])

    @contextmanager
    def open_with_fewer(*arguments: Any, **options: Any) -> Iterator[Any]:
        with whole(*arguments, **options) as evaluator:
            yield replace(evaluator, prompts=evaluator.prompts[next(left_out)])

    monkeypatch.setattr(module, "open_evaluation", open_with_fewer)
    result = compare_checkpoints([str(finished), str(finished)])
    assert [evaluation.size for evaluation in result.evaluations] == [6, 6]
    assert list(result.evaluations[0].ids) == list(result.evaluations[1].ids)
    assert result.notices == ["6 of 8 questions fit into every model's context; the tables are of those"]
    assert result.as_dict()["differences"][0]["metrics"]["accuracy"]["difference"] == 0.0


def test_robustness_of_models_that_answer_different_questions_is_left_out_with_a_notice() -> None:
    perturbed: Any = {"framing": object()}
    few = Evaluation(task="t", size=1, values={"accuracy": [1.0]}, ids=["a"], rows=[{"id": "a"}], robustness=perturbed)
    more = replace(few, size=2, values={"accuracy": [1.0, 0.0]}, ids=["a", "b"], rows=[{"id": "a"}, {"id": "b"}])
    for models in ([few, more], [more, few]):
        kept, notices = _on_common_questions(models)
        assert [one.robustness for one in kept] == [{}, {}]
        assert notices[1] == "perturbed questions and sharpness are of a model's whole set, and are left out"
        assert Comparison(labels=["a", "b"], evaluations=kept).render()
    assert _on_common_questions([few, few]) == ([few, few], [])


def test_rows_say_what_every_model_answered(finished: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(app, ["eval", str(finished), "evaluation.size=3", "--rows", str(file), "--json"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    accuracy = json.loads(done.stdout)["models"][0]["metrics"]["accuracy"]
    assert [float(row["answer"] == row["gold"]) for row in rows] == [row["scores"]["correctness"] for row in rows]
    assert sum(row["scores"]["correctness"] for row in rows) / 3 == pytest.approx(accuracy)
    missing = CliRunner().invoke(app, ["eval", str(finished), "--rows", str(tmp_path / "no" / "rows.jsonl")])
    assert "no directory" in str(missing.exception or missing.output)


def test_chat_answers_every_line_until_an_empty_one(finished: Path) -> None:
    asked = iter(["1+2=", "3+4=", ""])
    answers: list[Any] = []

    def read(prompt: str) -> str:
        return next(asked)

    chat_loop(str(finished), max_new_tokens=3, console=Console(read=read, write=answers.append))
    assert len(answers) == 2
    assert all(isinstance(answer, str) and len(answer) <= 3 for answer in answers)
    with pytest.raises(StopIteration):
        next(asked)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rich measures the terminal; tests have none."""
    monkeypatch.setenv("COLUMNS", "200")
    yield
