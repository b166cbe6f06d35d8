"""The policy loss with importance weights of the sampler: by hand, beside TRL's, in both passes of a penalty."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training_old_logprobs import FROZEN, LIMIT, SCORES, fixed_groups
from test_training_trl_parity import LIMIT as TRL_LIMIT
from test_training_trl_parity import MOVED, PROMPTS, REWARDS, TOLERANCE, Case, groups, trl_trainer
from test_training_trl_parity import trl as trl
from torch import Tensor

from flatpeak.config.load import parse_config
from flatpeak.errors import RunError
from flatpeak.functional import (
    masked_importance_weights,
    sequence_probability_ratio,
    truncated_importance_weights,
)
from flatpeak.policy.model import Policy
from flatpeak.policy.reference import snapshot
from flatpeak.training.config import TrainingConfig
from flatpeak.training.learner import ABSURD_GAP
from flatpeak.training.objective_config import AdvantageConfig, KLConfig, ObjectiveConfig
from flatpeak.types import Batch, Group
from support.regularized_training import (
    double_qwen2,
    gradient_of,
    make_learner,
    norm,
    off_policy,
    penalty_of,
    relative_error,
)
from support.training import largest_difference, make_trainer, tiny_policy, weights

TYPES = ("truncate", "mask")
LEVELS = ("token", "sequence")
LOSSES: dict[str, dict[str, Any]] = {
    "clipped": {},
    "capped": {"loss": "truncated_policy_gradient", "cap": 1.2},
    "policy gradient": {"loss": "policy_gradient"},
    "clipped, sequence ratio": {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.1},
}


def corrected(type_: str, level: str, *, loss: str = "clipped", cap: float = 1.3) -> ObjectiveConfig:
    return ObjectiveConfig(**LOSSES[loss], sampler_correction={"type": type_, "level": level, "cap": cap})


@cache
def setting() -> tuple[Policy, Batch]:
    """A policy in float64, and a batch of a sampler that is about 0.2 nats per token from its old log-probabilities."""
    policy = double_qwen2()
    batch = off_policy(policy)
    generator = torch.Generator().manual_seed(8)
    assert batch.old_logprobs_T is not None
    noise_T = torch.randn(len(batch.tokens_T), generator=generator, dtype=torch.float64)
    return policy, replace(batch, sampler_logprobs_T=batch.old_logprobs_T + 0.2 * noise_T)


def weights_by_hand(batch: Batch, type_: str, level: str, *, cap: float) -> Tensor:
    """One weight per token, by a loop over completions."""
    assert batch.old_logprobs_T is not None
    assert batch.sampler_logprobs_T is not None
    result = []
    for index in range(len(batch.lengths_N)):
        own = batch.sequence_T == index
        ratio = torch.exp((batch.old_logprobs_T - batch.sampler_logprobs_T)[own])
        if level == "sequence":
            ratio = ratio.prod().expand(len(ratio))
        kept = ratio <= cap
        result.append(torch.where(kept, ratio, cap if type_ == "truncate" else 0.0))
    return torch.cat(result)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("type_", TYPES)
def test_the_gradient_is_that_of_a_hand_made_importance_weighted_loss(type_: str, level: str) -> None:
    policy, batch = setting()
    weights_T = weights_by_hand(batch, type_, level, cap=1.3)
    bounded_T = weights_T == (1.3 if type_ == "truncate" else 0.0)
    assert bounded_T.any()
    assert not bounded_T.all()
    ours = gradient_of(policy, batch, objective=corrected(type_, level), kl=KLConfig(coefficient=0.3))
    logprobs_T, _ = policy.token_logprobs(batch, temperature=1.0)
    assert batch.old_logprobs_T is not None
    assert batch.reference_logprobs_T is not None
    ratio_T = (logprobs_T - batch.old_logprobs_T).exp()
    gains_T = batch.advantages_T
    surrogate_T = torch.minimum(ratio_T * gains_T, ratio_T.clamp(0.8, 1.2) * gains_T)
    d_T = batch.reference_logprobs_T - logprobs_T
    # KL is not weighted: it says nothing about what was drawn for its reward.
    loss_T = -weights_T * surrogate_T + 0.3 * (d_T.exp() - d_T - 1)
    (loss_T * batch.weights_N[batch.sequence_T]).sum().backward()
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-6, atol=1e-9)
    policy.model.zero_grad()
    assert relative_error(gradient_of(policy, batch, kl=KLConfig(coefficient=0.3)), ours) > 0.01


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "importance": {"strength": 1.0, "ratio_mode": "importance"},
    "reuse": {"strength": 1.0, "ratio_mode": "reuse"},
    "importance_clipped": {"strength": 1.0, "ratio_mode": "importance_clipped"},
    "some groups": {"strength": 1.0, "group_fraction": 0.67},
    "exact": {"strength": 1.0, "difference": "exact", "perturbed": "all"},
}


@pytest.mark.parametrize("own", [False, True], ids=["stored", "of the first pass"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_of_completions_act_as_factors_of_their_advantages_in_every_pass(
    loss: str, name: str, own: bool
) -> None:
    policy, batch = setting()
    # Old log-probabilities are stored for later minibatches, and the first pass's own for the first.
    old_T = make_learner(policy).score(policy, batch) if own else batch.old_logprobs_T
    assert old_T is not None
    assert batch.sampler_logprobs_T is not None
    ratio_T = sequence_probability_ratio(old_T, batch.sampler_logprobs_T, batch.sequence_T, len(batch.lengths_N))
    first_N = batch.lengths_N.cumsum(0) - batch.lengths_N
    factors_N = truncated_importance_weights(ratio_T, cap=1.3)[first_N]
    settings = {**SETTINGS[name], "micro_batch_tokens": 25}
    stored = replace(batch, old_logprobs_T=None if own else old_T)
    by_hand = replace(batch, old_logprobs_T=old_T, advantages_T=batch.advantages_T * factors_N[batch.sequence_T])
    with torch.random.fork_rng():
        torch.manual_seed(0)  # which groups are chosen
        ours = gradient_of(policy, stored, objective=corrected("truncate", "sequence", loss=loss), **settings)
        torch.manual_seed(0)
        expected = gradient_of(policy, by_hand, objective=ObjectiveConfig(**LOSSES[loss]), **settings)
    assert relative_error(ours, expected) < 1e-6


@pytest.mark.parametrize("mode", ["importance", "reuse", "importance_clipped"])
@pytest.mark.parametrize("type_", TYPES)
def test_the_penalty_with_weights_of_tokens_does_not_depend_on_the_step(type_: str, mode: str) -> None:
    policy, batch = setting()
    given: dict[str, Any] = {"objective": corrected(type_, "token"), "ratio_mode": mode}
    plain = gradient_of(policy, batch, objective=given["objective"])
    coarse, fine = (penalty_of(policy, batch, plain=plain, step=step, **given) for step in (3e-5, 3e-6))
    assert relative_error(coarse, fine) < 0.01
    assert norm(fine) > 0.1 * norm(plain)
    uncorrected = penalty_of(policy, batch, step=3e-6, ratio_mode=mode)
    assert relative_error(uncorrected, fine) > 0.01


def perturbed(fixed: list[Group], *, spread: float, seed: int = 4) -> list[Group]:
    """The groups with log-probabilities that are off by a normal of that standard deviation."""
    generator = torch.Generator().manual_seed(seed)

    def off(logprobs: tuple[float, ...]) -> tuple[float, ...]:
        noise = torch.randn(len(logprobs), generator=generator) * spread
        return tuple((torch.tensor(logprobs) + noise).tolist())

    return [
        replace(group, completions=tuple(replace(c, logprobs=off(c.logprobs)) for c in group.completions))
        for group in fixed
    ]


@cache
def sampled(spread: float) -> tuple[Group, ...]:
    return tuple(perturbed(list(groups(1.0)), spread=spread))


@cache
def trl_weights(trl: Any, directory: Path, mode: str, loss_type: str) -> dict[str, Tensor]:
    """The weights after two updates of TRL's trainer on rollouts of a foreign sampler, as it treats those of vLLM."""
    stored = {group.prompt.id: [list(c.logprobs) for c in group.completions] for group in sampled(0.3)}
    with torch.random.fork_rng():
        trainer = trl_trainer(trl, Case(loss_type=loss_type, num_iterations=2), directory)
        plain = trainer.rollout_func
        trainer.rollout_func = lambda prompts, of: (
            plain(prompts, of) | {"logprobs": [row for name in PROMPTS for row in stored[name]]}
        )
        trainer.use_vllm, trainer._last_loaded_step = True, 0  # as if vLLM had these weights
        trainer.vllm_importance_sampling_correction = True
        trainer.vllm_importance_sampling_mode = mode
        trainer.vllm_importance_sampling_clip_max = 1.3
        trainer.train()
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("type_", "level", "loss_type"),
    [
        *[("truncate", "token", "grpo"), ("truncate", "sequence", "dapo"), ("mask", "token", "dapo")],
        ("mask", "sequence", "grpo"),
        pytest.param("truncate", "token", "dapo", marks=pytest.mark.slow),
        pytest.param("truncate", "sequence", "grpo", marks=pytest.mark.slow),
        pytest.param("mask", "token", "grpo", marks=pytest.mark.slow),
        pytest.param("mask", "sequence", "dapo", marks=pytest.mark.slow),
    ],
)
def test_updates_give_the_weights_of_trls_trainer_with_vllm(
    type_: str, level: str, loss_type: str, trl: Any, tmp_path: Path
) -> None:
    theirs = trl_weights(trl, tmp_path, f"{level}_{type_}", loss_type)
    results = {}
    for kind in (type_, "none"):
        policy = tiny_policy()
        trainer = make_trainer(
            policy,
            sampled(0.3),
            REWARDS,
            max_new_tokens=TRL_LIMIT,
            objective=ObjectiveConfig(
                normalization="sequence_mean" if loss_type == "grpo" else "token_mean",
                sampler_correction={"type": kind, "level": level, "cap": 1.3},
            ),
            advantage=AdvantageConfig(eps=1e-4),
            training=TrainingConfig(steps=1, epochs_per_rollout=2, micro_batch_tokens=40),
        )
        metrics = trainer.train_step(1)
        results[kind] = weights(policy)
        if kind != "none":
            assert 0.05 < metrics["rollout/correction_capped"] < 0.6
    assert largest_difference(weights(tiny_policy()), theirs) > MOVED
    assert largest_difference(results[type_], theirs) <= TOLERANCE
    assert largest_difference(results["none"], theirs) > 100 * TOLERANCE


def test_the_old_log_probabilities_are_the_trainers_own_where_the_sampler_is_corrected() -> None:
    for objective, off in ((ObjectiveConfig(), True), (corrected("truncate", "token"), False)):
        policy = tiny_policy()
        trainer = make_trainer(
            policy,
            perturbed(fixed_groups(policy), spread=0.2),
            SCORES,
            max_new_tokens=LIMIT,
            objective=objective,
            optimizer=FROZEN,
            training=TrainingConfig(steps=1, minibatches=2, epochs_per_rollout=2),
        )
        metrics = trainer.train_step(1)
        assert (metrics["policy/ratio_max_gap"] > 0.1) is off
        assert ("rollout/correction_mean" in metrics) is not off


def identical(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("name", SETTINGS)
def test_without_a_correction_the_sampler_changes_no_bit(name: str) -> None:
    policy, batch = setting()

    def result(batch: Batch, objective: ObjectiveConfig) -> dict[str, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # which groups are chosen
            return gradient_of(policy, batch, objective=objective, **SETTINGS[name])

    expected = result(replace(batch, sampler_logprobs_T=None), ObjectiveConfig())
    off = ObjectiveConfig(sampler_correction={"type": "none", "level": "sequence", "cap": 1.1})
    assert identical(result(batch, off), expected)
    assert not identical(result(batch, corrected("mask", "token")), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("type_", TYPES)
def test_a_sampler_that_agrees_with_the_trainer_changes_no_bit(type_: str, level: str) -> None:
    policy, batch = setting()
    agreed = replace(batch, sampler_logprobs_T=batch.old_logprobs_T)
    assert identical(gradient_of(policy, agreed, objective=corrected(type_, level)), gradient_of(policy, batch))


def test_metrics_of_the_sampler_are_those_of_the_first_update_by_hand() -> None:
    policy = tiny_policy()
    fixed = perturbed(fixed_groups(policy), spread=0.3)
    trainer = make_trainer(
        policy,
        fixed,
        SCORES,
        max_new_tokens=LIMIT,
        objective=corrected("mask", "token"),
        kl=KLConfig(coefficient=0.1),  # so that every token is trained on
        reference=snapshot(policy),
    )
    own = [c.logprobs for group in fixed_groups(policy) for c in group.completions]
    stored = [c.logprobs for group in fixed for c in group.completions]
    d_T = torch.tensor([log for row in own for log in row]).double() - torch.tensor(
        [log for row in stored for log in row]
    )
    ratio_T = d_T.exp()
    expected = {
        "rollout/logprob_gap_mean": float(d_T.abs().mean()),
        "rollout/logprob_gap_max": float(d_T.abs().max()),
        "rollout/kl_sampler_trainer": float((ratio_T - d_T - 1).mean()),
        "rollout/correction_mean": float(masked_importance_weights(ratio_T, cap=1.3).mean()),
        "rollout/correction_capped": float((ratio_T > 1.3).double().mean()),
    }
    metrics = trainer.train_step(1)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert 0.02 < expected["rollout/kl_sampler_trainer"] < 0.1
    assert 0 < expected["rollout/correction_capped"] < 0.5


@pytest.mark.parametrize("regularization", [{}, {"strength": 0.1}], ids=["plain", "regularized"])
def test_a_sampler_that_is_another_model_is_refused_before_a_weight_changes(regularization: dict[str, Any]) -> None:
    policy = tiny_policy()
    foreign = perturbed(fixed_groups(policy), spread=3.0)
    trainer = make_trainer(policy, foreign, SCORES, max_new_tokens=LIMIT)
    objective = corrected("truncate", "token")
    trainer.learner = make_learner(policy, objective=objective, **regularization)
    before = weights(policy)
    with pytest.raises(RunError, match=r"nats per token from the trainer's on average, more than the 1 .* template"):
        trainer.train_step(1)
    assert identical(weights(policy), before)
    assert trainer.learner.updates == 0


def test_one_unlikely_token_of_a_small_update_ends_no_run() -> None:
    policy = tiny_policy()
    group = fixed_groups(policy)[0]
    short = [
        replace(c, token_ids=c.token_ids[:2], logprobs=(c.logprobs[0] - shift, *c.logprobs[1:2]))
        for c, shift in zip(group.completions, (9.0, 0.0), strict=False)
    ]
    few = replace(group, completions=tuple(short))
    trainer = make_trainer(
        policy, [few], {"p0": (1.0, 0.0)}, max_new_tokens=LIMIT, objective=corrected("truncate", "token")
    )
    metrics = trainer.train_step(1)
    assert metrics["rollout/logprob_gap_mean"] > ABSURD_GAP
    assert trainer.learner.updates == 1


def test_an_absurd_distance_is_no_error_without_a_correction() -> None:
    policy = tiny_policy()
    foreign = perturbed(fixed_groups(policy), spread=3.0)
    trainer = make_trainer(policy, foreign, SCORES, max_new_tokens=LIMIT)
    metrics = trainer.train_step(1)
    assert metrics["rollout/logprob_gap_mean"] > ABSURD_GAP
    assert trainer.learner.updates == 1


def test_the_default_has_no_correction() -> None:
    assert not parse_config({}).objective.sampler_correction.enabled
    written = {"objective": {"sampler_correction": {"type": "mask", "level": "sequence", "cap": 5}}}
    assert parse_config(written).objective.sampler_correction.enabled
