"""Below float32 ratio and KL compare like with like, whatever features meet; in float32 with the sampler, as ever."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_training_masters import coarse_model, coarse_policy
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from flatpeak.policy.loading import cast_weights
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import training_layers
from flatpeak.policy.precision import below_float32
from flatpeak.policy.reference import snapshot
from flatpeak.training.batch import collate
from flatpeak.training.config import TrainingConfig
from flatpeak.training.history import GAP_BOUND, LogprobGapMonitor
from flatpeak.training.objective_config import AdvantageConfig, KLConfig, ObjectiveConfig
from flatpeak.types import Batch, Group, Score
from support.models import EOS, letter_tokenizer
from support.regularized_training import double_qwen2, gradient_of, make_learner, off_policy
from support.training import SGD, completion, make_trainer, prompt, scored, tiny_policy, weights

LIMIT = 12
FROZEN = SGD.model_copy(update={"learning_rate": 0.0})
"""No weight ever moves, so that every update of a step is on policy."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "dapo": {"normalization": "token_mean", "clip_high": 0.28, "truncated": "soft_penalty", "overlong_buffer": 4},
    "cispo": {"loss": "truncated_policy_gradient", "normalization": "token_mean"},
    "masked": {"truncated": "mask", "normalization": "constant"},
}
PENALTIES: dict[str, dict[str, Any]] = {
    "no KL": {},
    "k3 in the loss": {"coefficient": 0.1},
    "k1 in the loss": {"coefficient": 0.1, "estimator": "k1", "ratio_weighted": True},
    "k1 in the reward": {"coefficient": 0.1, "estimator": "k1", "placement": "reward"},
}
REGULARIZATION: dict[str, dict[str, Any]] = {
    "plain": {},
    "regularized": {"strength": 0.1, "step": 3e-2, "ratio_mode": "importance_clipped", "min_perturbation_kept": 0.0},
    "some groups": {"strength": 0.1, "step": 3e-2, "group_fraction": 0.5, "min_perturbation_kept": 0.0},
    "KL outside": {"strength": 0.1, "step": 3e-2, "kl_in_penalty": False, "group_fraction": 0.5},
    "exact": {"strength": 0.1, "difference": "exact", "perturbed": "all"},
}


def adapted_policy() -> Policy:
    """Float32 adapters over a frozen base in bfloat16."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = Policy(get_peft_model(coarse_model(), config, autocast_adapter_dtype=True), letter_tokenizer())
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    return policy


def padded_policy() -> Policy:
    """An architecture that the native engine does not serve, in bfloat16."""
    config = GPTNeoConfig(
        vocab_size=len(letter_tokenizer()),
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=64,
        eos_token_id=EOS,
        bos_token_id=EOS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPTNeoForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(8 if parameter.ndim > 1 else 1)
    cast_weights(model, torch.bfloat16)
    policy = Policy(model, letter_tokenizer())
    assert not policy.native
    return policy


def random_groups(draw: random.Random, *, groups: int, size: int) -> list[Group]:
    """Completions of 0 to LIMIT tokens whose log-probabilities a sampler rounded in its own way."""

    def one() -> tuple[int, ...]:
        length = draw.choice([0, 1, 3, 5, 8, LIMIT])
        tokens = [draw.randrange(3, 24) for _ in range(length)]
        return (*tokens[:-1], EOS) if 0 < length < LIMIT else tuple(tokens)

    return [
        Group(
            prompt=prompt(f"p{index}", [draw.randrange(3, 24) for _ in range(draw.choice([1, 2, 7, 15]))]),
            completions=tuple(
                completion(tokens, limit=LIMIT, logprobs=[-3.0 - draw.random() for _ in tokens])
                for tokens in (one() for _ in range(size))
            ),
        )
        for index in range(groups)
    ]


def random_scores(draw: random.Random, groups: Sequence[Group]) -> dict[str, list[Score]]:
    """Right, wrong or missing; of some groups all alike."""
    kinds = [(3, 3, 1, 1), (3, 3, 1, 0), (0, 1, 0, 0), (0, 0, 0, 1)]
    return {
        group.prompt.id: draw.choices([0.0, 1.0, 0.5, None], weights=draw.choice(kinds), k=len(group.completions))
        for group in groups
    }


def on_policy_step(seed: int, policy: Policy) -> tuple[dict[str, Any], dict[str, float], dict[str, list[float]]]:
    """What was drawn, and the metrics and advantages of a step whose updates change nothing."""
    draw = random.Random(seed)
    chosen = {
        "algorithm": draw.choice(list(ALGORITHMS)),
        "kl": draw.choice(list(PENALTIES)),
        "regularization": draw.choice(list(REGULARIZATION)) if policy.native else "plain",
        "groups": draw.choice([1, 3, 6]),
        "recomputed": draw.random() < 0.3 and policy.native,
        "training": {
            "minibatches": draw.choice([1, 2, 4]),
            "minibatch_of": draw.choice(["groups", "completions"]),
            "epochs_per_rollout": draw.choice([1, 2]),
            "micro_batch_tokens": draw.choice([5, 25, 60, 1000]),
        },
    }
    groups = random_groups(draw, groups=chosen["groups"], size=4)
    training = TrainingConfig(steps=1, **chosen["training"])
    shared: dict[str, Any] = {
        "objective": ObjectiveConfig(**ALGORITHMS[chosen["algorithm"]]),
        "kl": KLConfig(**PENALTIES[chosen["kl"]]),
        "optimizer": FROZEN,
    }
    trainer = make_trainer(
        policy,
        groups,
        random_scores(draw, groups),
        max_new_tokens=LIMIT,
        training=training,
        reference=snapshot(policy),
        **shared,
    )
    reference = trainer.learner.reference
    trainer.learner = make_learner(
        policy,
        micro_batch_tokens=training.micro_batch_tokens or 1000,
        **shared,
        **REGULARIZATION[chosen["regularization"]],
    )
    trainer.learner.reference = reference
    before = weights(policy)
    layers = training_layers(policy.causal, recompute=True, compiled=False) if chosen["recomputed"] else nullcontext()
    with layers:
        metrics = trainer.train_step(1)
    assert all(torch.equal(before[name], after) for name, after in weights(policy).items())
    return chosen, metrics, trainer.recorder.advantages  # type: ignore[attr-defined]


POLICIES = {"bfloat16": coarse_policy, "adapters": adapted_policy, "padded": padded_policy}


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("seed", range(16))
def test_below_float32_unmoved_weights_have_ratio_one_and_no_kl(kind: str, seed: int) -> None:
    chosen, metrics, _ = on_policy_step(100 * seed + len(kind), POLICIES[kind]())
    if "policy/ratio_mean" in metrics:
        result = {name: metrics[f"policy/{name}"] for name in ("ratio_max_gap", "clip_fraction", "kl_reference")}
        assert result == dict.fromkeys(result, 0.0), chosen
        assert metrics["policy/ratio_mean"] == 1.0, chosen


def fixed_groups(policy: Policy, *, own: bool = True) -> list[Group]:
    groups = random_groups(random.Random(1), groups=4, size=3)
    return scored(policy, groups) if own else groups


SCORES: dict[str, Sequence[Score]] = {f"p{index}": (1.0, 0.0, 0.5) for index in range(4)}


def updates_of(policy: Policy, *, own: bool = True, **training: Any) -> tuple[list[Any], dict[str, float], Any]:
    """The statistics of each update of a step that does move the weights, its metrics, and the trainer."""
    trainer = make_trainer(
        policy,
        fixed_groups(policy, own=own),
        SCORES,
        max_new_tokens=LIMIT,
        training=TrainingConfig(steps=1, **training),
    )
    result: list[Any] = []
    plain = trainer.learner.update

    def recorded(*parts: Batch, rate: float) -> Any:
        result.append(plain(*parts, rate=rate))
        return result[-1]

    trainer.learner.update = recorded  # type: ignore[method-assign]
    return result, trainer.train_step(1), trainer


def ratio_gaps(updates: Sequence[Any]) -> list[float]:
    return [max(float(tokens.max_ratio_gap) for tokens in update.tokens) for update in updates]


@pytest.mark.parametrize("training", [{"minibatches": 2}, {"epochs_per_rollout": 2}], ids=["minibatches", "epochs"])
def test_later_updates_are_off_policy_by_what_the_first_one_moved(training: dict[str, Any]) -> None:
    policy = coarse_policy()
    updates, _, _ = updates_of(policy, own=False, **training)
    first, second = ratio_gaps(updates)
    assert first == 0.0
    assert 1e-3 < second < 100.0  # the sampler's numbers, drawn by hand, would say 1e3 and more


def test_in_float32_the_old_log_probabilities_are_the_samplers() -> None:
    policy = tiny_policy()
    groups = fixed_groups(policy, own=False)
    batch = collate(groups, torch.ones(4, 3, dtype=torch.bool), device=policy.device)
    trainer = make_trainer(policy, groups, SCORES, max_new_tokens=LIMIT)
    now_T = trainer.learner.score(policy, batch)
    # In every group the third completion has the mean reward, and no pass.
    third_T = batch.sequence_T % 3 == 2
    gap_T = (now_T - batch.sampler_logprobs_T)[~third_T]
    metrics = trainer.train_step(1)
    assert metrics["policy/ratio_mean"] == pytest.approx(float(gap_T.exp().mean()), rel=1e-5)
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx(float(gap_T.abs().mean()), rel=1e-5)
    assert metrics["rollout/logprob_gap_max"] == pytest.approx(float(gap_T.abs().max()), rel=1e-5)


@pytest.mark.parametrize("make", [tiny_policy, coarse_policy])
def test_the_samplers_distance_is_that_of_the_first_update_alone(make: Any) -> None:
    policy = make()
    updates, metrics, _ = updates_of(policy, own=False, minibatches=2, epochs_per_rollout=2)
    tokens = updates[0].tokens
    count = sum(one.tokens for one in tokens)
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx(sum(float(t.sampler.gap) for t in tokens) / count)
    assert metrics["rollout/logprob_gap_max"] == max(float(t.sampler.max_gap) for t in tokens)
    assert metrics["rollout/logprob_gap_max"] > 1.0


def test_a_step_without_passes_has_no_distance() -> None:
    policy = coarse_policy()
    groups = fixed_groups(policy)
    dead = dict.fromkeys(SCORES, (1.0, 1.0, 1.0))
    metrics = make_trainer(policy, groups, dead, max_new_tokens=LIMIT).train_step(1)
    assert not [name for name in metrics if "logprob_gap" in name or "ratio" in name]


@pytest.mark.parametrize("make", [coarse_policy, adapted_policy, tiny_policy, double_qwen2])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_in_the_reward_to_an_unmoved_reference_leaves_equal_rewards_equal(make: Any, estimator: Any) -> None:
    policy = make()
    trainer = make_trainer(
        policy,
        fixed_groups(policy),
        dict.fromkeys(SCORES, (1.0, 1.0, 1.0)),
        max_new_tokens=LIMIT,
        kl=KLConfig(coefficient=0.05, estimator=estimator, placement="reward"),
        advantage=AdvantageConfig(scale="std", eps=0.0),
        reference=snapshot(policy),
    )
    trainer.train_step(1)
    advantages = trainer.recorder.advantages.values()  # type: ignore[attr-defined]
    assert {value for row in advantages for value in row} == {0.0}


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["importance", "reuse", "importance_clipped"])
@pytest.mark.parametrize("loss", ["clipped_surrogate", "truncated_policy_gradient"])
def test_the_penalty_is_the_same_where_the_first_pass_brings_the_old_log_probabilities(
    ratio: Any, mode: str, loss: Any
) -> None:
    policy = double_qwen2()
    batch = off_policy(policy)
    own_T = make_learner(policy, micro_batch_tokens=25).score(policy, batch)
    settings: dict[str, Any] = {
        "objective": ObjectiveConfig(loss=loss, ratio=ratio, clip_low=1e-4, clip_high=1e-4, cap=1.0001),
        "kl": KLConfig(coefficient=0.1, estimator="k1", ratio_weighted=True),
        "strength": 1.0,
        "step": 1e-2,
        "ratio_mode": mode,
        "micro_batch_tokens": 25,
    }
    stored, result = (gradient_of(policy, replace(batch, old_logprobs_T=old), **settings) for old in (own_T, None))
    assert all(torch.equal(result[name], stored[name]) for name in stored)


def test_everything_on_the_way_through_a_model_counts() -> None:
    policy = tiny_policy()
    assert not below_float32(policy.model)
    assert not below_float32(double_qwen2().model)
    assert coarse_policy().below_float32
    assert adapted_policy().below_float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert below_float32(policy.model)
    torch.set_float32_matmul_precision("high")
    try:
        assert below_float32(policy.model)
    finally:
        torch.set_float32_matmul_precision("highest")
    quantized = torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    policy.model.register_parameter("quantized", quantized)
    assert below_float32(policy.model)


def test_a_distance_that_is_no_rounding_is_told_at_the_first_and_the_tenth_step() -> None:
    messages: list[str] = []
    gaps = LogprobGapMonitor(messages.append)
    gaps.observe({})
    gaps.observe({"rollout/logprob_gap_mean": GAP_BOUND})
    gaps.observe({"rollout/logprob_gap_mean": float("nan")})
    assert messages == []
    for _ in range(11):
        gaps.observe({"rollout/logprob_gap_mean": 2.7})
    assert ["in 1 step so far" in messages[0], "2.7 on average" in messages[0], "in 10 steps" in messages[1]] == [
        True
    ] * 3
    assert len(messages) == 2
    assert "those of the step before with rollout.staleness=1" in messages[0]  # which is no fault
