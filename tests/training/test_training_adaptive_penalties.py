"""Coefficients of KL and entropy that follow what is measured, an averaged reference, and KL on some groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flatpeak.policy.config import ReferenceConfig
from flatpeak.policy.reference import ReferenceResets, snapshot
from flatpeak.training.batch import minibatches
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.objective import Objective
from flatpeak.training.objective_config import AdaptiveEntropyConfig, AdaptiveKLConfig, KLConfig, ObjectiveConfig
from support.regularized_training import double_qwen2, gradient_of, make_learner, off_policy, relative_error
from support.resumes import MakeRun, Whole, assert_same
from support.training import make_batch, tiny_policy

KL = KLConfig(coefficient=0.1, adaptive=AdaptiveKLConfig(target=0.05, horizon=100))
ENTROPY = ObjectiveConfig(adaptive_entropy=AdaptiveEntropyConfig(target=1.0, step=0.01, start=0.02, largest=0.035))


@pytest.mark.parametrize(
    ("distance", "factor"),
    [
        (0.05, 1.0),
        (0.055, 1 + 0.1 * 20 / 100),
        (5.0, 1 + 0.2 * 20 / 100),
        (0.0, 1 - 0.2 * 20 / 100),
        (float("nan"), 1.0),  # of an update that was skipped
    ],
)
def test_the_kl_coefficient_follows_the_distance_within_a_fifth(distance: float, factor: float) -> None:
    objective = Objective(config=ObjectiveConfig(), kl=KL).adapted({"policy/kl_reference": distance}, 20)
    assert objective.kl.coefficient == pytest.approx(0.1 * factor, rel=1e-12)
    assert objective.metrics() == {"kl/coefficient": objective.kl.coefficient}


def test_the_kl_that_a_coefficient_follows_is_that_of_all_sampled_tokens_where_there_is_one() -> None:
    measured = {"policy/kl_reference": -0.02, "rollout/kl_reference": 0.055}
    objective = Objective(config=ObjectiveConfig(), kl=KL).adapted(measured, 20)
    assert objective.kl.coefficient == pytest.approx(0.1 * (1 + 0.1 * 20 / 100), rel=1e-12)


def test_the_entropy_bonus_grows_below_the_target_and_pauses_above_it() -> None:
    objective = Objective(config=ENTROPY, kl=KLConfig())
    seen = []
    for entropy in (0.9, 0.9, 1.1, 0.9):
        objective = objective.adapted({"policy/entropy": entropy}, 20)
        rule = objective.config.adaptive_entropy
        assert rule is not None
        seen.append((objective.config.entropy_coefficient, rule.start))
    expected = [(0.03, 0.03), (0.035, 0.035), (0.0, 0.025), (0.035, 0.035)]
    assert seen == [pytest.approx(pair) for pair in expected]
    assert objective.needs_all_tokens


def test_adaptive_coefficients_are_in_the_loss_and_come_back_from_a_checkpoint() -> None:
    policy = double_qwen2()
    batch = off_policy(policy)
    learner = make_learner(policy, objective=ENTROPY, kl=KL)
    learner.objective = learner.objective.adapted({"policy/kl_reference": 9.0, "policy/entropy": 0.5}, 40)
    expected = gradient_of(
        policy, batch, objective=ObjectiveConfig(entropy_coefficient=0.03), kl=KLConfig(coefficient=0.1 * 1.08)
    )
    learner.accumulate_gradients(batch)
    ours = {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}
    assert relative_error(ours, expected) < 1e-12
    loaded = Objective(config=ENTROPY, kl=KL).loaded(learner.objective.state())
    assert loaded == learner.objective
    assert Objective(config=ENTROPY, kl=KL).loaded({}) == Objective(config=ENTROPY, kl=KL)


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_a_regularized_learner_penalizes_the_loss_with_the_coefficients_of_the_step(strength: float) -> None:
    policy = double_qwen2()
    batch = off_policy(policy)
    learner = make_learner(policy, kl=KL, strength=strength)
    learner.objective = learner.objective.adapted({"policy/kl_reference": 9.0}, 40)
    learner.accumulate_gradients(batch)
    ours = {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}
    expected = gradient_of(policy, batch, kl=KLConfig(coefficient=0.1 * 1.08), strength=strength)
    assert relative_error(ours, expected) < 1e-9


def moved(policy: Any, by: float) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(by)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_an_average_of_the_policy_kept_in_float32(dtype: torch.dtype) -> None:
    policy = tiny_policy()
    policy.model.to(dtype)
    resets = ReferenceResets(ReferenceConfig(ema=0.9))
    reference = snapshot(policy)
    expected = {name: tensor.float().clone() for name, tensor in reference.tensors().items()}
    optimizer = torch.optim.SGD(policy.model.parameters(), **{"lr": OptimizerConfig().learning_rate})
    for step in range(1, 4):
        moved(policy, 0.02)
        reference = resets.after_step(step, {}, reference=reference, policy=policy, optimizer=optimizer)
        for name, tensor in snapshot(policy).tensors().items():
            expected[name] = 0.9 * expected[name] + 0.1 * tensor.float()
    assert reference is not None
    for name, tensor in reference.tensors().items():
        torch.testing.assert_close(resets.averages[name], expected[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(tensor, resets.averages[name].to(dtype))
    again = ReferenceResets(ReferenceConfig(ema=0.9))
    saved = {name: tensor.clone() for name, tensor in resets.tensors(reference).items()}
    loaded = again.load(resets.count, saved, reference=snapshot(policy), policy=policy)
    assert loaded is not None
    assert all(torch.equal(tensor, loaded.tensors()[name]) for name, tensor in reference.tensors().items())
    assert all(torch.equal(tensor, again.averages[name]) for name, tensor in saved.items())


def test_kl_on_informative_groups_leaves_out_groups_without_an_advantage_alone() -> None:
    batch = make_batch([1, 2, 3, 1, 2, 1], prompts=[(3,), (4,), (5,)], prompt_N=[0, 0, 1, 1, 2, 2])
    advantages_N = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.5, -0.5])
    batch = replace(batch, advantages_T=advantages_N[batch.sequence_T])

    def lengths(kl: KLConfig, *, of: Any = "groups") -> list[int]:
        objective = Objective(config=ObjectiveConfig(), kl=kl)
        cut = minibatches(
            batch,
            1,
            advantages_T=batch.advantages_T,
            old_logprobs_T=batch.old_logprobs_T,
            of=of,
            normalization="sequence_mean",
            max_tokens=9,
            seed=0,
            all_tokens=objective.needs_all_tokens,
            whole_groups=objective.kl_in_loss,
        )
        return sorted(length for one in cut for length in one.lengths_N.tolist())

    assert lengths(KLConfig(coefficient=0.1)) == [1, 1, 1, 2, 2, 3]
    assert lengths(KLConfig(coefficient=0.1, groups="informative")) == [1, 1, 2, 2]
    assert lengths(KLConfig()) == [1, 1, 2]


SECTIONS: dict[str, dict[str, Any]] = {
    "adaptive KL": {"kl": {"coefficient": 0.05, "adaptive": {"target": 1e-4, "horizon": 50}}},
    "adaptive entropy": {"objective": {"adaptive_entropy": {"target": 3.0, "start": 0.01}}},
    "average": {"reference": {"ema": 0.8}},
    "average in bfloat16": {"reference": {"ema": 0.8}, "model": {"dtype": "bfloat16"}},
    "KL to go, whitened": {
        "kl": {"coefficient": 0.05, "placement": "reward_to_go", "discount": 0.9},
        "advantage": {"whiten": "tokens", "limit": 1.5},
    },
    "token weights": {
        "objective": {"token_weights": {"function": "clip_cov", "arguments": {"fraction": 0.2, "low": 0.01}}}
    },
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", [name if name == "average" else pytest.param(name, marks=pytest.mark.slow) for name in SECTIONS]
)
def test_a_stopped_run_goes_on_bit_for_bit(make_run: MakeRun, whole: Whole, name: str) -> None:
    expected, run = whole(**SECTIONS[name]), make_run(**SECTIONS[name])
    run.stop_at("train", 3)
    assert_same(run.go_on(), expected)
