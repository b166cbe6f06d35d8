"""Settings that contradict each other are refused together, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from flatpeak.config.load import load_recipe, parse_config, shipped_recipes

MODEL = {"model": {"path": "x"}}


def test_minibatches_of_completions_may_be_more_than_the_groups() -> None:
    training = {"minibatches": 6, "minibatch_of": "completions"}
    config = parse_config({**MODEL, "rollout": {"prompts_per_step": 2, "group_size": 3}, "training": training})
    assert config.training.minibatches == 6


def test_k1_is_allowed_where_it_has_a_gradient() -> None:
    for kl in ({"placement": "reward"}, {"ratio_weighted": True}):
        config = parse_config({**MODEL, "kl": {"coefficient": 0.1, "estimator": "k1", **kl}})
        assert config.kl.estimator == "k1"


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if "algorithms" in name])
def test_every_algorithm_is_a_delta_that_applies_to_any_recipe(name: str) -> None:
    config = parse_config({**MODEL, **load_recipe(name)})
    plain = parse_config(MODEL)
    assert config.task == plain.task
    assert config.optimizer == plain.optimizer


@pytest.mark.parametrize("name", shipped_recipes())
def test_no_shipped_recipe_regularizes_where_rounding_would_swallow_the_perturbation(name: str) -> None:
    config = parse_config({**MODEL, **load_recipe(name)})
    if config.gradient_regularization.enabled:
        assert config.model.dtype == "float32"  # the default step of bfloat16 is refused as a run begins


def test_the_presets_say_what_their_papers_say() -> None:
    def preset(name: str) -> Any:
        return parse_config({**MODEL, **load_recipe(f"flatpeak:algorithms/{name}")})

    dr_grpo, dapo, gspo = preset("dr_grpo"), preset("dapo"), preset("gspo")
    assert (dr_grpo.advantage.scale, dr_grpo.objective.normalization) == ("none", "constant")
    assert (dapo.objective.clip_low, dapo.objective.clip_high, dapo.objective.normalization) == (
        0.2,
        0.28,
        "token_mean",
    )
    assert dapo.training.dynamic_sampling.max_resamples > 0
    assert dapo.objective.truncated == "soft_penalty"
    assert (gspo.objective.ratio, gspo.objective.clip_low, gspo.objective.clip_high) == ("sequence", 3e-4, 4e-4)
    assert preset("rloo").advantage.baseline == "leave_one_out"
    assert preset("reinforce").advantage.baseline == "none"
    assert preset("cispo").objective.loss == "truncated_policy_gradient"
