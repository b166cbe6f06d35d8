"""A completion is a function of (seed, prompt, index) to the last bit, whatever is decoded beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.kernels.matmul import SETTING, onednn_is_faster
from flatpeak.pipeline import rollout_engines
from flatpeak.pipeline.rollout_engines import announce_decoding, batch_invariant
from flatpeak.policy import kernel_verdicts
from flatpeak.policy.linears import FastLinear
from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.training.batch import collate
from flatpeak.types import Completion, Group, SamplingParams
from support.engines import LIBRARIES_SERVE, make_policy, prompt, sample
from support.runs import Watcher

SHORT, LONG = (1, 3, 40, 100, 9), (5, 128, 150, 190, 300)
"""Prompts, and with them all that a completion sees, below and above the 192 columns that MKL sums in one go."""
SAMPLING = SamplingParams(max_new_tokens=32)
MATMUL = ["mkl", "onednn"]
Found = dict[int, tuple[Completion, ...]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, one_thread: None, tmp_path: Path) -> Iterator[Callable[..., Policy]]:
    """`make(matmul, threads)`: a policy whose products go through that library, and no verdicts from before."""
    monkeypatch.setattr(kernel_verdicts, "cache_folder", lambda: tmp_path)

    def make_with(matmul: str, threads: int = 1) -> Policy:
        monkeypatch.setenv(SETTING, matmul)
        onednn_is_faster.cache_clear()
        if matmul == "onednn" and not onednn_is_faster():
            pytest.skip("torch was built without oneDNN")
        torch.set_num_threads(threads)
        policy = make_policy(**LIBRARIES_SERVE)
        assert any(isinstance(m, FastLinear) for m in policy.model.modules()) == (matmul == "onednn")
        return policy

    yield make_with
    onednn_is_faster.cache_clear()


def companies(lengths: Sequence[int]) -> list[tuple[Sequence[int], dict[str, Any]]]:
    """Other prompts beside a completion, another order, other groups, other slots, prefills and readings."""
    return [
        (lengths[::-1], {}),
        (lengths[2:3], {}),
        (lengths[1:3], {"group_size": 1}),
        (lengths, {"group_size": 9}),
        (lengths, {"max_rows": 8}),
        (lengths, {"max_rows": 3, "read_every": 5}),
        (lengths, {"max_rows": 1}),
        (lengths, {"prefill_tokens": 70}),
        (lengths, {"compact_below": 1.0, "read_every": 7}),
        (lengths, {"compact_below": 0.0}),
    ]


def differing(policy: Policy, lengths: Sequence[int], tried: Sequence[Any], sampling: SamplingParams = SAMPLING) -> Any:
    """The companies in which some completion is another one than among all prompts, in any bit."""
    expected = sample(policy, lengths, sampling=sampling, seed=3)
    drawn = [len(completion.token_ids) for group in expected.values() for completion in group]
    assert len(set(drawn)) > 4
    wrong = []
    for some, settings in tried:
        result = sample(policy, some, sampling=sampling, seed=3, **settings)
        same = all(
            one == other for length in some for one, other in zip(result[length], expected[length], strict=False)
        )
        if not same:
            wrong.append((some, settings))
    return wrong


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("matmul", MATMUL)
def test_no_bit_of_a_completion_depends_on_what_is_decoded_beside_it(
    make: Callable[..., Policy], matmul: str, lengths: Sequence[int]
) -> None:
    assert differing(make(matmul), lengths, companies(lengths)) == []


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("matmul", MATMUL)
def test_the_same_holds_with_two_threads(make: Callable[..., Policy], matmul: str, lengths: Sequence[int]) -> None:
    policy = make(matmul, 2)
    assert torch.get_num_threads() == 2
    assert differing(policy, lengths, companies(lengths)[1:6]) == []


def test_the_same_holds_where_answers_are_much_longer_than_prompts(make: Callable[..., Policy]) -> None:
    sampling = SamplingParams(max_new_tokens=280, min_new_tokens=120)
    tried = [((40,), {}), ((9, 40), {"group_size": 1}), ((1, 9, 40, 100), {"max_rows": 6})]
    assert differing(make("mkl"), (1, 9, 40, 100), tried, sampling) == []


@pytest.mark.parametrize("matmul", MATMUL)
def test_the_same_holds_after_the_weights_have_moved(make: Callable[..., Policy], matmul: str) -> None:
    policy = make(matmul)
    before = sample(policy, SHORT, sampling=SAMPLING, seed=3)
    groups = [Group(prompt=prompt(length), completions=completions) for length, completions in before.items()]
    batch = collate(groups, torch.ones(len(SHORT), 4, dtype=torch.bool), device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    policy.token_logprobs(batch, temperature=1.0)[0].mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert sample(policy, SHORT, sampling=SAMPLING, seed=3) != before
    assert differing(policy, SHORT, companies(SHORT)[1:6]) == []


def test_another_seed_draws_other_completions(make: Callable[..., Policy]) -> None:
    policy = make("mkl")
    one, other = (sample(policy, SHORT, sampling=SAMPLING, seed=seed) for seed in (3, 4))
    assert all(set(one[length]).isdisjoint(other[length]) for length in SHORT)


@pytest.mark.parametrize("matmul", MATMUL)
def test_the_start_up_test_finds_the_model_independent_of_the_batch_and_a_run_says_nothing(
    make: Callable[..., Policy], matmul: str
) -> None:
    policy, progress = make(matmul), Watcher()
    prompts = [prompt(length) for length in SHORT[1:4]]
    assert batch_invariant(NativeEngine(policy), prompts)
    announce_decoding(policy, prompts, progress, max_new_tokens=16)
    assert progress.notices == []


def test_a_second_start_makes_no_trial(make: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, sizes = [prompt(length) for length in SHORT[1:4]], []

    def count(engine: NativeEngine, tried: Sequence[Any], **settings: int) -> bool:
        sizes.append(len(tried))
        return batch_invariant(engine, tried, **settings)

    monkeypatch.setattr(rollout_engines, "batch_invariant", count)
    for _ in range(2):
        announce_decoding(make("mkl"), prompts, Watcher(), max_new_tokens=4)
    announce_decoding(make("mkl"), prompts[:2], Watcher(), max_new_tokens=4)
    assert sizes == [3, 2]


def test_a_run_says_so_where_decoding_depends_on_the_batch_unless_padding_was_turned_off(
    make: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make("mkl")
    plain = policy.decode

    def depends_on_the_batch(state: Any, tokens_R: Tensor) -> Tensor:
        return plain(state, tokens_R) * (1 + 1e-6 * (len(tokens_R) > 4))

    monkeypatch.setattr(policy, "decode", depends_on_the_batch)
    prompts = [prompt(length) for length in SHORT[1:4]]
    assert not batch_invariant(NativeEngine(policy), prompts)
    for asked_for, notices in ((True, 1), (False, 0)):
        policy.batch_invariant = asked_for
        announce_decoding(policy, prompts, progress := Watcher(), max_new_tokens=16)
        assert len(progress.notices) == notices
        assert all("depend on the batch" in notice for notice in progress.notices)
