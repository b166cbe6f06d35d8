"""Completions in, scores out."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.rewards.config import RewardConfig as RewardConfig
    from flatpeak.rewards.functions import FunctionReward as FunctionReward
    from flatpeak.rewards.reward_set import RewardSet as RewardSet
    from flatpeak.rewards.reward_set import as_reward as as_reward
    from flatpeak.rewards.reward_set import build_reward as build_reward

__getattr__ = lazy_names(
    __name__,
    {
        "FunctionReward": "functions",
        "RewardConfig": "config",
        "RewardSet": "reward_set",
        "as_reward": "reward_set",
        "build_reward": "reward_set",
    },
)
