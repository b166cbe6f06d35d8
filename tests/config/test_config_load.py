import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from flatpeak.config import load as recipe
from flatpeak.config import run_config
from flatpeak.config.error_messages import known_keys
from flatpeak.config.foreign_names import FOREIGN_NAMES
from flatpeak.config.load import (
    apply_overrides,
    apply_settings,
    load_recipe,
    merge,
    parse_config,
    parse_file,
    parse_value,
    read_recipe,
    shipped_recipes,
)
from flatpeak.config.settings_reference import as_value
from flatpeak.errors import UserError
from flatpeak.policy.config import LoraConfig
from flatpeak.training.config import OptimizerConfig
from support.properties import repeatable
from support.recipes import unsaid
from support.tables import read_tables

TABLES = read_tables(__file__)

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


@pytest.mark.parametrize(("text", "value"), TABLES["values"])
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


NAMES = st.sampled_from("abc")
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.lists(st.integers(), max_size=2)
DELTAS = st.dictionaries(st.sampled_from(["s", "t"]), st.dictionaries(NAMES, LEAVES, max_size=3), max_size=2)
"""Some settings of two sections; null takes one away."""


@given(base=DELTAS, second=DELTAS, third=DELTAS)
@repeatable
def test_recipes_merge_to_the_same_however_they_are_grouped_and_a_repetition_or_an_empty_one_adds_nothing(
    base, second, third
):
    merged = merge(merge(base, second), third)
    assert merged == merge(base, merge(second, third))
    assert merge({}, merged) == merge(merged, {}) == merge(merged, third) == merged


@given(base=DELTAS, delta=DELTAS)
@repeatable
def test_overrides_settings_and_recipes_in_files_say_the_same(base, delta, tmp_path):
    values = {f"{section}.{key}": value for section, keys in delta.items() for key, value in keys.items()}
    expected = merge(base, {section: keys for section, keys in delta.items() if keys})
    assert apply_overrides(base, [f"{key}={as_value(value)}" for key, value in values.items()]) == expected
    assert apply_settings(base, values) == expected
    put(tmp_path / "base.yaml", yaml.safe_dump(base))
    assert load_recipe(put(tmp_path / "r.yaml", yaml.safe_dump(delta | {"extends": "base"}))) == merge(base, delta)


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


def test_a_type_given_after_its_settings_does_not_lose_them():
    base = {"task": {"type": "arithmetic", "max_value": 9}}
    assert apply_overrides(base, ["task.path=x", "task.type=gsm8k"]) == {"task": {"type": "gsm8k", "path": "x"}}
    assert apply_overrides(base, ["task.seed=1", "task.type=arithmetic"]) == {
        "task": {"type": "arithmetic", "max_value": 9, "seed": 1}
    }


def test_the_last_of_two_overrides_wins_and_a_value_may_hold_equal_signs():
    resolved = apply_overrides({}, ["a.b=1", "a.b=2", "task.question={a}{op}{b}="])
    assert resolved == {"a": {"b": 2}, "task": {"question": "{a}{op}{b}="}}


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


def test_a_section_among_settings_changes_the_fields_that_it_was_given():
    settings = {"optimizer": OptimizerConfig(learning_rate=2e-6), "model.lora": LoraConfig(rank=2)}
    config = parse_config(apply_settings({"optimizer": {"warmup_steps": 3, "learning_rate": 1.0}}, settings))
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (2e-6, 3)
    assert config.model.lora == LoraConfig(rank=2)


def test_the_module_of_the_whole_recipe_names_the_class_of_every_section():
    sections = {value.annotation for value in run_config.RunConfig.model_fields.values()}
    classes = {one for one in sections if isinstance(one, type) and issubclass(one, BaseModel)}
    assert len(classes) > 12
    assert {one.__name__ for one in classes} <= set(run_config.__all__)
    assert all(hasattr(run_config, name) for name in run_config.__all__)


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
        ("{a: " + "[" * 300 + "]" * 300 + "}", "nested"),
        ("{a: " + "9" * 6000 + "}", "too many digits"),
    ],
    ids=["deep", "digits"],
)
def test_yaml_that_no_check_would_finish_is_one_line_with_the_file(tmp_path, config, problem):
    file = put(tmp_path / "mine.yaml", f"model: {{new: {{architecture: llama, config: {config}}}}}\n")
    with pytest.raises(UserError, match=f"mine.yaml: cannot be read as YAML: .*{problem}") as error:
        load_recipe(file)
    assert len(str(error.value).splitlines()) == 1


def test_a_value_of_the_command_line_that_is_no_yaml_is_text():
    assert parse_value("9" * 6000) == "9" * 6000
    assert parse_value("[" * 3000) == "[" * 3000


@pytest.mark.parametrize("name", sorted(FOREIGN_NAMES))
def test_every_translation_names_keys_that_there_are(name):
    known = {*known_keys()}
    assert name.partition(".*")[0] not in known
    named = re.findall(
        r"[a-z_]+(?:\.[A-Za-z0-9_]+)+|\b[a-z]+(?==)", re.sub(r"docs/\S+|file\.py\S*", "", FOREIGN_NAMES[name])
    )
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


def test_a_mapping_may_be_merged_into_another_that_is_merged_too(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("arms: {slow: &slow {<<: &base {rate: 1, steps: 1}, rate: 2}}\nsettings: {<<: *slow, steps: 3}\n")
    assert parse_file(file) == {"arms": {"slow": {"rate": 2, "steps": 1}}, "settings": {"rate": 2, "steps": 3}}
