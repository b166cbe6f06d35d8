"""GRPO on one page: a new model learns one-digit sums from rewards alone, in under a minute on a CPU.

    python examples/minimal_loop.py

flatpeak provides everything except the loop: the engine samples with the weights in training, the policy scores the
samples, and `flatpeak.functional` has the mathematics. There is no SFT and no reference model.
"""

from __future__ import annotations

import random
import sys

import torch

from flatpeak import NativeEngine, Policy, collate
from flatpeak import functional as F
from flatpeak.policy.config import NewModelConfig
from flatpeak.policy.loading import make_model
from flatpeak.types import Batch, Example, Group, Prompt, SamplingParams

PROMPTS, GROUP_SIZE = 32, 16
UPDATES_PER_ROLLOUT = 2
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=3)
MODEL = NewModelConfig(
    architecture="qwen2",
    config={
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    },
)


def reward(text: str, gold: str) -> float:
    """Half for starting with the right digit, and half for stopping after it."""
    return 0.5 * text.startswith(gold) + 0.5 * (text == gold)


def make_policy(*, seed: int) -> Policy:
    """A policy with random weights and a tokenizer of single characters."""
    model, tokenizer = make_model(MODEL, texts=["0123456789+="], seed=seed)
    return Policy(model, tokenizer)


def make_prompts(policy: Policy) -> list[Prompt]:
    """All sums of two digits whose result is a digit."""
    sums = [(a, b) for a in range(10) for b in range(10 - a)]
    return [
        Prompt(
            id=f"{a}+{b}",
            token_ids=tuple(policy.tokenizer.encode(f"{a}+{b}=")),
            text=f"{a}+{b}=",
            example=Example(id=f"{a}+{b}", question=f"{a}+{b}=", gold=str(a + b)),
        )
        for a, b in sums
    ]


def make_batch(groups: list[Group], rewards_PG: torch.Tensor, policy: Policy) -> Batch:
    """Packed completions, each with its advantage and the weight of its tokens in the loss."""
    nothing_missing_PG = torch.ones_like(rewards_PG, dtype=torch.bool)
    completions = collate(groups, nothing_missing_PG, device=policy.device)
    advantages_N = F.group_advantages(rewards_PG, baseline="mean", scale="std").flatten()
    return completions.to_batch(
        advantages_T=advantages_N.index_select(0, completions.sequence_T),
        weights_N=F.completion_weights(completions.lengths_N, "sequence_mean"),
        old_logprobs_T=completions.sampler_logprobs_T,
    )


def loss_of(policy: Policy, batch: Batch) -> torch.Tensor:
    """sum_i w_i sum_t -min(r A, clip(r) A), with the ratio r to the sampler's probabilities.

    Other algorithms change single lines: `F.policy_gradient(logprobs_T, batch.advantages_T)` here is REINFORCE, and the
    weights "constant" with scale "none" above are Dr. GRPO.
    """
    logprobs_T, _ = policy.token_logprobs(batch, temperature=SAMPLING.temperature)
    weights_T = batch.weights_N.index_select(0, batch.sequence_T)
    ratio_T = F.importance_ratio(logprobs_T, batch.old_logprobs_T)
    return (weights_T * F.clipped_surrogate(ratio_T, batch.advantages_T, clip_low=0.2, clip_high=0.2)).sum()


def train(steps: int, *, seed: int = 0) -> list[float]:
    """Train, and return the mean reward of each step."""
    policy = make_policy(seed=seed)
    prompts = make_prompts(policy)
    engine = NativeEngine(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    order = random.Random(seed)
    history = []
    for step in range(1, steps + 1):
        groups = engine.generate(
            order.sample(prompts, PROMPTS), group_size=GROUP_SIZE, sampling=SAMPLING, seed=seed + step
        )
        rewards_PG = torch.tensor(
            [[reward(c.text, group.prompt.example.gold) for c in group.completions] for group in groups]
        )
        batch = make_batch(groups, rewards_PG, policy)
        for _ in range(UPDATES_PER_ROLLOUT):
            optimizer.zero_grad()
            loss_of(policy, batch).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        history.append(float(rewards_PG.mean()))
        if step % 10 == 0 or step == 1:
            print(f"step {step:3d}: mean reward {history[-1]:.3f}")
    return history


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 150)
