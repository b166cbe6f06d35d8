"""One update of a regularized learner: what it costs, what it changes, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from flatpeak.functional import hessian_vector_product
from flatpeak.gradreg.guard import Report
from flatpeak.policy.model import Policy
from flatpeak.training.config import OptimizerConfig, TrainingConfig
from flatpeak.training.learner import Learner, PolicyStatistics, weighted_sum
from flatpeak.training.objective import Objective
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.training.step_metrics import regularization_metrics
from support.models import letter_tokenizer, tiny_model
from support.regularized_training import (
    blocks_of,
    count_backward_tokens,
    double_qwen2,
    gradient_of,
    make_learner,
    make_regularized_trainer,
    norm,
    off_policy,
    penalty_of,
    relative_error,
)
from support.training import largest_difference, tiny_policy, weights

ADAMW = OptimizerConfig(learning_rate=1e-3)
TWO_UPDATES = TrainingConfig(steps=4, epochs_per_rollout=2, micro_batch_tokens=12)
"""Several micro-batches, and off-policy in the second epoch."""


def after_steps(count: int, *, steps: TrainingConfig = TWO_UPDATES, **settings: Any) -> tuple[dict[str, Tensor], int]:
    """The weights after so many steps of the trainer, and how many passes with gradients they took."""
    policy = tiny_policy()
    trainer = make_regularized_trainer(policy, optimizer=ADAMW, training=steps, **settings)
    pass_count = count_backward_tokens(policy)
    for step in range(1, count + 1):
        trainer.train_step(step)
    return weights(policy), len(pass_count)


def test_strength_0_trains_to_the_bits_of_no_regularization_without_a_second_pass() -> None:
    policy = tiny_policy()
    trainer = make_regularized_trainer(policy, optimizer=ADAMW, training=TWO_UPDATES)
    objective = trainer.learner.objective
    trainer.learner = Learner(policy, objective, ADAMW, temperature=1.0, micro_batch_tokens=12)
    pass_count = count_backward_tokens(policy)
    for step in range(1, 5):
        trainer.train_step(step)
    off, off_passes = after_steps(4, strength=0.0, step=1e-3, every=2, group_fraction=0.5, kl_in_penalty=False)
    on, on_passes = after_steps(4, strength=0.1)
    assert largest_difference(off, weights(policy)) == 0
    assert (off_passes, on_passes) == (len(pass_count), 2 * len(pass_count))
    assert largest_difference(off, on) > 1e-4


@pytest.mark.parametrize("perturbed", ["blocks", "all", ("*.mlp.*",)])
def test_without_a_penalty_an_update_reports_the_norm_that_it_would_be_on(perturbed: Any) -> None:
    policy = double_qwen2()
    batch = off_policy(policy)
    kept = gradient_of(policy, batch)
    names = {"blocks": ".layers.", "all": ""}.get(perturbed, ".mlp.")
    expected = sum(float(grad.square().sum()) for name, grad in kept.items() if names in name) ** 0.5
    clipped = OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.1 * expected)
    plain = make_learner(policy, optimizer=clipped, perturbed=perturbed, micro_batch_tokens=12).update(batch, rate=0.0)
    assert plain.g1_norm == pytest.approx(expected, rel=1e-12)
    regularized = make_learner(policy, perturbed=perturbed, strength=0.1).update(batch, rate=0.0)
    assert regularized.regularization is not None
    assert regularized.regularization.g1_norm == pytest.approx(expected, rel=1e-12)


def test_the_reported_norm_is_the_mean_over_updates_that_were_not_skipped() -> None:
    updates = [PolicyStatistics(g1_norm=norm, skipped=norm > 5) for norm in (1.0, 2.0, float("inf"))]
    assert regularization_metrics(updates, step_seconds=1.0) == {"gradreg/g1_norm": 1.5}
    assert regularization_metrics(updates[2:], step_seconds=1.0) == {}


def test_an_infinite_gradient_among_regularized_updates_is_counted_and_left_out_of_the_mean() -> None:
    reports = [
        Report(pass_count=1, g1_norm=1.0, penalty_ratio=0.3),
        Report(skipped="g1 is not finite", g1_norm=float("inf")),
        Report(pass_count=1, g1_norm=2.0, penalty_ratio=0.5),
    ]
    updates = [PolicyStatistics(regularization=report, skipped=bool(report.skipped)) for report in reports]
    metrics = regularization_metrics(updates, step_seconds=1.0)
    assert (metrics["gradreg/g1_norm"], metrics["gradreg/penalty_ratio"]) == (1.5, 0.4)
    assert metrics["gradreg/skipped"] == 1


def test_a_model_without_the_parameters_to_perturb_has_no_such_norm() -> None:
    policy = double_qwen2()
    learner = make_learner(policy, perturbed=("*.nothing.*",))
    statistics = learner.update(off_policy(policy), rate=0.0)
    assert statistics.g1_norm is None
    assert regularization_metrics([statistics], step_seconds=1.0) == {}


@pytest.mark.parametrize(
    "settings",
    [{}, {"difference": "central"}, {"every": 3}, {"group_fraction": 0.4, "ratio_mode": "importance_clipped"}],
    ids=["forward", "central", "every third", "some groups"],
)
def test_at_a_learning_rate_of_0_no_weight_ever_changes(settings: dict[str, Any]) -> None:
    policy = tiny_policy()
    before = weights(policy)
    frozen, steps = OptimizerConfig(learning_rate=0.0), TrainingConfig(steps=20, epochs_per_rollout=2)
    trainer = make_regularized_trainer(policy, optimizer=frozen, training=steps, strength=0.5, **settings)
    name = "model.layers.0.mlp.up_proj.weight"
    moved: list[bool] = []
    plain = policy.token_logprobs

    def watched(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        moved.append(not torch.equal(policy.model.get_parameter(name), before[name]))
        return plain(*args, **kwargs)

    policy.token_logprobs = watched  # type: ignore[method-assign]
    for step in range(1, 21):
        trainer.train_step(step)
        assert largest_difference(weights(policy), before) == 0
    # In the second passes they had moved, to the end.
    assert sum(moved) >= 13
    assert any(moved[-4:])


@pytest.mark.parametrize("mode", ["importance", "reuse", "importance_clipped"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_no_cut_of_a_batch_changes_the_penalty(mode: str, ratio: str) -> None:
    policy = double_qwen2()
    batch = off_policy(policy)
    given: dict[str, Any] = {
        "objective": ObjectiveConfig(ratio=ratio, clip_low=0.1, clip_high=0.1, entropy_coefficient=0.05),
        "kl": KLConfig(coefficient=0.2),
        "ratio_mode": mode,
    }
    whole = penalty_of(policy, batch, **given)
    for budget in (1, 12, 25):
        assert relative_error(penalty_of(policy, batch, micro_batch_tokens=budget, **given), whole) < 1e-8


def test_the_gradient_is_clipped_once_after_the_penalty() -> None:
    policy = double_qwen2()
    batch = off_policy(policy)
    before = weights(policy)
    plain = gradient_of(policy, batch)
    regularized = gradient_of(policy, batch, strength=0.3)
    limit = 0.2
    assert min(norm(plain), norm(regularized)) > 2 * limit
    sgd = OptimizerConfig(name="sgd", learning_rate=1.0, max_grad_norm=limit)
    statistics = make_learner(policy, optimizer=sgd, strength=0.3).update(batch, rate=0.7)
    # The reported norm is that before clipping.
    assert statistics.grad_norm == pytest.approx(norm(regularized), rel=1e-6)
    expected = {
        name: before[name] - 0.7 * limit / (norm(regularized) + 1e-6) * component
        for name, component in regularized.items()
    }
    assert largest_difference(weights(policy), expected) < 1e-12


@pytest.mark.parametrize(
    ("perturbed", "inside"),
    [
        ("blocks", (".layers.",)),
        ("last_block", (".layers.1.",)),
        ("last_layer", ("lm_head",)),
        (("*.mlp.*", "model.norm.weight"), (".mlp.", "model.norm.weight")),
    ],
)
def test_parameters_outside_the_perturbed_set_keep_the_plain_gradient_to_the_bit(
    perturbed: Any, inside: tuple[str, ...]
) -> None:
    policy = tiny_policy()
    batch = off_policy(policy)
    plain = gradient_of(policy, batch)
    regularized = gradient_of(policy, batch, strength=0.5, perturbed=perturbed)
    for name, component in plain.items():
        assert component.any(), name
        assert torch.equal(regularized[name], component) != any(chosen in name for chosen in inside), name


@pytest.mark.parametrize("group_fraction", [1.0, 0.4])
def test_the_second_pass_draws_the_dropout_of_the_first(group_fraction: float) -> None:
    policy = double_qwen2(dropout=0.3)
    batch = off_policy(policy)
    norms = {}
    for step in (3e-5, 3e-6):
        given: dict[str, Any] = {"step": step, "group_fraction": group_fraction, "micro_batch_tokens": 15}
        torch.manual_seed(1)
        plain = gradient_of(policy, batch, strength=1.0, delay_updates=1, **given)
        torch.manual_seed(1)
        norms[step] = norm(penalty_of(policy, batch, plain=plain, **given))
    # Other masks in the second pass would make the quotient grow as the step shrinks.
    assert norms[3e-5] == pytest.approx(norms[3e-6], rel=0.01)


def test_exact_curvature_sees_the_dropout_of_the_first_pass() -> None:
    policy = Policy(tiny_model(), letter_tokenizer(), dropout=True)
    for layer in policy.model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    batch = off_policy(policy)
    objective = Objective(config=ObjectiveConfig(), kl=KLConfig())
    held = list(blocks_of(policy).values())

    def loss() -> Tensor:
        torch.manual_seed(1)
        logprobs_T, entropy_T = policy.token_logprobs(batch, temperature=1.0, twice_differentiable=True)
        return weighted_sum(objective(logprobs_T, entropy_T, batch)[0], batch)

    g1 = torch.autograd.grad(loss(), held, materialize_grads=True)
    curvature = hessian_vector_product(loss, held, g1)
    expected = {name: a + 0.5 * b for name, a, b in zip(blocks_of(policy), g1, curvature, strict=True)}
    torch.manual_seed(1)
    result = gradient_of(policy, batch, strength=0.5, difference="exact")
    assert relative_error({name: result[name] for name in expected}, expected) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [{}, {"difference": "central"}, {"every": 2}, {"group_fraction": 0.4}],
    ids=["forward", "central", "every second", "some groups"],
)
def test_random_numbers_after_an_update_are_those_without_a_second_pass(settings: dict[str, Any]) -> None:
    policy = double_qwen2(dropout=0.3)
    batch = off_policy(policy)
    states = []
    for delay in (0, 2):
        torch.manual_seed(1)
        learner = make_learner(policy, strength=0.5, delay_updates=delay, micro_batch_tokens=20, **settings)
        learner.accumulate_gradients(batch)
        learner.accumulate_gradients(batch)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    if "group_fraction" not in settings:
        torch.manual_seed(1)
        plain = make_learner(policy, micro_batch_tokens=20)
        plain.accumulate_gradients(batch)
        plain.accumulate_gradients(batch)
        assert torch.equal(torch.get_rng_state(), states[0])


def test_adapters_move_and_nothing_else_does() -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    policy = Policy(get_peft_model(tiny_model(), lora), letter_tokenizer())
    batch = off_policy(policy)
    before = weights(policy)
    plain = gradient_of(policy, batch)
    regularized = gradient_of(policy, batch, strength=0.5, perturbed="adapters")
    make_learner(policy, strength=0.5, perturbed="adapters", optimizer=ADAMW).update(batch, rate=1e-3)
    for name, weight in weights(policy).items():
        assert torch.equal(weight, before[name]) != ("lora_" in name), name
        if "lora_A" in name:
            # B begins at 0, so A has no gradient yet. Its penalty has one: moving B is what gives A a gradient.
            assert not plain[name].any()
            assert regularized[name].any()
