"""Regularized steps written out by hand: plain forward passes, losses as formulas, one difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from support.trl import COMPLETIONS, LIMIT, PROMPTS, REWARDS, ROWS

BLOCKS = (".layers.", ".h.")
"""Substrings of the names of parameters in the repeated blocks."""


def in_blocks(name: str) -> bool:
    return any(block in name for block in BLOCKS)


def gradient_of(model: Any, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """d loss / d every trainable parameter."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss(), list(parameters.values()), materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


@torch.no_grad()
def move(model: Any, direction: dict[str, Tensor], by: float) -> None:
    for name, parameter in model.named_parameters():
        if name in direction:
            parameter.add_(direction[name], alpha=by)


def norm(gradient: dict[str, Tensor]) -> float:
    return float(torch.stack([g.double().pow(2).sum() for g in gradient.values()]).sum().sqrt())


def gradients(
    model: Any, first: Callable[[], Tensor], second: Callable[[], Tensor], *, eps: float, perturbed: Any = in_blocks
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """g1, and g2 at theta + eps * g1; theta is back afterwards."""
    g1 = gradient_of(model, first)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    move(model, {name: g for name, g in g1.items() if perturbed(name)}, eps)
    g2 = gradient_of(model, second)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    return g1, g2


def regularized_step(
    model: Any,
    first: Callable[[], Tensor],
    second: Callable[[], Tensor],
    *,
    strength: float,
    eps: float,
    rate: float,
    perturbed: Any = in_blocks,
) -> float:
    """theta - rate * (g1 + strength / eps * (g2 - g1) on the perturbed); gives the largest move due to the penalty."""
    g1, g2 = gradients(model, first, second, eps=eps, perturbed=perturbed)
    penalty = {name: strength / eps * (g2[name] - g1[name]) for name in g1 if perturbed(name)}
    move(model, g1, -rate)
    move(model, penalty, -rate)
    return rate * max(p.abs().max().item() for p in penalty.values())


def advantages() -> dict[str, Tensor]:
    """(r - mean) / (unbiased std + 1e-4) in each group, as TRL scales them."""
    rewards = {name: torch.tensor(values) for name, values in REWARDS.items()}
    return {name: (r - r.mean()) / (r.std() + 1e-4) for name, r in rewards.items()}


def tokens(model: Any) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every completion token of every row, end to end.

    Rows are filled up on the right: what comes after a token does not matter to it, so no mask is needed.
    """
    whole = [torch.tensor([*PROMPTS[name], *COMPLETIONS[name][index]]) for name, index in ROWS]
    logits = model(input_ids=torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)).logits.float()
    logprobs, entropies = [], []
    for row, ids, (name, _) in zip(torch.log_softmax(logits, -1), whole, ROWS, strict=True):
        start = len(PROMPTS[name])
        predicted = row[start - 1 : len(ids) - 1]
        logprobs.append(predicted.gather(1, ids[start:, None])[:, 0])
        entropies.append(-(predicted.exp() * predicted).sum(1))
    return torch.cat(logprobs), torch.cat(entropies)


@dataclass(frozen=True, kw_only=True)
class Hand:
    """GRPO's losses by their formulas, for the fixed rollouts."""

    loss_type: str
    mode: str
    low: float = 0.2
    high: float = 0.2
    beta: float = 0.0
    entropy: float = 0.0
    sequence: bool = False
    """Whether a ratio is its completion's geometric mean."""

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(COMPLETIONS[name][index]) for name, index in ROWS])

    @property
    def row_T(self) -> Tensor:
        """The row of each token."""
        return torch.arange(len(ROWS)).repeat_interleave(self.lengths)

    @property
    def advantages_T(self) -> Tensor:
        of = advantages()
        return torch.stack([of[name][index] for name, index in ROWS])[self.row_T]

    @property
    def weights_T(self) -> Tensor:
        """The factor of each token's loss in the sum."""
        lengths = self.lengths.float()
        count = len(ROWS)
        by_row = {
            "grpo": 1 / (count * lengths),
            "dr_grpo": torch.full((count,), 1 / (count * LIMIT)),
            "dapo": torch.full((count,), 1 / float(lengths.sum())),
        }
        return by_row["dapo" if self.loss_type == "cispo" else self.loss_type][self.row_T]

    def ratio(self, new_T: Tensor, old_T: Tensor) -> Tensor:
        difference = new_T - old_T
        if not self.sequence:
            return difference.exp()
        means = [difference[self.row_T == row].mean() for row in range(len(ROWS))]
        return torch.stack(means)[self.row_T].exp()

    def clipped(self, first_T: Tensor, old_T: Tensor) -> Tensor:
        """Mask of the tokens whose first gradient is zero, or for CISPO capped."""
        ratio = self.ratio(first_T, old_T)
        if self.loss_type == "cispo":
            return ratio > self.high
        above = (ratio > 1 + self.high) & (self.advantages_T > 0)
        return above | ((ratio < 1 - self.low) & (self.advantages_T < 0))

    def first(self, new_T: Tensor, entropy_T: Tensor, old_T: Tensor, reference_T: Tensor | None) -> Tensor:
        """The loss as it was published."""
        ratio = self.ratio(new_T, old_T)
        if self.loss_type == "cispo":
            loss_T = -ratio.clamp(max=self.high).detach() * self.advantages_T * new_T
        else:
            clamped = ratio.clamp(1 - self.low, 1 + self.high)
            loss_T = -torch.minimum(ratio * self.advantages_T, clamped * self.advantages_T)
        return (loss_T * self.weights_T).sum() + self.others(new_T, entropy_T, old_T, reference_T)

    def others(self, new_T: Tensor, entropy_T: Tensor, old_T: Tensor, reference_T: Tensor | None) -> Tensor:
        """k3 times the ratio, and the entropy's mean."""
        total = -self.entropy * entropy_T.mean()
        if reference_T is not None:
            d = reference_T - new_T
            total = total + (self.beta * self.weights_T * (d.exp() - d - 1) * self.ratio(new_T, old_T)).sum()
        return total

    def second(
        self, new_T: Tensor, entropy_T: Tensor, old_T: Tensor, reference_T: Tensor | None, first_T: Tensor
    ) -> Tensor:
        """The second pass's loss in the ratio mode."""
        if self.mode == "importance_clipped":
            return self.first(new_T, entropy_T, old_T, reference_T)
        clipped = self.clipped(first_T, old_T)
        first_ratio = self.ratio(first_T, old_T)
        frozen_T = -self.advantages_T * first_ratio.clamp(max=self.high) * new_T
        if self.loss_type != "cispo":
            frozen_T = torch.where(clipped, 0, -self.advantages_T * self.frozen(first_ratio, new_T))
        if self.mode == "importance":
            live_T = -self.advantages_T * self.ratio(new_T, old_T)
            kept_T = frozen_T if self.loss_type == "cispo" else torch.zeros_like(live_T)
            frozen_T = torch.where(clipped, kept_T, live_T)
        return (frozen_T * self.weights_T).sum() + self.others(new_T, entropy_T, old_T, reference_T)

    def frozen(self, first_ratio_T: Tensor, new_T: Tensor) -> Tensor:
        """Linear in the log-probabilities, with the first pass's slopes."""
        if not self.sequence:
            return first_ratio_T * new_T
        means = [new_T[self.row_T == row].mean() for row in range(len(ROWS))]
        return first_ratio_T * torch.stack(means)[self.row_T]

    def run(
        self, model: Any, *, steps: int, strength: float, eps: float, rate: float, mu: int = 1, reference: Any = None
    ) -> Iterator[tuple[float, int]]:
        """Steps on the fixed rollouts; gives each one's move due to the penalty, and how many tokens were clipped."""
        reference_T = None if reference is None else tokens(reference)[0].detach()
        old_T = torch.empty(0)
        for step in range(steps):
            first_T = tokens(model)[0].detach()
            old_T = first_T if step % mu == 0 else old_T

            def first(old_T: Tensor = old_T) -> Tensor:
                return self.first(*tokens(model), old_T, reference_T)

            def second(old_T: Tensor = old_T, first_T: Tensor = first_T) -> Tensor:
                return self.second(*tokens(model), old_T, reference_T, first_T)

            clipped = int(self.clipped(first_T, old_T).sum())
            yield regularized_step(model, first, second, strength=strength, eps=eps, rate=rate), clipped
