"""The shipped recipes of science, puzzles and preferences, on small rows of our own in the published layouts."""

import json
import zipfile

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import TypeAdapter

from flatpeak.config.load import load_recipe
from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.rewards.config import RewardConfig
from flatpeak.tasks.config import TaskConfig, build_task
from flatpeak.tasks.prompts import PromptConfig

NAMES = ["camel_ai", "countdown", "dr_sci", "preferences", "reasoning_gym"]


def task_of(name, *overrides):
    recipe = load_recipe(f"flatpeak:tasks/{name}", overrides)
    return build_task(TypeAdapter(TaskConfig).validate_python(recipe["task"]))


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_known_keys_only(name):
    recipe = load_recipe(f"flatpeak:tasks/{name}")
    assert set(recipe) - {"evaluation"} == {"task", "prompt", "rewards", "rollout"}
    assert TypeAdapter(TaskConfig).validate_python(recipe["task"]).type == name
    PromptConfig.model_validate(recipe["prompt"])
    evaluation = EvaluationConfig.model_validate(recipe.get("evaluation", {}))
    assert evaluation.accuracy_part in {None, *recipe["rewards"]}
    TypeAdapter(dict[str, RewardConfig]).validate_python(recipe["rewards"])


def question(number):
    # In letters: questions that differ in numbers alone are near duplicates.
    name = "".join(chr(ord("a") + int(digit)) for digit in f"{number:03d}")
    return f"Which force holds star{name} to moon{name} while rock{name} falls on dust{name}?"


@pytest.fixture
def overlap(tmp_path):
    (tmp_path / "pro.jsonl").write_text(json.dumps({"question": question(7)}) + "\n")
    return [f"task.overlap.sources.0.path={tmp_path / 'pro.jsonl'}", "task.overlap.sources.0.hub=null"]


def test_camel_ai_reads_three_zips_and_leaves_the_overlap_out(tmp_path, overlap):
    for start, subject in enumerate(("biology", "chemistry", "physics")):
        with zipfile.ZipFile(tmp_path / f"{subject}.zip", "w") as archive:
            for number in range(100 * start, 100 * start + 100):
                row = {"role_1": "R", "topic;": f"t{number % 10}", "sub_topic": f"s{number}"}
                row |= {"message_1": question(number), "message_2": "Gravity."}
                archive.writestr(f"{number:03d}.json", json.dumps(row))
    task = task_of("camel_ai", f"task.path={tmp_path}", *overlap)
    assert len(task.train) + len(task.test) == 299
    assert question(7) not in {example.question for example in task.train}
    assert {example.subsets["subject"] for example in task.train} == {"biology", "chemistry", "physics"}


def test_dr_sci_reads_the_open_ended_file(tmp_path, overlap):
    rows = [
        {
            "prompt": [{"role": "user", "content": question(number)}],
            "reward_model": {"ground_truth": "Gravity.", "rubric": [{"title": "a", "description": "b", "weight": 1}]},
            "extra_info": {"question": question(number), "subject": "physics"},
        }
        for number in range(400)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "Dr_SCI_open-ended.parquet")
    task = task_of("dr_sci", f"task.path={tmp_path}", *overlap)
    assert len(task.train) + len(task.test) == 399
    assert 0 < len(task.test) < 20


def test_countdown_has_the_published_sizes_and_can_be_smaller():
    task = task_of("countdown", "task.train_size=100", "task.test_size=10")
    assert (len(task.train), len(task.test)) == (100, 10)
    assert load_recipe("flatpeak:tasks/countdown")["task"]["train_size"] == 327_680


def test_reasoning_gym_can_be_pointed_at_one_data_set():
    pytest.importorskip("reasoning_gym")
    task = task_of("reasoning_gym", "task.size=30", "task.test_size=6")
    assert {example.subsets["dataset"] for example in task.test} == {"chain_sum", "leg_counting", "spell_backward"}
    one = task_of("reasoning_gym", "task.datasets=null", "task.dataset=gcd", "task.size=3", "task.test_size=1")
    assert {example.subsets["dataset"] for example in one.train} == {"gcd"}


def test_preferences_read_alpaca_farms_columns_from_a_file(tmp_path):
    rows = [
        {
            "instruction": f"Name {n} trees.",
            "input": "",
            "output_1": "Oak.",
            "output_2": "Elm.",
            "preference": 1 + n % 2,
        }
        for n in range(100)
    ]
    (tmp_path / "preference.json").write_text(json.dumps(rows))
    task = task_of("preferences", f"task.path={tmp_path / 'preference.json'}")
    assert task.name == "alpaca_farm"
    assert len(task.train) + len(task.test) == 100
    assert {example.gold for example in task.train} == {"Oak.", "Elm."}
