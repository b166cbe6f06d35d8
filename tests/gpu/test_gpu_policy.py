"""Rollouts and updates on a GPU: skipped where there is none."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch

from flatpeak.kernels.gpu_kernels import kernel_notices
from flatpeak.policy.loading import cast_weights
from flatpeak.policy.model import Policy
from flatpeak.rollout.cuda_graphs import GraphedStep
from flatpeak.rollout.engine import NativeEngine
from flatpeak.training.batch import collate
from flatpeak.training.learner import score
from flatpeak.types import Completion, Example, Group, PackedCompletions, Prompt, SamplingParams
from support.episodes import TOKENIZER, Game, asked, draw, sampler_of
from support.models import letter_tokenizer, tiny_model
from support.policies import gradients, largest_gap

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
KINDS = ["qwen2", "qwen3", "llama", "gemma2", "mistral"]


def gpu_policy(kind: str = "qwen2", dtype: torch.dtype = torch.float32, *, scale: float = 2.0) -> Policy:
    model = tiny_model(kind, scale=scale, **SIZES)
    cast_weights(model, dtype)
    policy = Policy(model.cuda().eval(), letter_tokenizer())
    assert policy.native, policy.notice
    return policy


def prompts(count: int = 6, *, longest: int = 300) -> list[Prompt]:
    generator = torch.Generator().manual_seed(count)
    lengths = [1 + (longest - 1) * index // max(1, count - 1) for index in range(count)]
    ids = [tuple(torch.randint(2, 24, (length,), generator=generator).tolist()) for length in lengths]
    return [
        Prompt(id=str(index), token_ids=each, text="", example=Example(id=str(index), question="", gold=""))
        for index, each in enumerate(ids)
    ]


def rollout(policy: Policy, *, max_rows: int = 512, engine: NativeEngine | None = None, **settings: Any) -> list[Group]:
    sampling = SamplingParams(**{"max_new_tokens": 90, "temperature": 0.8, **settings})
    engine = engine or NativeEngine(policy, max_rows=max_rows)
    groups = engine.generate(prompts(), group_size=8, sampling=sampling, seed=3)
    assert engine.notices == []
    assert kernel_notices() == []
    return groups


def packed(groups: list[Group], policy: Policy) -> PackedCompletions:
    return collate(groups, torch.ones(len(groups), len(groups[0].completions), dtype=torch.bool), device=policy.device)


def completions_of(groups: list[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_rows", [512, 16])
def test_those_of_every_turn_of_an_episode_are_too(kind: str, max_rows: int) -> None:
    model = tiny_model(kind, scale=2.0, **SIZES, vocab_size=len(TOKENIZER))
    policy = Policy(model.cuda().eval(), TOKENIZER)
    host, engine = Game(delays=Random(0)), NativeEngine(policy, max_rows=max_rows)
    asks = [asked(str(length), "2+2=" * length) for length in (1, 3, 40)]
    groups = draw(sampler_of(engine, host, max_tokens=6), asks, group_size=8, max_new_tokens=200)
    assert engine.notices == []
    episodes = completions_of(groups)
    assert max(len(episode.turns) for episode in episodes) > 3
    batch = packed(groups, policy)
    gaps_T = (score(policy, batch, temperature=1.0, micro_batch_tokens=5000) - batch.sampler_logprobs_T).abs().cpu()
    sampled = [own for episode in episodes for own in episode.trained or (True,) * len(episode.token_ids)]
    assert float(gaps_T[torch.tensor(sampled)].max()) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_rows", [512, 16])
def test_the_samplers_logprobs_are_those_that_the_trainer_recomputes(kind: str, max_rows: int) -> None:
    policy = gpu_policy(kind)
    batch = packed(rollout(policy, max_rows=max_rows), policy)
    scored_T = score(policy, batch, temperature=0.8, micro_batch_tokens=5000)
    with torch.no_grad():
        logits = policy.read(batch, lambda outputs: outputs.scores()(slice(None)), temperature=1.0)
    tolerance = 1e-5 * max(1.0, float(logits.abs().max())) / 0.8
    assert float((scored_T - batch.sampler_logprobs_T).abs().max()) < tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_they_differ_by_little(kind: str) -> None:
    policy = gpu_policy(kind, torch.bfloat16)
    batch = packed(rollout(policy), policy)
    scored_T = score(policy, batch, temperature=0.8, micro_batch_tokens=5000)
    assert float((scored_T - batch.sampler_logprobs_T).abs().mean()) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_sample_what_plain_steps_sample(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = gpu_policy(dtype=dtype)
    captured = rollout(policy, max_rows=32)
    monkeypatch.setattr(GraphedStep, "__call__", lambda self, size: self._step(size))
    plain = rollout(policy, max_rows=32)
    assert completions_of(captured) == completions_of(plain)


def test_graphs_of_the_last_request_read_the_weights_of_the_next() -> None:
    policy = gpu_policy()
    engine = NativeEngine(policy, max_rows=512)
    before = rollout(policy, engine=engine)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(-0.9)
    again = rollout(policy, engine=engine)
    assert completions_of(again) != completions_of(before)
    assert completions_of(again) == completions_of(rollout(policy))


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.7}, {"top_k": 5}, {"min_new_tokens": 30}])
def test_20000_first_tokens_follow_the_distribution(filters: dict[str, Any]) -> None:
    policy = gpu_policy()
    prompt = prompts(2)[1]
    sampling = SamplingParams(max_new_tokens=1, temperature=1.0, **filters)
    engine = NativeEngine(policy, max_rows=4096)
    (group,) = engine.generate([prompt], group_size=20_000, sampling=sampling, seed=5)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in group.completions]), minlength=24).double()
    with policy.plain_attention() as model, torch.no_grad():
        ids = torch.tensor([prompt.token_ids], device="cuda")
        exact = model(input_ids=ids).logits[0, -1].double().softmax(-1).cpu()
    if "min_new_tokens" in filters:
        exact[1] = 0.0
    if "top_k" in filters:
        exact[exact < exact.sort(descending=True).values[4]] = 0.0
    if "top_p" in filters:
        ordered = exact.sort(descending=True)
        exact[ordered.indices[int((ordered.values.cumsum(0) < 0.7).sum()) + 1 :]] = 0.0
    expected = 20_000 * exact / exact.sum()
    assert float(counts[expected == 0].sum()) == 0
    seen = expected > 0
    statistic = float(((counts - expected)[seen] ** 2 / expected[seen]).sum())
    freedom = int(seen.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("kind", KINDS)
def test_packed_gradients_are_those_of_the_same_pass_on_a_cpu(kind: str) -> None:
    policy = gpu_policy(kind)
    batch = packed(rollout(policy), policy)
    weights_T = torch.linspace(0.5, 1.5, len(batch.tokens_T))
    logprobs_T, _ = policy.token_logprobs(batch, temperature=0.8)
    result = [each.cpu() for each in gradients(policy, (weights_T.cuda() * logprobs_T).sum())]
    policy.release()
    twin = Policy(policy.model.cpu(), letter_tokenizer())
    there = packed(rollout_on(batch, policy), twin)
    exact_T, _ = twin.token_logprobs(there, temperature=0.8)
    expected = gradients(twin, (weights_T * exact_T).sum())
    torch.testing.assert_close(logprobs_T.cpu(), exact_T, atol=1e-4, rtol=1e-4)
    assert largest_gap(result, expected) < 1e-4


def rollout_on(batch: PackedCompletions, policy: Policy) -> list[Group]:
    """The groups of a batch again, from its tokens."""
    tokens = batch.tokens_T.cpu().split(batch.lengths_N.tolist())
    groups: list[list[Completion]] = [[] for _ in batch.prompts]
    for prompt, ids in zip(batch.prompt_N.tolist(), tokens, strict=True):
        groups[prompt].append(
            Completion(token_ids=tuple(ids.tolist()), logprobs=(-1.0,) * len(ids), finish_reason="length")
        )
    made = [
        Prompt(id=str(p), token_ids=ids, text="", example=Example(id=str(p), question="", gold=""))
        for p, ids in enumerate(batch.prompts)
    ]
    return [Group(prompt=prompt, completions=tuple(group)) for prompt, group in zip(made, groups, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_packed_gradients_are_close_to_those_in_float32(kind: str) -> None:
    coarse = gpu_policy(kind, torch.bfloat16)
    batch = packed(rollout(coarse), coarse)
    weights_T = torch.linspace(0.5, 1.5, len(batch.tokens_T)).cuda()
    logprobs_T, _ = coarse.token_logprobs(batch, temperature=0.8)
    result = gradients(coarse, (weights_T * logprobs_T).sum())
    precise = gpu_policy(kind)
    precise.model.load_state_dict(coarse.model.state_dict())
    exact_T, _ = precise.token_logprobs(batch, temperature=0.8)
    expected = gradients(precise, (weights_T * exact_T).sum())
    ours, theirs = (torch.cat([each.float().flatten() for each in grads]) for grads in (result, expected))
    assert float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0)) > 0.995
    assert float(ours.norm() / theirs.norm()) == pytest.approx(1.0, abs=0.05)
