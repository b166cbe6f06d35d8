"""An advantage of the user's own: tried before a run, checked at every step, and equal to a built-in one it copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.errors import UserError
from flatpeak.functional import group_advantages
from flatpeak.training.objective_config import AdvantageConfig
from flatpeak.training.reward_tensors import Advantages
from flatpeak.training.user_functions import make_advantages

VALID = torch.tensor([[True, True, False, True], [True, True, True, True], [False, False, False, False]])
REWARDS = torch.tensor([[1.0, 0.0, 0.0, 0.5], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])


def standardized(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    return group_advantages(rewards_PG, valid_PG=valid_PG)


def centred(rewards_PG: Tensor, valid_PG: Tensor, *, weight: float = 1.0) -> Tensor:
    count_P1 = valid_PG.sum(-1, keepdim=True).clamp(min=1)
    return weight * (rewards_PG - (rewards_PG * valid_PG).sum(-1, keepdim=True) / count_P1)


def advantages(own: Any, *, num_prompts: int = 3, group_size: int = 4, **arguments: Any) -> Advantages:
    config = AdvantageConfig(function="python:own", arguments=arguments)
    return make_advantages(config, own=own, num_prompts=num_prompts, group_size=group_size)


def test_a_copy_of_the_standardized_rewards_gives_the_same_numbers() -> None:
    built_in = make_advantages(AdvantageConfig())
    assert torch.equal(advantages(standardized)(REWARDS, VALID), built_in(REWARDS, VALID))
    assert bool(built_in(REWARDS, VALID).any())


def test_missing_rewards_are_given_as_0_and_have_no_advantage() -> None:
    result = advantages(centred, weight=2.0)(REWARDS.masked_fill(~VALID, 7.0), VALID)
    assert result.tolist() == [[1.0, -1.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4]


def test_a_function_is_tried_with_the_names_of_the_recipes_rewards() -> None:
    def short_ones_first(rewards_PG: Tensor, valid_PG: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        return centred(parts["short"], valid_PG)

    config = AdvantageConfig(function="python:own")
    made = make_advantages(config, own=short_ones_first, part_weights={"correctness": 1.0, "short": 0.5})
    assert made.asks == {"parts"}
    with pytest.raises(UserError, match="short"):
        make_advantages(config, own=short_ones_first)


def test_a_function_may_change_what_it_is_given() -> None:
    def in_place(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
        result = centred(rewards_PG, valid_PG)
        rewards_PG.zero_()
        valid_PG.zero_()
        return result

    rewards_PG, valid_PG = REWARDS.clone(), VALID.clone()
    advantages(in_place)(rewards_PG, valid_PG)
    assert torch.equal(rewards_PG, REWARDS)
    assert torch.equal(valid_PG, VALID)


@pytest.mark.parametrize(
    ("config", "own", "group_size", "compares"),
    [
        (AdvantageConfig(), None, 4, True),
        (AdvantageConfig(baseline="none", scale="none"), None, 4, False),
        (AdvantageConfig(function="python:own"), centred, 4, True),
        (AdvantageConfig(function="python:own"), lambda rewards_PG, valid_PG: rewards_PG, 1, False),
    ],
)
def test_groups_are_compared_unless_there_is_nothing_to_compare(
    config: AdvantageConfig, own: Any, group_size: int, compares: bool
) -> None:
    assert make_advantages(config, own=own, group_size=group_size).compare_groups(group_size) is compares


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rewards_PG, valid_PG: rewards_PG.tolist(), r"returned list .*: return torch\.float32 \[3, 4\]"),
        (lambda rewards_PG, valid_PG: rewards_PG.flatten(), r"returned torch\.float32 \[12\] on cpu"),
        (lambda rewards_PG, valid_PG: rewards_PG.double(), r"returned torch\.float64 \[3, 4\] on cpu"),
        (
            lambda rewards_PG, valid_PG: (
                centred(rewards_PG, valid_PG) / centred(rewards_PG, valid_PG).std(-1, keepdim=True)
            ),
            r"returned nan for a completion of the group with the rewards \[0, 0, 0, 0\]: .* eps",
        ),
        (
            lambda rewards_PG, valid_PG: rewards_PG - rewards_PG.mean(-1, keepdim=True),
            r"depends? on rewards that are missing.*valid_PG",
        ),
        (lambda rewards_PG, valid_PG: rewards_PG + torch.rand(()), "other advantages for the same rewards"),
        (
            lambda rewards_PG, valid_PG: rewards_PG - rewards_PG[valid_PG].max(),
            "tried on rewards where all are missing: RuntimeError: .*max",
        ),
        (lambda rewards_PG: rewards_PG, r"let it take \(rewards_PG, valid_PG\)$"),
        ("text", "is str 'text', not a function"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:std")
def test_an_unfit_function_is_refused_before_anything_is_built(function: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"^advantage\.function=python:own.*{message}"):
        advantages(function)


@pytest.mark.parametrize("allowed", [lambda rewards_PG: rewards_PG <= 1, lambda rewards_PG: rewards_PG % 1 == 0])
def test_a_function_may_refuse_rewards_other_than_0_and_1(allowed: Callable[[Tensor], Tensor]) -> None:
    def strict(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
        if not bool((allowed(rewards_PG) & (rewards_PG <= 1)).all()):
            raise ValueError("rewards are 0 or 1")
        return centred(rewards_PG, valid_PG)

    assert advantages(strict)(torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)).tolist() == [[0.5, -0.5]]


@pytest.mark.parametrize(("num_prompts", "group_size"), [(1, 2), (1, 5), (2, 3), (5, 2), (64, 16)])
@pytest.mark.parametrize("function", [standardized, centred])
def test_a_sound_function_passes_whatever_the_size_of_a_step(
    function: Callable[..., Tensor], num_prompts: int, group_size: int
) -> None:
    made = advantages(function, num_prompts=num_prompts, group_size=group_size)
    rewards_PG = torch.arange(num_prompts * group_size, dtype=torch.float32).view(num_prompts, group_size)
    everything_PG = torch.ones(num_prompts, group_size, dtype=torch.bool)
    assert torch.equal(made(rewards_PG, everything_PG), function(rewards_PG, everything_PG))


def test_a_result_that_turns_bad_in_training_names_the_function_and_the_rewards() -> None:
    def fragile(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
        return rewards_PG / (rewards_PG.abs() < 100)

    made = advantages(fragile)
    with pytest.raises(UserError, match=r"python:own returned inf .* rewards \[1, 500, missing, 0\.5\]"):
        made(torch.tensor([[1.0, 500.0, 3.0, 0.5]]), torch.tensor([[True, True, False, True]]))
