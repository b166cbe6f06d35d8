"""The JSON schema of recipes, as editors use it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml

from flatpeak.config.load import RECIPES
from flatpeak.config.settings_rendering import to_schema

SCHEMA: dict[str, Any] = json.loads(to_schema())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


@pytest.mark.parametrize("recipe", sorted(path.relative_to(RECIPES).as_posix() for path in RECIPES.rglob("*.yaml")))
def test_every_shipped_recipe_is_valid(recipe: str) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(yaml.safe_load((RECIPES / recipe).read_text()))] == []


@pytest.mark.parametrize(
    "recipe",
    [
        {"optimzer": {}},
        {"optimizer": {"lerning_rate": 1e-5}},
        {"optimizer": {"learning_rate": "fast"}},
        {"rollout": {"group_size": 0}},
        {"advantage": {"scale": "stdev"}},
        {"task": {"type": "gsm8k", "rows": 3}},
        {"rewards": {"right": {"type": "number", "extraction": "boxd"}}},
        {"extends": 3},
    ],
)
def test_a_mistake_is_marked(recipe: dict[str, Any]) -> None:
    assert list(VALIDATOR.iter_errors(recipe)) != []


@pytest.mark.parametrize("recipe", [{}, {"extends": ["a.yaml", "flatpeak:demo"], "task": {"train_size": 3}}])
def test_a_recipe_may_inherit_whatever_it_leaves_out(recipe: dict[str, Any]) -> None:
    assert list(VALIDATOR.iter_errors(recipe)) == []


def test_a_key_is_explained_as_in_the_settings() -> None:
    properties = SCHEMA["$defs"]["OptimizerConfig"]["properties"]
    assert properties["max_grad_norm"]["description"] == "Gradients are clipped to this norm; null: not clipped."
    assert SCHEMA["$defs"]["SFTOptimizerConfig"]["properties"]["eps"]["description"] != ""
