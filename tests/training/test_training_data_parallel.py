"""The division of a batch among ranks: shares, fillers, and what comes back together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatpeak.distributed.ranks import Ranks
from flatpeak.training.batch import UNDIVIDED, DataParallel, divide_evenly, filler, take
from support.training import make_batch, tiny_policy

BATCH = make_batch(
    [3, 2, 9, 8, 1, 1, 4], prompts=[(3, 4), (5,), (6, 7, 8), (9,)], prompt_N=[0, 0, 1, 1, 2, 2, 3], seed=2
)
"""Groups of 7, 18, 5 and 5 tokens, prompts included: 35 in all."""


class Alike(Ranks):
    """Ranks of which every other one has what this one has."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


def shares(count: int) -> list[list[int]]:
    return [share.tolist() for share in divide_evenly(BATCH, count)]


def test_the_largest_group_comes_first_and_each_goes_where_the_fewest_tokens_are():
    # Half of 35 is 17.5: the group of 18 is cut into completions of 1 + 9 and 1 + 8 tokens. 10 | 9, then 7 to the
    # second, 5 to the first, 5 to the first (15 against 16).
    assert shares(2) == [[2, 4, 5, 6], [0, 1, 3]]


def test_one_share_is_everything_in_its_order():
    assert shares(1) == [[0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_every_completion_is_in_one_share(count):
    assert sorted(completion for share in shares(count) for completion in share) == list(range(7))
    assert all(share == sorted(share) for share in shares(count))


def test_all_ranks_have_as_many_micro_batches_the_last_ones_without_a_token():
    counts, tokens = set(), 0
    for rank in range(9):  # two ranks more than completions
        own = list(DataParallel(ranks=Ranks(rank=rank, size=9)).micro_batches(BATCH, 8, padded=False))
        counts.add(len(own))
        tokens += sum(len(micro_batch.tokens_T) for micro_batch in own)
    assert len(counts) == 1
    assert tokens == len(BATCH.tokens_T)


@pytest.mark.parametrize(("undivided", "tokens"), [(34, [20, 16]), (35, [35, 0])])
def test_a_batch_of_few_tokens_is_the_first_ranks_alone(undivided, tokens):
    counts = []
    for rank in range(2):
        parallel = DataParallel(ranks=Ranks(rank=rank, size=2), undivided_tokens=undivided)
        own = list(parallel.micro_batches(BATCH, 100, padded=False))
        assert len(own) == 1
        counts.append(sum(map(len, own[0].prompts)) + len(own[0].tokens_T) if len(own[0].tokens_T) else 0)
    assert counts == tokens


def test_an_empty_batch_has_no_micro_batches_on_any_rank():
    empty = take(BATCH, torch.zeros(0, dtype=torch.int64))
    assert [*DataParallel(ranks=Ranks(rank=1, size=2)).micro_batches(empty, 8, padded=False)] == []


@pytest.mark.parametrize("twice_differentiable", [False, True])
def test_a_filler_goes_through_the_model_and_adds_nothing(twice_differentiable):
    policy, empty = tiny_policy(), filler(BATCH)
    logprobs_T, entropy_T = policy.token_logprobs(empty, temperature=1.0, twice_differentiable=twice_differentiable)
    assert len(logprobs_T) == len(entropy_T) == 0
    logprobs_T.sum().backward()
    gradients = [parameter.grad for parameter in policy.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_the_values_of_all_shares_stand_in_the_order_of_the_batch():
    wanted_T = torch.arange(float(len(BATCH.tokens_T)))
    parts = [wanted_T[torch.isin(BATCH.sequence_T, share)] for share in divide_evenly(BATCH, 2)]

    class Both(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return parts

    assert torch.equal(DataParallel(ranks=Both(size=2)).in_order(BATCH, parts[0]), wanted_T)
    assert UNDIVIDED.in_order(BATCH, wanted_T) is wanted_T


def test_losses_are_added_and_scaled_so_that_an_average_is_their_sum():
    parallel = DataParallel(ranks=Alike(size=4))
    assert parallel.joined(0.25, []) == (1.0, [])
    loss = torch.tensor(0.5)
    assert float(parallel.scale(loss)) == 2.0
    assert UNDIVIDED.scale(loss) is loss
