"""The corrections of a sampler: levels, two bounds, normalization, rejection by KL estimates, and what is logged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flatpeak.policy.model import Policy
from flatpeak.training.objective import Objective
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig, SamplerCorrectionConfig
from flatpeak.training.step_metrics import sampler_gap_metrics
from flatpeak.types import Batch
from support.regularized_training import (
    double_qwen2,
    gradient_of,
    make_learner,
    off_policy,
    relative_error,
    with_sampler,
)

CORRECTIONS: dict[str, dict[str, Any]] = {
    "two bounds": {"type": "truncate", "floor": 0.9, "cap": 1.1},
    "IcePop": {"type": "mask", "floor": 0.85, "cap": 1.2},
    "geometric mean": {"type": "truncate", "level": "sequence_mean", "cap": 1.05},
    "normalized": {"type": "truncate", "cap": 1.3, "normalize": True},
    "rejected tokens": {"reject": {"estimator": "k2", "over": "token", "above": 0.02}},
    "rejected by k1": {"reject": {"estimator": "k1", "over": "token", "above": 0.2}},
    "rejected means of k1": {"reject": {"estimator": "k1", "over": "mean", "above": 0.05}},
    "rejected maxima of k1": {"reject": {"estimator": "k1", "over": "max", "above": 0.3}},
    "rejected sums": {"reject": {"estimator": "k3", "over": "sum", "above": 0.1}},
    "rejected means": {"type": "mask", "cap": 1.5, "reject": {"estimator": "k3", "over": "mean", "above": 0.02}},
    "rejected maxima": {"reject": {"estimator": "k3", "over": "max", "above": 0.06}},
}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return double_qwen2()


@pytest.fixture(scope="module")
def batch(policy: Policy) -> Batch:
    return with_sampler(off_policy(policy, groups=4))


def by_hand(batch: Batch, settings: dict[str, Any]) -> np.ndarray:
    """The weights, in numpy."""
    assert batch.old_logprobs_T is not None
    assert batch.sampler_logprobs_T is not None
    distance = (batch.old_logprobs_T - batch.sampler_logprobs_T).numpy()
    sequence = batch.sequence_T.numpy()
    each = [distance[sequence == number] for number in range(len(batch.lengths_N))]
    ratio = np.exp(distance)
    if settings.get("level") == "sequence_mean":
        ratio = np.array([np.exp(values.mean()) for values in each])[sequence]
    weights = np.ones_like(ratio)
    floor, cap = settings.get("floor", 0.0), settings.get("cap", 2.0)
    if settings.get("type") == "truncate":
        weights = ratio.clip(floor, cap)
    if settings.get("type") == "mask":
        weights = np.where((ratio < floor) | (ratio > cap), 0.0, ratio)
    if "reject" in settings:
        rule = settings["reject"]
        estimates = {"k1": -distance, "k2": distance**2 / 2, "k3": np.exp(distance) - 1 - distance}
        estimate = estimates[rule["estimator"]]
        if rule["over"] != "token":
            by = {"sum": np.sum, "mean": np.mean, "max": lambda values: abs(values).max()}[rule["over"]]
            estimate = np.array([by(estimate[sequence == n]) for n in range(len(batch.lengths_N))])[sequence]
        weights = np.where(abs(estimate) > rule["above"], 0.0, weights)
    return weights / weights.mean() if settings.get("normalize") else weights


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_weights_are_those_by_hand_and_no_cut_changes_the_gradient(policy: Policy, batch: Batch, name: str) -> None:
    settings = CORRECTIONS[name]
    config = ObjectiveConfig(sampler_correction=SamplerCorrectionConfig(**settings))
    expected = by_hand(batch, settings)
    assert len(np.unique(expected.round(12))) > 1
    learner = make_learner(policy, objective=config)
    (weighted,) = learner.weighted(batch)
    weights_T = learner.objective.correction(weighted)
    if weighted.policy_weights_T is not None:
        weights_T = weights_T * weighted.policy_weights_T
    np.testing.assert_allclose(weights_T.numpy(), expected, rtol=1e-9)
    ours = gradient_of(policy, weighted, objective=config)
    factors = replace(batch, advantages_T=batch.advantages_T * torch.from_numpy(expected))
    plain = gradient_of(policy, factors, objective=ObjectiveConfig())
    assert relative_error(ours, plain) < 1e-9
    (cut,) = make_learner(policy, objective=config, micro_batch_tokens=14).weighted(batch)
    assert relative_error(gradient_of(policy, cut, objective=config, micro_batch_tokens=14), ours) < 1e-10


def test_the_effective_share_and_the_gap_by_depth_are_logged(policy: Policy, batch: Batch) -> None:
    config = ObjectiveConfig(sampler_correction=SamplerCorrectionConfig(type="truncate", cap=1.3))
    statistics = make_learner(policy, objective=config, micro_batch_tokens=14).accumulate_gradients(batch)
    metrics = sampler_gap_metrics([statistics])
    weights = by_hand(batch, {"type": "truncate", "cap": 1.3})
    share = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert metrics["rollout/correction_effective_share"] == pytest.approx(share, rel=1e-6)
    assert batch.old_logprobs_T is not None
    assert batch.sampler_logprobs_T is not None
    gaps = (batch.old_logprobs_T - batch.sampler_logprobs_T).abs().numpy()
    quarters = np.concatenate([np.arange(n) * 4 // n for n in batch.lengths_N.tolist()])
    for quarter in range(4):
        expected = gaps[quarters == quarter].mean()
        assert metrics[f"rollout/logprob_gap_quarter_{quarter + 1}"] == pytest.approx(expected, rel=1e-5)


def test_a_rejection_alone_corrects_the_sampler() -> None:
    settings = {"reject": {"above": 0.1}}
    objective = Objective(config=ObjectiveConfig(sampler_correction=SamplerCorrectionConfig(**settings)), kl=KLConfig())
    assert objective.corrects_sampler
    assert not objective.weighs_minibatches
