"""The task recipes that ship with the package, on small rows in each data set's layout."""

import importlib
import json
import os
import pkgutil
from importlib.resources import files
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import TypeAdapter

import flatpeak.tasks
from flatpeak.rewards.config import RewardConfig
from flatpeak.tasks.config import TaskConfig, build_task
from flatpeak.tasks.prompts import PromptConfig

ROOT = Path(__file__).parents[2]
FOLDER = Path(str(files("flatpeak"))) / "recipes" / "tasks"
UNION = get_args(get_args(TaskConfig)[0])
NAMES = sorted(entry.name.removesuffix(".yaml") for entry in FOLDER.iterdir())
WORDS = ["amber", "basin", "cedar", "delta", "ember", "fjord", "glade", "heath", "islet", "knoll"]


def recipe(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def task_from_files(name, paths):
    """The recipe's task with each source's file given, as `task.train.0.path=FILE task.train.0.hub=null` would."""
    task = recipe(name)["task"]
    for (side, position), path in paths.items():
        task[side][position] |= {"path": str(path), "hub": None}
    return build_task(TypeAdapter(TaskConfig).validate_python(task))


@pytest.fixture
def layouts(tmp_path):
    """One file per layout; the questions of a file are unlike each other."""

    def texts(kind):
        return [
            f"{kind} {a} {b} {a}{b} {kind}{a}{b} holds {i} stones."
            for i, (a, b) in enumerate(zip(WORDS, WORDS[1:] + WORDS[:1], strict=True))
        ]

    asdiv = [
        {"body": t, "question": "How many? ", "answer": f"{i} (stones)", "formula": f"{i}+0={i}"}
        for i, t in enumerate(texts("north"))
    ]
    odd = ("3:30 p.m.", "6th", "2:3", "Monday", "1/2", "1.5 (kg)")
    asdiv += [{"body": f"odd {a}", "question": "What?", "answer": a, "formula": "x"} for a in odd]
    asdiv += [{"body": "plain bare", "question": "What?", "answer": "1,250", "formula": "x"}]
    mawps = [{"input": t + " How many ?", "target": float(i), "type": "t"} for i, t in enumerate(texts("south"))]
    mawps += [{"input": "half of one ?", "target": 0.5, "type": "t"}, mawps[0]]
    svamp = [
        {"ID": f"chal-{i}", "Body": t, "Question": "How many?", "Equation": f"( {i}.0 + 1.0 )", "Answer": i + 1.0}
        for i, t in enumerate(texts("west"))
    ]
    svamp[0]["Body"] = mawps[0]["input"].removesuffix(" How many ?").replace("0", "77")
    paths = {}
    for name, rows in (("asdiv", asdiv), ("mawps", mawps), ("svamp", svamp)):
        paths[name] = tmp_path / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def missing_pieces(config):
    """What adding a task takes and this one lacks, beyond its file: see "Adding to it" in docs/architecture.md."""
    name = config.model_fields["type"].default
    recipes = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in FOLDER.parent.rglob("*.yaml")]
    if name != "custom" and name not in {(content.get("task") or {}).get("type") for content in recipes}:
        yield f"a recipe with `task.type: {name}` in src/flatpeak/recipes/tasks/"
    docs = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("tasks.md", "recipes.md"))
    if not any(mention in docs for mention in (f"`{name}`", f"type: {name}`", f"type: {name}\n", f"`tasks/{name}`")):
        yield f"a mention of `{name}` in docs/tasks.md"
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    if config.__name__ not in tests and f'"type": "{name}"' not in tests:
        yield f"a test of {config.__name__} in tests/tasks/"


def test_every_task_has_a_recipe_a_mention_in_the_docs_and_a_test():
    assert {config.__name__: list(missing_pieces(config)) for config in UNION if any(missing_pieces(config))} == {}


def test_every_configuration_that_loads_a_task_is_in_the_union():
    modules = [
        importlib.import_module(f"flatpeak.tasks.{module.name}")
        for module in pkgutil.iter_modules(flatpeak.tasks.__path__)
    ]
    loadable = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "load")
    }
    assert {config.__name__ for config in loadable - set(UNION)} == set(), "add it to TaskConfig in tasks/config.py"


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_known_keys_only(name):
    content = recipe(name)
    assert set(content) <= {"task", "prompt", "rewards", "rollout", "evaluation"}
    TypeAdapter(TaskConfig).validate_python(content["task"])
    PromptConfig.model_validate(content["prompt"])
    TypeAdapter(dict[str, RewardConfig]).validate_python(content["rewards"])


def test_arithmetic_builds_from_nothing():
    task = build_task(TypeAdapter(TaskConfig).validate_python(recipe("arithmetic")["task"]))
    assert (len(task.train), len(task.test)) == (8000, 500)


def test_asdiv_takes_whole_numbers_and_nothing_that_only_starts_with_one(layouts):
    task = task_from_files("asdiv", {("train", 0): layouts["asdiv"]})
    by_id = {e.id: e for e in (*task.train, *task.test)}
    assert sorted(by_id, key=int) == [*map(str, range(10)), "16"]
    assert by_id["3"].gold == "3"
    assert by_id["16"].gold == "1250"
    assert by_id["3"].question.endswith("holds 3 stones. How many?\n")
    assert by_id["3"].rationale == "3+0=3\n#### 3"


def test_mawps_drops_decimals_and_repeated_problems(layouts):
    task = task_from_files("mawps", {("train", 0): layouts["mawps"]})
    by_id = {e.id: e for e in (*task.train, *task.test)}
    assert sorted(by_id, key=int) == [*map(str, range(10))]
    assert (by_id["4"].gold, by_id["4"].rationale) == ("4", "#### 4")


def test_svamp_joins_body_and_question(layouts):
    task = task_from_files("svamp", {("train", 0): layouts["svamp"], ("test", 0): layouts["svamp"]})
    assert (len(task.train), len(task.test)) == (10, 10)
    assert task.train[2].id == "train.0/chal-2"
    assert task.train[2].question.endswith("holds 2 stones. How many?\n")
    assert task.train[2].rationale == "( 2.0 + 1.0 ) = 3\n#### 3"
    assert all(e.columns["near_train"] for e in task.test)


def test_word_problems_trains_on_two_sets_and_marks_what_a_third_repeats(layouts):
    positions = {("train", 0): "mawps", ("train", 1): "asdiv", ("test", 0): "svamp"}
    task = task_from_files("word_problems", {place: layouts[name] for place, name in positions.items()})
    assert task.name == "word_problems"
    assert [e.id.split("/")[0] for e in task.train].count("train.0") == 10
    assert [e.id.split("/")[0] for e in task.train].count("train.1") == 11
    assert {e.rationale for e in task.train if e.gold == "3"} == {"#### 3"}
    assert [e.columns["near_train"] for e in task.test] == [True] + [False] * 9


@pytest.mark.skipif("FLATPEAK_DATA" not in os.environ, reason="FLATPEAK_DATA names no folder of data sets")
def test_the_published_data_sets_load():
    data = Path(os.environ["FLATPEAK_DATA"])
    gsm8k = build_task(TypeAdapter(TaskConfig).validate_python({"type": "gsm8k", "path": str(data / "gsm8k")}))
    assert (len(gsm8k.train), len(gsm8k.test)) == (7473, 1319)
    asdiv, mawps, svamp = (data / name / "test.jsonl" for name in ("asdiv", "mawps", "svamp"))
    for name, path, distinct in (("asdiv", asdiv, 2023), ("mawps", mawps, 1617)):
        task = task_from_files(name, {("train", 0): path})
        assert len(task.train) + len(task.test) == distinct
    task = task_from_files("word_problems", {("train", 0): mawps, ("train", 1): asdiv, ("test", 0): svamp})
    assert (len(task.train), len(task.test)) == (3401, 1000)
    assert sum(e.columns["near_train"] for e in task.test) == 303
