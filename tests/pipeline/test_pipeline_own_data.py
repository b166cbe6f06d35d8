"""`flatpeak.train` with a model, a data set and a reward, without a recipe; and its result in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flatpeak
from flatpeak.config.load import load_recipe, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.pipeline.request import (
    OWN_DATA,
    CallerObjects,
    RunRequest,
    code_digests,
    resolve_config,
    with_own_data,
)
from flatpeak.rewards.numeric_answer import NumberReward
from support.runs import Train, Watcher

ROWS = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(4) for b in range(4)]
SMALL: dict[str, Any] = {
    "training.steps": 2,
    "rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 4},
    "evaluation.every": 1,
}


def reward(completion: str, gold: str) -> float:
    return float(completion[:1] in "0123456789")


def read(recipe: Any = OWN_DATA, *, dataset: Any = None, settings: Any = None, **objects: Any) -> tuple[RunConfig, Any]:
    """The configuration and the objects of a call of flatpeak.train."""
    request = RunRequest(recipe=recipe, settings=settings, progress=None, resume=False, overwrite=False, command=None)
    request, given = with_own_data(request, CallerObjects(**objects), dataset)
    return resolve_config(request.recipe, request.settings), given


@pytest.fixture
def run(base: Path, train: Train, tmp_path: Path) -> flatpeak.RunResult:
    settings = {**SMALL, "run.directory": str(tmp_path / "runs")}
    return train(None, model=None, dataset=ROWS, reward=reward, settings={**settings, "model.path": str(base)})


def test_rows_and_a_reward_are_enough(run: flatpeak.RunResult) -> None:
    assert (run.summary.status, run.summary.last_step) == ("done", 2)
    assert run.summary.evaluations[-1].task == "dataset"
    assert run.path.name == "own_data"
    rollouts = run.rollouts(1)
    asked = {row["prompt"]: str(row["answer"]) for row in ROWS}
    assert all(asked[prompt] == gold for prompt, gold in zip(rollouts["prompt"], rollouts["gold"], strict=True))


def test_a_model_given_by_its_name_is_named_in_the_run(base: Path) -> None:
    config, objects = read(model=str(base), dataset=ROWS, settings={"run.name": "x"})
    assert (config.model.path, config.run.name, objects.model) == (str(base), "x", None)
    config, _ = read("flatpeak:demo", model=base, settings=["run.name=x", "model.new=null"])
    assert (config.model.path, config.run.name) == (str(base), "x")


@pytest.mark.parametrize(("template", "wording"), [(None, "plain"), ("{{ messages }}", "chat")])
def test_questions_are_worded_by_the_chat_template_if_there_is_one(
    make_tiny_model: Any, base: Path, template: str | None, wording: str
) -> None:
    _, tokenizer = make_tiny_model()
    tokenizer.chat_template = template
    given, _ = read(model=object(), tokenizer=tokenizer, dataset=ROWS)
    assert given.prompt.template == wording
    tokenizer.save_pretrained(base)
    named, _ = read(model=base, dataset=ROWS)
    assert named.prompt.template == wording
    chosen, _ = read(model=base, dataset=ROWS, settings={"prompt.template": "r1_zero"})
    assert chosen.prompt.template == "r1_zero"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({}, r"train\(\) needs a recipe, or a model and a data set: flatpeak.train\(model=NAME, dataset=rows"),
        ({"model": "x"}, r"train\(\) needs a recipe"),
        ({"dataset": ROWS, "task": object()}, "both are the data to train on"),
        ({"dataset": []}, "dataset has no rows"),
        (
            {"dataset": ["a?", "b?"]},
            "no column with gold answers, which the reward asks for, in its training rows: name it answer or ",
        ),
        ({"dataset": ["a?", "b?"], "reward": reward}, "dataset has no column with gold answers"),
        ({"dataset": ["a?", "b?"], "reward": {"x": reward}}, "dataset has no column with gold answers"),
        ({"dataset": {"train": ROWS, "test": ["a?"]}, "reward": reward}, "asks for, in its held-out rows"),
        ({"model": "no/such/model", "dataset": ROWS}, "model.path=no/such/model does not load"),
    ],
)
def test_a_call_that_lacks_something_says_what(call: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(**call)


@pytest.mark.parametrize(
    ("rewards", "accuracy", "metric"),
    [(("correctness", "style"), "auto", "accuracy"), (("style",), "style", "accuracy"), (("a", "b"), None, "reward")],
)
def test_rewards_by_name_say_what_is_right(rewards: tuple[str, ...], accuracy: str | None, metric: str) -> None:
    given = dict.fromkeys(rewards, lambda completion: 1.0)
    config, _ = read(dataset=["a?", "b?"], reward=given)
    assert (config.evaluation.accuracy, config.evaluation.metric) == (accuracy, metric)


@pytest.mark.slow  # whole runs
def test_a_result_has_its_figures_as_tables_and_plots(run: flatpeak.RunResult) -> None:
    assert repr(run).startswith(f"RunResult({run.path.as_posix()}: done after step 2, ")
    assert len(repr(run)) < len(str(run.path)) + 80
    metrics = run.metrics
    assert list(metrics[metrics["stage"] == "train"]["step"]) == [1, 2]
    assert len(run.rollouts()) == 8
    assert next(axes.get_title() for axes in run.plot().axes) == "reward/mean"
    (axes,) = run.plot("rollout/length_mean").axes
    assert list(axes.lines[0].get_xdata()) == [1, 2]
    with pytest.raises(UserError, match=r"no metric 'rollout/lenght_mean', did you mean 'rollout/length_mean'\?"):
        run.plot("rollout/lenght_mean")
    with pytest.raises(UserError, match="logged no rollouts of step 9; it has 1, 2"):
        run.rollouts(9)


@pytest.mark.slow  # whole runs
def test_a_run_made_before_is_loaded_from_its_directory(run: flatpeak.RunResult, tmp_path: Path) -> None:
    loaded = flatpeak.load_run(run.path)
    assert (loaded.path, loaded.report, loaded.exit_code, loaded.best) == (run.path, run.report, 0, run.best)
    assert repr(loaded) == repr(run)
    with pytest.raises(UserError, match="is not a run"):
        flatpeak.load_run(tmp_path)


def test_names_of_the_package_complete_in_a_notebook() -> None:
    assert {*flatpeak.__all__} <= {*dir(flatpeak)}


def test_the_recipe_of_such_a_call_trains_by_grpo() -> None:
    ours, grpo = (parse_config(load_recipe(f"flatpeak:{name}")) for name in ("own_data", "algorithms/grpo"))
    assert (ours.advantage, ours.objective) == (grpo.advantage, grpo.objective)


@pytest.mark.slow  # whole runs
def test_a_resumed_run_says_that_its_rows_have_changed(
    base: Path, train: Train, tmp_path: Path, watch: Callable[..., Watcher]
) -> None:
    settings = {**SMALL, "run.directory": str(tmp_path / "runs"), "model.path": str(base)}

    def notices(rows: list[dict[str, Any]], steps: int, **options: Any) -> list[str]:
        progress = watch()
        more = {**settings, "training.steps": steps}
        train(None, dataset=rows, reward=reward, settings=more, progress=progress, **options)
        return [text for text in progress.notices if "has changed since" in text]

    assert notices(ROWS, 1) == []
    assert notices([dict(row) for row in ROWS], 2, resume=True) == []
    [notice] = notices([{**row, "level": 1} for row in ROWS], 3, resume=True)
    assert notice.startswith("the data of dataset=... from Python has changed since the run was last started: ")


def test_sft_compares_with_replies_only_where_nothing_else_says_what_is_right() -> None:
    replied = {"role": "assistant", "content": "We add: 2."}
    chat = [{"messages": [{"role": "user", "content": f"{n}+1?"}, replied]} for n in range(9)]

    def types(dataset: Any, **given: Any) -> tuple[str, set[str]]:
        request, objects = with_own_data(RunRequest(recipe=OWN_DATA), CallerObjects(**given), dataset, sft=True)
        config = resolve_config(request.recipe, request.settings)
        return config.rewards["correctness"].type, {one.gold for one in objects.task.train}

    assert types(chat) == ("exact", {"We add: 2."})
    assert types([{**row, "answer": "2"} for row in chat]) == ("math", {"2"})
    assert types(chat, reward=lambda completion: 1.0) == ("math", {""})
    with pytest.raises(UserError, match="no column with gold answers"):
        read(dataset=chat)


def test_a_reward_from_python_is_recorded_by_its_text() -> None:
    config, objects = read(dataset=ROWS, reward={"right": (reward, 0.5), "other": lambda completion: 1.0})
    digests = code_digests(config, objects)
    assert digests.keys() == {"rewards.right"}
    assert code_digests(*read(dataset=ROWS, reward=reward))["rewards"] == digests["rewards.right"]
    assert code_digests(*read(dataset=ROWS, reward=read)) != digests
    assert code_digests(*read(dataset=ROWS, reward=NumberReward())) == {}


@pytest.mark.slow  # a whole run
def test_sft_on_chat_messages_needs_neither_reward_nor_gold_answers(
    make_tiny_model: Any, watch: Callable[..., Watcher], tmp_path: Path
) -> None:
    model, tokenizer = make_tiny_model()
    rows = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": str(row["answer"])}]}
        for row in ROWS
    ]
    progress = watch()
    result = flatpeak.sft(
        model=model,
        tokenizer=tokenizer,
        dataset=rows,
        settings={"sft.steps": 1, "rollout.max_new_tokens": 4, "run.directory": str(tmp_path)},
        progress=progress,
    )
    assert (result.summary.status, result.summary.evaluations[-1].metrics.keys() >= {"accuracy"}) == ("done", True)
    assert any("the share of answers that equal the assistant's last messages" in text for text in progress.notices)


@pytest.mark.slow  # whole runs
def test_errors_of_a_call_from_python_name_its_arguments(
    run: flatpeak.RunResult, base: Path, train: Train, tmp_path: Path
) -> None:
    settings = {**SMALL, "run.directory": str(tmp_path / "runs"), "model.path": str(base)}
    with pytest.raises(UserError, match="exists: continue it with resume=True, delete it with overwrite=True, or "):
        train(None, dataset=ROWS, reward=reward, settings=settings)
    with pytest.raises(UserError, match="resume=True continues a run and overwrite=True deletes it"):
        train(None, dataset=ROWS, reward=reward, settings=settings, resume=True, overwrite=True)
    with pytest.raises(UserError, match="exists: continue it with --resume, delete it with --overwrite"):
        train(None, dataset=ROWS, reward=reward, settings=settings, command=["flatpeak", "train"])
