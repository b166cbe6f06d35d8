"""A softmax bandit whose every action can be written down: the objective, its gradient and its curvature are sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from flatpeak.functional import hessian_vector_product
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.regularizer import GradientRegularizer

REWARDS = (1.0, 0.2, -0.5, 0.7, 0.0, 0.4)
THETA = (0.3, -0.8, 1.1, 0.2, -0.1, 0.6)


class Bandit(nn.Module):
    """pi(a) = softmax(theta)_a over K actions, each with its reward."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(THETA, dtype=torch.float64))
        self.rewards_K = torch.tensor(REWARDS, dtype=torch.float64)

    def logprobs(self) -> Tensor:
        """log pi(a), float64 [K]."""
        return torch.log_softmax(self.theta, 0)

    def expected_loss(self) -> Tensor:
        """-J = -sum_a pi(a) r(a)."""
        return -(self.logprobs().exp() * self.rewards_K).sum()

    def true_penalty(self) -> Tensor:
        """The gradient of 1/2 ||grad J||^2: the Hessian of -J times its gradient."""
        (gradient,) = torch.autograd.grad(self.expected_loss(), [self.theta])
        return hessian_vector_product(self.expected_loss, [self.theta], [gradient])[0]

    def advantages(self, actions_N: Tensor, shares_N: Tensor) -> Tensor:
        """Rewards less their mean under the shares, as a group's baseline does."""
        rewards_N = self.rewards_K[actions_N]
        return rewards_N - (shares_N * rewards_N).sum()


LossOf = Callable[[Tensor], Tensor]
"""The log-probabilities of all K actions -> the scalar loss."""


def penalty_of(bandit: Bandit, first: LossOf, second: LossOf, *, difference: str, step: float = 1e-5) -> Tensor:
    """The regularizer's addition at strength 1, with these losses in its two passes."""
    config = GradientRegularizationConfig(strength=1.0, perturbed="all", difference=difference, step=step)
    regularizer = GradientRegularizer(bandit, config)

    def losses(loss: LossOf) -> Iterator[Tensor]:
        yield loss(bandit.logprobs())

    bandit.zero_grad()
    (plain,) = torch.autograd.grad(first(bandit.logprobs()), [bandit.theta])
    regularizer.accumulate(lambda: losses(first), again=lambda: losses(second))
    assert bandit.theta.grad is not None
    return bandit.theta.grad - plain
