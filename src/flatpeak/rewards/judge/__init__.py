"""LLM judges as rewards: prompts, clients, rubrics, and the reading of verdicts."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.rewards.judge.config import JudgeConfig as JudgeConfig
    from flatpeak.rewards.judge.protocol import JudgeReply as JudgeReply
    from flatpeak.rewards.judge.protocol import JudgeRequest as JudgeRequest
    from flatpeak.rewards.judge.reward import build_judge_reward as build_judge_reward
    from flatpeak.rewards.judge.reward import judge_reward as judge_reward

__getattr__ = lazy_names(
    __name__,
    {
        "JudgeConfig": "config",
        "JudgeReply": "protocol",
        "JudgeRequest": "protocol",
        "build_judge_reward": "reward",
        "judge_reward": "reward",
    },
)
