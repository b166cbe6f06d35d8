"""Whatever goes wrong in an update, the weights are as they were: errors, interrupts, numbers that are none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.policy.model import Policy
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.regularized import RegularizedLearner
from flatpeak.types import Batch
from support.regularized_training import count_backward_tokens, double_qwen2, gradient_of, make_learner, off_policy
from support.training import gradients, largest_difference, tiny_policy, weights

ADAMW = OptimizerConfig(learning_rate=1e-3)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("late", [1, 2, 3])
def test_whatever_lands_in_the_second_pass_the_weights_are_as_before(
    error: BaseException, moment: str, late: int
) -> None:
    policy = double_qwen2()
    batch = off_policy(policy)
    learner = make_learner(policy, strength=0.5, micro_batch_tokens=20)
    before = weights(policy)
    first = len(count_micro_batches(policy, batch))
    assert first >= 3
    plain = policy.token_logprobs
    calls: list[bool] = []

    def failing(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        calls.append(largest_difference(weights(policy), before) > 0)
        if len(calls) == first + late and moment == "before":
            raise error
        result = plain(*args, **kwargs)
        if len(calls) == first + late:
            raise error
        return result

    policy.token_logprobs = failing  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        learner.update(batch, rate=0.1)
    assert calls == [False] * first + [True] * late
    assert largest_difference(weights(policy), before) == 0

    # And the learner is as good as new: the same update, tried again, is the update.
    policy.token_logprobs = plain  # type: ignore[method-assign]
    learner.update(batch, rate=0.1)
    untouched = double_qwen2()
    make_learner(untouched, strength=0.5, micro_batch_tokens=20).update(batch, rate=0.1)
    assert largest_difference(weights(policy), weights(untouched)) == 0
    assert largest_difference(weights(policy), before) > 1e-4


def count_micro_batches(policy: Policy, batch: Batch) -> list[int]:
    """The tokens of each piece of a first pass."""
    pass_count = count_backward_tokens(policy)
    make_learner(policy, micro_batch_tokens=20).accumulate_gradients(batch)
    policy.model.zero_grad()
    del policy.token_logprobs
    return pass_count


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_gradient_that_is_not_finite_changes_no_weight(value: float, name: str) -> None:
    policy = tiny_policy()
    batch = off_policy(policy)
    learner = make_learner(policy, strength=0.5, optimizer=ADAMW)
    before = weights(policy)
    hook = policy.model.get_parameter(name).register_hook(lambda gradient: torch.full_like(gradient, value))
    statistics = learner.update(batch, rate=1e-2)
    assert statistics.skipped
    assert largest_difference(weights(policy), before) == 0

    hook.remove()
    statistics = learner.update(batch, rate=1e-2)
    assert not statistics.skipped
    assert largest_difference(weights(policy), before) > 1e-4
    assert all(bool(component.isfinite().all()) for component in weights(policy).values())


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_second_pass_that_is_not_finite_leaves_the_plain_update(name: str) -> None:
    policy = tiny_policy()
    batch = off_policy(policy)
    plain = gradient_of(policy, batch)
    learner = make_learner(policy, strength=0.5)
    before = weights(policy)

    def poison(gradient: Tensor) -> Tensor:
        in_second = largest_difference(weights(policy), before) > 0
        return torch.full_like(gradient, float("nan")) if in_second else gradient

    policy.model.get_parameter(name).register_hook(poison)
    statistics = learner.accumulate_gradients(batch)
    assert statistics.regularization is not None
    if "layers" in name:
        assert statistics.regularization.skipped == "the second pass is not finite"
        assert largest_difference(gradients(policy), plain) == 0
    else:
        # What is not perturbed has no second gradient to speak of.
        assert statistics.regularization.skipped is None
        assert all(bool(component.isfinite().all()) for component in gradients(policy).values())


def test_a_minibatch_without_signal_is_skipped_and_changes_nothing() -> None:
    policy = tiny_policy()
    batch = off_policy(policy)
    learner = make_learner(policy, strength="ratio:0.3")
    assert isinstance(learner, RegularizedLearner)
    before = weights(policy)
    statistics = learner.update(replace(batch, advantages_T=torch.zeros_like(batch.advantages_T)), rate=1.0)
    assert statistics.regularization is not None
    assert statistics.regularization.skipped == "g1 is zero"
    assert learner.regularizer.schedule.log_strength is None
    assert largest_difference(weights(policy), before) == 0
