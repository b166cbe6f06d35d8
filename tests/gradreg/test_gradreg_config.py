"""Settings that cannot work are refused by name, with the way out."""

import pytest

from flatpeak.gradreg.config import GradientRegularizationConfig


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
