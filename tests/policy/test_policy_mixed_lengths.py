"""One long prompt or response among short ones: the same numbers as ever, and about the cost of the parts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from flatpeak.kernels import block_attention
from flatpeak.policy import packing
from flatpeak.policy.model import Policy
from flatpeak.types import Batch
from support.architectures import ARCHITECTURES, COMMON, architecture_model
from support.models import tiny_model
from support.policies import Tokenizer, gradients, largest_gap, plain_logprobs, tokens_and_weights


def make_batch(prompts: list[int], responses: list[tuple[int, int]], *, seed: int = 0) -> Batch:
    """Random tokens; responses are (prompt, length)."""
    generator = torch.Generator().manual_seed(seed)
    lengths_N = torch.tensor([length for _, length in responses])
    total = int(lengths_N.sum())
    return Batch(
        prompts=tuple(tuple(torch.randint(2, 40, (n,), generator=generator).tolist()) for n in prompts),
        prompt_N=torch.tensor([prompt for prompt, _ in responses]),
        lengths_N=lengths_N,
        tokens_T=torch.randint(2, 40, (total,), generator=generator),
        sequence_T=torch.arange(len(responses)).repeat_interleave(lengths_N),
        advantages_T=torch.ones(total),
        weights_N=torch.ones(len(responses)),
        old_logprobs_T=torch.zeros(total),
    )


def random_batch(seed: int) -> Batch:
    """Groups of up to four responses, some empty, to prompts of 1 to 20 tokens and a few long ones."""
    draw = random.Random(seed)
    prompts = [draw.choice([1, draw.randint(1, 20), draw.randint(70, 330)]) for _ in range(draw.randint(2, 6))]
    responses = [
        (p, draw.choice([0, 1, draw.randint(1, 12), draw.randint(60, 140)]))
        for p in range(len(prompts))
        for _ in range(draw.randint(1, 4))
    ]
    return make_batch(prompts, [*responses, (0, 3)], seed=seed)


def check_against_plain(policy: Policy, batch: Batch) -> None:
    weights_T = tokens_and_weights(batch)
    packed_T, _ = policy.token_logprobs(batch, temperature=0.7)
    packed = gradients(policy, (weights_T * packed_T).sum())
    plain_T = plain_logprobs(policy, batch, 0.7)
    plain = gradients(policy, (weights_T * plain_T).sum())
    torch.testing.assert_close(packed_T, plain_T, atol=2e-5, rtol=2e-5)
    assert largest_gap(packed, plain) < 2e-5


@pytest.mark.parametrize("layout", ARCHITECTURES)
def test_every_architecture_scores_prompts_of_very_different_length_as_the_plain_model_does(layout: str) -> None:
    policy = Policy(architecture_model(layout, scale=5.0), Tokenizer())
    assert policy.native, policy.notice
    check_against_plain(policy, make_batch([3, 300, 1, 110, 9], [(0, 4), (1, 2), (0, 1), (1, 70), (2, 9), (3, 3)]))


@pytest.mark.parametrize("layout", ["qwen2", "gemma2"])
@pytest.mark.parametrize("small", [4096, 1])
def test_log_probabilities_and_gradients_are_the_plain_ones_whatever_the_lengths(
    layout: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SMALL", small)
    monkeypatch.setattr(packing, "LARGEST_WASTE", 2)
    policy = Policy(architecture_model(layout, scale=4.0), Tokenizer())
    for seed in range(4):
        check_against_plain(policy, random_batch(seed))


class Largest(TorchDispatchMode):
    """Notes the most numbers in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor):
                self.numbers = max(self.numbers, each.numel())
        return result


def cost(policy: Policy, batch: Batch) -> tuple[int, int]:
    """(numbers kept for the backward pass, the largest tensor) of one training pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with Largest() as largest, saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs_T, _ = policy.token_logprobs(batch, temperature=1.0)
        total = sum(kept.values())
        logprobs_T.sum().backward()
    return total, largest.numbers


@pytest.fixture(scope="module")
def policy() -> Policy:
    made = Policy(tiny_model("qwen2", scale=2.0, **COMMON | {"max_position_embeddings": 4096}).eval(), Tokenizer())
    assert made.native, made.notice
    return made


@pytest.mark.parametrize(
    "mixed",
    [
        lambda: make_batch([1500, *[20] * 80], [(p, 10) for p in range(81)]),
        lambda: make_batch([20] * 81, [(0, 1500), *[(p, 10) for p in range(1, 81)]]),
        lambda: make_batch([20], [(0, 1500), *[(0, 2)] * 900]),
        lambda: make_batch([1500], [(0, 1000), *[(0, 1)] * 400]),
    ],
    ids=["a long prompt", "a long response", "a long response in a group", "both"],
)
def test_memory_goes_by_the_tokens_of_a_micro_batch_and_not_by_the_longest(
    policy: Policy, mixed: Callable[[], Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_attention, "MOST_KEYS", 2**14)
    monkeypatch.setattr(block_attention, "MOST_SCORES", 2**18)
    batch = mixed()
    tokens = sum(map(len, batch.prompts)) + len(batch.tokens_T)
    pairs = tokens // 50
    even, even_largest = cost(policy, make_batch([25] * pairs, [(p, 25) for p in range(pairs)]))
    kept, largest = cost(policy, batch)
    assert kept < 1.5 * even
    # What a block lays side by side is bounded by itself: columns of two key heads of 8, scores of two query heads.
    assert largest <= max(3 * even_largest, 2 * 8 * 2**14, 2 * 2**18)


def test_mixed_prompts_are_prefilled_and_decoded_as_the_plain_model_does(policy: Policy) -> None:
    policy.kernels.setting = "torch"  # whose cache is looked at below
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 700, 17, 1, 100]
    prompts = [torch.randint(2, 40, (n,), generator=generator).tolist() for n in lengths]
    with torch.inference_mode(), policy.decoding():
        state = policy.open(slots=8, entries=5, prompt_lengths=lengths, new_tokens=12)
        entries = [3, 0, 4, 1, 2]
        logits = policy.prefill(state, prompts, entries)
        of_slot = [1, 1, 0, 2, 3, 4, 4, 1]
        state.admit(range(8), [entries[p] for p in of_slot])
        sequences = [list(prompts[p]) for p in range(5)]
        assert_plain(policy, sequences, logits)
        sequences = [list(prompts[p]) for p in of_slot]
        for _ in range(12):
            tokens_R = torch.randint(2, 40, (8,), generator=generator)
            logits = policy.decode(state, tokens_R)
            for sequence, token in zip(sequences, tokens_R.tolist(), strict=True):
                sequence.append(token)
        assert_plain(policy, sequences, logits)
    assert state.prompts.cells == 704 + 128 + 3 * 32


def assert_plain(policy: Policy, sequences: list[list[int]], logits_RV: Tensor) -> None:
    with policy.plain_attention() as model:
        for tokens, logits_V in zip(sequences, logits_RV, strict=True):
            plain_V = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits_V, plain_V, atol=1e-5, rtol=1e-5)


def test_one_long_prompt_makes_neither_prefill_nor_decoding_read_columns_for_all(policy: Policy) -> None:
    lengths = [1500, *[20] * 100]
    with torch.inference_mode(), Largest() as largest:
        state = policy.open(slots=104, entries=101, prompt_lengths=lengths, new_tokens=4)
        policy.prefill(state, [[2] * n for n in lengths], list(range(101)))
        state.admit(range(101), range(101))
        policy.decode(state, torch.full((104,), 3))
    hidden, head = 48, 16  # the intermediate layer's width, and two key heads of 8
    assert state.prompts.cells == 1504 + 100 * 32
    assert largest.numbers <= max((1500 + 100 * 20 + 4) * hidden, state.prompts.cells * head, 4 * 1504 * 64 * 4)
