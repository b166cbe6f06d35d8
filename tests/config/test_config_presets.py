"""The recipes of gradient regularization say what the presets in code say."""

import pytest

from flatpeak import GradientRegularizationConfig
from flatpeak.config.load import load_recipe, merge, parse_config

MODEL = {"model": {"path": "x"}}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gradient_regularization", GradientRegularizationConfig(strength="calibrated:3", ratio_mode="reuse")),
        ("gradient_regularization_paper", GradientRegularizationConfig.paper(gamma=1e-3, eps=1e-3)),
        (
            "gradient_regularization_from_scratch_dr_grpo",
            GradientRegularizationConfig.from_scratch_dr_grpo(gamma=1e-2, eps=1e-2),
        ),
    ],
)
def test_a_preset_in_yaml_is_the_one_in_code(name: str, config: GradientRegularizationConfig) -> None:
    recipe = parse_config(merge(load_recipe(f"flatpeak:algorithms/{name}"), MODEL))
    assert recipe.gradient_regularization == config
    assert (recipe.advantage.scale, recipe.objective.normalization) == ("none", "constant")


def test_regularization_is_off_unless_asked_for() -> None:
    recipe = parse_config(merge(load_recipe("flatpeak:algorithms/dr_grpo"), MODEL))
    assert recipe.gradient_regularization == GradientRegularizationConfig()
    assert not recipe.gradient_regularization.enabled
