"""The largest micro-batch of a planned run: what one backward pass holds at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flatpeak.apps.planning.workload import Workload
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.types import Batch


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """The largest micro-batch that may come of a minibatch, and whether there are others."""

    micro_batch: Batch
    several: bool
    padded: bool = False

    @property
    def tokens(self) -> int:
        """The tokens of the micro-batch, as the budget counts them."""
        prompts, batch = self.micro_batch.prompts, self.micro_batch
        times = len(batch.lengths_N) // len(prompts) if self.padded else 1
        return times * sum(map(len, prompts)) + len(batch.tokens_T)


def plan_minibatch(config: RunConfig, work: Workload, *, token_budget: int, padded: bool) -> Minibatch:
    """The largest micro-batch of RL."""
    prompts, group = work.prompt_lengths, work.group_size
    count = config.training.minibatches
    if config.training.minibatch_of == "groups":
        prompts = prompts[: -(-len(prompts) // count)]
    else:
        group = -(-group // count)
    return largest_micro_batch(
        prompts, group_size=group, new_tokens=work.new_tokens, token_budget=token_budget, padded=padded
    )


def plan_sft_minibatch(work: Workload, *, token_budget: int, padded: bool) -> Minibatch:
    """The largest micro-batch of SFT: each demonstration has a prompt of its own, and none is longer than the longest.

    UserError where there is nothing to learn from.
    """
    if not work.demonstrations:
        raise UserError("sft.steps is set but no training row has a rationale: map task.rationale, or set sft.steps=0")
    return largest_micro_batch(
        [prompt for prompt, _ in work.demonstrations],
        group_size=1,
        new_tokens=max(target for _, target in work.demonstrations),
        token_budget=token_budget,
        padded=padded,
    )


def largest_micro_batch(
    prompts: Sequence[int], *, group_size: int, new_tokens: int, token_budget: int, padded: bool
) -> Minibatch:
    """The whole minibatch where its tokens are within the budget, else as many as that is.

    Completions may end anywhere, so that nearly every budget can be filled up. `padded`: the tokens of a prompt count
    for each of its completions.
    """
    completions = len(prompts) * group_size
    if padded:
        rows = max(1, min(token_budget // (prompts[0] + new_tokens), completions))
        batch = full_batch(prompts[:1], group_size=rows, new_tokens=new_tokens)
        return Minibatch(micro_batch=batch, several=rows < completions, padded=True)
    if sum(prompts) + completions * new_tokens <= token_budget:
        return Minibatch(micro_batch=full_batch(prompts, group_size=group_size, new_tokens=new_tokens), several=False)
    if prompts[0] + group_size * new_tokens > token_budget:
        rows = max(1, min(group_size, -(-(token_budget - prompts[0]) // new_tokens)))
        tokens = (token_budget - prompts[0]) // rows if rows > 1 else new_tokens
        batch = full_batch(prompts[:1], group_size=rows, new_tokens=max(1, min(tokens, new_tokens)))
        return Minibatch(micro_batch=batch, several=True)
    return Minibatch(micro_batch=_filled(prompts, group_size, new_tokens, token_budget), several=True)


def _filled(prompts: Sequence[int], group: int, new_tokens: int, token_budget: int) -> Batch:
    """Whole groups of as many tokens as the budget has: those that are full, or one more with shorter completions."""
    full = 1
    while full < len(prompts) and sum(prompts[: full + 1]) + (full + 1) * group * new_tokens <= token_budget:
        full += 1
    more = prompts[: full + 1]
    shorter = (token_budget - sum(more)) // (len(more) * group)
    batch = full_batch(prompts[:full], group_size=group, new_tokens=new_tokens)
    if len(more) == full or shorter < 1:
        return batch
    fuller = full_batch(more, group_size=group, new_tokens=shorter)
    return max(batch, fuller, key=lambda one: sum(map(len, one.prompts)) + len(one.tokens_T))


def full_batch(prompt_lengths: Sequence[int], *, group_size: int, new_tokens: int) -> Batch:
    """A batch of groups whose completions all have `new_tokens` tokens; which tokens these are plays no role."""
    count = len(prompt_lengths) * group_size
    lengths_N = torch.full((count,), new_tokens, dtype=torch.int64)
    return Batch(
        prompts=tuple((0,) * length for length in prompt_lengths),
        prompt_N=torch.arange(len(prompt_lengths)).repeat_interleave(group_size),
        lengths_N=lengths_N,
        tokens_T=torch.zeros(count * new_tokens, dtype=torch.int64),
        sequence_T=torch.arange(count).repeat_interleave(lengths_N),
        advantages_N=torch.ones(count),
        weights_N=torch.ones(count),
        old_logprobs_T=None,
    )
