"""The reference of settings: every key, with the default that the schema has, and a description."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from flatpeak.config.error_messages import known_keys
from flatpeak.config.load import apply_overrides, merge, parse_config
from flatpeak.config.schema_types import type_in_words
from flatpeak.config.settings_reference import Section, Setting, as_value, settings_reference
from flatpeak.config.settings_rendering import COMMAND, listed_once, to_json, to_markdown, to_text
from flatpeak.errors import UserError
from support.properties import repeatable
from support.tables import read_tables

TABLES = read_tables(__file__)

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = settings_reference()
ALL = [(section, setting) for section in SECTIONS for setting in section.settings]
PARENTS = {key.rpartition(".")[0] for key in known_keys()}
OPTIMIZERS = ("optimizer", "sft.optimizer", "reward_model.optimizer")
REQUIRED = {
    "task.train": [{"path": "rows.jsonl"}],
    "task.factory": "task.py:make",
    "task.overlap.sources": [{"path": "test.jsonl"}],
    "rewards.<name>.path": "runs/reward-model",
    "rewards.<name>.target": 10,
    "rewards.<name>.limit": 20,
    "rewards.<name>.function": "reward.py:score",
    "rewards.<name>.backend.base_url": "http://127.0.0.1/v1",
    "rewards.<name>.backend.model": "judge",
    "rewards.<name>.backend.path": "judge",
    "rewards.<name>.backend.factory": "judge.py:make",
    "training.stop_when.metric": "reward/mean",
    "curriculum.task": {"type": "arithmetic"},
    "curriculum.steps": 10,
    "tasks.0.task": {"type": "arithmetic"},
}
"""Values of settings without a default."""


def nested(path: str, value: Any) -> Any:
    """The value within the sections of its path."""
    for name in reversed(path.replace("<name>", "probe").split(".")):
        value = [value] if name == "0" else {name: value}
    return value


def recipe_with(section: Section) -> dict[str, Any]:
    """A recipe in which this section is chosen, with all that it requires."""
    recipe: dict[str, Any] = nested(section.key, {}) if "." in section.key or section.key == "curriculum" else {}
    for variant in section.variants:
        recipe = merge(recipe, nested(*variant.split("=")))
    if section.variants[-1:] == ("rewards.<name>.type=judge",):
        recipe = merge(recipe, nested("rewards.<name>.backend", {"type": "custom", "factory": "judge.py:make"}))
    if section.variants[-1:] == ("rewards.<name>.type=environment",):
        recipe["environment"] = "game.py:Game"
    if section.key == "training.stop_when":
        recipe = merge(recipe, nested("training.stop_when.above", 0.9))
    for one, setting in ALL:
        is_around = f"{section.key}.".startswith(f"{one.key}.") and set(one.variants) <= set(section.variants)
        if is_around and setting.key in REQUIRED and not section.key.startswith(setting.key):
            recipe = merge(recipe, nested(setting.key, REQUIRED[setting.key] if setting.required else setting.default))
    return recipe


def test_every_setting_and_section_has_a_description() -> None:
    """Where this fails, write a docstring below the field: short, true, with units."""
    assert [setting.key for _, setting in ALL if not setting.description.endswith((".", ".)"))] == []
    assert [section.key for section in SECTIONS if not section.description.endswith(".")] == []


def test_every_value_that_has_a_name_is_explained() -> None:
    """Of settings with a choice of names; those of dtypes, types and SFT's normalization are explained elsewhere."""
    unexplained = [
        (setting.key, value)
        for _, setting in ALL
        for value in setting.values
        if len(setting.values) > 1 and isinstance(value, str) and not setting.key.endswith((".dtype", ".type"))
        if not re.search(rf"(?<![\w-]){value}(?![\w-])", setting.description)
    ]
    assert {key for key, _ in unexplained} == {"sft.normalization"}


def test_every_setting_that_may_be_null_says_what_null_means() -> None:
    null = [setting for _, setting in ALL if re.search(r"\bnull$", setting.type)]
    assert len(null) > 100
    assert [setting.key for setting in null if "null" not in setting.description] == []


def test_every_key_that_a_recipe_may_have_is_listed() -> None:
    keys = {setting.key for _, setting in ALL}
    for section in SECTIONS:
        if section.others_as is not None:
            inherited = {key for key in keys if key.startswith(f"{section.others_as}.")}
            keys |= {key.replace(section.others_as, section.key, 1) for key in inherited}
    for _ in range(3):  # the sections that are listed elsewhere, and those within them
        for _, setting in ALL:
            if setting.same_as is not None:
                place = setting.same_as.partition(" ")[0]
                here = next(k for k in (setting.key, f"{setting.key}.0", f"{setting.key}.<name>") if k in PARENTS)
                keys |= {key.replace(place, here, 1) for key in keys if key.startswith(f"{place}.")}
    assert {key for key in known_keys() if key not in PARENTS} - keys == set()
    assert {setting.key for _, setting in ALL} - set(known_keys()) == set()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda one: " ".join((one.key, *one.variants)))
def test_a_default_that_is_printed_can_be_given_and_changes_nothing(section: Section) -> None:
    base = recipe_with(section)
    for setting in section.settings:
        if setting.required or (setting.key, setting.default) == ("training.stop_when.above", None):
            continue
        recipe = base if setting.key != section.key else {}
        key = setting.key.replace("<name>", "probe")
        assignment = setting.assignment.replace(setting.key, key, 1)
        try:
            given = parse_config(apply_overrides(recipe, [assignment]))
        except UserError as error:
            # Refused only because another choice, which the error names, leaves it without effect.
            choice = re.search(r"has no effect with .* set ([\w.]+=\S+)$", str(error))
            assert choice is not None, f"{assignment}: {error}"
            recipe = apply_overrides(recipe, [choice[1]])
            given = parse_config(apply_overrides(recipe, [assignment]))
        assert given == parse_config(recipe), assignment


def find(prefix: str) -> dict[str, Setting]:
    return {setting.key: setting for section in settings_reference(prefix) for setting in section.settings}


def test_a_setting_has_its_type_bounds_and_default() -> None:
    rate = find("optimizer.learning_rate")["optimizer.learning_rate"]
    assert (rate.type, rate.default, rate.required) == ("number of at least 0", 1e-6, False)
    assert rate.assignment == "optimizer.learning_rate=1e-06"
    assert find("sft.optimizer.learning_rate")["sft.optimizer.learning_rate"].default == 1e-4
    scale = find("advantage.scale")["advantage.scale"]
    assert (scale.type, scale.values) == ("std, batch_std or none", ("std", "batch_std", "none"))
    assert find("model.dropout")["model.dropout"].values == (True, False)
    assert find("rewards.x.target")["rewards.<name>.target"].required
    assert find("rewards")["rewards"].default["correctness"]["type"] == "number"


def test_a_docstring_of_a_base_class_describes_the_field_of_the_others() -> None:
    same = {find(f"{section}.max_grad_norm")[f"{section}.max_grad_norm"].description for section in OPTIMIZERS}
    assert same == {"Gradients are clipped to this norm; null: not clipped."}


def test_a_key_within_several_types_is_listed_with_each() -> None:
    sections = settings_reference("task.shots")
    listed = [(section.variants, [one.assignment for one in section.settings]) for section in sections]
    assert listed == [
        (("task.type=gsm8k",), ["task.shots=0"]),
        (("task.type=mmlu",), ["task.shots=5"]),
        (("task.type=mmlu_pro",), ["task.shots=5"]),
    ]


def test_a_type_selects_its_own_settings() -> None:
    sections = settings_reference("rewards.mine.backend.type=local")
    assert [section.variants[-1] for section in sections] == ["rewards.<name>.backend.type=local"]
    keys = [setting.key.rpartition(".")[2] for setting in sections[0].settings]
    assert keys == ["path", "revision", "dtype", "device", "batch_size"]
    assert settings_reference("rewards.type=math") == settings_reference("rewards.mine.type=math") != []
    rows = settings_reference("task.type=rows")
    assert [section.key for section in rows] == ["task", "task.train.0", "task.overlap"]


@pytest.mark.parametrize(("prefix", "key"), TABLES["lookups"])
def test_a_key_is_looked_up_as_recipes_write_it(prefix: str, key: str) -> None:
    assert set(find(prefix)) == {key}


@pytest.mark.parametrize(("prefix", "key"), TABLES["within"])
def test_a_key_within_a_list_or_free_mapping_is_explained_by_it(prefix: str, key: str) -> None:
    assert list(find(prefix)) == [key]


def test_a_section_that_occurs_twice_is_listed_once_or_where_it_is_asked_for() -> None:
    assert find("curriculum")["curriculum.task"].same_as == "task"
    assert "curriculum.task.max_value" not in find("curriculum")
    assert find("curriculum.task")["curriculum.task.max_value"].default == 99
    assert find("task.type=camel_ai")["task.overlap"].same_as == "task.overlap of task.type=rows"


@pytest.mark.parametrize(("prefix", "message"), TABLES["unknown"])
def test_an_unknown_key_is_an_error_with_the_nearest_one(prefix: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        settings_reference(prefix)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int | None, "whole number, or null"),
        (Annotated[float, Field(gt=0, le=1)], "number above 0 and at most 1"),
        (Annotated[int, Field(ge=0, le=999_999)] | None, "whole number from 0 to 999,999, or null"),
        (Annotated[float, Field(ge=0, lt=1)] | Literal["auto"], "number of at least 0 and below 1, or auto"),
        (Literal["a", "b"] | None, "a, b or null"),
        (tuple[Annotated[int, Field(ge=1)], ...], "list of whole numbers of at least 1"),
        (tuple[float, float], "list of 2 numbers"),
        (Annotated[tuple[str, ...], Field(min_length=1)], "non-empty list of texts"),
        (tuple[Literal["x", "y"], ...], "list of any of x, y"),
        (dict[str, Any], "mapping"),
        (dict[str, str | bool], "mapping of names to texts"),
        (Annotated[str, Field(min_length=1, max_length=9)], "text of 1 to 9 characters"),
        (bool, "true or false"),
        (Path | None, "path or null"),
    ],
)
def test_types_are_plain_words(annotation: Any, words: str) -> None:
    assert type_in_words(annotation) == words


PRINTED = st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs"))
TEXTS = st.text(PRINTED) | st.sampled_from(["null", "1e-5", " x"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS


@given(value=LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(TEXTS, LEAVES, max_size=3))
@repeatable
def test_values_are_read_back_as_they_were(value: Any) -> None:
    assert apply_overrides({}, [f"key={as_value(value)}"]) == {"key": value}


def test_values_that_begin_a_line_stay_as_recipes_write_them() -> None:
    text = to_text(settings_reference("rewards"), width=500)
    assert "    number, exact, format, choice, length, environment, countdown," in text
    assert "    whole, answer_tag, gsm8k_strict," in text
    assert "    Whole number of at least 1. Processes" in text


def test_the_json_has_what_the_text_has() -> None:
    text = " ".join(to_text(SECTIONS, width=80).split())
    rows = json.loads(to_json(SECTIONS))["settings"]
    assert [row["key"] for row in rows] == [setting.key for _, setting in ALL]
    for row in rows:
        head = f"{row['key']} (required)" if row["required"] else f"{row['key']}={as_value(row['default'])}"
        assert " ".join(head.split()) in text
        assert row["description"] in text
        assert ("default" in row) is not row["required"]
        assert any(section.key == row["section"] and list(section.variants) == row["variants"] for section in SECTIONS)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_are_as_wide_as_the_terminal_but_for_single_words(width: int) -> None:
    lines = to_text(SECTIONS, width=width).splitlines()
    assert [line for line in lines if len(line) > width and len(line.split()) > 1] == []
    assert max(len(line) for line in lines if len(line.split()) > 1) > width - 4


def test_the_page_of_the_documentation_is_up_to_date() -> None:
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == to_markdown(listed_once(SECTIONS)) + "\n", (
        f"run: {COMMAND}"
    )


def test_every_row_of_the_page_has_four_cells() -> None:
    rows = [line for line in to_markdown(listed_once(SECTIONS)).splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(section.settings) for section in listed_once(SECTIONS))
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}
