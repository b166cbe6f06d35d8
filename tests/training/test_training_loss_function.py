"""A policy loss of the user's own: tried before a run, checked at every call, and equal to a built-in one it copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.errors import UserError
from flatpeak.functional import PolicyLoss, clipped_surrogate, importance_ratio
from flatpeak.functional.losses import capped_policy_loss, truncated_policy_gradient
from flatpeak.functional.policy_losses import POLICY_LOSSES
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.training.objective import Objective
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.training.regularized import build_learner
from flatpeak.training.user_functions import make_objective
from support.training import SGD, make_batch, tiny_policy, weights

OWN = ObjectiveConfig(loss="python:loss")
PROMPTS = [[3, 4, 5], [6, 7]]


def clipped(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any) -> Tensor:
    return clipped_surrogate(ratio_T, advantages_T, clip_low=config.clip_low, clip_high=config.clip_high)


def cispo(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any, *, cap: float = 1.2) -> Tensor:
    return truncated_policy_gradient(logprobs_T, ratio_T, advantages_T, cap=cap)


def cispo_curve(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any, *, cap: float = 1.2) -> Tensor:
    return capped_policy_loss(logprobs_T, ratio_T, advantages_T, cap=cap)


def above(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any, *, cap: float = 1.2) -> Tensor:
    return ratio_T > cap


def squared(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any) -> Tensor:
    """(A - log r)^2: a token of advantage 0 has a gradient where its ratio is not 1."""
    return (advantages_T - ratio_T.log()).square()


def objective(own: Any, **settings: Any) -> Objective:
    config = ObjectiveConfig(**{"loss": "python:loss", **settings})
    return make_objective(config, KLConfig(), own=own)


def trained(one: Objective, **regularization: Any) -> dict[str, Tensor]:
    """The weights after three updates on batches whose old log-probabilities are far from the policy's."""
    policy = tiny_policy()
    learner = build_learner(
        policy,
        one,
        SGD,
        GradientRegularizationConfig(**regularization),
        temperature=1.0,
        micro_batch_tokens=12,
        notice=lambda text: None,
    )
    for seed in range(3):
        learner.update(make_batch([4, 2, 5, 3], prompts=PROMPTS, prompt_N=[0, 0, 1, 1], seed=seed), rate=0.5)
    return weights(policy)


REGULARIZED: list[dict[str, Any]] = [
    {},
    {"strength": 0.1, "ratio_mode": "reuse"},
    {"strength": 0.1, "ratio_mode": "importance"},
    {"strength": 0.1, "ratio_mode": "importance_clipped"},
    {"strength": 0.1, "ratio_mode": "importance_clipped", "difference": "exact"},
]


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("regularization", REGULARIZED, ids=str)
def test_a_copy_of_the_clipped_surrogate_trains_the_same_weights(regularization: dict[str, Any], ratio: Any) -> None:
    built_in = Objective(config=ObjectiveConfig(ratio=ratio), kl=KLConfig())
    expected, own = trained(built_in, **regularization), trained(objective(clipped, ratio=ratio), **regularization)
    assert all(torch.equal(expected[name], own[name]) for name in expected)
    assert not all(torch.equal(expected[name], weight) for name, weight in weights(tiny_policy()).items())


@pytest.mark.parametrize("regularization", REGULARIZED, ids=str)
def test_a_copy_of_cispo_with_its_curvature_trains_the_same_weights(regularization: dict[str, Any]) -> None:
    loss = PolicyLoss(value=cispo, clipped=above, with_curvature=cispo_curve)
    config = ObjectiveConfig(loss="truncated_policy_gradient", cap=1.2)
    expected = trained(Objective(config=config, kl=KLConfig()), **regularization)
    own = trained(objective(loss), **regularization)
    assert all(torch.equal(expected[name], own[name]) for name in expected)


def test_arguments_of_the_recipe_reach_every_function_of_a_loss() -> None:
    loss = PolicyLoss(value=cispo, clipped=above, with_curvature=cispo_curve)
    made = objective(loss, arguments={"cap": 2.0}).loss
    values = torch.tensor([-1.0]), torch.tensor([1.5]), torch.tensor([1.0])
    assert made.value(*values, OWN).tolist() == [1.5]
    assert made.clipped(*values, OWN).tolist() == [False]
    assert objective(loss).loss.clipped(*values, OWN).tolist() == [True]
    assert made.with_curvature is not None
    assert made.with_curvature(*values, OWN).tolist() == [-1.5]


def test_a_plain_function_counts_no_clipped_tokens() -> None:
    values = torch.tensor([-1.0]), torch.tensor([9.0]), torch.tensor([1.0])
    assert objective(clipped).loss.clipped(*values, OWN).tolist() == [False]
    assert POLICY_LOSSES["clipped_surrogate"].clipped(*values, ObjectiveConfig()).tolist() == [True]


def test_tokens_without_advantage_are_trained_on_where_the_loss_moves_them() -> None:
    assert not objective(clipped).needs_all_tokens
    assert objective(squared).needs_all_tokens
    assert objective(squared).without_regularizers().needs_all_tokens
    stated = PolicyLoss(value=clipped, all_tokens=True)
    assert objective(stated).needs_all_tokens


def barrier(bound: float, *, below: bool = False) -> Any:
    """-r A, and half the squared way of the ratio beyond a bound."""

    def loss(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any) -> Tensor:
        beyond_T = (bound - ratio_T if below else ratio_T - bound).clamp(min=0)
        return -ratio_T * advantages_T + beyond_T.square() / 2

    return loss


def unlikely(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any) -> Tensor:
    """-r A, and a penalty on tokens below a probability of e^-10."""
    return -ratio_T * advantages_T + (-10 - logprobs_T).clamp(min=0)


def refusing(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any) -> Tensor:
    """A barrier above 3 that refuses ratios above 100."""
    assert float(ratio_T.detach().max()) < 100
    return barrier(3.0)(logprobs_T, ratio_T, advantages_T, config)


def fifth_power(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any) -> Tensor:
    """-r^5 A, which is 0 times infinity at the largest ratios."""
    return -(ratio_T**5) * advantages_T


@pytest.mark.parametrize(
    ("own", "moves"),
    [
        (barrier(1.5), True),
        (barrier(2.0), True),
        (barrier(3.0), True),
        (barrier(1e6), True),
        (barrier(0.3, below=True), True),
        (barrier(1e-6, below=True), True),
        (unlikely, True),
        (refusing, True),
        (fifth_power, False),
        (cispo, False),
    ],
    ids=[
        "1.5",
        "2",
        "3",
        "a million",
        "below 0.3",
        "below a millionth",
        "unlikely tokens",
        "refusing",
        "infinite",
        "cispo",
    ],
)
def test_a_gradient_without_advantage_is_found_wherever_it_begins(own: Any, moves: bool) -> None:
    assert objective(own).needs_all_tokens == moves


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logprobs_T, ratio_T, advantages_T, config: 1.0, r"returned float 1\.0: return torch\.float32 \[12\]"),
        (
            lambda logprobs_T, ratio_T, advantages_T, config: (ratio_T * advantages_T).mean(),
            r"\[\] on cpu: return torch\.float32 \[12\]",
        ),
        (lambda logprobs_T, ratio_T, advantages_T, config: ratio_T.double(), r"returned torch\.float64 \[12\] on cpu"),
        (
            lambda logprobs_T, ratio_T, advantages_T, config: -ratio_T.detach() * advantages_T,
            "does not reach the log-p",
        ),
        (lambda logprobs_T, ratio_T, advantages_T, config: (ratio_T * 0).round(), "does not reach the log-probabilit"),
        (
            lambda logprobs_T, ratio_T, advantages_T, config: -ratio_T * advantages_T / advantages_T.abs(),
            "at advantages of 0: its loss is nan for a token of log-probability -3.5, ratio 0.607 and advantage 0",
        ),
        (
            lambda logprobs_T, ratio_T, advantages_T, config: -(ratio_T - ratio_T.detach()).abs().sqrt() * advantages_T,
            "its gradient is (nan|-?inf) for a token",
        ),
        (
            lambda logprobs_T, ratio_T, advantages_T, config: -ratio_T * (advantages_T - advantages_T.mean()),
            "depends on the other tokens of the call, or on chance",
        ),
        (
            lambda logprobs_T, ratio_T, advantages_T, config: -ratio_T * advantages_T * torch.rand(()),
            "depends on the other tokens of the call, or on chance",
        ),
        (
            lambda logprobs_T, ratio_T, advantages_T: -ratio_T * advantages_T,
            r"too many positional arguments; let it take \(logprobs_T, ratio_T, advantages_T, config\)",
        ),
        (lambda *values: {}["tau"], r"KeyError: 'tau' \(.*test_training_loss_function\.py:\d+\)"),
        (
            lambda logprobs_T, ratio_T, advantages_T, config: -ratio_T * advantages_T + 0 * logprobs_T.detach().exp_(),
            "changes logprobs_T in place",
        ),
        (3, "is int 3: name a function or a flatpeak.functional.PolicyLoss"),
        (
            PolicyLoss(value=clipped, clipped=clipped),
            r"clipped returned torch\.float32 \[12\] on cpu: return torch\.bool",
        ),
        (PolicyLoss(value=clipped, with_curvature=cispo_curve), "with_curvature has another gradient than value"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_an_unfit_loss_is_refused_before_anything_is_built(function: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"^objective\.loss=python:loss.*{message}"):
        objective(function)


def test_an_unknown_argument_is_named_with_its_setting() -> None:
    with pytest.raises(UserError, match=r"unexpected keyword argument 'tau'.* change objective\.arguments"):
        objective(clipped, arguments={"tau": 1.0})


def test_an_argument_that_is_missing_is_named_with_its_setting() -> None:
    def tempered(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any, *, tau: float) -> Tensor:
        return -tau * ratio_T * advantages_T

    with pytest.raises(UserError, match=r"missing a required (keyword-only )?argument: 'tau'.*change objective\.argum"):
        objective(tempered)
    assert objective(tempered, arguments={"tau": 2.0}).loss.value(*[torch.ones(1)] * 3, OWN).tolist() == [-2.0]


def test_a_result_that_turns_bad_in_training_names_the_function() -> None:
    calls: list[int] = []

    def shrinking(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any) -> Tensor:
        calls.append(len(logprobs_T))
        return -(ratio_T * advantages_T)[: len(ratio_T) - (len(calls) > 10)]

    made = objective(shrinking)
    values = torch.tensor([-1.0, -2.0]), torch.ones(2), torch.ones(2)
    calls.extend([0] * 10)
    with pytest.raises(
        UserError,
        match=r"objective\.loss=python:loss returned torch\.float32 \[1\] on cpu: return torch\.float32 \[2\]",
    ):
        made.loss.value(*values, OWN)


def test_a_loss_is_not_called_for_no_tokens() -> None:
    def narrowed(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any) -> Tensor:
        assert float(ratio_T.detach().max()) < 9
        return -ratio_T * advantages_T

    def outside(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any) -> Tensor:
        return ratio_T >= ratio_T.min()

    loss = objective(PolicyLoss(value=narrowed, clipped=outside)).loss
    logprobs_T, nothing_T = torch.zeros(0, requires_grad=True), torch.zeros(0)
    loss.value(logprobs_T, nothing_T, nothing_T, OWN).sum().backward()
    assert logprobs_T.grad is not None
    assert loss.clipped(logprobs_T, nothing_T, nothing_T, OWN).dtype == torch.bool


def test_trying_a_loss_moves_no_random_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(UserError):
        objective(lambda logprobs_T, ratio_T, advantages_T, config: -ratio_T * advantages_T * torch.rand(()))
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("function", [partial(cispo, cap=3.0), cispo], ids=["partial", "function"])
def test_a_partial_function_is_a_loss(function: Callable[..., Tensor]) -> None:
    logprobs_T, old_T = torch.tensor([-1.0]), torch.tensor([-2.0])
    cap = 3.0 if isinstance(function, partial) else 1.2
    loss_T = objective(function).loss.value(logprobs_T, importance_ratio(logprobs_T, old_T), torch.ones(1), OWN)
    assert loss_T.tolist() == pytest.approx([min(cap, 2.718281828)])
