"""The sampler of a run: the caller's own, which is wrapped here and nowhere else, or the recipe's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.ranks import ALONE, Ranks
from flatpeak.distributed.shared_rollouts import ServedSampler
from flatpeak.episodes.build import episode_sampler, read_environment
from flatpeak.errors import UserError
from flatpeak.pipeline.rollout_engines import RolloutProcess, build_sampler, configure_policy, served_sampler
from flatpeak.pipeline.run_rewards import open_pool
from flatpeak.policy.model import Policy
from flatpeak.protocols import Progress, Sampler, SamplerLike, Tokenizer, WrappedSampler
from flatpeak.rollout.ahead import RolloutsAhead
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.vllm.sampler import DrawingThread
from flatpeak.types import Completion, Group, Prompt, SamplingParams

SamplerFactory = Callable[[Policy], SamplerLike]
"""Makes a sampler of the policy that is trained."""
LARGEST_LOGPROB = 1e-4
"""The logarithm of a probability may exceed 0 by as much as float32 rounds of large logits."""
_HINT = (
    "give a sampler, or a factory that is called with the policy and returns one, such as "
    "sampler=lambda policy: MySampler(NativeEngine(policy))"
)


def make_sampler(
    config: RunConfig, own: SamplerLike | SamplerFactory | None, policy: Policy, *, ranks: Ranks = ALONE
) -> Sampler:
    """The caller's sampler, or the one that the recipe asks for, with rollouts ahead where it asks for these.

    The first of several ranks asks servers, for all of them; any other sampler is one of each rank, and not shared yet.
    """
    if asks_servers(config, own):
        configure_policy(policy, config)
        policy.kernels.idle = True
        sampler = acting(config, _asking_sampler(config, policy), policy) if ranks.is_first else Sampler()
        if ranks.size == 1:
            return sampler
        return ServedSampler(sampler, ranks, weights=policy.whole, draws_ahead=config.rollout.staleness > 0)
    sampler = build_sampler(policy, config) if own is None else callers_sampler(own, policy, config)
    if not config.rollout.staleness:
        return acting(config, sampler, policy)
    _check_copy(config, policy, sampler)
    return RolloutsAhead(sampler, RolloutProcess(policy, config), staleness=config.rollout.staleness)


def acting(config: RunConfig, sampler: Sampler, policy: Policy) -> Sampler:
    """The sampler, of episodes where the recipe has tools or an environment."""
    environment = read_environment(config.tools, config.environment)
    if environment is None:
        return sampler
    asking = [name for name, reward in config.rewards.items() if reward.type == "environment"]
    if asking and not environment.rewards:
        raise UserError(
            f"rewards.{asking[0]}.type=environment: {config.environment} has no reward(): define it, or choose another "
            "type"
        )
    if config.advantage.credit == "turn" and not environment.rewards_turns:
        reason = "has a reward(), which replaces the rewards of its turns" if environment.is_game else "has no step()"
        raise UserError(f"advantage.credit=turn: {config.environment} {reason}; set advantage.credit=episode")
    return episode_sampler(
        sampler,
        environment,
        open_pool(config.run, timeout=config.episodes.call_timeout),
        config=config.episodes,
        prompt=config.prompt,
        tokenizer=policy.tokenizer,
        context=policy.context_length or 2**31,
        longest_prompt=(policy.context_length or 2**31) - config.rollout.max_new_tokens,
    )


def asks_servers(config: RunConfig, own: SamplerLike | SamplerFactory | None) -> bool:
    """Whether the sampler of `make_sampler` asks servers."""
    return own is None and isinstance(config.rollout.engine, VLLMConfig)


def _asking_sampler(config: RunConfig, policy: Policy) -> Sampler:
    """The sampler over servers, with a thread that draws ahead beside it where the recipe asks for that."""
    sampler = served_sampler(policy, config)
    if not config.rollout.staleness:
        return sampler
    if (url := sampler.sleeping_server) is not None:
        sampler.close()
        raise UserError(
            f"rollout.staleness={config.rollout.staleness} with {url}, which sleeps between rollouts to leave its "
            "GPU to the trainer: set rollout.staleness=0, or start it without sleep mode on a device of its own"
        )
    return RolloutsAhead(sampler, DrawingThread(sampler), staleness=config.rollout.staleness)


def _check_copy(config: RunConfig, policy: Policy, sampler: Sampler) -> None:
    """UserError where no second process can draw as the sampler does, with a copy of the policy."""
    adapters = config.model.lora is None and hasattr(policy.model, "peft_config")
    reasons = {
        "a sampler of the caller's, which no second process has": sampler.foreign,
        f"a model on {policy.device.type}: its copy draws on a CPU": policy.device.type != "cpu",
        "model.quantization": config.model.quantization is not None,
        "adapters of the caller's own model, whose base a copy does not know": adapters,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"rollout.staleness={config.rollout.staleness} beside {reason}: set rollout.staleness=0")


def callers_sampler(callers_own: SamplerLike | SamplerFactory, policy: Policy, config: RunConfig) -> Sampler:
    """The caller's sampler, or the one that its factory makes of the policy; UserError without a `generate` method."""
    configure_policy(policy, config)
    sampler: Any = callers_own
    # A class has `generate` too, but nothing to call it on.
    if callable(sampler) and (isinstance(sampler, type) or not hasattr(sampler, "generate")):
        _check_factory(sampler, policy)
        sampler = sampler(policy)
    if not _can_generate(sampler):
        source = "" if sampler is callers_own else "the factory returned "
        raise UserError(
            f"sampler: {source}{sampler!r} has no generate(prompts, *, group_size, sampling, seed): {_HINT}"
        )
    return CheckedSampler(sampler, policy.tokenizer)


def _can_generate(sampler: Any) -> bool:
    """Whether an object has the method `generate`; that of `Sampler` needs a `stream` of the class's own."""
    kind = type(sampler)
    defines_none = all(getattr(kind, name, None) is getattr(Sampler, name) for name in ("generate", "stream"))
    return callable(getattr(sampler, "generate", None)) and not defines_none


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
    for name in ("logprobs", "filtered_logprobs", "kept"):
        values = getattr(completion, name)
        if values is not None and len(values) != tokens:
            what = "sets" if name == "kept" else "log-probs"
            raise UserError(
                f"the sampler returned {len(values)} {what} for {tokens} tokens of prompt {prompt} ({name}): give "
                "one per token"
            )
    impossible = [logprob for logprob in completion.logprobs if not -math.inf < logprob <= LARGEST_LOGPROB]
    if impossible and not greedy:
        raise UserError(
            f"the sampler returned the log-prob {impossible[0]} for a token of prompt {prompt}: give the natural "
            "logarithm of each drawn token's probability, which is finite and at most 0"
        )


class CheckedSampler(Sampler):
    """A sampler of the caller's, whose groups are checked, and decoded where they bring no text."""

    foreign = True

    def __init__(self, sampler: SamplerLike, tokenizer: Tokenizer) -> None:
        self.sampler: Any = sampler
        self.tokenizer = tokenizer
        self.decoder = type(sampler).__name__
        self.resumable = hasattr(sampler, "state") and hasattr(sampler, "load")

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """Generate as `protocols.SamplerLike` says.

        UserError where the groups do not fit the request, or a log-probability is impossible; those of greedy
        completions are not checked, since nothing reads them.
        """
        groups: list[Group] = self.sampler.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
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
        return dict(self.sampler.state()) if self.resumable else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back a saved state, where the caller's sampler has one."""
        if self.resumable:
            self.sampler.load(state)

    def _with_text(self, completion: Completion) -> Completion:
        if completion.text or not completion.token_ids:
            return completion
        return replace(completion, text=self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))


class DisplayedSampler(WrappedSampler):
    """A sampler that shows how many completions of a request are sampled, on a display with a method for that."""

    def __init__(self, sampler: Sampler, progress: Progress) -> None:
        super().__init__(sampler)
        self._show: Callable[[int, int], None] = getattr(progress, "sampled", lambda completions, total: None)

    def stream(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[int, Group]]:
        """The groups of the wrapped sampler, as they finish."""
        sampled, total = 0, len(prompts) * group_size
        self._show(sampled, total)
        try:
            for index, group in self.sampler.stream(prompts, group_size=group_size, sampling=sampling, seed=seed):
                sampled += group_size
                self._show(sampled, total)
                yield index, group
        finally:
            self._show(total, total)
