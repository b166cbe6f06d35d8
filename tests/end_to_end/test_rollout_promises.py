"""What the native engine promises of every completion: its distribution, its log-probs, its gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from flatpeak.policy.model import Policy
from flatpeak.training.batch import collate, micro_batches
from flatpeak.types import Batch, Group, SamplingParams
from support.engines import VOCABULARY, make_policy, plain_logits, prompt, sample
from support.models import EOS

pytestmark = pytest.mark.usefixtures("one_thread")
DRAWS = 20_000
FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "all three": {"temperature": 0.7, "top_k": 5, "top_p": 0.8},
}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy()


def next_probs(policy: Policy, history: tuple[int, ...], sampling: SamplingParams) -> np.ndarray:
    """float64 [V], by transformers' own filters on the plain model's logits."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    logits_1V = plain_logits(policy, history)[-1:].double()
    return torch.softmax(processors(torch.zeros(1, 1, dtype=torch.int64), logits_1V), -1)[0].numpy()


def pair_probs(policy: Policy, history: tuple[int, ...], sampling: SamplingParams) -> np.ndarray:
    """float64 [V, V + 1]: first and second token; the last column is for a first token that ended the completion."""
    probs = np.zeros((VOCABULARY, VOCABULARY + 1))
    for token, first in enumerate(next_probs(policy, history, sampling)):
        if token == EOS:
            probs[token, -1] = first
        elif first > 0:
            probs[token, :-1] = first * next_probs(policy, (*history, token), sampling)
    return probs


def excess(counts: np.ndarray, probs: np.ndarray) -> float:
    """How many standard deviations chi-square lies above its mean; cells of fewer than 5 expected draws are one."""
    expected = counts.sum() * probs
    common = expected >= 5
    cells = np.append((counts - expected)[common] ** 2 / expected[common], 0.0)
    if expected[~common].sum() >= 5:
        cells[-1] = (counts - expected)[~common].sum() ** 2 / expected[~common].sum()
    freedom = common.sum() + (expected[~common].sum() >= 5) - 1
    return float((cells.sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_follow_the_plain_models_softmax_after_transformers_own_filters(policy: Policy, name: str) -> None:
    sampling = SamplingParams(max_new_tokens=2, **FILTERS[name])
    history = prompt(9).token_ids
    completions = sample(policy, [9], group_size=DRAWS, sampling=sampling, seed=5, max_rows=DRAWS)[9]
    pairs = [(*c.token_ids, VOCABULARY)[:2] for c in completions]
    counts = np.zeros((VOCABULARY, VOCABULARY + 1))
    np.add.at(counts, tuple(np.array(pairs).T), 1)
    probs = pair_probs(policy, history, sampling)
    assert counts.sum() == DRAWS
    assert counts[probs == 0].sum() == 0  # what is filtered out, or would follow an end, is never drawn
    assert excess(counts, probs) < 4
    # The bound is tight enough to tell these settings from others close by.
    other = replace(sampling, temperature=1.1 * sampling.temperature)
    assert excess(counts, np.maximum(pair_probs(policy, history, other), 1e-12)) > 4


def test_filters_leave_few_tokens_and_their_log_probs_are_stored_beside_the_full_ones(policy: Policy) -> None:
    sampling = SamplingParams(max_new_tokens=1, **FILTERS["all three"])
    filtered = next_probs(policy, prompt(9).token_ids, sampling)
    full = next_probs(policy, prompt(9).token_ids, replace(sampling, top_k=0, top_p=1.0))
    completions = sample(policy, [9], group_size=200, sampling=sampling)[9]
    assert 1 < (filtered > 0).sum() <= 5
    assert {c.token_ids[0] for c in completions} == set(np.flatnonzero(filtered).tolist())
    for completion in completions:
        assert completion.logprobs[0] == pytest.approx(math.log(full[completion.token_ids[0]]), abs=1e-5)
        assert completion.filtered_logprobs is not None
        assert completion.filtered_logprobs[0] == pytest.approx(math.log(filtered[completion.token_ids[0]]), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_log_probs_are_the_plain_models_for_any_length_and_more_completions_than_slots(
    policy: Policy, temperature: float
) -> None:
    cap = 24
    sampling = SamplingParams(max_new_tokens=cap, temperature=temperature)
    lengths = (1, 300, 2, 130, 17)
    result = sample(policy, lengths, sampling=sampling, seed=2, max_rows=8, group_size=16)
    drawn = [len(c.token_ids) for group in result.values() for c in group]
    assert (min(drawn), max(drawn)) == (1, cap)
    for length, completions in result.items():
        for completion in completions:
            check_log_probs(policy, prompt(length).token_ids, completion, temperature)
            assert completion.finish_reason == ("stop" if completion.token_ids[-1] == EOS else "length")
            assert EOS not in completion.token_ids[:-1]
            assert len(completion.token_ids) == cap or completion.finish_reason == "stop"


def test_a_cap_of_one_token_needs_the_prompt_only(policy: Policy) -> None:
    result = sample(policy, (1, 300), sampling=SamplingParams(max_new_tokens=1), max_rows=3)
    for length, completions in result.items():
        assert [len(completion.token_ids) for completion in completions] == [1] * 4
        for completion in completions:
            check_log_probs(policy, prompt(length).token_ids, completion, 1.0)


def check_log_probs(policy: Policy, prompt_ids: tuple[int, ...], completion: Any, temperature: float) -> None:
    logits_TV = plain_logits(policy, (*prompt_ids, *completion.token_ids))[len(prompt_ids) - 1 : -1].double()
    exact_TV = torch.log_softmax(logits_TV / temperature, -1)
    exact_T = exact_TV.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    gap = float((exact_T - torch.tensor(completion.logprobs, dtype=torch.float64)).abs().max())
    assert gap <= 1e-5 * max(1.0, float(logits_TV.abs().max())) / temperature


def test_without_padding_results_are_the_same_to_rounding_and_the_model_sees_fewer_rows(policy: Policy) -> None:
    sampling = SamplingParams(max_new_tokens=24)
    lengths = (1, 9, 33, 140)
    rows, result = [], []
    for invariant in (True, False):
        policy.batch_invariant = invariant
        sizes: list[int] = []
        hook = policy.trunk.register_forward_pre_hook(
            lambda module, args, kwargs, sizes=sizes: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        result.append(sample(policy, lengths, group_size=3, sampling=sampling, seed=1, compact_below=1.0))
        hook.remove()
        rows.append([count for count, tokens in sizes if tokens == 1])
    policy.batch_invariant = True
    padded, exact = result
    for length in lengths:
        assert [c.token_ids for c in padded[length]] == [c.token_ids for c in exact[length]]
        for one, other in zip(padded[length], exact[length], strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    live = [sum(len(c.token_ids) > step for group in exact.values() for c in group) for step in range(1, 24)]
    # Given up as soon as they end, completions are decoded once for each of their tokens but the first.
    assert rows[1] == live
    assert rows[0] == [-(-count // 4) * 4 for count in live]
    assert sum(rows[1]) < sum(rows[0])


@pytest.fixture(scope="module")
def long_responses(policy: Policy) -> Batch:
    """Responses of 1 to 150 tokens, drawn by the engine: some end within the first block of attention, some past it."""
    sampling = SamplingParams(max_new_tokens=150, min_new_tokens=150)
    groups = []
    for length, completions in sample(policy, (3, 70, 1), sampling=sampling, seed=4).items():
        cut = zip(completions, (150, 1, 129, 66), strict=True)
        short = tuple(replace(c, token_ids=c.token_ids[:n], logprobs=c.logprobs[:n], kept=None) for c, n in cut)
        groups.append(Group(prompt=prompt(length), completions=short))
    completions = collate(groups, torch.ones(3, 4, dtype=torch.bool), device=torch.device("cpu"))
    weights_N = torch.randn(12, generator=torch.Generator().manual_seed(0))
    return completions.to_batch(
        advantages_T=torch.zeros(len(completions.tokens_T)), weights_N=weights_N, old_logprobs_T=None
    )


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 500, 160])
def test_the_gradient_in_blocks_and_micro_batches_is_that_of_the_plain_padded_model(
    policy: Policy, long_responses: Batch, micro_batch_tokens: int
) -> None:
    pieces = list(micro_batches(long_responses, micro_batch_tokens))
    assert len(pieces) == {10_000: 1, 500: 3, 160: 10}[micro_batch_tokens]
    policy.model.zero_grad()
    for piece in pieces:
        logprobs_T, entropy_T = policy.token_logprobs(piece, temperature=0.8)
        weighted(logprobs_T + 0.1 * entropy_T, piece).backward()
    ours = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.model.zero_grad()
    weighted(padded_scores(policy, long_responses, temperature=0.8), long_responses).backward()
    theirs = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.model.zero_grad()
    largest = max(float(grad.abs().max()) for grad in theirs)
    assert largest > 0
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) <= 1e-5 * largest


def weighted(scores_T: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (scores_T * batch.weights_N.index_select(0, batch.sequence_T)).sum()


def padded_scores(policy: Policy, batch: Batch, *, temperature: float) -> torch.Tensor:
    """Log-prob plus a tenth of the entropy [T], all completions right-padded in one plain forward pass."""
    texts = [
        torch.cat([torch.tensor(batch.prompts[p]), tokens])
        for p, tokens in zip(batch.prompt_N.tolist(), batch.tokens_T.split(batch.lengths_N.tolist()), strict=True)
    ]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    with policy.plain_attention() as model:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits / temperature
        pieces = []
        for row, text, length in zip(logits, texts, batch.lengths_N.tolist(), strict=True):
            logprobs_TV = torch.log_softmax(row[len(text) - length - 1 : len(text) - 1], -1)
            entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
            pieces.append(logprobs_TV.gather(1, text[-length:, None])[:, 0] + 0.1 * entropy_T)
    return torch.cat(pieces)
