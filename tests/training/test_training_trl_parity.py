"""One optimizer step of flatpeak against the same step of TRL's own GRPOTrainer, from the same rollouts."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from huggingface_hub import constants
from torch import Tensor
from transformers import AutoModelForCausalLM

from flatpeak.policy.model import Policy
from flatpeak.rewards.reward_set import CallersReward
from flatpeak.training.config import TrainingConfig
from flatpeak.training.objective_config import AdvantageConfig, KLConfig, ObjectiveConfig, TokenWeightsConfig
from flatpeak.types import Group, Scores
from support.models import EOS, letter_tokenizer
from support.regularized_training import Repeated
from support.training import (
    SGD,
    FixedSampler,
    completion,
    largest_difference,
    make_trainer,
    prompt,
    scored,
    tiny_policy,
    weights,
)

TOLERANCE = 1e-6
MOVED = 1e-2
"""What a step moves some weight by, at least: a comparison of steps that do nothing would prove nothing."""
LIMIT = 6
PROMPTS = {"first": (3, 7, 12, 9, 4), "second": (20, 5), "third": (8, 8, 14), "fourth": (6, 11, 3, 17, 10, 5, 19)}
COMPLETIONS = {
    "first": [(4, 9, EOS), (12, EOS), (5, 17, 3, 8, 21, EOS), (7, 7, 13, EOS)],
    "second": [(10, EOS), (3, 18, 6, EOS), (EOS,), (22, 4, 9, 5, EOS)],
    "third": [(16, 3, EOS), (11, 19, 14, 6, 4, 8), (20, 15, 9, 12, EOS), (5, EOS)],
    "fourth": [(9, 13, 10, EOS), (21, 6, EOS), (18, 3, 7, 7, 4, EOS), (14, 5, 11, 20, EOS)],
}
"""Uneven lengths; one of them is cut at the limit."""
REWARDS = {
    "first": (1.0, 0.0, 0.0, 1.0),
    # Equal, and a number whose mean is exact: TRL divides the rounding of 8 * 1.2 / 8 by a standard deviation of 0.
    "second": (0.5, 0.5, 0.5, 0.5),
    "third": (0.0, 0.0, 0.25, 1.0),
    "fourth": (-1.0, 2.0, 0.375, 0.375),
}
SECOND_REWARDS = {
    "first": (0.0, 1.0, 0.5, 1.0),
    "second": (1.0, 0.0, 0.0, 0.0),
    "third": (0.25, 0.25, 0.25, 0.25),
    "fourth": (3.0, -2.0, 0.0, 1.0),
}
PART_WEIGHTS = {"correctness": 1.0, "second": 0.5}
NORMALIZATIONS = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "dr_grpo": "constant",
    "luspo": "sequence_sum",
    "cispo": "token_mean",
    "sapo": "sequence_mean",
    "vespo": "token_mean",
    "gmpo": "sequence_mean",
}
OWN_LOSSES = {"cispo": "truncated_policy_gradient", "sapo": "sapo", "vespo": "vespo", "gmpo": "gmpo"}
SCALES = {"group": "std", "batch": "batch_std", "none": "none"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings by TRL's names."""

    loss_type: str = "grpo"
    scale_rewards: str = "group"
    temperature: float = 1.0
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    gradient_accumulation_steps: int = 1
    num_iterations: int = 1
    importance_sampling_level: str = "token"
    mask_truncated_completions: bool = False
    epsilon_high: float = 0.2
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    entropy_coef: float = 0.0
    multi_objective_aggregation: str = "sum_then_normalize"
    use_adaptive_entropy: bool = False
    entropy_target: float = 0.2
    entropy_coef_delta: float = 0.005

    @property
    def parts(self) -> bool:
        """Whether a second reward is standardized by itself (GDPO)."""
        return self.multi_objective_aggregation == "normalize_then_sum"

    @property
    def steps(self) -> int:
        """Rollouts: an adaptive coefficient acts from the second on."""
        return 2 if self.use_adaptive_entropy else 1

    def __str__(self) -> str:
        others = list(vars(self).items())[2:]
        changed = [f"{name}={value}" for name, value in others if value != getattr(Case, name)]
        return " ".join([self.loss_type, self.scale_rewards, *changed])


GRPO, DAPO_BATCH = Case(), Case(loss_type="dapo", scale_rewards="batch")
DR_GRPO_NONE = Case(loss_type="dr_grpo", scale_rewards="none")
PLAIN_KL = Case(loss_type="dapo", beta=0.3, use_bias_correction_kl=False)
TWICE = Case(temperature=1.5, num_iterations=2)
CASES = [
    *(GRPO, DAPO_BATCH, DR_GRPO_NONE, PLAIN_KL, TWICE),
    Case(loss_type="dr_grpo", beta=0.3, temperature=0.7),
    Case(loss_type="grpo", beta=0.3, scale_rewards="none", gradient_accumulation_steps=2),
    Case(loss_type="grpo", importance_sampling_level="sequence", beta=0.3, num_iterations=2),
    Case(loss_type="luspo", importance_sampling_level="sequence", scale_rewards="none"),
    Case(loss_type="cispo", epsilon_high=2.0, num_iterations=2),
    Case(loss_type="sapo", num_iterations=2),
    Case(loss_type="vespo", num_iterations=2),
    Case(loss_type="gmpo", epsilon_high=0.05, num_iterations=2),
    Case(top_entropy_quantile=0.3, beta=0.3),
    Case(loss_type="dapo", top_entropy_quantile=0.5, num_iterations=2),
    Case(off_policy_mask_threshold=1e-3, num_iterations=2),
    Case(loss_type="dapo", entropy_coef=0.05),
    Case(loss_type="dapo", mask_truncated_completions=True, beta=0.3),
    Case(multi_objective_aggregation="normalize_then_sum"),
    Case(loss_type="dapo", use_adaptive_entropy=True, entropy_target=5.0, entropy_coef=0.2, entropy_coef_delta=0.3),
    Case(loss_type="dapo", use_adaptive_entropy=True, entropy_target=0.1, entropy_coef=0.2),
]
"""Every value of every setting; below, all losses with each of them."""
LOSSES = ("grpo", "dapo", "dr_grpo")
PRODUCT = [
    *[Case(loss_type=loss, scale_rewards=scale) for loss in LOSSES for scale in SCALES],
    *[Case(loss_type=loss, beta=0.3, temperature=0.7) for loss in LOSSES],
    *[Case(loss_type=loss, beta=0.3, use_bias_correction_kl=False) for loss in LOSSES],
    *[Case(loss_type=loss, beta=0.3, scale_rewards="none", gradient_accumulation_steps=2) for loss in LOSSES],
    *[Case(loss_type=loss, temperature=1.5, num_iterations=2) for loss in LOSSES],
]


@pytest.fixture(scope="module")
def trl() -> Iterator[Any]:
    """TRL without telemetry or the Hub. Where tests have to be whole (CI), a missing TRL is a failure."""
    required = bool(os.environ.get("CI"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI", "1")
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
            patch.setenv(name, "1")
            patch.setattr(constants, name, True)
        try:
            module = importlib.import_module("trl")
        except ImportError:
            if required:
                raise
            pytest.skip("trl is not installed")
        yield module
        importlib.import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)


@cache
def groups(temperature: float) -> tuple[Group, ...]:
    """The rollouts, with the log-probabilities of the policy that both sides start from."""
    made = [
        Group(
            prompt=prompt(name, PROMPTS[name]),
            completions=tuple(completion(ids, limit=LIMIT) for ids in COMPLETIONS[name]),
        )
        for name in PROMPTS
    ]
    return tuple(scored(tiny_policy(), made, temperature=temperature))


@torch.no_grad()
def perturb(model: Any) -> None:
    """Move every weight: a reference that is the policy would have no KL."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def trl_trainer(trl: Any, case: Case, directory: Path) -> Any:
    """TRL's trainer of the starting policy, which is given the rollouts instead of sampling them."""
    start = tiny_policy()
    start.release()
    start.model.save_pretrained(directory / "model")
    rows = [(name, index) for name in PROMPTS for index in range(len(COMPLETIONS[name]))]

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        assert prompts == [name for name, _ in rows]
        return {
            "prompt_ids": [list(PROMPTS[name]) for name, _ in rows],
            "completion_ids": [list(COMPLETIONS[name][index]) for name, index in rows],
            "logprobs": None,
            "fixed_reward": [REWARDS[name][index] for name, index in rows],
            "second_reward": [SECOND_REWARDS[name][index] for name, index in rows],
        }

    def reward(completions: list[str], fixed_reward: list[float], **columns: Any) -> list[float]:
        return fixed_reward

    def second(completions: list[str], second_reward: list[float], **columns: Any) -> list[float]:
        return second_reward

    settings, trainer, config = dict(vars(case)), trl.GRPOTrainer, trl.GRPOConfig
    if case.parts:
        settings["reward_weights"] = list(PART_WEIGHTS.values())
    if settings["loss_type"] == "gmpo":
        gmpo = importlib.import_module("trl.experimental.gmpo")
        trainer, config = gmpo.GMPOTrainer, gmpo.GMPOConfig
        settings |= {"loss_type": "grpo", "epsilon": 0.2}
    arguments = config(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=len(rows) // case.gradient_accumulation_steps,
        num_generations=4,
        max_completion_length=LIMIT,
        max_steps=case.num_iterations * case.steps,
        optim="sgd",
        learning_rate=SGD.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        use_cpu=True,
        bf16=False,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    return trainer(
        AutoModelForCausalLM.from_pretrained(directory / "model"),
        reward_funcs=[reward, second] if case.parts else [reward],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": name} for name in PROMPTS]),
        processing_class=letter_tokenizer(),
        rollout_func=rollout,
    )


@pytest.fixture(scope="module")
def trl_weights(trl: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], dict[str, Tensor]]:
    """The weights after TRL's step; each case is run once."""

    @cache
    def run(case: Case) -> dict[str, Tensor]:
        with torch.random.fork_rng():
            trainer = trl_trainer(trl, case, tmp_path_factory.mktemp("trl"))
            if case.beta:
                perturb(trainer.ref_model)
            trainer.train()
        return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}

    return run


def token_weights(case: Case) -> TokenWeightsConfig:
    """TRL's quantile and mask by flatpeak's names."""
    if case.top_entropy_quantile < 1:
        return TokenWeightsConfig(function="top_entropy", arguments={"fraction": case.top_entropy_quantile})
    if case.off_policy_mask_threshold is not None:
        arguments = {"threshold": case.off_policy_mask_threshold}
        return TokenWeightsConfig(function="off_policy_mask", arguments=arguments)
    return TokenWeightsConfig()


def entropy(case: Case) -> dict[str, Any]:
    """The section's keys of the entropy bonus."""
    if not case.use_adaptive_entropy:
        return {"entropy_coefficient": case.entropy_coef}
    rule = {"target": case.entropy_target, "step": case.entropy_coef_delta, "start": case.entropy_coef}
    return {"adaptive_entropy": rule}


def advantage(case: Case) -> AdvantageConfig:
    """TRL's scaling of rewards, or of each of them, by flatpeak's names."""
    if case.parts:
        return AdvantageConfig(function="gdpo", arguments={"eps": 1e-4}, whiten="completions", eps=1e-4)
    return AdvantageConfig(scale=SCALES[case.scale_rewards], eps=1e-4)


class PartsReward(CallersReward):
    """Both rewards, with their weights."""

    weights = PART_WEIGHTS

    def __init__(self) -> None:
        super().__init__(self.both)

    def both(self, groups: Sequence[Group]) -> Scores:
        """The weighted sum and its parts."""
        parts = {
            name: [list(rewards[group.prompt.id]) for group in groups]
            for name, rewards in zip(PART_WEIGHTS, (REWARDS, SECOND_REWARDS), strict=True)
        }
        total = [
            [first + 0.5 * second for first, second in zip(*rows, strict=True)]
            for rows in zip(*parts.values(), strict=True)
        ]
        return Scores(total=total, parts=parts)


def flatpeak_step(case: Case) -> tuple[Policy, dict[str, float]]:
    """The policy after flatpeak's step, and what the step reports."""
    policy = tiny_policy()
    reference = None
    if case.beta:
        reference = tiny_policy()
        perturb(reference.model)
    trainer = make_trainer(
        policy,
        groups(case.temperature),
        REWARDS,
        max_new_tokens=LIMIT,
        objective=ObjectiveConfig(
            loss=OWN_LOSSES.get(case.loss_type, "clipped_surrogate"),
            ratio=case.importance_sampling_level,
            normalization=NORMALIZATIONS[case.loss_type],
            clip_high=case.epsilon_high,
            cap=case.epsilon_high,
            truncated="mask" if case.mask_truncated_completions else "keep",
            **entropy(case),
            token_weights=token_weights(case),
        ),
        kl=KLConfig(coefficient=case.beta, ratio_weighted=case.use_bias_correction_kl),
        advantage=advantage(case),
        training=TrainingConfig(steps=1, epochs_per_rollout=case.num_iterations, micro_batch_tokens=40),
        reference=reference,
        temperature=case.temperature,
    )
    if case.parts:
        trainer.phases = tuple(replace(phase, reward=PartsReward()) for phase in trainer.phases)
    metrics = trainer.train_step(1)
    for step in range(2, case.steps + 1):
        again = FixedSampler(scored(policy, groups(case.temperature), temperature=case.temperature))
        again.groups = Repeated(again.groups)
        trainer.sampler = again
        metrics = trainer.train_step(step)
    return policy, metrics


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in PRODUCT if case not in CASES)],
    ids=str,
)
def test_a_step_gives_the_weights_of_trls_grpo_trainer(case: Case, trl_weights: Any) -> None:
    theirs = trl_weights(case)
    policy, metrics = flatpeak_step(case)
    assert largest_difference(weights(tiny_policy()), theirs) > MOVED
    assert largest_difference(weights(policy), theirs) <= TOLERANCE
    if case.num_iterations > 1:
        assert metrics["policy/ratio_max_gap"] > 0
        assert metrics["policy/clip_fraction"] > 0 or case.loss_type in ("sapo", "vespo", "gmpo")  # which count none


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        (GRPO, {"loss_type": "dapo"}),
        (DAPO_BATCH, {"loss_type": "dr_grpo"}),
        (DR_GRPO_NONE, {"loss_type": "grpo"}),
        (GRPO, {"scale_rewards": "none"}),
        (GRPO, {"temperature": 1.1}),
        (PLAIN_KL, {"use_bias_correction_kl": True}),
        (TWICE, {"epsilon_high": 1.0}),
    ],
    ids=str,
)
def test_a_step_with_one_setting_wrong_gives_other_weights(case: Case, wrong: dict[str, Any], trl_weights: Any) -> None:
    policy, _ = flatpeak_step(replace(case, **wrong))
    assert largest_difference(weights(policy), trl_weights(case)) > 100 * TOLERANCE
