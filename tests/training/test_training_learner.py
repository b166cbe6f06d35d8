"""Which completions a step spends passes on, and what a reference is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.training.learner import score
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.types import Batch, Group
from support.models import EOS
from support.training import (
    completion,
    gradients,
    largest_difference,
    make_batch,
    make_trainer,
    plain_logprobs,
    prompt,
    scored,
    tiny_policy,
    weights,
)

LIMIT = 5
TOKENS = {"alive": [(5, 9, EOS), (12, 3, 7, EOS)], "dead": [(8, EOS), (4, 6, 11, EOS)]}
REWARDS = {"alive": (1.0, 0.0), "dead": (0.5, 0.5)}


def groups(*names: str) -> list[Group]:
    return scored(
        tiny_policy(),
        [
            Group(prompt=prompt(name, (3, 7)), completions=tuple(completion(c, limit=LIMIT) for c in TOKENS[name]))
            for name in names
        ],
    )


def scored_tokens(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[list[int], dict[str, Tensor]]:
    """How many response tokens each pass with gradients read in one step, and the gradient it left."""
    policy = tiny_policy()
    pass_count: list[int] = []
    plain: Callable[..., tuple[Tensor, Tensor]] = policy.token_logprobs

    def counted(batch: Batch, **settings: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            pass_count.append(len(batch.tokens_T))
        return plain(batch, **settings)

    monkeypatch.setattr(policy, "token_logprobs", counted)
    names = settings.pop("names", ("alive", "dead"))
    trainer = make_trainer(policy, groups(*names), REWARDS, max_new_tokens=LIMIT, **settings)
    trainer.train_step(1)
    return pass_count, gradients(policy)


def test_groups_without_signal_cost_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scored_tokens(monkeypatch)[0] == [7]
    assert scored_tokens(monkeypatch, names=("dead",))[0] == []


@pytest.mark.parametrize(
    "settings",
    [
        {"kl": KLConfig(coefficient=0.1)},
        {"objective": ObjectiveConfig(entropy_coefficient=0.1)},
        {"objective": ObjectiveConfig(entropy_coefficient=-0.1)},
    ],
    ids=["KL", "entropy", "negative entropy"],
)
def test_kl_and_entropy_in_the_loss_move_groups_without_signal(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_count, gradient = scored_tokens(monkeypatch, names=("dead",), reference=tiny_policy(seed=5), **settings)
    assert pass_count == [6]
    assert max(component.abs().max().item() for component in gradient.values()) > 1e-3


@pytest.mark.parametrize("kl", [KLConfig(), KLConfig(coefficient=0.1, placement="reward")], ids=["logged", "in reward"])
def test_a_reference_outside_the_loss_costs_groups_without_signal_no_pass(
    kl: KLConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_count, _ = scored_tokens(monkeypatch, kl=kl, reference=tiny_policy())
    assert pass_count == [7]


def test_a_reference_that_is_only_logged_changes_no_weight() -> None:
    results = []
    for reference in (None, tiny_policy(seed=5)):
        policy = tiny_policy()
        trainer = make_trainer(policy, groups("alive", "dead"), REWARDS, max_new_tokens=LIMIT, reference=reference)
        results.append((weights(policy), trainer.train_step(1), weights(policy)))
    (start, without, plain), (_, with_reference, logged) = results
    assert largest_difference(plain, start) > 1e-3
    assert largest_difference(plain, logged) == 0
    assert "policy/kl_reference" not in without
    assert with_reference["policy/kl_reference"] > 0.01


@pytest.mark.parametrize("budget", [1, 1000])
def test_a_batch_is_scored_at_the_sampling_temperature_without_gradients(budget: int) -> None:
    policy = tiny_policy()
    batch = make_batch([3, 1, 2], prompts=[(3, 9), (4, 5, 8)], prompt_N=[0, 0, 1])
    logprobs_T = score(policy, batch, temperature=0.7, micro_batch_tokens=budget)
    assert not logprobs_T.requires_grad
    rows = zip(((3, 9), (3, 9), (4, 5, 8)), batch.tokens_T.split([3, 1, 2]), strict=True)
    expected = torch.cat([plain_logprobs(policy, ids, tokens.tolist(), temperature=0.7) for ids, tokens in rows])
    torch.testing.assert_close(logprobs_T, expected, rtol=0, atol=1e-5)
