"""The log-probabilities stored by the sampler are those the trainer computes, also after training and at low T."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flatpeak.policy.config import NewModelConfig
from flatpeak.policy.loading import make_model
from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.training.batch import collate
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.learner import Learner
from flatpeak.training.objective import Objective
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.types import Example, Group, PackedCompletions, Prompt, SamplingParams

TEXT = "abcdefghijklmnopqrstuvwxyz 0123456789+-*=#"
SIZES = {"max_position_embeddings": 640, "tie_word_embeddings": True}
MODELS = {
    "qwen2": NewModelConfig(
        architecture="qwen2",
        config={
            **SIZES,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "gpt2 with dropout": NewModelConfig(
        architecture="gpt2",
        config={
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 640,
            "resid_pdrop": 0.3,
            "embd_pdrop": 0.3,
            "attn_pdrop": 0.3,
        },
    ),
}
LONG = SamplingParams(max_new_tokens=512, min_new_tokens=512)


def prompts(policy: Policy) -> list[Prompt]:
    texts = ["a", "12+34=", "the quick brown fox"]
    return [
        Prompt(
            id=text,
            token_ids=tuple(policy.tokenizer.encode(text)),
            text=text,
            example=Example(id=text, question=text, gold=""),
        )
        for text in texts
    ]


def packed(groups: list[Group]) -> PackedCompletions:
    return collate(groups, torch.ones(len(groups), len(groups[0].completions), dtype=torch.bool), device="cpu")


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name.replace(" ", "_"))
def trained(request: pytest.FixtureRequest) -> Policy:
    """A model taught to prefer some of its own samples, until its logits are well above those at init."""
    policy = Policy(*make_model(MODELS[request.param], texts=[TEXT], seed=0))
    assert policy.native, policy.notice
    learner = Learner(
        policy,
        Objective(config=ObjectiveConfig(loss="policy_gradient"), kl=KLConfig()),
        OptimizerConfig(learning_rate=3e-3),
        temperature=1.0,
        micro_batch_tokens=4096,
    )
    groups = NativeEngine(policy).generate(
        prompts(policy), group_size=2, sampling=SamplingParams(max_new_tokens=48), seed=0
    )
    completions = packed(groups)
    ones_N = torch.ones(len(completions.lengths_N))
    batch = completions.to_batch(
        advantages_T=torch.ones(len(completions.tokens_T)),
        weights_N=ones_N / len(completions.tokens_T),
        old_logprobs_T=completions.sampler_logprobs_T,
    )
    losses = [learner.update(batch, rate=3e-3).loss for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    return policy


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0, 1.5])
def test_sampler_log_probabilities_equal_the_trainers(trained: Policy, temperature: float) -> None:
    groups = NativeEngine(trained).generate(
        prompts(trained)[:2], group_size=1, sampling=replace(LONG, temperature=temperature), seed=1
    )
    batch = packed(groups)
    assert batch.lengths_N.tolist() == [512, 512]
    # With gradients on the policy is in train mode, where dropout would show.
    recomputed_T, _ = trained.token_logprobs(batch, temperature=temperature)
    largest_logit = float(max_logit(trained, batch))
    tolerance = 1e-5 * max(1.0, largest_logit) / temperature
    gap = float((recomputed_T.detach() - batch.sampler_logprobs_T).abs().max())
    assert gap <= tolerance, f"{gap:.2e} > {tolerance:.2e}"


def test_the_agreement_would_notice_a_wrong_temperature(trained: Policy) -> None:
    groups = NativeEngine(trained).generate(
        prompts(trained), group_size=1, sampling=SamplingParams(max_new_tokens=64), seed=1
    )
    batch = packed(groups)
    recomputed_T, _ = trained.token_logprobs(batch, temperature=0.9)
    assert float((recomputed_T.detach() - batch.sampler_logprobs_T).abs().max()) > 1e-2


@torch.no_grad()
def max_logit(policy: Policy, batch: PackedCompletions) -> torch.Tensor:
    with policy.plain_attention() as model:
        ids = torch.cat([torch.tensor(batch.prompts[0]), batch.tokens_T[: int(batch.lengths_N[0])]])
        return model(input_ids=ids[None]).logits.abs().max()
