"""KL and entropy beside the penalty: inside it, or left out of it and descended all the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import autograd, exp

from flatpeak.functional import hessian_vector_product
from flatpeak.policy.model import Policy
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.types import Batch
from support.regularized_training import (
    WHOLE,
    blocks_of,
    count_backward_tokens,
    double_qwen2,
    gradient_of,
    make_learner,
    make_regularized_trainer,
    off_policy,
    penalty_of,
    plain_rows,
    relative_error,
)
from support.training import tiny_policy

TERMS: dict[str, dict[str, Any]] = {
    "KL": {"kl": KLConfig(coefficient=0.3)},
    "KL weighted by the ratio": {"kl": KLConfig(coefficient=0.3, estimator="k1", ratio_weighted=True)},
    "entropy": {"objective": ObjectiveConfig(entropy_coefficient=0.2)},
    "both": {"kl": KLConfig(coefficient=0.3), "objective": ObjectiveConfig(entropy_coefficient=-0.2)},
}
STRENGTH = 0.4
STATISTICS = ("entropy", "ratio", "clipped", "kl", "max_ratio_gap", "tokens")


@cache
def setting() -> tuple[Policy, Batch]:
    policy = double_qwen2()
    return policy, off_policy(policy)


@pytest.mark.parametrize("difference", ["forward", "central"])
@pytest.mark.parametrize("budget", [WHOLE, 20])
@pytest.mark.parametrize("terms", TERMS)
def test_left_out_of_the_penalty_they_are_still_descended(terms: str, budget: int, difference: str) -> None:
    policy, batch = setting()
    whole = gradient_of(policy, batch, **TERMS[terms])
    policy_penalty = penalty_of(policy, batch, difference=difference)
    expected = {name: component + STRENGTH * policy_penalty[name] for name, component in whole.items()}
    given = {"strength": STRENGTH, "difference": difference, "micro_batch_tokens": budget, **TERMS[terms]}
    assert relative_error(gradient_of(policy, batch, kl_in_penalty=False, **given), expected) < 1e-9
    # Inside the penalty they make another gradient.
    assert relative_error(gradient_of(policy, batch, **given), expected) > 0.01


def test_the_penalty_without_kl_is_the_curvature_of_the_policy_loss_written_out() -> None:
    policy, batch = setting()
    held = blocks_of(policy)
    a = batch.advantages_T
    weights_T = batch.weights_N[batch.sequence_T]

    def policy_loss() -> Any:
        ratio = exp(plain_rows(policy, batch)[0] - batch.old_logprobs_T)
        lost = ((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8))
        return (weights_T * -ratio * a * ~lost).sum()

    g1 = autograd.grad(policy_loss(), list(held.values()), materialize_grads=True)
    expected = dict(zip(held, hessian_vector_product(policy_loss, list(held.values()), g1), strict=True))
    given: dict[str, Any] = {"difference": "central", "step": 1e-6, "kl_in_penalty": False}
    result = penalty_of(policy, batch, **given, **TERMS["both"])
    assert relative_error({name: result[name] for name in held}, expected) < 1e-7


@pytest.mark.parametrize(
    ("given", "passes"),
    [
        ({}, 2),
        ({"kl_in_penalty": False}, 2),
        (TERMS["both"], 2),
        ({"kl_in_penalty": False, **TERMS["both"]}, 3),
        ({"kl_in_penalty": False, **TERMS["KL"]}, 3),
        ({"kl_in_penalty": False, **TERMS["entropy"]}, 3),
        ({"kl_in_penalty": False, "kl": KLConfig(coefficient=0.3, placement="reward")}, 2),
    ],
)
def test_only_terms_that_are_there_cost_a_pass_of_their_own(given: dict[str, Any], passes: int) -> None:
    policy = double_qwen2()
    batch = off_policy(policy)
    counted = count_backward_tokens(policy)
    make_learner(policy, strength=STRENGTH, **given).accumulate_gradients(batch)
    assert counted == [len(batch.tokens_T)] * passes


@pytest.mark.parametrize("given", [{}, {"kl_in_penalty": False}, {"group_fraction": 0.4}, {"difference": "central"}])
@pytest.mark.parametrize("terms", TERMS)
def test_loss_and_tokens_are_those_of_the_plain_update(terms: str, given: dict[str, Any]) -> None:
    policy, batch = setting()
    shared: dict[str, Any] = {"micro_batch_tokens": 20, **TERMS[terms]}
    plain = make_learner(policy, **shared).accumulate_gradients(batch)
    result = make_learner(policy, strength=STRENGTH, **shared, **given).accumulate_gradients(batch)
    policy.model.zero_grad()
    assert result.loss == pytest.approx(plain.loss, rel=1e-12)
    for name in STATISTICS:
        combine = max if name == "max_ratio_gap" else sum
        ours, expected = (combine(float(getattr(row, name)) for row in kind.tokens) for kind in (result, plain))
        assert ours == pytest.approx(expected, rel=1e-12), name
    assert sum(row.tokens for row in result.tokens) == len(batch.tokens_T)


@pytest.mark.parametrize("given", [{}, {"kl_in_penalty": False}, {"group_fraction": 0.4}])
def test_the_first_step_reports_of_the_policy_what_it_does_without_regularization(given: dict[str, Any]) -> None:
    reports = []
    for regularization in ({}, {"strength": STRENGTH, **given}):
        policy, reference = tiny_policy(), tiny_policy(seed=5)
        trainer = make_regularized_trainer(policy, reference=reference, **TERMS["both"], **regularization)
        reports.append(trainer.train_step(1))
    plain, result = reports
    names = [name for name in plain if name.startswith(("policy/", "rollout/", "reward/", "groups/", "optimizer/"))]
    assert {"policy/loss", "policy/entropy", "policy/clip_fraction", "policy/kl_reference"} <= set(names)
    for name in names:
        if name != "policy/grad_norm":
            assert result[name] == pytest.approx(plain[name], rel=1e-6, abs=1e-7), name
    assert result["policy/grad_norm"] != pytest.approx(plain["policy/grad_norm"], rel=1e-3)
    assert result.keys() - plain.keys() == {f"gradreg/{name}" for name in GRADREG}
    if "group_fraction" not in given and "kl_in_penalty" not in given:
        assert result["gradreg/g1_norm"] == pytest.approx(plain["gradreg/g1_norm"], rel=1e-6)


GRADREG = (
    "penalty_ratio",
    "cosine",
    "perturbation_kept",
    "perturbation_norm_kept",
    "step",
    "strength",
    "skipped",
    "time_share",
)


@pytest.mark.parametrize("given", [{}, {"kl_in_penalty": False}, {"group_fraction": 0.4}])
def test_before_the_delay_is_over_the_gradient_is_the_plain_one(given: dict[str, Any]) -> None:
    policy, batch = setting()
    plain = gradient_of(policy, batch, **TERMS["both"])
    result = gradient_of(policy, batch, strength=STRENGTH, delay_updates=1, **TERMS["both"], **given)
    assert relative_error(result, plain) < 1e-14
