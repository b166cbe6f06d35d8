"""The second pass computes no gradient that nobody asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatpeak.policy.model_settings import gradients_of
from support.regularized_training import double_qwen2, make_learner, off_policy
from support.training import tiny_policy


def test_parameters_that_keep_g1_are_out_of_the_second_pass_and_back_afterwards() -> None:
    policy = tiny_policy()
    parameters = list(policy.model.parameters())
    fixed, outside = parameters[0].requires_grad_(False), parameters[1:3]
    with pytest.raises(RuntimeError), gradients_of([fixed, *outside], required=False):
        assert [p.requires_grad for p in parameters[:4]] == [False, False, False, True]
        raise RuntimeError
    assert [p.requires_grad for p in parameters[:4]] == [False, True, True, True]


def test_the_output_layer_s_gradient_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = double_qwen2()
    learner = make_learner(policy, strength=0.5)
    asked: list[bool] = []
    head: Any = policy.head.linear.weight
    seen = policy.token_logprobs

    def watch(*args: Any, **keywords: Any) -> Any:
        asked.append(head.requires_grad)
        return seen(*args, **keywords)

    monkeypatch.setattr(policy, "token_logprobs", watch)
    batch = off_policy(policy)
    asked.clear()
    learner.accumulate_gradients(batch)
    assert asked == [True, False]
    assert head.requires_grad
    assert head.grad is not None
    assert bool(torch.isfinite(head.grad).all())
