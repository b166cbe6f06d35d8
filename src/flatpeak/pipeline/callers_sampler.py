"""A sampler of the caller's, or a factory of one: what it returns is checked, and decoded where it brings no text."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.pipeline.components import configure_policy
from flatpeak.policy.model import Policy
from flatpeak.protocols import ResumableSampler, Sampler, Tokenizer
from flatpeak.types import Completion, Group, Prompt, SamplingParams

SamplerFactory = Callable[[Policy], Sampler]
"""Makes a sampler of the policy that is trained."""
LARGEST_LOGPROB = 1e-4
"""The logarithm of a probability may exceed 0 by as much as float32 rounds of large logits."""
_HINT = (
    "give a sampler, or a factory that is called with the policy and returns one, such as "
    "sampler=lambda policy: MySampler(NativeEngine(policy))"
)


def callers_sampler(callers_own: Sampler | SamplerFactory, policy: Policy, config: RunConfig) -> CheckedSampler:
    """The caller's sampler, or the one that its factory makes of the policy; UserError without a `generate` method."""
    configure_policy(policy, config)
    sampler: Any = callers_own
    # A class has `generate` too, but nothing to call it on.
    if callable(sampler) and (isinstance(sampler, type) or not hasattr(sampler, "generate")):
        _check_factory(sampler, policy)
        sampler = sampler(policy)
    if not callable(getattr(sampler, "generate", None)):
        source = "" if sampler is callers_own else "the factory returned "
        raise UserError(
            f"sampler: {source}{sampler!r} has no generate(prompts, *, group_size, sampling, seed): {_HINT}"
        )
    return CheckedSampler(sampler, policy.tokenizer)


def _check_factory(factory: Callable[..., Any], policy: Policy) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some of what is written in C has none
        return
    try:
        signature.bind(policy)
    except TypeError as error:
        raise UserError(f"sampler: {factory!r} cannot be called with the policy alone ({error}): {_HINT}") from None


def _check_logprobs(completion: Completion, prompt: str, *, greedy: bool) -> None:
    tokens = len(completion.token_ids)
    for name, logprobs in (("logprobs", completion.logprobs), ("filtered_logprobs", completion.filtered_logprobs)):
        if logprobs is not None and len(logprobs) != tokens:
            raise UserError(
                f"the sampler returned {len(logprobs)} log-probs for {tokens} tokens of prompt {prompt} ({name}): give "
                "one per token"
            )
    impossible = [logprob for logprob in completion.logprobs if not -math.inf < logprob <= LARGEST_LOGPROB]
    if impossible and not greedy:
        raise UserError(
            f"the sampler returned the log-prob {impossible[0]} for a token of prompt {prompt}: give the natural "
            "logarithm of each drawn token's probability, which is finite and at most 0"
        )


class CheckedSampler:
    """A sampler of the caller's, whose groups are checked, and decoded where they bring no text."""

    def __init__(self, sampler: Sampler, tokenizer: Tokenizer) -> None:
        self.sampler = sampler
        self.tokenizer = tokenizer

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """Generate as `protocols.Sampler` says.

        UserError where the groups do not fit the request, or a log-probability is impossible; those of greedy
        completions are not checked, since nothing reads them.
        """
        groups = self.sampler.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
        if [group.prompt.id for group in groups] != [prompt.id for prompt in prompts]:
            raise UserError("the sampler must return one group per prompt, in the order of the prompts")
        for group in groups:
            if len(group.completions) != group_size:
                raise UserError(
                    f"the sampler returned {len(group.completions)} completions for prompt {group.prompt.id}, "
                    f"asked for group_size={group_size}"
                )
            for completion in group.completions:
                _check_logprobs(completion, group.prompt.id, greedy=sampling.temperature == 0)
        return [replace(group, completions=tuple(map(self._with_text, group.completions))) for group in groups]

    def state(self) -> Mapping[str, Any]:
        """The state of the caller's sampler, where it has one."""
        return self.sampler.state() if isinstance(self.sampler, ResumableSampler) else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back a saved state, where the caller's sampler has one."""
        if isinstance(self.sampler, ResumableSampler):
            self.sampler.load(state)

    def _with_text(self, completion: Completion) -> Completion:
        if completion.text or not completion.token_ids:
            return completion
        return replace(completion, text=self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))
