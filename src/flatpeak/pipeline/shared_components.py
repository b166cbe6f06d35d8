"""The components of a run of several ranks: the same objects on each, and what they do together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.ranks import Ranks
from flatpeak.distributed.sharding import Replica, shard
from flatpeak.distributed.shared_rollouts import SharedRanker, SharedReward, SharedSampler
from flatpeak.errors import UserError
from flatpeak.evaluation.choice_ranking import LetterRanker
from flatpeak.evaluation.evaluate import Evaluator, PolicyEvaluator
from flatpeak.pipeline.build import Components
from flatpeak.pipeline.components import check_regularization
from flatpeak.pipeline.samplers import asks_servers, make_sampler
from flatpeak.pipeline.user_objects import CallerObjects, code_digests
from flatpeak.policy.model import Policy
from flatpeak.rewards.reward_set import RewardSet
from flatpeak.rollout.vllm.weight_versions import checksums_of
from flatpeak.training.optimizer import check_blocks


def share_components(components: Components, config: RunConfig, objects: CallerObjects, ranks: Ranks) -> Components:
    """The components with a sampler, rewards and evaluators that the ranks share; sharded where the recipe says so.

    One process alone has them as they are. UserError where the model cannot be sharded, or the ranks differ.
    """
    if ranks.size == 1:
        return components
    check_alike(components, code_digests(config, objects), ranks)
    policy, sampler = components.policy, components.sampler
    served = asks_servers(config, objects.sampler)
    whole: Policy = policy
    weights: Callable[[], AbstractContextManager[object]] = nullcontext
    if config.distributed.sharded:
        check_shardable(objects, policy)
        whole = replica = Replica(policy)
        weights = replica.present
        if not served:
            sampler = make_sampler(config, objects.sampler, replica)
        shard(policy, replica, config.distributed, ranks)
        check_regularization(config, policy)
        for where, optimizer in (("optimizer", config.optimizer), ("sft.optimizer", config.sft.optimizer)):
            check_blocks(dict(policy.model.named_parameters()), optimizer, where=where)
    rewards = {id(phase.reward): SharedReward(phase.reward, ranks) for phase in components.phases}
    shared: dict[str, Any] = {"sampler": sampler if served else SharedSampler(sampler, ranks, weights=weights)}
    if config.evaluation.choices == "rank":
        ranker = LetterRanker(policy=whole, tokenizer=policy.tokenizer)
        shared["ranker"] = SharedRanker(ranker, ranks, weights=weights)
    return replace(
        components,
        sampler=shared["sampler"],
        phases=tuple(replace(phase, reward=rewards[id(phase.reward)]) for phase in components.phases),
        evaluator=_shared(components.evaluator, rewards, shared),
        sft_check=_shared(components.sft_check, rewards, shared),
    )


def check_alike(components: Components, code: Mapping[str, str], ranks: Ranks) -> None:
    """UserError, on all ranks, where they have other weights or data: nothing later would show it.

    Gradients would be averaged over unlike models, and completions given to other prompts than drew them.
    """
    prompts = [prompt for phase in components.phases for prompt in phase.prompts.items]
    own = {
        "weights": checksums_of(list(components.policy.model.parameters())),
        "training prompts": _digest([(prompt.id, prompt.token_ids) for prompt in prompts]),
        "test prompts": _digest([(prompt.id, prompt.token_ids) for prompt in components.test]),
        "functions": _digest(sorted(code.items())),
        "demonstrations": _digest([(one.prompt_ids, one.target_ids) for one in components.demonstrations.items]),
    }
    first, *others = ranks.gather(own)
    for rank, other in enumerate(others, start=1):
        differing = [name for name in own if other[name] != first[name]]
        if differing:
            raise UserError(
                f"rank {rank} has other {' and '.join(differing)} than rank 0, and all ranks train one model on the "
                "same data in the same order: give every process the same, with torch.manual_seed before a model is "
                "made, and no order of a set"
            )


def _digest(rows: Sequence[tuple[Any, ...]]) -> str:
    return blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()


def check_shardable(objects: CallerObjects, policy: Policy) -> None:
    """UserError for a model that would not come back whole, or that flatpeak's engine does not decode."""
    if objects.model is not None:
        raise UserError(
            "a model that is passed to train() would stay sharded: save it and name it in model.path, or use "
            "distributed.strategy=ddp"
        )
    if not policy.native:
        raise UserError(f"distributed.strategy shards models of the native engine only ({policy.notice}): use ddp")


def _shared(evaluator: Evaluator, rewards: Mapping[int, RewardSet], shared: Mapping[str, Any]) -> Evaluator:
    if not isinstance(evaluator, PolicyEvaluator):
        return evaluator
    return replace(evaluator, reward=rewards.get(id(evaluator.reward), evaluator.reward), **shared)
