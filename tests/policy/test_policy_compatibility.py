"""Every layout the native engine claims is proven equal to the plain forward pass, packed and decoded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flatpeak.policy.compatibility import COARSE_TOLERANCE, PROVEN
from flatpeak.policy.model import Policy
from support.architectures import ARCHITECTURES, architecture_model
from support.policies import Tokenizer, gradients, largest_gap, plain_logprobs, tokens_and_weights, uneven_batch

TOLERANCE = 1e-5
"""float32 against float32, on logits of size about 1 to 10."""


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda name: name.replace(" ", "_"))
def policy(request: pytest.FixtureRequest) -> Policy:
    made = Policy(architecture_model(request.param), Tokenizer())
    assert made.native, made.notice
    return made


def test_every_proven_model_type_has_a_layout_here() -> None:
    assert {model_type for model_type, _ in ARCHITECTURES.values()} == PROVEN


def test_packed_log_probabilities_and_gradients_equal_the_plain_ones(policy: Policy) -> None:
    batch = uneven_batch()
    weights_T = tokens_and_weights(batch)
    packed_T, _ = policy.token_logprobs(batch, temperature=0.7)
    packed = gradients(policy, (weights_T * packed_T).sum())
    plain_T = plain_logprobs(policy, batch, 0.7)
    plain = gradients(policy, (weights_T * plain_T).sum())
    torch.testing.assert_close(packed_T, plain_T, atol=TOLERANCE, rtol=TOLERANCE)
    assert largest_gap(packed, plain) < TOLERANCE


@pytest.mark.parametrize("name", ARCHITECTURES, ids=lambda name: name.replace(" ", "_"))
def test_a_model_whose_products_are_rounded_keeps_the_native_engine(name: str) -> None:
    batch = uneven_batch()
    weights_T = tokens_and_weights(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = Policy(architecture_model(name), Tokenizer())
        assert made.native, made.notice
        packed_T, _ = made.token_logprobs(batch, temperature=0.7)
        plain_T = plain_logprobs(made, batch, 0.7)
    torch.testing.assert_close(packed_T, plain_T, atol=COARSE_TOLERANCE, rtol=COARSE_TOLERANCE)
    gap = largest_gap(gradients(made, (weights_T * packed_T).sum()), gradients(made, (weights_T * plain_T).sum()))
    assert gap < COARSE_TOLERANCE


def test_a_short_prompt_does_not_see_its_neighbours(policy: Policy) -> None:
    batch = uneven_batch()
    changed_T = batch.tokens_T.clone()
    changed_T[:10] = 39  # the completions of the first prompt
    with torch.no_grad():
        before_T, _ = policy.token_logprobs(batch, temperature=1.0)
        other = replace(batch, tokens_T=changed_T)
        after_T, _ = policy.token_logprobs(other, temperature=1.0)
    assert not torch.equal(before_T[:10], after_T[:10])
    torch.testing.assert_close(before_T[10:], after_T[10:], atol=1e-6, rtol=1e-6)


def test_decoding_equals_the_plain_forward_pass_through_compaction(policy: Policy) -> None:
    prompts = uneven_batch().prompts
    count = len(prompts)
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode(), policy.decoding():
        state = policy.open(slots=2 * count + 2, entries=count, prompt_lengths=list(map(len, prompts)), new_tokens=30)
        entries = list(range(count))[::-1]
        assert_equal_to_plain(policy, [list(prompt) for prompt in prompts], policy.prefill(state, prompts, entries))
        state.admit(range(2 * count), [entries[n // 2] for n in range(2 * count)])
        sequences = {slot: list(prompts[slot // 2]) for slot in range(2 * count)}
        for step in range(20):
            if step == 7:  # only the first and the last prompt go on
                last = 2 * count - 1
                state.compact(([last], [1]), ([entries[0]], [1]), [2, 3])
                sequences = {0: sequences[0], 1: sequences[last]}
            batch_size = 4 if step >= 7 else 2 * count
            tokens_R = torch.randint(2, 40, (batch_size,), generator=generator)
            logits_RV = policy.decode(state, tokens_R)
            for slot, tokens in sequences.items():
                tokens.append(int(tokens_R[slot]))
            if step in (0, 6, 7, 19):
                assert_equal_to_plain(policy, list(sequences.values()), logits_RV[: len(sequences)])


def assert_equal_to_plain(policy: Policy, sequences: list[list[int]], logits_RV: torch.Tensor) -> None:
    for tokens, logits_V in zip(sequences, logits_RV, strict=True):
        with policy.plain_attention() as model:
            plain_V = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
        torch.testing.assert_close(logits_V, plain_V, atol=TOLERANCE, rtol=TOLERANCE)
