"""Packing: what a micro-batch, a minibatch and a sub-batch hold, and that no cut changes a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from training_parts import (
    EOS,
    completion,
    double_policy,
    gradients,
    largest_difference,
    make_batch,
    make_trainer,
    prompt,
    tiny_policy,
    weights,
)

from flatpeak.policy.policy import Policy
from flatpeak.training.batch import collate, micro_batches, minibatches, take
from flatpeak.training.config import AdvantageConfig, KLConfig, Normalization, ObjectiveConfig, TrainingConfig
from flatpeak.types import Batch, Group, Score

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

    def counted(batch: Batch, *, temperature: float) -> tuple[Tensor, Tensor]:
        seen.append(batch)
        return plain(batch, temperature=temperature)

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
    assert trainer.journal.advantages == {"a": [0.75, -0.25, -0.25, -0.25], "b": [0.25, 0.25, 0.25, -0.75]}


def test_collate_lays_valid_completions_end_to_end() -> None:
    groups = [
        Group(
            prompt=prompt("x", (4, 5)),
            completions=(
                completion((6, 7, EOS), limit=9, logprobs=(-0.5, -1.0, -1.5)),
                completion((8,), limit=9, logprobs=(-2.0,)),
            ),
        ),
        Group(
            prompt=prompt("y", (9,)),
            completions=(
                completion((), limit=9),
                completion((10, EOS), limit=9, logprobs=(-2.5, -3.0)),
            ),
        ),
    ]
    batch = collate(groups, torch.tensor([[True, False], [True, True]]), device=torch.device("cpu"))
    assert batch.prompts == ((4, 5), (9,))
    assert batch.prompt_N.tolist() == [0, 1, 1]
    assert batch.lengths_N.tolist() == [3, 0, 2]
    assert batch.tokens_T.tolist() == [6, 7, EOS, 10, EOS]
    assert batch.sequence_T.tolist() == [0, 0, 0, 2, 2]
    assert batch.old_logprobs_T.tolist() == [-0.5, -1.0, -1.5, -2.5, -3.0]
    assert batch.advantages_N.tolist() == batch.weights_N.tolist() == [0, 0, 0]
    assert batch.reference_logprobs_T is None
    assert batch.tokens_T.dtype == torch.int64


def three_groups() -> Batch:
    """Groups of 2, 3 and 2 completions; lengths 2 1 | 3 1 2 | 1 4."""
    return make_batch([2, 1, 3, 1, 2, 1, 4], prompts=[(3, 4), (5,), (6, 7, 8)], prompt_N=[0, 0, 1, 1, 1, 2, 2])


def test_take_keeps_order_and_what_belongs_to_each_token() -> None:
    batch = three_groups()
    part = take(batch, torch.tensor([1, 4, 6]))
    tokens = [2, 7, 8, 10, 11, 12, 13]
    assert part.prompts == ((3, 4), (5,), (6, 7, 8))
    assert part.prompt_N.tolist() == [0, 1, 2]
    assert part.lengths_N.tolist() == [1, 2, 4]
    assert part.sequence_T.tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert part.tokens_T.tolist() == [batch.tokens_T[token].item() for token in tokens]
    assert part.old_logprobs_T.tolist() == [batch.old_logprobs_T[token].item() for token in tokens]
    assert part.reference_logprobs_T is not None
    assert batch.reference_logprobs_T is not None
    assert part.reference_logprobs_T.tolist() == [batch.reference_logprobs_T[token].item() for token in tokens]
    assert part.advantages_N.tolist() == [batch.advantages_N[n].item() for n in (1, 4, 6)]
    assert part.weights_N.tolist() == [batch.weights_N[n].item() for n in (1, 4, 6)]


def test_take_leaves_out_prompts_that_are_not_needed() -> None:
    part = take(three_groups(), torch.tensor([2, 3, 5]))
    assert part.prompts == ((5,), (6, 7, 8))
    assert part.prompt_N.tolist() == [0, 0, 1]


def test_take_of_nothing_is_an_empty_batch() -> None:
    part = take(three_groups(), torch.tensor([], dtype=torch.int64))
    assert part.prompts == ()
    assert len(part.lengths_N) == len(part.tokens_T) == 0


def cut(batch: Batch, count: int, *, seed: int = 0, all_tokens: bool = True) -> list[Batch]:
    return list(
        minibatches(batch, count, normalization="sequence_mean", max_tokens=LIMIT, seed=seed, all_tokens=all_tokens)
    )


def many_groups(groups: int = 8) -> Batch:
    """Group p has the prompt (p + 3,) and completions of lengths 1 and 2."""
    return make_batch(
        [1, 2] * groups,
        prompts=[(p + 3,) for p in range(groups)],
        prompt_N=[p for p in range(groups) for _ in range(2)],
    )


@pytest.mark.parametrize(("count", "sizes"), [(1, [8]), (3, [3, 3, 2]), (8, [1] * 8), (20, [1] * 8)])
def test_minibatches_are_whole_groups_and_cover_every_group_once(count: int, sizes: list[int]) -> None:
    parts = cut(many_groups(), count)
    assert [len(part.prompts) for part in parts] == sizes
    assert sorted(p for part in parts for p in part.prompts) == [(p + 3,) for p in range(8)]
    for part in parts:
        assert part.lengths_N.tolist() == [1, 2] * len(part.prompts)


def test_minibatches_are_reshuffled_by_seed_and_only_by_seed() -> None:
    orders = [[part.prompts for part in cut(many_groups(), 4, seed=seed)] for seed in (1, 1, 2, 3)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[2] != orders[3]


def test_weights_count_completions_without_signal_which_then_cost_nothing() -> None:
    batch = replace(three_groups(), advantages_N=torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0, 2.0, -2.0]))
    (signal,) = cut(batch, 1, all_tokens=False)
    assert signal.prompts == ((3, 4), (6, 7, 8))
    np.testing.assert_allclose(signal.weights_N, [1 / 14, 1 / 7, 1 / 7, 1 / 28], rtol=1e-6)
    (everything,) = cut(batch, 1, all_tokens=True)
    np.testing.assert_allclose(everything.weights_N, [1 / 14, 1 / 7, 1 / 21, 1 / 7, 1 / 14, 1 / 7, 1 / 28], rtol=1e-6)


def test_weights_are_those_of_the_minibatch_and_not_of_the_whole_batch() -> None:
    for part in cut(many_groups(), 4):
        np.testing.assert_allclose(part.weights_N, [1 / 4, 1 / 8] * 2, rtol=1e-6)


def test_an_empty_completion_counts_in_the_mean_and_is_left_out_of_the_pass() -> None:
    batch = make_batch([2, 0, 1], prompts=[(3,)], prompt_N=[0, 0, 0])
    (part,) = cut(batch, 1)
    assert part.lengths_N.tolist() == [2, 1]
    np.testing.assert_allclose(part.weights_N, [1 / 6, 1 / 3], rtol=1e-6)
    assert part.tokens_T.tolist() == batch.tokens_T.tolist()


def test_a_batch_without_completions_has_no_minibatches() -> None:
    assert cut(take(three_groups(), torch.tensor([], dtype=torch.int64)), 2) == []


def random_layouts() -> list[Batch]:
    generator = np.random.default_rng(0)
    layouts = []
    for _ in range(40):
        sizes = generator.integers(1, 5, size=generator.integers(1, 6))
        prompts = [tuple(range(3, 3 + n)) for n in generator.integers(1, 8, size=len(sizes))]
        prompt_N = [p for p, size in enumerate(sizes) for _ in range(size)]
        layouts.append(
            make_batch(generator.integers(1, 9, size=len(prompt_N)).tolist(), prompts=prompts, prompt_N=prompt_N)
        )
    return layouts


def tokens_of(batch: Batch) -> int:
    return sum(map(len, batch.prompts)) + len(batch.tokens_T)


@pytest.mark.parametrize("budget", [1, 5, 12, 20, 45])
def test_micro_batches_keep_the_budget_and_split_neither_completions_nor_groups_that_fit(budget: int) -> None:
    for batch in random_layouts():
        pieces = list(micro_batches(batch, budget))
        assert torch.equal(torch.cat([piece.tokens_T for piece in pieces]), batch.tokens_T)
        assert torch.equal(torch.cat([piece.lengths_N for piece in pieces]), batch.lengths_N)
        assert torch.equal(torch.cat([piece.weights_N for piece in pieces]), batch.weights_N)
        assert all(tokens_of(piece) <= budget or len(piece.lengths_N) == 1 for piece in pieces)
        owners = [
            {int(p) for p in batch.prompt_N[start : start + size]}
            for start, size in zip(
                np.cumsum([0, *(len(piece.lengths_N) for piece in pieces[:-1])]),
                [len(piece.lengths_N) for piece in pieces],
                strict=True,
            )
        ]
        for p in range(len(batch.prompts)):
            group = take(batch, (batch.prompt_N == p).nonzero()[:, 0])
            if tokens_of(group) <= budget:
                assert sum(p in owner for owner in owners) == 1


def test_micro_batches_are_filled_as_far_as_the_budget_goes() -> None:
    # Groups cost 5, 7 and 8 tokens with their prompts.
    for budget, expected in (
        (20, [[2, 1, 3, 1, 2, 1, 4]]),
        (12, [[2, 1, 3, 1, 2], [1, 4]]),
        (11, [[2, 1], [3, 1, 2], [1, 4]]),
    ):
        assert [piece.lengths_N.tolist() for piece in micro_batches(three_groups(), budget)] == expected


def test_a_batch_without_completions_has_no_micro_batches() -> None:
    assert list(micro_batches(take(three_groups(), torch.tensor([], dtype=torch.int64)), 5)) == []
