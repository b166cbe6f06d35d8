"""Off-policy, the second pass differentiates the function of the first: its gradient meets g1 as the step goes to 0."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from flatpeak.functional import importance_ratio
from flatpeak.gradreg.config import RatioMode
from flatpeak.policy.model import Policy
from flatpeak.training import regularized
from flatpeak.training.objective import Objective
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.training.regularized import FirstPass
from flatpeak.types import Batch
from support.regularized_training import (
    double_qwen2,
    gradient_of,
    make_learner,
    norm,
    off_policy,
    penalty_of,
    relative_error,
)

STEP = 3e-5
"""The default."""
MODES: tuple[RatioMode, ...] = get_args(RatioMode)
LOSSES: dict[str, dict[str, Any]] = {
    "clipped": {},
    "clipped, sequence ratio": {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.1},
    "dual clip": {"dual_clip": 1.5},
    "capped": {"loss": "truncated_policy_gradient", "cap": 1.2},
    "capped, sequence ratio": {"loss": "truncated_policy_gradient", "cap": 1.05, "ratio": "sequence"},
    "policy gradient": {"loss": "policy_gradient"},
    "policy gradient, sequence ratio": {"loss": "policy_gradient", "ratio": "sequence"},
    "unclipped": {"loss": "unclipped_surrogate"},
    "clipped within the ratio": {"loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4},
}
CLIPPED = ("clipped", "clipped, sequence ratio", "dual clip", "capped", "capped, sequence ratio")
OTHERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "with KL": {"kl": KLConfig(coefficient=0.3)},
    "with KL weighted by the ratio": {"kl": KLConfig(coefficient=0.3, ratio_weighted=True)},
    "with an entropy bonus": {"entropy": 0.2},
    "with KL and entropy": {"kl": KLConfig(coefficient=0.3, estimator="k2"), "entropy": 0.2},
}


@cache
def setting() -> tuple[Policy, Batch]:
    policy = double_qwen2()
    return policy, off_policy(policy)


def arguments(loss: str, others: str = "alone") -> dict[str, Any]:
    """The learner's objective and KL."""
    extra = OTHERS[others]
    objective = ObjectiveConfig(**LOSSES[loss], entropy_coefficient=extra.get("entropy", 0.0))
    return {"objective": objective, "kl": extra.get("kl", KLConfig())}


@pytest.mark.parametrize("loss", CLIPPED)
def test_in_this_batch_some_tokens_are_clipped_and_some_are_not(loss: str) -> None:
    policy, batch = setting()
    (statistics,) = make_learner(policy, **arguments(loss)).accumulate_gradients(batch).tokens
    assert statistics.tokens == 36
    assert 9 <= int(statistics.clipped) <= 16
    assert float(statistics.max_ratio_gap) > 0.5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_penalty_does_not_depend_on_the_step(loss: str, others: str, mode: RatioMode) -> None:
    policy, batch = setting()
    given = arguments(loss, others)
    plain = gradient_of(policy, batch, **given)
    default, finer = (
        penalty_of(policy, batch, plain=plain, ratio_mode=mode, step=step, **given) for step in (None, STEP / 10)
    )
    assert norm(default) == pytest.approx(norm(finer), rel=0.1)
    # Another direction of the same length is no agreement either.
    assert relative_error(default, finer) < 0.01
    assert norm(finer) > 0.1 * norm(plain)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_second_gradient_meets_the_first_as_the_step_goes_to_zero(loss: str, mode: RatioMode) -> None:
    policy, batch = setting()
    given = arguments(loss, "with KL and entropy")
    g1 = gradient_of(policy, batch, **given)
    gaps = []
    for step in (1e-5, 1e-6, 1e-9):
        # With a strength equal to the step, what comes out is g2 itself.
        g2 = gradient_of(policy, batch, strength=step, step=step, step_scale="absolute", ratio_mode=mode, **given)
        gaps.append(relative_error(g2, g1))
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=0.01)
    assert gaps[2] < 1e-6


@pytest.mark.parametrize("loss", ["clipped", "clipped, sequence ratio", "clipped within the ratio"])
def test_the_default_mode_penalizes_the_gradient_that_is_trained_on(loss: str) -> None:
    policy, batch = setting()
    given = arguments(loss)
    names = [name for name, _ in policy.model.named_parameters() if ".layers." in name]
    plain = {name: gradient_of(policy, batch, **given)[name] for name in names}
    weights = dict(policy.model.named_parameters())

    def moved(by: float) -> dict[str, Tensor]:
        with torch.no_grad():
            for name in names:
                weights[name].add_(plain[name], alpha=by)
        gradient = gradient_of(policy, batch, **given)
        with torch.no_grad():
            for name in names:
                weights[name].sub_(plain[name], alpha=by)
        return {name: gradient[name] for name in names}

    step = 5e-6 / norm(plain)
    ahead, back = moved(step), moved(-step)
    expected = {name: (ahead[name] - back[name]) / (2 * step) for name in names}
    penalty = penalty_of(policy, batch, difference="central", step=1e-6, **given)
    assert relative_error({name: penalty[name] for name in names}, expected) < 1e-6


def test_both_passes_are_at_the_sampling_temperature() -> None:
    policy, batch = setting()
    given = {**arguments("clipped", "with KL and entropy"), "temperature": 0.7}
    warm = gradient_of(policy, batch, **arguments("clipped", "with KL and entropy"))
    plain = gradient_of(policy, batch, **given)
    assert relative_error(warm, plain) > 0.1
    default, finer = (penalty_of(policy, batch, plain=plain, step=step, **given) for step in (None, STEP / 10))
    assert relative_error(default, finer) < 0.01


def ratio_of_one(
    objective: Objective, frozen: FirstPass, logprobs_T: Tensor, entropy_T: Tensor, batch: Batch, *, mode: RatioMode
) -> Tensor:
    """What trainers without stored log-probabilities do: every ratio is to the pass's own, so 1, and nothing clips."""
    return -importance_ratio(logprobs_T, logprobs_T.detach()) * batch.advantages_T


def importance_without_the_clip(
    objective: Objective, frozen: FirstPass, logprobs_T: Tensor, entropy_T: Tensor, batch: Batch, *, mode: RatioMode
) -> Tensor:
    """The ratio of the first pass, but not its clip."""
    ratio_T = importance_ratio(logprobs_T, batch.old_logprobs_T)
    return -ratio_T * batch.advantages_T


@pytest.mark.parametrize("naive", [ratio_of_one, importance_without_the_clip])
def test_the_same_check_finds_a_second_pass_of_another_function(naive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch = setting()
    plain = gradient_of(policy, batch)
    right = norm(penalty_of(policy, batch, plain=plain))
    monkeypatch.setattr(regularized, "second_pass_loss", naive)
    default, finer = (norm(penalty_of(policy, batch, plain=plain, step=step)) for step in (None, STEP / 10))
    assert finer / default == pytest.approx(10, rel=0.1)
    assert default > 10 * right
