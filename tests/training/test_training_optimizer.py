"""Learning rates, one step of each optimizer, and its state as tensors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from flatpeak.training.config import OptimizerConfig, TrainingConfig
from flatpeak.training.learner import Learner
from flatpeak.training.objective import Objective
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.training.optimizer import (
    build_optimizer,
    learning_rate,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from flatpeak.types import Group
from support.models import EOS
from support.training import (
    SGD,
    completion,
    gradients,
    largest_difference,
    make_batch,
    make_trainer,
    prompt,
    scored,
    tiny_policy,
    weights,
    with_advantages,
)

RATE = 0.8


def rates(total: int, **settings: object) -> list[float]:
    config = OptimizerConfig(learning_rate=RATE, **settings)  # type: ignore[arg-type]
    return [learning_rate(config, step=step, total_steps=total) for step in range(1, total + 1)]


def test_a_constant_schedule_is_constant_whatever_it_is_said_to_end_at() -> None:
    assert rates(5, final_fraction=0.5) == [RATE] * 5


def test_warm_up_rises_by_equal_parts_and_reaches_the_rate_at_its_last_step() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_a_linear_schedule_falls_by_equal_parts_to_its_final_fraction_at_the_last_step() -> None:
    assert rates(5, schedule="linear", final_fraction=0.5) == pytest.approx([0.8, 0.7, 0.6, 0.5, 0.4])
    assert rates(5, schedule="linear") == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])


def test_a_cosine_schedule_is_halfway_in_the_middle_and_at_its_final_fraction_at_the_last_step() -> None:
    # (1 + cos(pi / 4)) / 2 = 0.853553 of the way remains after the first of four parts.
    expected = [0.8, 0.8 * 0.8535534, 0.4, 0.8 * 0.1464466, 0.0]
    assert rates(5, schedule="cosine") == pytest.approx(expected, abs=1e-7)
    expected = [0.08 + 0.9 * rate for rate in expected]
    assert rates(5, schedule="cosine", final_fraction=0.1) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_falls_from_the_step_after_the_warm_up(schedule: str) -> None:
    values = rates(7, schedule=schedule, warmup_steps=2, final_fraction=0.25)
    assert values[:3] == pytest.approx([0.4, 0.8, 0.8])
    assert values[4] == pytest.approx(0.5)
    assert values[6] == pytest.approx(0.2)
    assert all(left > right for left, right in pairwise(values[2:]))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_shortest_runs_have_a_rate(schedule: str) -> None:
    assert rates(1, schedule=schedule) == [RATE]
    assert rates(3, schedule=schedule, warmup_steps=2) == pytest.approx([0.4, 0.8, 0.8])
    assert rates(2, schedule=schedule, warmup_steps=4) == pytest.approx([0.2, 0.4])


def parameter(values: list[float], gradient: list[float]) -> nn.Parameter:
    made = nn.Parameter(torch.tensor(values))
    made.grad = torch.tensor(gradient)
    return made


VALUES, FIRST, SECOND = [1.0, -2.0, 0.5], [0.3, -0.001, 4.0], [-0.2, 0.05, 3.0]


def test_sgd_steps_by_rate_times_gradient_plus_decay() -> None:
    weight = parameter(VALUES, FIRST)
    optimizer = build_optimizer([weight], OptimizerConfig(name="sgd", learning_rate=0.1, weight_decay=0.01))
    optimizer.step()
    expected = np.array(VALUES) - 0.1 * (np.array(FIRST) + 0.01 * np.array(VALUES))
    np.testing.assert_allclose(weight.detach(), expected, rtol=1e-6)


def test_two_steps_of_adamw_are_those_of_its_equations() -> None:
    config = OptimizerConfig(learning_rate=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)
    weight = parameter(VALUES, FIRST)
    optimizer = build_optimizer([weight], config)
    expected, mean, square = np.array(VALUES), np.zeros(3), np.zeros(3)
    for step, (gradient, rate) in enumerate([(FIRST, 0.1), (SECOND, 0.04)], start=1):
        weight.grad = torch.tensor(gradient)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        mean = 0.8 * mean + 0.2 * np.array(gradient)
        square = 0.95 * square + 0.05 * np.array(gradient) ** 2
        direction = (mean / (1 - 0.8**step)) / (np.sqrt(square / (1 - 0.95**step)) + 1e-3)
        # Loshchilov and Hutter 2019: the decay is decoupled from the gradient's moments.
        expected = expected - rate * 0.1 * expected - rate * direction
        np.testing.assert_allclose(weight.detach(), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_optimizer_goes_on_from_its_tensors_bit_for_bit(name: str) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.01)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(4, 3, generator=generator), torch.randn(5, generator=generator)]
    kept = [nn.Parameter(value.clone()) for value in start]
    optimizer = build_optimizer(kept, config)

    def step(parameters: list[nn.Parameter], used: torch.optim.Optimizer, number: int) -> None:
        noise = torch.Generator().manual_seed(number)
        for component in parameters:
            component.grad = torch.randn(component.shape, generator=noise)
        set_learning_rate(used, 0.1 / number)
        used.step()

    for number in (1, 2, 3):
        step(kept, optimizer, number)
    saved = {key: value.clone() for key, value in optimizer_tensors(optimizer).items()}
    resumed = [nn.Parameter(component.detach().clone()) for component in kept]
    restored = build_optimizer(resumed, config)
    load_optimizer_tensors(restored, saved)
    again = optimizer_tensors(restored)
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[key], saved[key]) and again[key].dtype == saved[key].dtype for key in saved)
    for number in (4, 5):
        step(kept, optimizer, number)
        step(resumed, restored, number)
    assert all(torch.equal(left, right) for left, right in zip(kept, resumed, strict=True))
    assert bool(saved) == (name == "adamw")


def make_learner(optimizer: OptimizerConfig) -> Learner:
    objective = Objective(config=ObjectiveConfig(loss="policy_gradient"), kl=KLConfig())
    return Learner(tiny_policy(), objective, optimizer, temperature=1.0, micro_batch_tokens=1000)


BATCH = make_batch([3, 2], prompts=[(3, 4), (5,)], prompt_N=[0, 1])


def test_gradients_are_clipped_once_to_the_norm_and_reported_as_they_were() -> None:
    free = make_learner(SGD)
    start = weights(free.policy)
    unclipped = free.update(BATCH, rate=0.1)
    norm = torch.sqrt(sum(gradient.square().sum() for gradient in gradients(free.policy).values())).item()
    assert unclipped.grad_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 1

    clipped = make_learner(SGD.model_copy(update={"max_grad_norm": 0.5}))
    assert clipped.update(BATCH, rate=0.1).grad_norm == pytest.approx(norm, rel=1e-5)
    free_step = {name: value - start[name] for name, value in weights(free.policy).items()}
    clipped_step = {name: value - start[name] for name, value in weights(clipped.policy).items()}
    scaled = {name: step * 0.5 / norm for name, step in free_step.items()}
    assert largest_difference(clipped_step, scaled) < 1e-6
    length = torch.sqrt(sum(step.square().sum() for step in clipped_step.values())).item()
    assert length == pytest.approx(0.1 * 0.5, rel=1e-4)


def test_the_rate_of_an_update_is_the_one_it_is_given() -> None:
    steps = []
    for rate in (0.01, 0.02):
        learner = make_learner(SGD)
        start = weights(learner.policy)
        learner.update(BATCH, rate=rate)
        steps.append({name: value - start[name] for name, value in weights(learner.policy).items()})
    assert largest_difference({name: 2 * step for name, step in steps[0].items()}, steps[1]) < 1e-6
    assert max(step.abs().max().item() for step in steps[0].values()) > 1e-3


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_reported(name: str) -> None:
    learner = make_learner(OptimizerConfig(name=name, learning_rate=0.1))  # type: ignore[arg-type]
    learner.update(BATCH, rate=0.1)
    before = weights(learner.policy)
    state = {key: value.clone() for key, value in optimizer_tensors(learner.optimizer).items()}
    poisoned = with_advantages(BATCH, [float("inf"), 1.0])
    statistics = learner.update(poisoned, rate=0.1)
    assert statistics.skipped
    assert largest_difference(weights(learner.policy), before) == 0
    after = optimizer_tensors(learner.optimizer)
    assert all(torch.equal(after[key], value) for key, value in state.items())
    assert not learner.update(BATCH, rate=0.1).skipped
    assert largest_difference(weights(learner.policy), before) > 1e-3


def test_a_step_of_the_trainer_uses_the_rate_of_its_number() -> None:
    tokens = {"x": [(5, 9, EOS), (12, 3, EOS)]}
    reported = []
    for step in (1, 2, 3):
        policy = tiny_policy()
        start = weights(policy)
        groups = scored(
            policy,
            [Group(prompt=prompt("x", (3, 7)), completions=tuple(completion(c, limit=5) for c in tokens["x"]))],
        )
        trainer = make_trainer(
            policy,
            groups,
            {"x": (1.0, 0.0)},
            max_new_tokens=5,
            optimizer=SGD.model_copy(update={"schedule": "linear", "learning_rate": 0.4}),
            training=TrainingConfig(steps=3),
        )
        reported.append(trainer.train_step(step)["optimizer/learning_rate"])
        moved = largest_difference(weights(policy), start)
        assert moved == 0 if step == 3 else moved > 1e-3
    assert reported == pytest.approx([0.4, 0.2, 0.0])
