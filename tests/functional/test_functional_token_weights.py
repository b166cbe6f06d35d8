"""Weights over a minibatch's tokens against definitions written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flatpeak.functional import TokenWeights, clip_cov, damp_rare, kl_cov, m2po, off_policy_mask, stapo, top_entropy

RNG = np.random.default_rng(3)
COUNT = 400
LOGPROBS = -RNG.exponential(1.0, COUNT)
OLD = LOGPROBS + RNG.normal(0, 0.2, COUNT)
SAMPLER = LOGPROBS + RNG.normal(0, 0.3, COUNT)
ENTROPY = RNG.exponential(0.7, COUNT)
SEQUENCE = np.sort(RNG.integers(0, 20, COUNT))
ADVANTAGES = RNG.normal(0, 2, 20)[SEQUENCE]
COVARIANCE = (ADVANTAGES - ADVANTAGES.mean()) * (LOGPROBS - LOGPROBS.mean())


def double(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values)


@pytest.mark.parametrize("fraction", [0.2, 0.5, 1.0])
def test_top_entropy_keeps_the_tokens_above_the_quantile(fraction: float) -> None:
    weights = top_entropy(double(ENTROPY), fraction=fraction).numpy()
    np.testing.assert_array_equal(weights, np.quantile(ENTROPY, 1 - fraction) <= ENTROPY)
    assert weights.mean() == pytest.approx(fraction, abs=0.01)


def test_top_entropy_of_no_token_keeps_none() -> None:
    assert top_entropy(torch.zeros(0)).shape == (0,)


def test_top_entropy_of_one_token_keeps_it() -> None:
    assert top_entropy(torch.tensor([0.3])).tolist() == [1.0]


def test_clip_cov_drops_random_tokens_of_high_covariance_that_ppo_does_not_clip() -> None:
    ratio = np.exp(LOGPROBS - OLD)
    clipped = np.where(ADVANTAGES > 0, ratio > 1.2, ratio < 0.8)
    candidates = (COVARIANCE > 1) & (COVARIANCE < 5) & ~clipped
    given = (double(LOGPROBS), double(OLD), double(ADVANTAGES), 0.2, 0.2)
    dropped = [clip_cov(*given, seed, fraction=0.02).numpy() == 0 for seed in (1, 1, 2)]
    for one in dropped:
        assert one.sum() == 8 < candidates.sum()
        assert not (one & ~candidates).any()
    assert (dropped[0] == dropped[1]).all()
    assert (dropped[0] != dropped[2]).any()
    everything = clip_cov(*given, 1, fraction=1.0).numpy() == 0
    np.testing.assert_array_equal(everything, candidates)


def test_kl_cov_penalizes_the_tokens_of_the_largest_covariance() -> None:
    weights = kl_cov(double(LOGPROBS), double(ADVANTAGES), fraction=0.05, coefficient=0.1)
    assert isinstance(weights, TokenWeights)
    assert weights.penalty_T is not None
    chosen = np.zeros(COUNT)
    chosen[np.argsort(-COVARIANCE)[:20]] = 0.1
    np.testing.assert_allclose(weights.penalty_T.numpy(), chosen, rtol=1e-6)
    assert weights.policy_T.tolist() == [1.0] * COUNT


def test_m2po_drops_as_few_tokens_as_leave_a_small_second_moment() -> None:
    squares = (SAMPLER - LOGPROBS) ** 2
    kept = m2po(double(LOGPROBS), double(SAMPLER), threshold=0.04).numpy() == 1
    assert squares.mean() > 0.04
    assert squares[kept].mean() <= 0.04
    assert squares[~kept].min() >= squares[kept].max()
    one_more = np.append(squares[kept], squares[~kept].min())
    assert one_more.mean() > 0.04
    assert bool((m2po(double(LOGPROBS), double(LOGPROBS)) == 1).all())


def test_the_off_policy_mask_drops_bad_completions_that_are_far_from_the_sampler() -> None:
    means = np.array([(SAMPLER - LOGPROBS)[SEQUENCE == number].mean() for number in range(20)])  # noqa: SIM300
    expected = ~((means[SEQUENCE] > 0.02) & (ADVANTAGES < 0))
    weights = off_policy_mask(
        double(LOGPROBS), double(SAMPLER), double(ADVANTAGES), torch.from_numpy(SEQUENCE), 20, threshold=0.02
    )
    np.testing.assert_array_equal(weights.numpy(), expected)
    assert 0 < expected.sum() < COUNT


def test_stapo_silences_improbable_rewarded_tokens_where_the_policy_is_sure_and_keeps_the_sum() -> None:
    silenced = (np.exp(LOGPROBS) < 0.2) & (ENTROPY < 0.5) & (ADVANTAGES > 0)
    weights = stapo(double(LOGPROBS), double(ENTROPY), double(ADVANTAGES), probability=0.2, entropy=0.5).numpy()
    assert silenced.any()
    np.testing.assert_array_equal(weights == 0, silenced)
    assert weights.sum() == pytest.approx(COUNT, rel=1e-6)


def test_damping_is_by_the_tokens_probability() -> None:
    weights = damp_rare(double(LOGPROBS), alpha=0.3).numpy()
    np.testing.assert_allclose(weights, 0.3 * np.exp(LOGPROBS) + 0.7, rtol=1e-6)
