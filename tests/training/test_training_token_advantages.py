"""From advantages of completions to those of tokens: a KL to come, whitening, limits; and what a function asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatpeak.errors import UserError
from flatpeak.functional import group_advantages
from flatpeak.training.batch import collate
from flatpeak.training.collect import advantage_inputs
from flatpeak.training.objective_config import AdvantageConfig, KLConfig
from flatpeak.training.reward_tensors import kl_to_go_T
from flatpeak.training.user_functions import make_advantages
from flatpeak.types import Group, PackedCompletions, Scores
from support.models import EOS
from support.training import completion, prompt

GROUPS = [
    Group(
        prompt=prompt("x", (4, 5)),
        completions=(
            replace(completion((6, 7, 8, EOS), limit=9), trained=(True, False, True, True)),
            completion((8, EOS), limit=9),
        ),
    ),
    Group(
        prompt=prompt("y", (9,)),
        completions=(completion((3, EOS), limit=9), completion((7, 7, EOS), limit=9)),
    ),
]
LENGTHS = [4, 2, 2, 3]
TRAINED = np.array([1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], dtype=bool)
REWARDS = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
ALL = torch.ones(2, 2, dtype=torch.bool)
PENALTIES = np.linspace(0.1, 1.1, 11)


def completions() -> PackedCompletions:
    return collate(GROUPS, ALL, device=torch.device("cpu"))


def per_token(config: AdvantageConfig, penalties: Any = None, *, counted: Sequence[bool] = (True,) * 4) -> np.ndarray:
    advantages = make_advantages(config, num_prompts=2, group_size=2)
    advantages_N = advantages(REWARDS, ALL).flatten()
    penalties_T = None if penalties is None else torch.tensor(penalties, dtype=torch.float32)
    counted_N = torch.tensor(counted)
    return advantages.per_token(advantages_N, completions(), penalties_T, counted_N=counted_N).numpy()


RAW = {"baseline": "none", "scale": "none"}


def test_each_token_has_the_advantage_of_its_completion() -> None:
    expected = np.repeat([1.0, 0.0, 0.5, 0.5], LENGTHS)
    np.testing.assert_array_equal(per_token(AdvantageConfig(**RAW)), expected)


def test_whitening_over_tokens_counts_long_completions_more_and_leaves_out_untrained_tokens() -> None:
    values = np.repeat([1.0, 0.0, 0.5, 0.5], LENGTHS) - PENALTIES
    counted = values[TRAINED]
    expected = np.where(TRAINED, (values - counted.mean()) / counted.std(ddof=1), 0.0)
    result = per_token(AdvantageConfig(**RAW, whiten="tokens", eps=0.0), PENALTIES)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_whitening_over_completions_counts_each_once() -> None:
    rewards = np.array([1.0, 0.0, 0.5, 0.5])
    expected = np.repeat((rewards - 0.5) / rewards.std(ddof=1), LENGTHS)
    np.testing.assert_allclose(per_token(AdvantageConfig(**RAW, whiten="completions", eps=0.0)), expected, rtol=1e-5)


@pytest.mark.parametrize("over", ["tokens", "completions"])
def test_whitening_leaves_out_completions_that_are_not_trained_on(over: str) -> None:
    counted = [True, False, True, True]
    config = AdvantageConfig(**RAW, whiten=over, eps=0.0)
    result = per_token(config, counted=counted)
    chosen = np.repeat(counted, LENGTHS) & (TRAINED if over == "tokens" else True)
    used = np.repeat([1.0, 0.0, 0.5, 0.5], LENGTHS)[chosen]
    values = used if over == "tokens" else np.array([1.0, 0.5, 0.5])
    np.testing.assert_allclose(result[chosen], (used - values.mean()) / values.std(ddof=1), rtol=1e-5)


def test_a_limit_bounds_what_is_trained_on() -> None:
    values = np.repeat([1.0, 0.0, 0.5, 0.5], LENGTHS) - PENALTIES
    result = per_token(AdvantageConfig(**RAW, limit=0.3), PENALTIES)
    np.testing.assert_allclose(result, values.clip(-0.3, 0.3), rtol=1e-6)


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_the_kl_to_go_of_a_token_is_the_discounted_sum_of_its_own_and_the_later_ones(discount: float) -> None:
    logprobs_T = torch.linspace(-2, -0.5, 11)
    reference_T = logprobs_T - torch.linspace(0.1, 1.0, 11)
    batch = replace(completions(), reference_logprobs_T=reference_T)
    kl = KLConfig(coefficient=0.5, estimator="k2", placement="reward_to_go", discount=discount)
    result = kl_to_go_T(batch, logprobs_T, kl).numpy()
    own = np.where(TRAINED, (logprobs_T - reference_T).numpy() ** 2 / 2, 0.0)
    expected, start = [], 0
    for length in LENGTHS:
        for first in range(start, start + length):
            expected.append(0.5 * sum(discount ** (t - first) * own[t] for t in range(first, start + length)))
        start += length
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_a_function_gets_by_name_what_it_asks_for() -> None:
    asked: dict[str, Any] = {}

    def own(
        rewards_PG: Tensor,
        valid_PG: Tensor,
        *,
        lengths_PG: Tensor,
        parts: dict[str, Tensor],
        part_weights: dict[str, float],
        old_logprobs_PGL: Tensor,
        greedy_P: Tensor,
        bonus: float,
    ) -> Tensor:
        asked.update(locals())
        return rewards_PG * bonus

    config = AdvantageConfig(function="python:own", arguments={"bonus": 2.0})
    advantages = make_advantages(config, own=own, num_prompts=2, group_size=2)
    assert advantages.asks == {"lengths_PG", "parts", "part_weights", "old_logprobs_PGL", "greedy_P"}
    scores = Scores(total=REWARDS.tolist(), parts={"correctness": [[1.0, None], [0.5, 0.5]]})
    inputs = advantage_inputs(advantages.asks, GROUPS, scores, weights={"correctness": 0.5}, greedy=[1.0, None])
    assert advantages(REWARDS, ALL, **inputs).tolist() == (2 * REWARDS).tolist()
    assert asked["lengths_PG"].tolist() == [[3, 2], [2, 3]]  # trained tokens
    assert asked["parts"]["correctness"].tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert asked["part_weights"] == {"correctness": 0.5}
    assert asked["old_logprobs_PGL"].shape == (2, 2, 3)  # of trained tokens
    assert asked["old_logprobs_PGL"][0, 1].tolist() == [*GROUPS[0].completions[1].logprobs, 0.0]
    assert asked["greedy_P"][0] == 1.0
    assert bool(asked["greedy_P"][1].isnan())


@pytest.mark.parametrize("name", ["opo", "max_rl", "gdpo", "remax", "pass_at_k"])
def test_functions_of_papers_are_chosen_by_name(name: str) -> None:
    arguments = {"k": 2} if name == "pass_at_k" else {}
    advantages = make_advantages(AdvantageConfig(function=name, arguments=arguments), num_prompts=2, group_size=4)
    assert advantages.compare_groups(4) == (name != "remax")


def test_arguments_that_do_not_fit_are_refused_before_a_run() -> None:
    config = AdvantageConfig(function="pass_at_k", arguments={"k": 4})
    with pytest.raises(
        UserError, match=r"advantage\.function=pass_at_k.*k=4 with groups of 4: give at least 1 and less"
    ):
        make_advantages(config, group_size=4)
    with pytest.raises(UserError, match=r"missing a required.*argument: 'k'"):
        make_advantages(AdvantageConfig(function="pass_at_k"), group_size=4)


def test_a_limit_in_spreads_follows_the_group_advantages() -> None:
    rewards_PG, valid_PG = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.ones(1, 4, dtype=torch.bool)
    plain_PG = group_advantages(rewards_PG, scale="none")
    config = AdvantageConfig(scale="none", limit_spreads=1.2)
    limited_PG = make_advantages(config)(rewards_PG, valid_PG)
    assert float(limited_PG.max()) == pytest.approx(1.2 * float(plain_PG.std()))
    assert float(limited_PG.min()) == float(plain_PG.min())
