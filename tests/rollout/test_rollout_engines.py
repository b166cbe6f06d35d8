"""Both engines on one real model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.rollout.hf_generate import GenerateEngine
from flatpeak.types import SamplingParams
from support.fake_decoders import NumberTokenizer, make_prompt

PROMPTS = [make_prompt(f"p{n}", range(3, 5 + 3 * n)) for n in range(5)]


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    made = Policy(Qwen2ForCausalLM(config), NumberTokenizer(special=(0,)))
    assert made.native, made.notice
    return made


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(max_new_tokens=40), SamplingParams(max_new_tokens=40, temperature=0.6, top_k=20, min_new_tokens=3)],
)
def test_the_native_engine_agrees_with_generate_and_with_a_plain_forward_pass(
    policy: Policy, sampling: SamplingParams
) -> None:
    native = NativeEngine(policy, max_rows=12).generate(PROMPTS, group_size=4, sampling=sampling, seed=3)
    with policy.plain_attention() as model:
        fallback = GenerateEngine(model, policy.tokenizer, eos_token_ids=policy.eos_token_ids)
        expected = fallback.generate(PROMPTS, group_size=4, sampling=sampling, seed=3)
        for group, other in zip(native, expected, strict=True):
            for mine, theirs in zip(group.completions, other.completions, strict=True):
                # The random numbers are the same, and logits differ by rounding only.
                assert mine.token_ids == theirs.token_ids
                assert mine.finish_reason == theirs.finish_reason
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=2e-5)
                ids = torch.tensor([[*group.prompt.token_ids, *mine.token_ids]])
                with torch.no_grad():
                    logits_TV = model(input_ids=ids).logits[0, len(group.prompt.token_ids) - 1 : -1].double()
                exact = torch.log_softmax(logits_TV / sampling.temperature, -1)
                exact_T = exact[torch.arange(len(mine.token_ids)), list(mine.token_ids)]
                np.testing.assert_allclose(mine.logprobs, exact_T, atol=1e-5 * logits_TV.abs().max().item())
    lengths = {len(completion.token_ids) for group in native for completion in group.completions}
    assert len(lengths) > 3


def test_rollouts_leave_the_policy_trainable(policy: Policy) -> None:
    sampling = SamplingParams(max_new_tokens=8)
    NativeEngine(policy).generate(PROMPTS, group_size=2, sampling=sampling, seed=0)
    policy.model.zero_grad()
    with policy.plain_attention() as model:
        model(input_ids=torch.tensor([[3, 4, 5]])).logits.logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())
    policy.model.zero_grad()


@pytest.mark.parametrize("read_every", [1, 8])
def test_slots_decoded_past_their_end_stay_within_learned_positions(read_every: int) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=None, eos_token_id=0
    )
    made = Policy(GPT2LMHeadModel(config), NumberTokenizer(special=(0,)))
    assert made.native, made.notice
    made.eos_token_ids = frozenset()  # all run to the cap, which is the end of the context
    prompts = [make_prompt(f"p{n}", [3 + n % 5] * 4) for n in range(79)]
    result = NativeEngine(made, max_rows=40, read_every=read_every).generate(
        prompts, group_size=1, sampling=SamplingParams(max_new_tokens=12), seed=0
    )
    for group in result[::13]:
        (completion,) = group.completions
        ids = torch.tensor([[*group.prompt.token_ids, *completion.token_ids]])
        with torch.no_grad(), made.plain_attention() as model:
            logprobs_TV = torch.log_softmax(model(input_ids=ids).logits[0, 3:-1], -1)
        exact_T = logprobs_TV[torch.arange(12), list(completion.token_ids)]
        np.testing.assert_allclose(completion.logprobs, exact_T, atol=1e-5)
