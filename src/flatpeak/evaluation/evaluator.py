"""An evaluator of one policy: how its questions are asked, and how perturbed ones are worded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.evaluation.evaluate import Evaluator, Grader, evaluate
from flatpeak.evaluation.ranking import LetterRanker, Scorer
from flatpeak.evaluation.result import Evaluation
from flatpeak.protocols import Sampler, Tokenizer
from flatpeak.rewards.reward_set import RewardSet
from flatpeak.rollout.config import RolloutConfig
from flatpeak.tasks.config import PromptConfig
from flatpeak.tasks.prompts import build_prompts
from flatpeak.types import Example, Prompt


def make_evaluator(
    config: EvaluationConfig,
    *,
    task: str,
    sampler: Sampler,
    reward: Grader,
    tokenizer: Tokenizer,
    prompt: PromptConfig,
    rollout: RolloutConfig,
    longest_prompt: int,
    policy: Scorer,
) -> Evaluator:
    """Evaluates on prompts, with `config` and what it leaves to `rollout`; the random state stays as it was.

    `policy` scores letters where `config.choices` is `rank`; all else is asked of the sampler.
    A perturbed question may be longer than `longest_prompt` tokens: it is left out, and the coverage says so.
    """
    wording = prompt if prompt.overlong == "truncate_left" else prompt.model_copy(update={"overlong": "drop"})

    rank = LetterRanker(policy=policy, tokenizer=tokenizer) if config.choices == "rank" else None

    def prompts_of(examples: Sequence[Example]) -> tuple[Prompt, ...]:
        return build_prompts(examples, tokenizer, wording, max_tokens=longest_prompt).prompts

    def run(prompts: Sequence[Prompt], *, robustness: bool = False) -> Evaluation:
        if isinstance(reward, RewardSet):
            reward.check()
        with torch.random.fork_rng():
            return evaluate(
                sampler,
                prompts,
                reward,
                config,
                task=task,
                max_new_tokens=rollout.max_new_tokens,
                stop=rollout.stop,
                prompts_of=prompts_of if robustness else None,
                rank=rank,
            )

    return run
