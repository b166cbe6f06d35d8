"""A tiny policy, rollouts by hand, and a trainer around them that writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flatpeak.policy.model import Policy
from flatpeak.protocols import Sampler
from flatpeak.rewards.reward_set import CallersReward
from flatpeak.rollout.config import RolloutConfig
from flatpeak.training.config import OptimizerConfig, TrainingConfig
from flatpeak.training.curriculum import Phase, Stream
from flatpeak.training.learner import Learner
from flatpeak.training.objective_config import AdvantageConfig, KLConfig, ObjectiveConfig
from flatpeak.training.trainer import Trainer, TrainerConfig
from flatpeak.training.user_functions import make_advantages, make_objective
from flatpeak.types import Batch, Completion, Example, Group, Prompt, SamplingParams, Score, Scores
from support.models import EOS, letter_tokenizer, tiny_model

SGD = OptimizerConfig(name="sgd", learning_rate=0.5, max_grad_norm=None)


def tiny_policy(*, seed: int = 0) -> Policy:
    policy = Policy(tiny_model(seed=seed), letter_tokenizer())
    assert policy.native, policy.notice
    return policy


def double_policy(*, seed: int = 0) -> Policy:
    """A random GPT-2 in float64: unlike Qwen2's, its norms do not go through float32."""
    policy = Policy(tiny_model("gpt2", seed=seed).double(), letter_tokenizer())
    assert policy.native, policy.notice
    return policy


def prompt(name: str, token_ids: Sequence[int]) -> Prompt:
    example = Example(id=name, question=name, gold="")
    return Prompt(id=name, token_ids=tuple(token_ids), text=name, example=example)


def completion(token_ids: Sequence[int], *, limit: int, logprobs: Sequence[float] | None = None) -> Completion:
    """Cut at `limit` where it does not end with the end-of-sequence token."""
    ended = len(token_ids) > 0 and token_ids[-1] == EOS
    return Completion(
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs) if logprobs is not None else (0.0,) * len(token_ids),
        finish_reason="length" if not ended and len(token_ids) >= limit else "stop",
    )


@torch.no_grad()
def plain_logprobs(
    policy: Policy, prompt_ids: Sequence[int], token_ids: Sequence[int], *, temperature: float
) -> Tensor:
    """log softmax(logits / temperature) at each completion token, by the unmodified model on this one row."""
    with policy.plain_attention() as model:
        model.eval()
        logits = model(input_ids=torch.tensor([[*prompt_ids, *token_ids]])).logits[0].float()
    rows = torch.arange(len(token_ids)) + len(prompt_ids) - 1
    return torch.log_softmax(logits[rows] / temperature, -1)[torch.arange(len(token_ids)), list(token_ids)]


def scored(policy: Policy, groups: Sequence[Group], *, temperature: float = 1.0) -> list[Group]:
    """The groups with the policy's own log-probabilities, as a sampler would have stored them."""
    return [
        replace(
            group,
            completions=tuple(
                replace(
                    c,
                    logprobs=tuple(
                        plain_logprobs(policy, group.prompt.token_ids, c.token_ids, temperature=temperature).tolist()
                    ),
                )
                for c in group.completions
            ),
        )
        for group in groups
    ]


class FixedSampler(Sampler):
    """Returns the same groups whenever it is asked for their prompts."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = {group.prompt.id: group for group in groups}

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        return [self.groups[prompt.id] for prompt in prompts]


class FixedReward:
    """The scores of each prompt's completions, by prompt id."""

    def __init__(self, scores: dict[str, Sequence[Score]]) -> None:
        self.scores = scores

    def __call__(self, groups: Sequence[Group]) -> Scores:
        total = [list(self.scores[group.prompt.id]) for group in groups]
        return Scores(total=total, parts={"correctness": total})


class NoRecorder:
    """Writes nothing; keeps the advantages of the last step."""

    def rollouts(self, step: int, rollouts: Any, advantages_PG: Tensor) -> None:
        self.advantages = {
            group.prompt.id: row.tolist() for group, row in zip(rollouts.groups, advantages_PG, strict=True)
        }


def make_trainer(
    policy: Policy,
    groups: Sequence[Group],
    scores: dict[str, Sequence[Score]],
    *,
    max_new_tokens: int,
    objective: ObjectiveConfig | None = None,
    kl: KLConfig | None = None,
    advantage: AdvantageConfig | None = None,
    optimizer: OptimizerConfig = SGD,
    training: TrainingConfig | None = None,
    reference: Policy | None = None,
    temperature: float = 1.0,
) -> Trainer:
    """The trainer of a run, with rollouts and rewards given."""
    training = training or TrainingConfig(steps=1)
    learner = Learner(
        policy,
        make_objective(objective or ObjectiveConfig(), kl or KLConfig()),
        optimizer,
        temperature=temperature,
        micro_batch_tokens=training.micro_batch_tokens,
    )
    stream = Stream(items=tuple(group.prompt for group in groups), seed=0)
    phase = Phase(task="fixed", prompts=stream, reward=CallersReward(FixedReward(scores)), accuracy="correctness")
    rollout = RolloutConfig(
        prompts_per_step=len(groups),
        group_size=len(groups[0].completions),
        temperature=temperature,
        max_new_tokens=max_new_tokens,
    )
    return Trainer(
        learner,
        advantages=make_advantages(advantage or AdvantageConfig(), group_size=len(groups[0].completions)),
        sampler=FixedSampler(groups),
        phases=(phase,),
        reference=reference,
        config=TrainerConfig(seed=0, rollout=rollout, training=training),
        recorder=NoRecorder(),  # type: ignore[arg-type]
    )


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in policy.model.named_parameters()
    }


def with_advantages(batch: Batch, advantages: Sequence[float]) -> Batch:
    """The batch with one advantage per completion."""
    return replace(batch, advantages_T=torch.tensor(advantages)[batch.sequence_T])


def make_batch(
    lengths: Sequence[int], *, prompts: Sequence[Sequence[int]], prompt_N: Sequence[int], seed: int = 0
) -> Batch:
    """A batch of random numbers, different everywhere, with the given layout."""
    generator = torch.Generator().manual_seed(seed)
    count, total = len(lengths), sum(lengths)
    lengths_N = torch.tensor(lengths)
    return Batch(
        prompts=tuple(tuple(p) for p in prompts),
        prompt_N=torch.tensor(prompt_N),
        lengths_N=lengths_N,
        tokens_T=torch.randint(3, 24, (total,), generator=generator),
        sequence_T=torch.arange(count).repeat_interleave(lengths_N),
        advantages_T=torch.randn(count, generator=generator).repeat_interleave(lengths_N),
        weights_N=torch.rand(count, generator=generator) + 0.5,
        old_logprobs_T=-torch.rand(total, generator=generator) * 3,
        reference_logprobs_T=-torch.rand(total, generator=generator) * 3,
    )
