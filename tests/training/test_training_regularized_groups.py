"""A second pass over some of a minibatch's groups: whole ones, their own first gradient, the right scale."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatpeak.policy.model import Policy
from flatpeak.training.batch import take
from flatpeak.training.config import OptimizerConfig, TrainingConfig
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.training.regularized import split_groups
from flatpeak.types import Batch
from support.regularized_training import (
    GROUP_TOKENS,
    PROMPTS,
    WHOLE,
    Gradient,
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
from support.training import NoRecorder, gradients, largest_difference, tiny_policy, weights

STRENGTH = 0.4
TERMS: dict[str, Any] = {
    "objective": ObjectiveConfig(entropy_coefficient=0.1),
    "kl": KLConfig(coefficient=0.2),
}


@cache
def setting() -> tuple[Policy, Batch]:
    policy = double_qwen2()
    return policy, off_policy(policy, groups=4)


def of_groups(batch: Batch, groups: list[int], *, scale: float) -> Batch:
    """The chosen groups alone, `scale` times as heavy."""
    chosen = torch.tensor([index for index, group in enumerate(batch.prompt_N.tolist()) if group in groups])
    component = take(batch, chosen)
    return replace(component, weights_N=scale * component.weights_N)


def chosen_groups(batch: Batch, fraction: float, *, seed: int) -> list[int]:
    """Which groups the second pass of an update under this seed reads."""
    torch.manual_seed(seed)
    component, _, _ = split_groups(batch, fraction)
    return [PROMPTS.index(prompt) for prompt in component.prompts]


@pytest.mark.parametrize(("fraction", "count"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.01, 1)])
def test_the_split_is_into_whole_groups_and_leaves_nothing_out(fraction: float, count: int) -> None:
    _, batch = setting()
    seen = set()
    for seed in range(60):
        torch.manual_seed(seed)
        component, rest, scale = split_groups(batch, fraction)
        assert rest is not None
        assert (len(component.prompts), len(rest.prompts), scale) == (count, 4 - count, 4 / count)
        assert {*component.prompts, *rest.prompts} == set(batch.prompts)
        for piece in (component, rest):
            for prompt, ids in enumerate(piece.prompts):
                tokens = piece.lengths_N[piece.prompt_N == prompt]
                assert (len(tokens), int(tokens.sum())) == (3, GROUP_TOKENS[PROMPTS.index(ids)])
        assert float(component.weights_N.sum() + rest.weights_N.sum()) == pytest.approx(float(batch.weights_N.sum()))
        seen.add(frozenset(PROMPTS.index(ids) for ids in component.prompts))
    # Every choice is drawn sooner or later.
    assert len(seen) == {1: 4, 2: 6, 3: 4}[count]


def test_over_all_choices_groups_of_uneven_size_have_the_weight_of_the_whole() -> None:
    _, batch = setting()
    # Shuffled completions leave a minibatch with three, two or one of a group.
    uneven = take(batch, torch.tensor([0, 1, 2, 3, 4, 6, 9]))
    result = torch.zeros(7)
    for group in range(4):
        seed = next(seed for seed in range(100) if chosen_groups(uneven, 0.25, seed=seed) == [group])
        torch.manual_seed(seed)
        component, _, scale = split_groups(uneven, 0.25)
        result[uneven.prompt_N == group] += scale * component.weights_N.float() / 4
    assert result.tolist() == pytest.approx(uneven.weights_N.tolist(), rel=1e-6)


def test_all_groups_are_the_batch_itself() -> None:
    _, batch = setting()
    before = torch.get_rng_state()
    assert split_groups(batch, 1.0) == (batch, None, 1.0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("fraction", [0.25, 0.5])
@pytest.mark.parametrize("budget", [WHOLE, 14])
def test_the_second_pass_costs_the_tokens_of_its_groups(fraction: float, budget: int) -> None:
    policy = double_qwen2()
    batch = off_policy(policy, groups=4)
    groups = chosen_groups(batch, fraction, seed=3)
    pass_count = count_backward_tokens(policy)
    torch.manual_seed(3)
    make_learner(policy, strength=STRENGTH, group_fraction=fraction, micro_batch_tokens=budget).accumulate_gradients(
        batch
    )
    assert sum(pass_count) == sum(GROUP_TOKENS) + sum(GROUP_TOKENS[group] for group in groups)
    assert len(groups) == 4 * fraction
    if budget == WHOLE:
        own = sum(GROUP_TOKENS[group] for group in groups)
        assert pass_count == [own, sum(GROUP_TOKENS) - own, own]


def by_hand(policy: Policy, batch: Batch, groups: list[int], **settings: Any) -> tuple[Gradient, Gradient]:
    """(the plain gradient of all groups, the penalty of the chosen ones in their place)."""
    component = of_groups(batch, groups, scale=4 / len(groups))
    plain = {name: value for name, value in settings.items() if name in TERMS}
    return gradient_of(policy, batch, **plain), penalty_of(policy, component, **settings)


@pytest.mark.parametrize("difference", ["forward", "central"])
@pytest.mark.parametrize("fraction", [0.25, 0.5])
@pytest.mark.parametrize("budget", [WHOLE, 14])
def test_the_penalty_is_that_of_the_chosen_groups_in_the_place_of_all(
    fraction: float, budget: int, difference: str
) -> None:
    policy, batch = setting()
    plain, penalty = by_hand(policy, batch, chosen_groups(batch, fraction, seed=5), difference=difference, **TERMS)
    expected = {name: component + STRENGTH * penalty[name] for name, component in plain.items()}
    torch.manual_seed(5)
    result = gradient_of(
        policy,
        batch,
        strength=STRENGTH,
        group_fraction=fraction,
        difference=difference,
        micro_batch_tokens=budget,
        **TERMS,
    )
    assert relative_error(result, expected) < 1e-8
    # A penalty over all the groups is another one.
    over_all = penalty_of(policy, batch, plain=plain, difference=difference, **TERMS)
    assert relative_error(penalty, over_all) > 0.1


def test_the_exact_penalty_is_that_of_the_chosen_groups_too() -> None:
    policy = tiny_policy()
    batch = off_policy(policy, groups=4)
    plain, penalty = by_hand(policy, batch, chosen_groups(batch, 0.5, seed=5), difference="exact")
    torch.manual_seed(5)
    result = gradient_of(policy, batch, strength=STRENGTH, group_fraction=0.5, difference="exact")
    assert (
        relative_error(result, {name: component + STRENGTH * penalty[name] for name, component in plain.items()}) < 1e-5
    )


def test_over_all_choices_the_first_gradients_average_to_the_whole_one() -> None:
    policy, batch = setting()
    whole = gradient_of(policy, batch)
    parts = [gradient_of(policy, of_groups(batch, [group], scale=4)) for group in range(4)]
    assert relative_error({name: sum(component[name] for component in parts) / 4 for name in whole}, whole) < 1e-12


def test_unperturbed_parameters_keep_the_gradient_of_all_groups() -> None:
    policy, batch = setting()
    plain = gradient_of(policy, batch)
    torch.manual_seed(5)
    result = gradient_of(policy, batch, strength=STRENGTH, group_fraction=0.5)
    inside = blocks_of(policy)
    others, expected = (
        {name: component for name, component in kind.items() if name not in inside} for kind in (result, plain)
    )
    assert relative_error(others, expected) < 1e-14


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_a_wanted_ratio_is_to_the_gradient_of_the_chosen_groups(fraction: float) -> None:
    policy, batch = setting()
    component = of_groups(batch, chosen_groups(batch, fraction, seed=5), scale=1 / fraction)
    plain, own = gradient_of(policy, batch), gradient_of(policy, component)
    torch.manual_seed(5)
    report = make_learner(policy, strength="ratio:0.3", group_fraction=fraction).accumulate_gradients(batch)
    result = gradients(policy)
    policy.model.zero_grad()
    inside = blocks_of(policy)
    own_norm = norm({name: own[name] for name in inside})
    assert norm({name: result[name] - plain[name] for name in inside}) / own_norm == pytest.approx(0.3, rel=1e-6)
    assert report.regularization is not None
    assert report.regularization.g1_norm == pytest.approx(own_norm, rel=1e-6)
    assert report.regularization.penalty_ratio == pytest.approx(0.3, rel=1e-6)


class QuietRecorder(NoRecorder):
    """Records, evaluates and saves nothing."""

    stopped = False
    evaluated = True
    progress = SimpleNamespace(notice=print)
    halvings = SimpleNamespace(apply=lambda bound: None)

    def check_stop(self) -> None:
        pass

    def begin_step(self, *step: Any) -> None:
        pass

    def evaluation_due(self, *step: Any, **settings: Any) -> bool:
        return False

    def complete(self, *step: Any, **settings: Any) -> None:
        """Nothing."""

    def check_skipped(self, *step: Any, **settings: Any) -> None:
        """Nothing."""

    def evaluate_if_due(self, *step: Any, **settings: Any) -> bool:
        return False

    def checkpoint_if_due(self, *step: Any, **settings: Any) -> None:
        """Nothing."""


def trained(seed: int, *, fraction: float = 0.5) -> dict[str, torch.Tensor]:
    """The weights after two steps of a run with this seed."""
    policy = tiny_policy()
    trainer = make_regularized_trainer(
        policy,
        optimizer=OptimizerConfig(learning_rate=1e-3),
        training=TrainingConfig(steps=3, epochs_per_rollout=2),
        strength=0.5,
        group_fraction=fraction,
    )
    trainer.seed = seed
    trainer.recorder = QuietRecorder()  # type: ignore[assignment]
    trainer.train(first_step=2)
    return weights(policy)


def test_the_choice_follows_from_the_runs_seed() -> None:
    torch.manual_seed(1)
    first = trained(0)
    torch.manual_seed(2)
    assert largest_difference(trained(0), first) == 0
    assert largest_difference(trained(1), first) > 1e-4
    # Over all groups the seed decides nothing but the order of sums.
    assert largest_difference(trained(0, fraction=1.0), trained(1, fraction=1.0)) < 1e-5
