"""The components of a run of several ranks: the same objects on each, and what they do together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.ranks import Ranks
from flatpeak.distributed.sharding import Replica, shard
from flatpeak.distributed.shared_rollouts import SharedReward, SharedSampler
from flatpeak.errors import UserError
from flatpeak.evaluation.evaluate import Evaluator, PolicyEvaluator
from flatpeak.pipeline.build import CallerObjects, Components, make_sampler
from flatpeak.policy.model import Policy
from flatpeak.protocols import Sampler
from flatpeak.rewards.reward_set import RewardSet


def share_components(components: Components, config: RunConfig, objects: CallerObjects, ranks: Ranks) -> Components:
    """The components with a sampler, rewards and evaluators that the ranks share; sharded where the recipe says so.

    One process alone has them as they are. UserError where the model cannot be sharded.
    """
    if ranks.size == 1:
        return components
    policy = components.policy
    sampler: Sampler = SharedSampler(components.sampler, ranks)
    if config.distributed.sharded:
        check_shardable(objects, policy)
        replica = Replica(policy)
        sampler = SharedSampler(make_sampler(config, objects, replica), ranks, weights=replica.present)
        shard(policy, replica, config.distributed, ranks)
    rewards = {id(phase.reward): SharedReward(phase.reward, ranks) for phase in components.phases}
    return replace(
        components,
        sampler=sampler,
        phases=tuple(replace(phase, reward=rewards[id(phase.reward)]) for phase in components.phases),
        evaluator=_shared(components.evaluator, sampler, rewards),
        sft_check=_shared(components.sft_check, sampler, rewards),
    )


def check_shardable(objects: CallerObjects, policy: Policy) -> None:
    """UserError for a model that would not come back whole, or that flatpeak's engine does not decode."""
    if objects.model is not None:
        raise UserError(
            "a model that is passed to train() would stay sharded: save it and name it in model.path, or use "
            "distributed.strategy=ddp"
        )
    if not policy.native:
        raise UserError(f"distributed.strategy shards models of the native engine only ({policy.notice}): use ddp")


def _shared(evaluator: Evaluator, sampler: Sampler, rewards: Mapping[int, RewardSet]) -> Evaluator:
    if not isinstance(evaluator, PolicyEvaluator):
        return evaluator
    return replace(evaluator, sampler=sampler, reward=rewards.get(id(evaluator.reward), evaluator.reward))
