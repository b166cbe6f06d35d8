import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

from flatpeak.config import load as recipe
from flatpeak.config.error_messages import known_keys
from flatpeak.config.foreign_names import FOREIGN_NAMES
from flatpeak.config.load import (
    apply_overrides,
    apply_settings,
    load_recipe,
    merge,
    parse_config,
    parse_value,
    read_recipe,
    shipped_recipes,
)
from flatpeak.errors import UserError
from flatpeak.tasks.config import TaskConfig
from flatpeak.training.config import PolicyLossName
from support.recipes import unsaid

TASK_TYPES = ", ".join(config.model_fields["type"].default for config in get_args(get_args(TaskConfig)[0]))

BOMB = "[&a [x], " + "".join(f"&{b} [{', '.join(['*' + a] * 10)}], " for a, b in pairwise("abcdefghij")) + "end]"
"""A billion values in 500 characters."""
MODEL = {"model": {"path": "somewhere"}}


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A package with recipes of our own."""
    folder = tmp_path / "package"
    put(folder / "algorithms" / "dr_grpo.yaml", "objective: {normalization: constant}\nadvantage: {scale: none}\n")
    put(folder / "demo.yaml", "extends: algorithms/dr_grpo\nrun: {name: demo}\n")
    monkeypatch.setattr(recipe, "RECIPES", folder)
    return folder


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("3", 3),
        ("1_000", 1000),
        ("0x1f", 31),
        (".inf", float("inf")),
        ("true", True),
        ("False", False),
        ("null", None),
        ("", None),
        ("no", "no"),
        ("2026-01-01", "2026-01-01"),
        ("1:30", "1:30"),
        ("007", "007"),
        ("[1, 2e-3, a]", [1, 2e-3, "a"]),
        ("{type: bpe, vocab_size: 99}", {"type": "bpe", "vocab_size": 99}),
        ("{a}{op}{b}=", "{a}{op}{b}="),
        ("{answer}", "{answer}"),
        ("{q}: {a}", "{q}: {a}"),
        ("Note: be brief #1", "Note: be brief #1"),
        ("*", "*"),
        ("'5'", "5"),
        ('"a\\nb"', "a\nb"),
    ],
)
def test_a_value_of_the_command_line_means_what_it_looks_like(text, value):
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_numbers_and_words_in_a_file_mean_what_they_look_like(tmp_path):
    path = put(tmp_path / "r.yaml", "a: 1e-5\nb: [1.5, 2e3, no, 1_000]\nc: 12:30\nd: ~\ne:\n")
    assert load_recipe(path) == {"a": 1e-5, "b": [1.5, 2000.0, "no", 1000], "c": "12:30", "d": None, "e": None}


def test_mappings_merge_and_lists_are_replaced():
    base = {"a": {"x": 1, "y": {"z": 2}}, "b": [1, 2], "c": 3}
    assert merge(base, {"a": {"y": {"w": 4}}, "b": [5], "d": None}) == {
        "a": {"x": 1, "y": {"z": 2, "w": 4}},
        "b": [5],
        "c": 3,
        "d": None,
    }
    assert base == {"a": {"x": 1, "y": {"z": 2}}, "b": [1, 2], "c": 3}


def test_another_type_replaces_a_section_and_the_same_type_merges_into_it():
    base = {"task": {"type": "arithmetic", "max_value": 9, "seed": 1}}
    assert merge(base, {"task": {"type": "gsm8k", "path": "x"}}) == {"task": {"type": "gsm8k", "path": "x"}}
    assert merge(base, {"task": {"type": "arithmetic", "seed": 2}}) == {
        "task": {"type": "arithmetic", "max_value": 9, "seed": 2}
    }
    assert merge(base, {"task": {"seed": 2}})["task"] == {"type": "arithmetic", "max_value": 9, "seed": 2}


def test_a_recipe_extends_others_relative_to_its_own_file(tmp_path):
    put(tmp_path / "base" / "a.yaml", "x: 1\ny: {p: 1, q: 1}\n")
    put(tmp_path / "base" / "b.yaml", "extends: a.yaml\ny: {q: 2}\n")
    put(tmp_path / "other.yml", "y: {q: 3, r: 3}\nz: 3\n")
    path = put(tmp_path / "run.yaml", "extends: [base/b, other.yml]\ny: {r: 4}\n")
    assert load_recipe(path) == {"x": 1, "y": {"p": 1, "q": 3, "r": 4}, "z": 3}


def test_two_recipes_may_share_a_base(tmp_path):
    put(tmp_path / "a.yaml", "x: 1\n")
    put(tmp_path / "b.yaml", "extends: a\ny: 1\n")
    put(tmp_path / "c.yaml", "extends: a\nx: 2\n")
    assert load_recipe(put(tmp_path / "d.yaml", "extends: [b, c]\n")) == {"x": 2, "y": 1}


def test_a_circle_is_refused_and_shown(tmp_path):
    put(tmp_path / "a.yaml", "extends: b\n")
    put(tmp_path / "b.yaml", "extends: c\n")
    put(tmp_path / "c.yaml", "extends: b\n")
    with pytest.raises(UserError, match=r"circle: .*b\.yaml -> .*c\.yaml -> .*b\.yaml"):
        load_recipe(tmp_path / "a.yaml")


def test_shipped_recipes_are_found_with_and_without_ending(shipped, tmp_path):
    expected = {"objective": {"normalization": "constant"}, "advantage": {"scale": "none"}, "run": {"name": "demo"}}
    assert load_recipe("flatpeak:demo") == load_recipe("flatpeak:demo.yaml") == expected
    mine = put(tmp_path / "mine.yaml", "extends: flatpeak:algorithms/dr_grpo\nadvantage: {scale: std}\n")
    assert load_recipe(mine) == {"objective": {"normalization": "constant"}, "advantage": {"scale": "std"}}
    assert shipped_recipes() == ["flatpeak:algorithms/dr_grpo", "flatpeak:demo"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("flatpeak:dr_grpo", "did you mean flatpeak:algorithms/dr_grpo?"),
        ("flatpeak:demmo", "did you mean flatpeak:demo?"),
        ("flatpeal:demo", "did you mean flatpeak:demo?"),
        ("runs/demo.yaml", "did you mean flatpeak:demo?"),
        ("nothing/like/it.yaml", "give a YAML file or a shipped recipe"),
    ],
)
def test_a_missing_recipe_is_named_with_the_nearest_shipped_ones(shipped, name, hint):
    with pytest.raises(UserError) as error:
        load_recipe(name)
    assert f"recipe {name} not found" in str(error.value)
    assert hint in str(error.value)


def test_a_missing_base_names_the_recipe_that_asks_for_it(tmp_path):
    with pytest.raises(UserError, match=r"recipe gone not found \(extended by .*a\.yaml\)"):
        load_recipe(put(tmp_path / "a.yaml", "extends: gone\n"))


@pytest.mark.parametrize("name", ["", " ", "flatpeak:"])
def test_a_recipe_without_a_name_is_an_error(name):
    with pytest.raises(UserError, match=r"has no name: give a YAML file or a shipped recipe, such as flatpeak:demo$"):
        load_recipe(name)


@pytest.mark.parametrize("name", [".", "..", "/", "flatpeak:.", "flatpeak:..", "flatpeak:/", "flatpeak:tasks"])
def test_the_name_of_a_directory_is_an_error(name):
    with pytest.raises(UserError, match=rf"^recipe {name} is a directory, not a recipe: "):
        load_recipe(name)


def test_a_directory_is_no_recipe(tmp_path):
    with pytest.raises(UserError, match="is a directory, not a recipe"):
        load_recipe(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\nc: 2\n", r"r\.yaml:3: broken YAML"),
        ("a:\n\tb: 1\n", r"r\.yaml:2: broken YAML"),
        ("a: 1\nb: {x: 1}\na: 2\n", r"r\.yaml:3: broken YAML: the key 'a' is given twice"),
        ("- a\n", r"r\.yaml: a recipe is a mapping of sections, this is a list"),
        ("extends: {a: b}\n", "extends must be the name of a recipe or a list"),
        ("a: !!python/object/apply:os.system [true]\n", r"r\.yaml:1: broken YAML"),
    ],
)
def test_broken_yaml_is_told_with_its_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load_recipe(put(tmp_path / "r.yaml", text))


def test_an_empty_recipe_is_empty(tmp_path):
    assert load_recipe(put(tmp_path / "r.yaml", "# nothing\n")) == {}


def test_overrides_set_merge_and_index():
    base = {"task": {"type": "rows", "train": [{"path": "a"}, {"path": "b", "id": "n"}]}, "kl": None}
    overrides = ["task.train.1.path=c", "optimizer.learning_rate=1e-5", "kl.coefficient=0.1", "evaluation.k=[1, 4]"]
    assert apply_overrides(base, overrides) == {
        "task": {"type": "rows", "train": [{"path": "a"}, {"path": "c", "id": "n"}]},
        "kl": {"coefficient": 0.1},
        "optimizer": {"learning_rate": 1e-5},
        "evaluation": {"k": [1, 4]},
    }
    assert base["task"]["train"][1]["path"] == "b"


def test_the_first_element_of_a_missing_list_makes_it():
    overrides = ["task.train.0.path=a.jsonl", "task.type=rows", "task.train.0.answer=label", "rollout.stop.0=x"]
    assert apply_overrides({"task": {"type": "gsm8k"}}, overrides) == {
        "task": {"type": "rows", "train": [{"path": "a.jsonl", "answer": "label"}]},
        "rollout": {"stop": ["x"]},
    }
    with pytest.raises(UserError, match=r"must be a list; its first element is task\.train\.0$"):
        parse_config(apply_overrides(MODEL, ["task.type=rows", "task.train.1.path=a.jsonl"]))


def test_a_type_given_after_its_settings_does_not_lose_them():
    base = {"task": {"type": "arithmetic", "max_value": 9}}
    assert apply_overrides(base, ["task.path=x", "task.type=gsm8k"]) == {"task": {"type": "gsm8k", "path": "x"}}
    assert apply_overrides(base, ["task.seed=1", "task.type=arithmetic"]) == {
        "task": {"type": "arithmetic", "max_value": 9, "seed": 1}
    }


def test_the_last_of_two_overrides_wins_and_a_value_may_hold_equal_signs():
    resolved = apply_overrides({}, ["a.b=1", "a.b=2", "task.question={a}{op}{b}="])
    assert resolved == {"a": {"b": 2}, "task": {"question": "{a}{op}{b}="}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "write key.path=value"),
        ("=3", "write key.path=value"),
        ("a..b=3", "write key.path=value"),
        ("extends=flatpeak:demo", "extends belongs in a recipe"),
        ("rows.2.path=x", r"rows\.2: rows is a list with elements 0 to 1; give all of it .* rows=\[\.\.\.\]"),
        ("rows.first=x", r"rows\.first: rows is a list with elements 0 to 1"),
        ("name.x=3", r"name\.x: name is 'demo', which has no keys"),
        ("a='open", "is not a YAML value"),
    ],
)
def test_an_override_that_cannot_be_applied_says_why(override, message):
    with pytest.raises(UserError, match=message):
        apply_overrides({"rows": [{"path": "a"}, 1], "name": "demo"}, [override])


def test_the_first_element_makes_an_empty_list_longer_as_it_makes_an_absent_one():
    empty = {"rollout": {"stop": []}}
    for base in ({}, {"rollout": {"stop": None}}, empty):
        assert apply_overrides(base, ["rollout.stop.0=x"]) == {"rollout": {"stop": ["x"]}}
    assert empty == {"rollout": {"stop": []}}


def test_settings_have_dotted_keys_or_sections_and_values_as_they_are():
    base = {"task": {"type": "rows", "train": [{"path": "a"}]}, "rollout": {"stop": ["x"], "group_size": 4}}
    settings = {"training.steps": 2, "rollout": {"group_size": 8}, "task.train.0.path": "no", "prompt.system": "1e-5"}
    assert apply_settings(base, settings) == {
        "task": {"type": "rows", "train": [{"path": "no"}]},
        "rollout": {"stop": ["x"], "group_size": 8},
        "training": {"steps": 2},
        "prompt": {"system": "1e-5"},
    }
    assert base["rollout"]["group_size"] == 4
    assert apply_settings(base, ["rollout.group_size=8"]) == apply_settings(base, "rollout.group_size=8")
    assert apply_settings(base, {"rollout.stop": None})["rollout"] == {"stop": None, "group_size": 4}
    assert apply_settings(base, {}) == apply_settings(base, []) == base


def test_a_type_among_settings_replaces_its_section_wherever_it_stands():
    base = {"task": {"type": "arithmetic", "max_value": 9}}
    wanted = {"task": {"type": "gsm8k", "path": "x"}}
    assert apply_settings(base, {"task.path": "x", "task.type": "gsm8k"}) == wanted
    assert apply_settings(base, {"task": {"type": "gsm8k", "path": "x"}}) == wanted


def test_settings_drop_what_they_leave_without_effect_and_keep_what_they_say():
    base = {"objective": {"loss": "clipped_surrogate", "clip_high": 0.3}}
    assert apply_settings(base, {"objective": {"loss": "policy_gradient"}}) == {
        "objective": {"loss": "policy_gradient"}
    }
    contradicting = apply_settings(base, {"objective.loss": "policy_gradient", "objective.clip_high": 0.4})
    with pytest.raises(UserError, match=r"objective\.clip_high=0\.4 has no effect"):
        parse_config(contradicting | MODEL)


@pytest.mark.parametrize("key", ["", "a..b", 3, None, ".a"])
def test_a_key_of_settings_that_is_none_is_shown(key):
    with pytest.raises(UserError, match=f"setting {key!r}: write key.path=value"):
        apply_settings({}, {key: 1})
    with pytest.raises(UserError, match="setting 'extends': extends belongs in a recipe"):
        apply_settings({}, {"extends": "flatpeak:demo"})


def test_a_mapping_extends_recipes_like_a_file(shipped, tmp_path, monkeypatch):
    put(tmp_path / "base.yaml", "extends: flatpeak:demo\nadvantage: {scale: batch_std}\n")
    monkeypatch.chdir(tmp_path)
    given = {"extends": ["base", "flatpeak:algorithms/dr_grpo"], "run": {"seed": 3}, "model": {"path": "somewhere"}}
    wanted = {
        "objective": {"normalization": "constant"},
        "advantage": {"scale": "none"},
        "run": {"name": "demo", "seed": 3},
        "model": {"path": "somewhere"},
    }
    assert read_recipe(given) == wanted
    assert read_recipe(given, {"run.seed": 4})["run"] == {"name": "demo", "seed": 4}
    assert "extends" in given
    assert read_recipe({"extends": tmp_path / "base.yaml"})["advantage"] == {"scale": "batch_std"}
    assert read_recipe("base", ["run.seed=5"])["run"] == {"name": "demo", "seed": 5}
    assert read_recipe({"extends": None, **MODEL}) == read_recipe(MODEL) == MODEL
    for wrong in (3, {"a": "b"}, [["base"]]):
        with pytest.raises(UserError, match="the recipe: extends must be the name of a recipe or a list of names"):
            read_recipe({"extends": wrong})
    with pytest.raises(UserError, match="recipe flatpeak:dmo not found: did you mean flatpeak:demo"):
        read_recipe({"extends": "flatpeak:dmo"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"optimizer": {"lerning_rate": 1}},
            "unknown key optimizer.lerning_rate: did you mean optimizer.learning_rate?",
        ),
        ({"optimiser": {}}, "unknown key optimiser: did you mean optimizer?"),
        (
            {"temperature": 1},
            "unknown key temperature: did you mean rollout.temperature or evaluation.temperature or "
            "rewards.<name>.temperature?",
        ),
        (
            {"task": {"type": "gsm8k", "pth": 1}},
            "unknown key task.pth: did you mean task.path?",
        ),
        (
            {"task": {"type": "rows", "train": [{"path": "a"}, {"quesion": "b"}]}},
            "unknown key task.train.1.quesion: did you mean task.train.1.question?",
        ),
        (
            {"rewards": {"mine": {"type": "number", "wieght": 2}}},
            "unknown key rewards.mine.wieght: did you mean rewards.mine.weight?",
        ),
        (
            {"curriculum": {"task": {"type": "arithmetic", "max_val": 1}, "steps": 1}},
            "unknown key curriculum.task.max_val: did you mean curriculum.task.max_value?",
        ),
        (
            {"reference": {"zzz": 1}},
            "unknown key reference.zzz: the keys of reference are model, keep, reset_every, reset_at_kl, "
            "reset_optimizer, offload (flatpeak settings reference explains them)",
        ),
        (
            {"task": {"type": "custom", "factory": "a.py:b", "zzzz": 1}},
            "unknown key task.zzzz: the keys of task are type, factory, arguments (flatpeak settings task.type=custom "
            "explains them)",
        ),
        (
            {"tracking": {"trackio": {"zzzz": 1}}},
            "unknown key tracking.trackio.zzzz: the keys of tracking.trackio are project (flatpeak settings "
            "tracking.trackio explains them)",
        ),
        (
            {"objective": {"loss": "cliped_surrogate"}},
            "objective.loss=cliped_surrogate: did you mean clipped_surrogate? allowed values are "
            + ", ".join(get_args(PolicyLossName))
            + ", or a function: file.py:name",
        ),
        (
            {"task": {"type": "rows", "train": "x.jsonl"}},
            "task.train=x.jsonl: must be a list, such as [x.jsonl]",
        ),
        (
            {"task": {"type": "gsm"}},
            f"task.type=gsm: did you mean gsm8k? allowed values are {TASK_TYPES}",
        ),
        (
            {"task": {"max_value": 3}},
            f"task.type is missing: give one of {TASK_TYPES}",
        ),
        ({"run": None}, "run=None: must be a section with keys of its own"),
        ({"training": {"steps": -1}}, "training.steps=-1: input should be greater than or equal to 0"),
        (
            {"sft": {"optimizer": {"learning_rate": "fast"}}},
            "sft.optimizer.learning_rate=fast: must be a number",
        ),
        ({"training": {"steps": 1.5}}, "training.steps=1.5: must be a whole number"),
        ({"training": {"steps": "many"}}, "training.steps=many: must be a whole number"),
        ({"reference": {"keep": "maybe"}}, "reference.keep=maybe: must be true or false"),
        (
            {"run": {"name": 2026}},
            'run.name=2026: must be a text: "2026" in a file, \'run.name="2026"\' on the command line',
        ),
        ({"run": {"name": ["a"]}}, "run.name=['a']: must be a text"),
        ({"rollout": {"stop": "[a"}}, "rollout.stop=[a: must be a list; its brackets do not match"),
        ({"task": {"type": "rows", "train": []}}, "task.train=[]: give at least 1"),
        (
            {"curriculum": {"task": {"type": "gsm8k"}}},
            "curriculum.steps is missing: give it in the recipe or as an override",
        ),
        (
            {"model": {"path": "x", "new": {}}},
            "give one of model.path (a directory or Hub name) and model.new, not both",
        ),
        (
            {"training": {"stepps": 1}, "kl": {"estimator": "k4"}},
            "kl.estimator=k4: allowed values are k1, k2, k3; unknown key training.stepps: did you mean training.steps?",
        ),
    ],
)
def test_a_wrong_recipe_is_one_line_with_the_key_and_what_would_be_right(content, message):
    with pytest.raises(UserError) as error:
        parse_config(MODEL | content)
    assert str(error.value) == message


def test_a_bad_element_is_not_also_reported_as_a_list_too_short():
    with pytest.raises(UserError) as error:
        parse_config(MODEL | {"task": {"type": "rows", "train": [{"nope": 1}]}})
    assert str(error.value).startswith("unknown key task.train.0.nope: the keys of task.train.0 are path, hub, ")
    assert "at least" not in str(error.value)


def test_a_right_recipe_becomes_a_config():
    config = parse_config(MODEL | {"optimizer": {"learning_rate": 1e-5}, "task": {"type": "gsm8k"}})
    assert config.optimizer.learning_rate == 1e-5
    assert config.task.type == "gsm8k"
    assert config.rollout.group_size == 8


def test_known_keys_go_through_lists_names_and_unions():
    keys = set(known_keys())
    assert {"task.train.0.path", "task.max_value", "rewards.<name>.extraction", "sft.optimizer.betas"} <= keys
    assert "extends" not in keys


@pytest.mark.parametrize("name", recipe.shipped_recipes())
def test_every_shipped_recipe_parses_to_what_it_says_once_it_has_a_model(name):
    content = load_recipe(name)
    config = parse_config(content if "model" in content else content | MODEL)
    assert unsaid(content, config.model_dump(mode="json")) == []


def test_what_does_not_arrive_in_a_config_is_noticed():
    assert unsaid({"a": {"b": 1, "c": [1, 2]}}, {"a": {"b": 2, "c": [1, 3], "d": 0}}) == ["a.b", "a.c.1"]
    assert unsaid({"a": {"b": 1}, "c": []}, {"c": [0]}) == ["a", "c"]


def test_a_bad_recipe_fails_before_torch_is_imported(tmp_path):
    path = put(tmp_path / "r.yaml", "model: {path: x}\noptimizer: {lerning_rate: 1}\n")
    code = (
        "import sys\n"
        "from flatpeak.errors import UserError\n"
        "from flatpeak.config.load import load_recipe, parse_config\n"
        "try:\n    parse_config(load_recipe(sys.argv[1]))\n"
        "except UserError as error:\n    print(error)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == ("unknown key optimizer.lerning_rate: did you mean optimizer.learning_rate?\nFalse\n")


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"prompt": {"template": "\ud800 {question}"}}, "prompt.template"),
        ({"prompt": {"template": "chat", "system": "\udcff"}}, "prompt.system"),
        (
            {"prompt": {"template": "chat", "chat_template_kwargs": {"a": ["x", "\ud83d"]}}},
            "prompt.chat_template_kwargs.a.1",
        ),
        ({"rewards": {"\ud83d": {"type": "format"}}}, "a key of rewards"),
    ],
)
def test_half_of_a_character_is_refused_with_its_key_before_a_run_begins(section, key):
    with pytest.raises(UserError) as error:
        parse_config(MODEL | section)
    assert str(error.value).startswith(f"{key}: '\\ud")
    assert str(error.value).endswith(" is half of a character; write the whole character, or remove it")


def test_a_whole_character_outside_of_the_basic_plane_is_taken():
    assert parse_config(MODEL | {"prompt": {"template": "\U0001f600 {question}"}}).prompt.template == "😀 {question}"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("&x {a: *x}", "nested more than 100 deep"),
        ("{a: " + "[" * 300 + "]" * 300 + "}", "nested"),
        ("{a: " + "9" * 6000 + "}", "too many digits"),
        (BOMB, "more than 100,000 values once their aliases"),
    ],
    ids=["recursive", "deep", "digits", "bomb"],
)
def test_yaml_that_no_check_would_finish_is_one_line_with_the_file(tmp_path, config, problem):
    file = put(tmp_path / "mine.yaml", f"model: {{new: {{architecture: llama, config: {config}}}}}\n")
    with pytest.raises(UserError, match=f"mine.yaml: cannot be read as YAML: .*{problem}") as error:
        load_recipe(file)
    assert len(str(error.value).splitlines()) == 1


def test_a_value_of_the_command_line_that_is_no_yaml_is_text():
    assert parse_value("9" * 6000) == "9" * 6000
    assert parse_value("[" * 3000) == "[" * 3000


def test_a_key_of_another_type_is_not_offered_as_what_was_meant():
    with pytest.raises(UserError, match=r"^unknown key task.question: task.type=rows has no question, but ") as error:
        parse_config(MODEL | {"task": {"type": "rows", "train": [{"path": "x.jsonl"}], "question": "q"}})
    assert "or task.question" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("beta=0.04", "here it is kl.coefficient"),
        ("kl.beta=0.1", "here it is kl.coefficient"),
        ("optimizer.lr=1e-5", "here it is optimizer.learning_rate"),
        ("rollout.n=8", "here it is rollout.group_size"),
        ("training.batch_size=4", "here it is rollout.prompts_per_step times"),
        ("push_to_hub=true", "here it is the command flatpeak push RUN"),
        ("scale_rewards=false", "here it is advantage.scale=none"),
        ("scale_rewards=group", "here it is advantage.scale"),
        ("loss_type=dr_grpo", "here it is a recipe: extends: flatpeak:algorithms/dr_grpo"),
        ("peft_config.r=16", "here it is model.lora"),
        ("tools=x", "not in flatpeak: no tools"),
        ("actor_rollout_ref.rollout.n=8", "here it is rollout.group_size"),
        ("actor_rollout_ref.rollout.name=vllm", "here it is rollout.engine.type=vllm"),
        ("actor_rollout_ref.actor.kl_loss_coef=0.001", "here it is kl.coefficient"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "here it is optimizer.learning_rate"),
        ("actor_rollout_ref.actor.loss_agg_mode=token-mean", "here it is objective.normalization=token_mean"),
        ("actor_rollout_ref.model.path=x", "did you mean model.path?"),
        ("actor_rollout_ref.rollout.temperature=1", "did you mean rollout.temperature?"),
        ("algorithm.adv_estimator=rloo", "here it is a recipe: extends: flatpeak:algorithms/rloo"),
        ("algorithm.kl_ctrl.kl_coef=0.001", "here it is kl.coefficient"),
        ("algorithm.filter_groups.enable=true", "here it is training.dynamic_sampling.max_resamples"),
        ("data.train_batch_size=128", "here it is rollout.prompts_per_step"),
        ("trainer.n_gpus_per_node=8", "here it is distributed.processes"),
        ("critic.optim.lr=1e-5", "not in flatpeak: baselines are those of a group"),
        ("reward_model.reward_manager=dapo", "here it is rewards.NAME.type"),
        ("advantage.epsilon=1e-4", "here it is advantage.eps"),
        ("optimizer.epsilon=1e-8", "here it is optimizer.eps"),
        ("sft.optimizer.beta=0.9", "here it is sft.optimizer.betas"),
        ("sft.optimizer.lr=1e-5", "here it is sft.optimizer.learning_rate"),
        ("sft.lr=1e-5", "here it is sft.optimizer.learning_rate"),
        ("sft.max_steps=4", "here it is sft.steps"),
        ("reward_model.optim=sgd", "here it is reward_model.optimizer.name"),
        ("evaluation.max_completion_length=4", "here it is evaluation.max_new_tokens"),
        ("rolout.group_size=4", "did you mean rollout.group_size?"),
        ("trainer.steps=4", "did you mean training.steps?"),
    ],
)
def test_a_key_of_another_tool_is_translated_by_its_whole_path(override, hint):
    with pytest.raises(UserError) as error:
        parse_config(load_recipe("flatpeak:demo", [override]))
    assert str(error.value).startswith(f"unknown key {override.partition('=')[0]}: {hint}")


def test_a_key_of_another_task_in_a_list_is_unknown_in_words():
    with pytest.raises(UserError, match=r"task\.train\.0 has no correct, but path"):
        parse_config(MODEL | {"task": {"type": "rows", "train": [{"path": "x", "correct": 1}]}})


@pytest.mark.parametrize("value", ["{a: 1}", "[1, 2]"])
def test_a_loss_that_is_no_text_is_refused_in_words(value):
    with pytest.raises(UserError, match=r"^objective\.loss=.*: must be a text$"):
        parse_config(apply_overrides(MODEL, [f"objective.loss={value}"]))


def test_an_unprintable_value_is_shown_escaped():
    with pytest.raises(UserError, match=r"^run\.threads='1\\n2': must be a whole number$"):
        parse_config(MODEL | {"run": {"threads": "1\n2"}})


def test_a_misspelled_section_with_several_keys_is_one_hint():
    with pytest.raises(UserError, match=r"^unknown key optimzer: did you mean optimizer\?$"):
        parse_config(MODEL | {"optimzer": {"learning_rate": 1e-5, "eps": 1e-8}})


def test_keys_of_another_tool_in_one_section_are_each_translated():
    with pytest.raises(UserError) as error:
        parse_config(MODEL | {"actor_rollout_ref": {"rollout": {"n": 8, "strange": 1}, "ref": {"odd": 1}}})
    first, second = str(error.value).split("; ")
    assert first == "unknown key actor_rollout_ref.rollout.n: here it is rollout.group_size"
    assert second.startswith("unknown key actor_rollout_ref: the sections of a recipe are run, model")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objective.loss=dapo", "objective.loss=dapo: here it is a recipe: extends: flatpeak:algorithms/dapo"),
        ("rollout.engine=vllm", "rollout.engine=vllm: here it is rollout.engine.type=vllm"),
    ],
)
def test_a_value_that_another_key_takes_is_told_with_that_key(override, message):
    with pytest.raises(UserError) as error:
        parse_config(load_recipe("flatpeak:demo", [override]))
    assert str(error.value) == message


@pytest.mark.parametrize("name", sorted(FOREIGN_NAMES))
def test_every_translation_names_keys_that_there_are(name):
    known = {*known_keys()}
    assert name.partition(".*")[0] not in known
    named = re.findall(r"[a-z_]+(?:\.[A-Za-z0-9_]+)+", re.sub(r"docs/\S+|file\.py\S*", "", FOREIGN_NAMES[name]))
    written = [key.replace("NAME", "<name>") for key in named]
    assert [key for key in written if key not in known] == []
    assert written or "flatpeak" in FOREIGN_NAMES[name]


COMPANIONS = {
    "rewards.correctness.type=function": ["rewards.correctness.function=file.py:name"],
    "rewards.correctness.function=file.py:name": ["rewards.correctness.type=function"],
    "task.type=rows": ["task.train.0.path=a.jsonl"],
    "model.quantization=nf4": ["model.lora={}"],
}
"""Settings that the same translation, or the error about its absence, names too."""


@pytest.mark.parametrize("name", sorted(name for name in FOREIGN_NAMES if "=" in FOREIGN_NAMES[name]))
def test_every_value_in_a_translation_is_accepted(name):
    text = re.sub(r"NAME(?=\.)", "correctness", FOREIGN_NAMES[name])
    for setting in re.findall(r"(?<!-)\b[a-z_]+(?:\.[a-z_0-9]+)+=[^\s,;]+", text):
        recipe = apply_overrides(MODEL, [setting, *COMPANIONS.get(setting, [])])
        assert recipe != MODEL
        assert parse_config(recipe).model.path == MODEL["model"]["path"]


@pytest.mark.parametrize("name", sorted(name for name in FOREIGN_NAMES if "extends: " in FOREIGN_NAMES[name]))
def test_every_recipe_in_a_translation_is_one(name):
    recipe = FOREIGN_NAMES[name].partition("extends: ")[2].split()[0].strip(",;")
    assert recipe in shipped_recipes()
    assert parse_config(read_recipe({"extends": recipe, **MODEL})).model.path == MODEL["model"]["path"]
