"""Packing: what a batch, a sub-batch, a minibatch and a micro-batch hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flatpeak.training.batch import collate, has_advantage, micro_batches, minibatches, take
from flatpeak.training.config import MinibatchOf
from flatpeak.types import Batch, Group
from support.models import EOS
from support.training import completion, make_batch, prompt, with_advantages

LIMIT = 6


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
    assert batch.sampler_logprobs_T.tolist() == [-0.5, -1.0, -1.5, -2.5, -3.0]
    assert batch.reference_logprobs_T is None
    assert batch.tokens_T.dtype == torch.int64


def three_groups() -> Batch:
    """Groups of 2, 3 and 2 completions; lengths 2 1 | 3 1 2 | 1 4."""
    return make_batch([2, 1, 3, 1, 2, 1, 4], prompts=[(3, 4), (5,), (6, 7, 8)], prompt_N=[0, 0, 1, 1, 1, 2, 2])


def test_take_keeps_order_and_what_belongs_to_each_token() -> None:
    batch = three_groups()
    component = take(batch, torch.tensor([1, 4, 6]))
    tokens = [2, 7, 8, 10, 11, 12, 13]
    assert component.prompts == ((3, 4), (5,), (6, 7, 8))
    assert component.prompt_N.tolist() == [0, 1, 2]
    assert component.lengths_N.tolist() == [1, 2, 4]
    assert component.sequence_T.tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert component.tokens_T.tolist() == [batch.tokens_T[token].item() for token in tokens]
    assert component.old_logprobs_T.tolist() == [batch.old_logprobs_T[token].item() for token in tokens]
    assert component.reference_logprobs_T is not None
    assert batch.reference_logprobs_T is not None
    assert component.reference_logprobs_T.tolist() == [batch.reference_logprobs_T[token].item() for token in tokens]
    assert component.advantages_T.tolist() == [batch.advantages_T[token].item() for token in tokens]
    assert component.weights_N.tolist() == [batch.weights_N[n].item() for n in (1, 4, 6)]


def test_take_leaves_out_prompts_that_are_not_needed() -> None:
    component = take(three_groups(), torch.tensor([2, 3, 5]))
    assert component.prompts == ((5,), (6, 7, 8))
    assert component.prompt_N.tolist() == [0, 0, 1]


def test_take_of_nothing_is_an_empty_batch() -> None:
    component = take(three_groups(), torch.tensor([], dtype=torch.int64))
    assert component.prompts == ()
    assert len(component.lengths_N) == len(component.tokens_T) == 0


def cut(batch: Batch, count: int, *, of: MinibatchOf = "groups", seed: int = 0, all_tokens: bool = True) -> list[Batch]:
    return list(
        minibatches(
            batch,
            count,
            advantages_T=batch.advantages_T,
            old_logprobs_T=batch.old_logprobs_T,
            of=of,
            normalization="sequence_mean",
            max_tokens=LIMIT,
            seed=seed,
            all_tokens=all_tokens,
        )
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
    assert [len(component.prompts) for component in parts] == sizes
    assert sorted(p for component in parts for p in component.prompts) == [(p + 3,) for p in range(8)]
    for component in parts:
        assert component.lengths_N.tolist() == [1, 2] * len(component.prompts)


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, [16]), (3, [6, 5, 5]), (12, [2] * 4 + [1] * 8), (16, [1] * 16), (40, [1] * 16)]
)
def test_minibatches_of_completions_cover_every_completion_once(count: int, sizes: list[int]) -> None:
    batch = many_groups()
    parts = cut(batch, count, of="completions")
    assert [len(component.lengths_N) for component in parts] == sizes
    owners = [component.prompts[p] for component in parts for p in component.prompt_N]
    lengths = [length for component in parts for length in component.lengths_N.tolist()]
    assert sorted(zip(owners, lengths, strict=True)) == [((p + 3,), length) for p in range(8) for length in (1, 2)]
    logprobs = torch.cat([component.old_logprobs_T for component in parts])
    assert sorted(logprobs.tolist()) == sorted(batch.old_logprobs_T.tolist())


def test_minibatches_of_completions_split_groups_and_keep_the_order_within() -> None:
    parts = cut(many_groups(), 2, of="completions")
    assert all(component.prompt_N.tolist() == sorted(component.prompt_N.tolist()) for component in parts)
    shared = set(parts[0].prompts) & set(parts[1].prompts)
    assert shared
    assert all(len(component.prompts) == len(set(component.prompts)) for component in parts)


def test_minibatches_of_completions_weigh_and_drop_as_those_of_groups_do() -> None:
    batch = many_groups()
    batch = with_advantages(batch, [1.0, -1.0] * 4 + [0.0] * 8)
    for component in cut(batch, 3, of="completions"):
        counted = 6 if len(component.lengths_N) == 6 else 5
        np.testing.assert_allclose(component.weights_N, 1 / (counted * component.lengths_N), rtol=1e-6)
    kept = cut(batch, 3, of="completions", all_tokens=False)
    assert sum(len(component.lengths_N) for component in kept) == 8
    for everything, signal in zip(cut(batch, 3, of="completions"), kept, strict=True):
        has_signal = has_advantage(everything)
        # The weights count the completions that were left out.
        assert signal.weights_N.tolist() == everything.weights_N[has_signal].tolist()
        assert signal.lengths_N.tolist() == everything.lengths_N[has_signal].tolist()


def test_one_minibatch_is_the_same_batch_of_groups_or_completions() -> None:
    (groups,), (completions,) = cut(many_groups(), 1), cut(many_groups(), 1, of="completions")
    assert groups.tokens_T.tolist() == completions.tokens_T.tolist()
    assert groups.weights_N.tolist() == completions.weights_N.tolist()


@pytest.mark.parametrize("of", ["groups", "completions"])
def test_minibatches_are_reshuffled_by_seed_and_only_by_seed(of: MinibatchOf) -> None:
    orders = [[component.prompts for component in cut(many_groups(), 4, of=of, seed=seed)] for seed in (1, 1, 2, 3)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[2] != orders[3]


def test_weights_count_completions_without_signal_which_then_cost_nothing() -> None:
    batch = with_advantages(three_groups(), [1.0, -1.0, 0.0, 0.0, 0.0, 2.0, -2.0])
    (signal,) = cut(batch, 1, all_tokens=False)
    assert signal.prompts == ((3, 4), (6, 7, 8))
    np.testing.assert_allclose(signal.weights_N, [1 / 14, 1 / 7, 1 / 7, 1 / 28], rtol=1e-6)
    (everything,) = cut(batch, 1, all_tokens=True)
    np.testing.assert_allclose(everything.weights_N, [1 / 14, 1 / 7, 1 / 21, 1 / 7, 1 / 14, 1 / 7, 1 / 28], rtol=1e-6)


def test_weights_are_those_of_the_minibatch_and_not_of_the_whole_batch() -> None:
    for component in cut(many_groups(), 4):
        np.testing.assert_allclose(component.weights_N, [1 / 4, 1 / 8] * 2, rtol=1e-6)


def test_an_empty_completion_counts_in_the_mean_and_is_left_out_of_the_pass() -> None:
    batch = make_batch([2, 0, 1], prompts=[(3,)], prompt_N=[0, 0, 0])
    (component,) = cut(batch, 1)
    assert component.lengths_N.tolist() == [2, 1]
    np.testing.assert_allclose(component.weights_N, [1 / 6, 1 / 3], rtol=1e-6)
    assert component.tokens_T.tolist() == batch.tokens_T.tolist()


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


@pytest.mark.parametrize("budget", [1, 12, 20, 45, 1000])
def test_micro_batches_of_a_pass_that_pads_keep_the_budget_in_padded_tokens(budget: int) -> None:
    def padded_tokens(batch: Batch, count: int) -> int:
        rows = [len(batch.prompts[p]) + length for p, length in zip(batch.prompt_N, batch.lengths_N, strict=True)]
        return count * int(max(rows[:count]))

    for batch in random_layouts():
        pieces = list(micro_batches(batch, budget, padded=True))
        assert torch.equal(torch.cat([piece.tokens_T for piece in pieces]), batch.tokens_T)
        assert torch.equal(torch.cat([piece.weights_N for piece in pieces]), batch.weights_N)
        left = batch
        for piece in pieces:
            count = len(piece.lengths_N)
            assert padded_tokens(piece, count) <= budget or count == 1
            if len(left.lengths_N) > count:  # one more would not fit
                assert padded_tokens(left, count + 1) > budget
                left = take(left, torch.arange(count, len(left.lengths_N)))


def test_a_batch_without_completions_has_no_micro_batches() -> None:
    assert list(micro_batches(take(three_groups(), torch.tensor([], dtype=torch.int64)), 5, padded=True)) == []
    assert list(micro_batches(take(three_groups(), torch.tensor([], dtype=torch.int64)), 5)) == []
