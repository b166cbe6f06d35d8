"""Settings that cannot work are refused by name, with the way out."""

import math

import pytest
from pydantic import ValidationError

from flatpeak.gradreg.config import GradientRegularizationConfig


@pytest.mark.parametrize(
    ("given", "field", "fix"),
    [
        ({"strength": -1}, "strength", "at least 0"),
        ({"strength": -1e-9}, "strength", "at least 0"),
        ({"strength": math.nan}, "strength", "at least 0"),
        ({"strength": math.inf}, "strength", "at least 0"),
        ({"strength": "ratio:-1"}, "strength", "calibrated:0.3, with a number above 0"),
        ({"strength": "ratio:0"}, "strength", "calibrated:0.3, with a number above 0"),
        ({"strength": "ratio:x"}, "strength", "give a number, ratio:0.3 or calibrated:0.3"),
        ({"strength": "ratio:"}, "strength", "give a number, ratio:0.3 or calibrated:0.3"),
        ({"strength": "ratio:nan"}, "strength", "with a number above 0"),
        ({"strength": "ratio:inf"}, "strength", "with a number above 0"),
        ({"strength": "calibrated:0"}, "strength", "with a number above 0"),
        ({"strength": "calibrated:x"}, "strength", "give a number, ratio:0.3 or calibrated:0.3"),
        ({"strength": "calibrated"}, "strength", "give a number, ratio:0.3 or calibrated:0.3"),
        ({"strength": "strong"}, "strength", "give a number, ratio:0.3 or calibrated:0.3"),
        ({"strength": None}, "strength", "valid number"),
        ({"step": 0}, "step", "greater than 0"),
        ({"step": -1e-3}, "step", "greater than 0"),
        ({"step": math.nan}, "step", "Input should be"),
        ({"step": math.inf}, "step", "finite"),
        ({"step_scale": "absolute"}, "step_scale=absolute", "set gradient_regularization.step"),
        ({"step_scale": "radius"}, "step_scale=radius", "set gradient_regularization.step"),
        ({"perturbed": []}, "perturbed", "name a pattern, or use blocks or all"),
        ({"perturbed": ()}, "perturbed", "name a pattern, or use blocks or all"),
        ({"perturbed": "layers"}, "perturbed", "'blocks', 'all', 'adapters', 'last_layer' or 'last_block'"),
        ({"ratio_mode": "is"}, "ratio_mode", "'importance', 'reuse' or 'importance_clipped'"),
        ({"every": 0}, "every", "greater than or equal to 1"),
        ({"group_fraction": 0}, "group_fraction", "greater than 0"),
        ({"group_fraction": 1.5}, "group_fraction", "less than or equal to 1"),
        ({"delay_updates": -1}, "delay_updates", "greater than or equal to 0"),
        ({"min_perturbation_kept": 1.1}, "min_perturbation_kept", "less than or equal to 1"),
        ({"direction": "radnom"}, "direction", "'gradient' or 'random'"),
        ({"direction": "random", "every": 2}, "direction=random", "set every=1"),
        ({"strenght": 1.0}, "strenght", "not permitted"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_by_name_with_the_way_out(given, field, fix):
    with pytest.raises(ValidationError) as result:
        GradientRegularizationConfig(**given)
    assert field in str(result.value)
    assert fix in str(result.value)


@pytest.mark.parametrize("written", ["0.3", "1e-3", " 0.01"])
def test_a_number_in_quotes_is_the_number_it_spells(written):
    # As with every other number of a recipe.
    assert GradientRegularizationConfig(strength=written).strength == float(written)
    assert GradientRegularizationConfig(step=written).step == float(written)


def test_by_default_nothing_happens():
    config = GradientRegularizationConfig()
    assert not config.enabled
    assert config.ratio is None
    assert GradientRegularizationConfig(strength=1e-3).enabled


def test_a_ratio_is_read_from_the_strength():
    config = GradientRegularizationConfig(strength="ratio:0.3")
    assert config.enabled
    assert config.ratio == 0.3
    assert not config.calibrated


def test_a_ratio_to_calibrate_is_read_from_the_strength():
    config = GradientRegularizationConfig(strength="calibrated:0.3")
    assert config.enabled
    assert (config.ratio, config.calibrated) == (0.3, True)


def test_a_list_of_patterns_is_taken_as_a_recipe_gives_it():
    assert GradientRegularizationConfig(perturbed=["*.mlp.*", "lm_head.*"]).perturbed == ("*.mlp.*", "lm_head.*")


def test_settings_survive_a_round_trip_through_a_file():
    config = GradientRegularizationConfig(strength="ratio:0.3", perturbed=["*.mlp.*"], step=1e-3)
    assert GradientRegularizationConfig(**config.model_dump(mode="json")) == config


def test_published_settings_follow_our_convention_of_the_strength():
    # Ours is strength / 2 * ||grad L||^2. The paper's code adds gamma (g2 - g1) / eps, the other gamma / 2 of it.
    paper = GradientRegularizationConfig.paper(gamma=0.02)
    other = GradientRegularizationConfig.from_scratch_dr_grpo(gamma=0.02)
    assert (paper.strength, paper.step, paper.step_scale, paper.ratio_mode) == (0.02, 1e-3, "absolute", "reuse")
    assert (other.strength, other.step, other.step_scale, other.ratio_mode) == (0.01, 1e-2, "absolute", "reuse")
