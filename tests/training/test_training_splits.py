"""No cut of a batch changes its gradient, whatever is missing, empty, truncated or without signal in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from flatpeak.policy.model import Policy
from flatpeak.training.config import TrainingConfig
from flatpeak.training.objective_config import AdvantageConfig, KLConfig, Normalization, ObjectiveConfig
from flatpeak.types import Batch, Group, Score
from support.models import EOS
from support.training import (
    completion,
    double_policy,
    gradients,
    largest_difference,
    make_trainer,
    prompt,
    tiny_policy,
    weights,
)

LIMIT = 6
PROMPTS = {"a": (3, 7, 12), "b": (20, 5, 9, 14, 8), "c": (8,), "d": (11, 4)}
LENGTHS = {"a": (3, 2, 6, 4), "b": (1, 5, 0, 2), "c": (2, 3, 1, 4), "d": (2, 3, 5, 1)}
"""The third completion of a is cut at the limit, the third of b is empty."""
REWARDS: dict[str, tuple[Score, ...]] = {
    "a": (1.0, 0.0, 1.0, 0.0),
    "b": (0.0, 1.0, 1.0, None),
    "c": (0.5, 0.5, 0.5, 0.5),
    "d": (1.0, None, None, None),
}
TRAINED = {"a": (0, 1, 3), "b": (0, 1, 2), "c": (0, 1, 2, 3)}
"""Of a without what was cut, of b without what is missing; d has one reward, so no baseline: all of it is missing."""
ADVANTAGES = {
    "a": (3**0.5 / 2, -(3**0.5) / 2, -(3**0.5) / 2),
    "b": (-2 / 3**0.5, 1 / 3**0.5, 1 / 3**0.5),
    "c": (0.0,) * 4,
}
"""(r - mean) / std by hand: std of (1, 0, 1, 0) is 1 / sqrt(3), and so is that of (0, 1, 1)."""
WEIGHTS = {
    "sequence_mean": lambda length: 1 / (10 * length),
    "constant": lambda length: 1 / (10 * LIMIT),
    "token_mean": lambda length: 1 / 25,
    "longest": lambda length: 1 / (10 * 5),
    "sequence_sum": lambda length: 1 / 10,
}
"""Ten completions of 25 tokens, at most 5 each: the empty one and those without advantage count."""
NORMALIZATIONS: tuple[Normalization, ...] = get_args(Normalization)
WHOLE, SPLIT_GROUPS, SINGLE = 10_000, 11, 1


def make_groups() -> list[Group]:
    """Random tokens and old log-probabilities near the policy's: ratios on both sides of the clip."""
    generator = torch.Generator().manual_seed(3)
    groups = []
    for name, lengths in LENGTHS.items():
        completions = []
        for length in lengths:
            tokens = torch.randint(3, 24, (length,), generator=generator).tolist()
            tokens = tokens if length in (0, LIMIT) else [*tokens[:-1], EOS]
            old = (-2.5 - torch.rand(length, generator=generator)).tolist()
            completions.append(completion(tokens, limit=LIMIT, logprobs=old))
        groups.append(Group(prompt=prompt(name, PROMPTS[name]), completions=tuple(completions)))
    return groups


def count_pieces(policy: Policy) -> list[Batch]:
    """Every batch the policy scores from now on."""
    seen: list[Batch] = []
    plain = policy.token_logprobs

    def counted(batch: Batch, **settings: Any) -> tuple[Tensor, Tensor]:
        seen.append(batch)
        return plain(batch, **settings)

    policy.token_logprobs = counted  # type: ignore[method-assign]
    return seen


def step_gradient(
    budget: int,
    *,
    objective: ObjectiveConfig,
    kl: KLConfig | None = None,
    make_policy: Callable[..., Policy] = tiny_policy,
) -> tuple[dict[str, Tensor], dict[str, float], list[Batch]]:
    """What one step of the trainer left in `.grad`, what it reported, and its micro-batches."""
    policy = make_policy()
    trainer = make_trainer(
        policy,
        make_groups(),
        REWARDS,
        max_new_tokens=LIMIT,
        objective=objective,
        kl=kl,
        advantage=AdvantageConfig(eps=0.0),
        training=TrainingConfig(steps=1, micro_batch_tokens=budget),
        reference=None if kl is None else make_policy(seed=5),
    )
    pieces = count_pieces(policy)
    metrics = trainer.train_step(1)
    return gradients(policy), metrics, pieces


def plain_gradient(normalization: Normalization) -> dict[str, Tensor]:
    """The gradient of sum_i w_i sum_t -r_it A_i, from one plain forward pass per completion and weights by hand."""
    policy = tiny_policy()
    groups = {group.prompt.id: group for group in make_groups()}
    with policy.plain_attention() as model:
        for name, indices in TRAINED.items():
            for index, advantage in zip(indices, ADVANTAGES[name], strict=True):
                answer = groups[name].completions[index]
                if not answer.token_ids or not advantage:
                    continue
                row = torch.tensor([[*PROMPTS[name], *answer.token_ids]])
                logits = model(input_ids=row).logits[0, len(PROMPTS[name]) - 1 : -1]
                logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
                ratio = torch.exp(logprobs - torch.tensor(answer.logprobs))
                weight = WEIGHTS[normalization](len(answer.token_ids))
                (-ratio * advantage * weight).sum().backward()
    return gradients(policy)


def relative_difference(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any entry, over the largest entry."""
    return largest_difference(ours, expected) / max(gradient.abs().max().item() for gradient in expected.values())


def tensorwise_difference(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The same with every tensor measured by its own largest entry."""
    return max(
        ((ours[name] - gradient).abs().max() / gradient.abs().max()).item()
        for name, gradient in expected.items()
        if bool(gradient.any())
    )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_the_gradient_is_that_of_plain_forward_passes_weighted_by_hand(normalization: Normalization) -> None:
    objective = ObjectiveConfig(loss="unclipped_surrogate", normalization=normalization, truncated="mask")
    ours, _, _ = step_gradient(WHOLE, objective=objective)
    assert tensorwise_difference(ours, plain_gradient(normalization)) < 1e-5


VARIANTS: dict[str, tuple[dict[str, Any], KLConfig | None]] = {
    "token ratio": ({"ratio": "token"}, None),
    "sequence ratio": ({"ratio": "sequence"}, None),
    "with KL and entropy": ({"entropy_coefficient": 0.1}, KLConfig(coefficient=0.2)),
}


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_do_not_depend_on_how_a_batch_is_cut(normalization: Normalization, variant: str) -> None:
    settings, kl = VARIANTS[variant]
    objective = ObjectiveConfig(normalization=normalization, truncated="mask", **settings)
    whole, whole_metrics, pieces = step_gradient(WHOLE, objective=objective, kl=kl)
    assert len(pieces) == 1
    for budget in (SINGLE, SPLIT_GROUPS, 2 * SPLIT_GROUPS):
        cut, metrics, pieces = step_gradient(budget, objective=objective, kl=kl)
        assert len(pieces) > 1
        assert relative_difference(cut, whole) < 1e-6
        for name in ("loss", "entropy", "ratio_mean", "ratio_max_gap", "clip_fraction", "kl_reference"):
            if name != "kl_reference" or kl:
                expected = whole_metrics[f"policy/{name}"]
                assert metrics[f"policy/{name}"] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_in_double_precision_no_cut_leaves_a_trace_in_any_tensor(normalization: Normalization) -> None:
    objective = ObjectiveConfig(normalization=normalization, truncated="mask", ratio="sequence")
    kl = KLConfig(coefficient=0.2)
    whole, _, _ = step_gradient(WHOLE, objective=objective, kl=kl, make_policy=double_policy)
    for budget in (SINGLE, SPLIT_GROUPS, 2 * SPLIT_GROUPS):
        cut, _, _ = step_gradient(budget, objective=objective, kl=kl, make_policy=double_policy)
        assert tensorwise_difference(cut, whole) < 1e-12


def test_these_gradients_come_from_groups_that_were_really_split() -> None:
    _, _, pieces = step_gradient(SPLIT_GROUPS, objective=ObjectiveConfig(truncated="mask"))
    prompts = [piece.prompts for piece in pieces]
    assert any(set(left) & set(right) for left, right in pairwise(prompts))


def test_a_step_whose_rewards_are_all_missing_changes_no_weight() -> None:
    policy = tiny_policy()
    before = weights(policy)
    missing: dict[str, Sequence[Score]] = {name: [None] * 4 for name in PROMPTS}
    trainer = make_trainer(policy, make_groups(), missing, max_new_tokens=LIMIT, reference=tiny_policy(seed=5))
    metrics = trainer.train_step(1)
    assert largest_difference(weights(policy), before) == 0
    assert metrics["optimizer/updates"] == 0
    assert metrics["reward/missing_fraction"] == 1


def test_a_step_of_nothing_but_empty_completions_changes_no_weight() -> None:
    policy = tiny_policy()
    before = weights(policy)
    empty = Group(prompt=prompt("a", PROMPTS["a"]), completions=(completion([], limit=LIMIT),) * 2)
    trainer = make_trainer(
        policy,
        [empty],
        {"a": (0.0, 1.0)},
        max_new_tokens=LIMIT,
        kl=KLConfig(coefficient=0.1),
        reference=tiny_policy(seed=5),
    )
    trainer.train_step(1)
    assert largest_difference(weights(policy), before) == 0


def test_groups_with_the_same_prompt_text_keep_baselines_of_their_own() -> None:
    groups = [
        replace(group, prompt=prompt(name, PROMPTS["a"])) for name, group in zip("ab", make_groups()[:2], strict=True)
    ]
    trainer = make_trainer(
        tiny_policy(),
        groups,
        {"a": (1, 0, 0, 0), "b": (1, 1, 1, 0)},
        max_new_tokens=LIMIT,
        advantage=AdvantageConfig(scale="none"),
    )
    trainer.train_step(1)
    assert trainer.recorder.advantages == {"a": [0.75, -0.25, -0.25, -0.25], "b": [0.25, 0.25, 0.25, -0.75]}
