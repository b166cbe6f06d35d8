"""Under top-p, top-k, min-p and a least length the ratio is that of the tokens that could be drawn: 1 on policy."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from flatpeak.functional import importance_ratio
from flatpeak.functional.kept_tokens import ALL_BUT, KeptTokens, list_sets
from flatpeak.functional.logprobs import token_logprobs
from flatpeak.pipeline.rollout_engines import PlainSampler
from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.training.batch import collate, micro_batches, take
from flatpeak.types import Group, PackedCompletions, SamplingParams
from support.models import letter_tokenizer, tiny_model
from support.training import prompt

FILTERS: dict[str, dict[str, Any]] = {
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 20},
    "min-p": {"min_p": 0.05},
    "a least length": {"min_new_tokens": 4},
    "all of them, warm": {"top_p": 0.9, "top_k": 20, "min_p": 0.02, "min_new_tokens": 4, "temperature": 1.3},
    "all of them, cold": {"top_p": 0.95, "top_k": 5, "min_p": 0.05, "min_new_tokens": 4, "temperature": 0.6},
}


def policy_of(kind: str) -> Policy:
    model = tiny_model("qwen2", scale=3.0, seed=2)
    model.lm_head.weight.data.mul_(8)  # sharp enough for every filter to leave something out
    if kind == "LoRA":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.2)
    policy = Policy(model, letter_tokenizer())
    if kind == "native kernels":
        policy.kernels.choose("native", unserved=None)
    return policy


def sampled(policy: Policy, settings: dict[str, Any], *, engine: str = "native") -> list[Group]:
    prompts = [prompt("a", (3, 7, 12)), prompt("b", (20, 5, 9, 14, 8))]
    sampling = SamplingParams(**{"max_new_tokens": 12, **settings})
    engine_of = {"native": NativeEngine, "generate": partial(PlainSampler, max_rows=64)}
    return engine_of[engine](policy).generate(prompts, group_size=8, sampling=sampling, seed=3)


def packed(groups: list[Group]) -> PackedCompletions:
    return collate(groups, torch.ones(len(groups), 8, dtype=torch.bool), device=torch.device("cpu"))


@pytest.mark.parametrize("kind", ["plain", "LoRA", "native kernels", "generate"])
@pytest.mark.parametrize("name", FILTERS)
def test_the_ratio_is_1_on_policy(kind: str, name: str) -> None:
    policy, settings = policy_of(kind), FILTERS[name]
    groups = sampled(policy, settings, engine="generate" if kind == "generate" else "native")
    batch = packed(groups)
    temperature = settings.get("temperature", 1.0)
    with torch.no_grad():
        logprobs_T, _ = policy.token_logprobs(batch, temperature=temperature)
        full_T, _ = policy.token_logprobs(replace(batch, kept_T=None), temperature=temperature)
    assert batch.sampler_logprobs_T is not None
    ratio_T = importance_ratio(logprobs_T, batch.sampler_logprobs_T)
    assert float((ratio_T - 1).abs().max()) < 1e-5
    stored = [value for group in groups for one in group.completions for value in one.logprobs]
    torch.testing.assert_close(full_T, torch.tensor(stored), rtol=0, atol=1e-5)
    assert float((full_T - logprobs_T).abs().max()) > 1e-3  # the filter has an effect


def test_micro_batches_and_padded_passes_keep_the_sets_of_their_tokens() -> None:
    policy = policy_of("plain")
    batch = packed(sampled(policy, FILTERS["all of them, warm"]))
    with torch.no_grad():
        whole_T, _ = policy.token_logprobs(batch, temperature=1.3)
        parts = [policy.token_logprobs(part, temperature=1.3)[0] for part in micro_batches(batch, 40)]
        padded_T, _ = policy.token_logprobs(batch, temperature=1.3, twice_differentiable=True)
        some = torch.tensor([1, 4, 9])
        some_T, _ = policy.token_logprobs(take(batch, some), temperature=1.3)
    assert len(parts) > 2
    torch.testing.assert_close(torch.cat(parts), whole_T, rtol=0, atol=1e-5)
    torch.testing.assert_close(padded_T, whole_T, rtol=0, atol=1e-5)
    torch.testing.assert_close(some_T, whole_T[torch.isin(batch.sequence_T, some)], rtol=0, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_gradient_is_that_of_softmax_over_the_kept_tokens(with_entropy: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    weight_VD = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    targets_T = torch.tensor([0, 3, 5, 2, 1])
    sets = [(0, 2), (1, 3, 4), (ALL_BUT, 0), (ALL_BUT,), (1,)]
    kept_T = KeptTokens.of(sets, device="cpu")
    weights_T = torch.randn(5, dtype=torch.float64, generator=generator)

    def gradients(chunk: int | None) -> list[torch.Tensor]:
        leaves = [hidden_TD.clone().requires_grad_(), weight_VD.clone().requires_grad_()]
        if chunk is not None:
            logprobs_T, entropy_T = token_logprobs(*leaves, targets_T, kept_T=kept_T, chunk_size=chunk, temperature=0.7)
        else:
            full_TV = torch.log_softmax(leaves[0] @ leaves[1].T / 0.7, -1)
            allowed = [set(range(6)) - set(one[1:]) if one[0] == ALL_BUT else set(one) for one in sets]
            kept = torch.tensor([[token in one for token in range(6)] for one in allowed])
            logprobs_TV = torch.log_softmax((leaves[0] @ leaves[1].T / 0.7).masked_fill(~kept, -math.inf), -1)
            logprobs_T = logprobs_TV.gather(1, targets_T[:, None])[:, 0]
            entropy_T = -(full_TV.exp() * full_TV).sum(-1)
        loss = (weights_T * logprobs_T).sum() + (0.3 * (weights_T * entropy_T).sum() if with_entropy else 0.0)
        return list(torch.autograd.grad(loss, leaves))

    for chunk in (2, 5):
        for ours, expected in zip(gradients(chunk), gradients(None), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_the_policy_gradient_of_a_truncated_policy_is_that_by_enumeration() -> None:
    """E over the draws of advantage * grad log q is grad of the expected reward under q, the truncated policy."""
    generator = torch.Generator().manual_seed(1)
    logits_V = torch.randn(6, dtype=torch.float64, generator=generator)
    rewards_V = torch.randn(6, dtype=torch.float64, generator=generator)
    kept = [0, 2, 3, 5]
    leaf_V = logits_V.clone().requires_grad_()
    expected_reward = (torch.softmax(leaf_V[kept], 0) * rewards_V[kept]).sum()
    (expected_V,) = torch.autograd.grad(expected_reward, leaf_V)
    identity = torch.eye(6, dtype=torch.float64)
    hidden_TD = logits_V[None].repeat(4, 1).requires_grad_()
    kept_T = KeptTokens.of([kept] * 4, device="cpu")
    logprobs_T, _ = token_logprobs(hidden_TD, identity, torch.tensor(kept), kept_T=kept_T)
    weights_T = logprobs_T.exp().detach() * rewards_V[kept]
    (gradient_TD,) = torch.autograd.grad((weights_T * logprobs_T).sum(), hidden_TD)
    torch.testing.assert_close(gradient_TD.sum(0), expected_V, rtol=1e-12, atol=1e-12)


def test_sets_are_listed_by_the_shorter_side_and_read_back() -> None:
    kept_RV = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 0, 1], [0, 1, 0, 1, 0], [1, 1, 1, 1, 1]]).bool()
    sets = [one.tolist() for one in list_sets(kept_RV)]
    assert sets == [[0], [ALL_BUT, 3], [1, 3], [ALL_BUT]]
    read = KeptTokens.of(sets, device="cpu")
    assert torch.equal(read.mask(slice(None), 5), kept_RV)
    assert torch.equal(read.mask(slice(1, 3), 5), kept_RV[1:3])
    assert torch.equal(read[torch.tensor([3, 0])].mask(slice(None), 5), kept_RV[[3, 0]])
    assert len(read[:0]) == 0
    assert read[:0].mask(slice(None), 5).shape == (0, 5)


def test_a_batch_of_some_truncated_completions_takes_the_others_over_all_tokens() -> None:
    policy = policy_of("plain")
    first, second = sampled(policy, FILTERS["top-p"])
    bare = tuple(replace(one, kept=None, filtered_logprobs=None) for one in second.completions)
    plain = replace(second, completions=bare)
    batch = packed([first, plain])
    with torch.no_grad():
        logprobs_T, _ = policy.token_logprobs(batch, temperature=1.0)
    assert batch.sampler_logprobs_T is not None
    torch.testing.assert_close(logprobs_T, batch.sampler_logprobs_T, rtol=0, atol=1e-5)
