"""What another choice leaves without effect is refused where it was written, and dropped where it was inherited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatpeak.config.load import apply_overrides, load_recipe, merge, parse_config, shipped_recipes
from flatpeak.config.unused_settings import explicit_settings
from flatpeak.errors import UserError
from flatpeak.training.objective_config import ObjectiveConfig
from support.tables import read_tables

TABLES = read_tables(__file__)

MODEL = {"model": {"path": "x"}}
SMALL_SUMS = {"type": "arithmetic", "max_value": 5}


@pytest.mark.parametrize("sections", TABLES["effective"])
def test_what_has_an_effect_or_is_left_at_its_default_arrives_as_written(sections: dict[str, Any]) -> None:
    resolved = parse_config(MODEL | sections).model_dump(mode="json")
    assert merge(resolved, sections) == resolved


@pytest.mark.parametrize(("name", "overrides", "section", "values"), TABLES["dropped"])
def test_an_override_drops_what_it_leaves_without_effect_of_a_preset(
    name: str, overrides: list[str], section: str, values: dict[str, Any]
) -> None:
    config = parse_config(load_recipe(f"flatpeak:algorithms/{name}", ["model.path=x", *overrides]))
    result = getattr(config, section).model_dump()
    assert {key: result[key] for key in values} == values


def test_overrides_of_task_recipes_drop_what_they_leave_without_effect() -> None:
    plain = parse_config(load_recipe("flatpeak:tasks/mmlu", ["model.path=x", "task.wording=plain"]))
    assert plain.task.model_dump()["shots"] == 5  # the default, which nothing reads
    files = ["task.path=a.jsonl", "task.test_path=b.jsonl"]
    two = parse_config(load_recipe("flatpeak:tasks/preferences", ["model.path=x", *files]))
    assert two.task.model_dump()["test_path"] == "b.jsonl"


def test_a_file_of_preferences_replaces_the_data_set_of_the_recipe() -> None:
    config = parse_config(load_recipe("flatpeak:tasks/preferences", ["model.path=x", "task.path=pairs.jsonl"]))
    assert (config.task.path, config.task.test_fraction) == ("pairs.jsonl", 0.1)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (["environment=mine.py:Game"], ([], "mine.py:Game", 3)),
        (["tools=[]"], ([], None, 8)),
        (["tools=[mine.py:add]"], (["mine.py:add"], None, 3)),
        (["tools=[]", "environment=mine.py:Game"], ([], "mine.py:Game", 3)),
    ],
)
def test_an_environment_replaces_the_tools_of_a_recipe_and_neither_leaves_no_episodes(
    overrides: list[str], kept: tuple[list[str], str | None, int]
) -> None:
    base = {**load_recipe("flatpeak:calculator"), "episodes": {"max_turns": 3}}
    config = parse_config(apply_overrides(base, overrides))
    assert (list(config.tools), config.environment, config.episodes.max_turns) == kept


def test_tools_replace_the_environment_of_a_recipe() -> None:
    config = parse_config(apply_overrides(MODEL | {"environment": "mine.py:Game"}, ["tools=[mine.py:add]"]))
    assert (config.tools, config.environment) == (("mine.py:add",), None)


def test_what_extends_a_recipe_drops_the_same(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "extends: [flatpeak:algorithms/dapo, flatpeak:algorithms/reinforce]\nmodel: {path: x}\n", encoding="utf-8"
    )
    config = parse_config(load_recipe(tmp_path / "mine.yaml"))
    assert config.objective.loss == "policy_gradient"
    assert config.training.dynamic_sampling.max_resamples == 0
    assert config.objective.truncated == "soft_penalty"  # which REINFORCE reads as well


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_resolved_recipe_is_accepted_again(name: str) -> None:
    config = parse_config(MODEL | load_recipe(name))
    assert parse_config(config.model_dump(mode="json")) == config


def test_the_defaults_of_a_resolved_section_are_nobodys_choice() -> None:
    assert list(explicit_settings(ObjectiveConfig(cap=5.0), "cap", "clip_low")) == ["cap"]
    everything = ObjectiveConfig.model_validate(ObjectiveConfig(dual_clip=2.0).model_dump())
    assert list(explicit_settings(everything, "cap", "clip_low", "dual_clip")) == ["dual_clip"]


def test_a_model_of_the_callers_beside_one_of_the_recipe_is_refused(
    recipe: Callable[..., Any], make_tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    import flatpeak

    model, tokenizer = make_tiny_model()
    with pytest.raises(UserError, match=r"model.new, model.device beside train\(model=...\), which brings the model"):
        flatpeak.train(recipe(), model=model, tokenizer=tokenizer)
    assert not (tmp_path / "runs").exists()


def test_a_recipe_by_name_gives_way_to_a_model_of_the_callers(
    recipe: Callable[..., Any], make_tiny_model: Callable[..., Any], train: Any, watch: Any, tmp_path: Path
) -> None:
    import yaml

    path, seen = tmp_path / "tiny.yaml", watch()
    path.write_text(yaml.safe_dump(recipe(training={"steps": 1})), encoding="utf-8")
    model, tokenizer = make_tiny_model()
    assert train(path, model=model, tokenizer=tokenizer, progress=seen).exit_code == 0
    assert f"model.new, model.device of {path} not used: train(model=...) brings the model" in seen.notices


def test_a_resolved_recipe_gives_way_to_a_model_of_the_callers(
    recipe: Callable[..., Any], make_tiny_model: Callable[..., Any], train: Any, watch: Any
) -> None:
    seen = watch()
    model, tokenizer = make_tiny_model()
    resolved = parse_config(recipe(training={"steps": 1}))
    assert train(resolved, model=model, tokenizer=tokenizer, progress=seen).exit_code == 0
    assert "model.new, model.device of the recipe not used: train(model=...) brings the model" in seen.notices


def test_a_curriculum_that_may_take_all_steps_is_announced(recipe: Callable[..., Any], train: Any, watch: Any) -> None:
    seen = watch()
    curriculum = {"task": {**SMALL_SUMS, "train_size": 5, "test_size": 2}, "steps": 9, "until_pass_rate": 1.0}
    train(recipe(curriculum=curriculum, training={"steps": 1}), progress=seen)
    assert any(notice.startswith("curriculum.steps=9 is not below training.steps=1") for notice in seen.notices)


@pytest.mark.parametrize(("buffer", "announced"), [(3, True), (2, False)])
def test_a_buffer_over_half_the_limit_is_announced(
    recipe: Callable[..., Any], train: Any, watch: Any, buffer: int, announced: bool
) -> None:
    seen = watch()
    objective = {"truncated": "soft_penalty", "overlong_buffer": buffer}
    train(recipe(objective=objective, training={"steps": 0}), progress=seen)
    notice = (
        "objective.overlong_buffer=3 is over half of rollout.max_new_tokens=4: completions of more than 1 tokens lose "
        "reward; a quarter of the limit is 1"
    )
    assert (notice in seen.notices) == announced


def test_a_loss_of_ones_own_may_read_every_coefficient_and_keeps_inherited_ones() -> None:
    settings = {"clip_low": 0.1, "clip_high": 0.3, "cap": 2.0, "dual_clip": 3.0, "ratio": "sequence"}
    config = parse_config({"objective": {"loss": "mine.py:loss", **settings}})
    assert {name: getattr(config.objective, name) for name in settings} == settings
    inherited = apply_overrides(load_recipe("flatpeak:algorithms/dapo"), ["objective.loss=mine.py:loss"])
    assert parse_config(inherited).objective.clip_high == 0.28


def test_a_function_takes_the_place_of_an_inherited_scale_and_gives_way_to_it() -> None:
    function = apply_overrides(load_recipe("flatpeak:algorithms/dr_grpo"), ["advantage.function=mine.py:f"])
    assert "scale" not in function["advantage"]
    with pytest.raises(UserError, match=r"advantage\.scale=none has no effect with advantage\.function=mine\.py:f"):
        parse_config(apply_overrides(function, ["advantage.scale=none"]))
    function["advantage"]["arguments"] = {"q": 1}
    back = parse_config(apply_overrides(function, ["advantage.function=null", "advantage.scale=none"]))
    assert (back.advantage.scale, back.advantage.arguments) == ("none", {})


BASE = {"objective": {"loss": "mine.py:spo", "arguments": {"epsilon": 0.1}}}


@pytest.mark.parametrize(("overrides", "arguments"), TABLES["arguments"], ids=str)
def test_another_function_does_not_take_over_the_arguments_of_the_one_before_it(
    overrides: list[str], arguments: dict[str, Any]
) -> None:
    assert parse_config(apply_overrides(BASE, overrides)).objective.arguments == arguments


@pytest.mark.parametrize(
    ("recipe", "override", "arguments"),
    [
        ("sapo", "objective.loss=dppo_tv", "objective.arguments"),
        ("pass_at_k", "advantage.function=gdpo", "advantage.arguments"),
        ("clip_cov", "objective.token_weights.function=m2po", "objective.token_weights.arguments"),
    ],
)
def test_a_function_of_flatpeaks_does_not_take_over_the_arguments_of_another(
    recipe: str, override: str, arguments: str
) -> None:
    section: Any = parse_config(apply_overrides(load_recipe(f"flatpeak:algorithms/{recipe}"), [override]))
    for name in arguments.split("."):
        section = getattr(section, name)
    assert section == {}


def test_arguments_that_wait_for_a_function_from_python_are_kept() -> None:
    recipe = {"objective": {"arguments": {"epsilon": 0.1}}}
    assert apply_overrides(recipe, ["objective.loss=python:spo"])["objective"]["arguments"] == {"epsilon": 0.1}


def test_a_recipe_that_extends_another_has_the_arguments_of_its_own_advantage(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("advantage: {function: 'mine.py:a', arguments: {q: 1}}", encoding="utf-8")
    child = tmp_path / "child.yaml"
    child.write_text("extends: base\nadvantage: {function: 'mine.py:b'}", encoding="utf-8")
    assert parse_config(load_recipe(child)).advantage.arguments == {}
    child.write_text("extends: base\nadvantage: {function: 'mine.py:b', arguments: {p: 2}}", encoding="utf-8")
    assert parse_config(load_recipe(child)).advantage.arguments == {"p": 2}
