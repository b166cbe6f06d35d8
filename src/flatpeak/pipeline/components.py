"""From a recipe, or what a caller brings, to the rewards of a run: built, fitted to the evaluation, made ready."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.kernels.decode_attention import kernel_notices
from flatpeak.pipeline.checks import check_accuracy, check_metric
from flatpeak.policy.model import Policy
from flatpeak.protocols import Progress, ResumableSampler, Sampler, Tokenizer
from flatpeak.rewards.build import as_reward, build_reward
from flatpeak.rewards.config import RewardConfig
from flatpeak.rewards.reward_set import RewardSet
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.rollout.engine import NativeEngine
from flatpeak.rollout.hf_generate import GenerateEngine
from flatpeak.types import Completion, Group, Prompt, SamplingParams

SHOWN_TO_REWARDS = 16
"""Examples that rewards may check themselves on."""


def open_workers(config: RunConfig) -> WorkerPool | None:
    """The processes that grade; each starts when there is something to grade. None where the recipe wants none."""
    size, memory = config.run.grading_workers, config.run.grading_memory
    if size == 0:
        return None
    return WorkerPool(
        2 if size is None else size,
        timeout=config.run.grading_timeout,
        memory_bytes=None if memory is None else int(memory * 2**30),
    )


def main_reward(config: RunConfig, given: Any, *, workers: WorkerPool | None, progress: Progress) -> RewardSet:
    """The recipe's rewards, or the caller's own. UserError where they do not fit the evaluation."""
    if given is None:
        reward = _build(config, config.rewards, workers=workers, progress=progress)
    else:
        rules = config.run.grading_workers is not None
        reward = as_reward(
            given,
            name=config.evaluation.accuracy,
            workers=workers,
            rules=rules,
            budget=config.run.grading_budget,
            notice=progress.notice,
        )
    if not reward.weights:  # a caller's own: the names of its components come with its scores
        return reward
    check_accuracy(config.evaluation, reward)
    check_metric(config.evaluation, reward)
    return reward


def first_reward(config: RunConfig, *, workers: WorkerPool | None, progress: Progress) -> RewardSet | None:
    """The rewards of the curriculum's first task, where it has its own."""
    if config.curriculum is None or config.curriculum.rewards is None:
        return None
    reward = _build(config, config.curriculum.rewards, workers=workers, progress=progress)
    check_accuracy(config.evaluation, reward)
    return reward


def _build(
    config: RunConfig, rewards: Mapping[str, RewardConfig], *, workers: WorkerPool | None, progress: Progress
) -> RewardSet:
    rules = config.run.grading_workers is not None
    return build_reward(rewards, workers=workers, rules=rules, budget=config.run.grading_budget, notice=progress.notice)


def prepare(reward: RewardSet, prompts: Sequence[Prompt]) -> None:
    """Let rewards that can check themselves do so, on the first examples: UserError where one is unfit."""
    reward.prepare([prompt.example for prompt in prompts[:SHOWN_TO_REWARDS]])


def batch_invariant(
    engine: NativeEngine, prompts: Sequence[Prompt], *, group_size: int = 4, max_new_tokens: int = 16, seed: int = 0
) -> bool:
    """Whether prompts decoded alone and together give the same tokens and bitwise the same log-probs.

    True is evidence and not proof: a matrix product may round differently at a shape that was not tried. Where it is
    False log-probs agree to rounding, and a token may rarely differ. Each prompt is sampled alone (one row), as a group
    alone, and among all of them; give prompts of different lengths.
    """
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens)
        together = engine.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
        for prompt, group in zip(prompts, together, strict=True):
            for size in (1, group_size):
                (alone,) = engine.generate([prompt], group_size=size, sampling=sampling, seed=seed)
                if alone.completions != group.completions[:size]:
                    return False
    return True


LARGEST_LOGPROB = 1e-4
"""The logarithm of a probability may exceed 0 by as much as float32 rounds of large logits."""


class PlainSampler:
    """transformers' `generate` on a policy, under the model's own attention."""

    def __init__(self, policy: Policy, *, max_rows: int) -> None:
        self.policy = policy
        self.engine = GenerateEngine(
            policy.model, policy.tokenizer, eos_token_ids=policy.eos_token_ids, max_rows=max_rows
        )

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """See protocols.Sampler."""
        with self.policy.plain_attention():
            return self.engine.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)


class CheckedSampler:
    """A sampler of the caller's: what it returns is checked, and decoded where it brings no text."""

    def __init__(self, sampler: Sampler, tokenizer: Tokenizer) -> None:
        self.sampler = sampler
        self.tokenizer = tokenizer

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """See protocols.Sampler. Raises UserError where the groups do not fit the request, or their log-probabilities
        cannot be any. Those of greedy completions are not looked at: nothing reads them."""
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


_GIVE = (
    "give a sampler, or a factory that is called with the policy and returns one, such as "
    "sampler=lambda policy: MySampler(NativeEngine(policy))"
)

SamplerFactory = Callable[[Policy], Sampler]
"""Makes a sampler of the policy that is trained."""


def callers_sampler(given: Sampler | SamplerFactory, policy: Policy, config: RunConfig) -> CheckedSampler:
    """The caller's sampler, or what its factory makes of the policy. UserError where neither has `generate`."""
    sampler: Any = given
    # A class has `generate` too, but nothing to call it on.
    if callable(sampler) and (isinstance(sampler, type) or not hasattr(sampler, "generate")):
        _check_factory(sampler, policy)
        policy.batch_invariant = config.rollout.batch_invariant
        sampler = sampler(policy)
    if not callable(getattr(sampler, "generate", None)):
        made = "" if sampler is given else "the factory returned "
        raise UserError(f"sampler: {made}{sampler!r} has no generate(prompts, *, group_size, sampling, seed): {_GIVE}")
    return CheckedSampler(sampler, policy.tokenizer)


def _check_factory(factory: Callable[..., Any], policy: Policy) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some of what is written in C has none
        return
    try:
        signature.bind(policy)
    except TypeError as error:
        raise UserError(f"sampler: {factory!r} cannot be called with the policy alone ({error}): {_GIVE}") from None


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


def build_sampler(policy: Policy, config: RunConfig) -> Sampler:
    """The native engine where the policy is served by it, else `generate`."""
    wanted = config.rollout.engine
    if wanted == "native" and not policy.native:
        raise UserError(f"rollout.engine=native: {policy.notice}; use rollout.engine=auto or generate")
    if wanted == "generate" or not policy.native:
        return PlainSampler(policy, max_rows=config.rollout.max_rows)
    policy.batch_invariant = config.rollout.batch_invariant
    return NativeEngine(policy, max_rows=config.rollout.max_rows)


def announce_decoding(policy: Policy, prompts: Sequence[Prompt], progress: Progress, *, max_new_tokens: int) -> None:
    """Try the native engine, and say where completions depend on the batch, or where it is slower than it could be.

    Prompts leave room for `max_new_tokens`.
    """
    if not policy.native:
        return
    engine = NativeEngine(policy)
    invariant = batch_invariant(engine, prompts[:3], max_new_tokens=min(16, max_new_tokens))
    if policy.batch_invariant and not invariant:
        progress.notice(
            "on this machine a completion's log-probabilities depend on the batch in their last bits, so a token may "
            "rarely differ with other batch settings"
        )
    for reason in (*engine.notices, *kernel_notices()):
        progress.notice(reason)
