from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flatpeak.errors import UserError
from flatpeak.policy.model import Policy
from flatpeak.policy.reference import check_reference
from flatpeak.training.trainer import Trainer
from support.reward_functions import varied
from support.runs import MakeModel, Recipe, Train

pytestmark = pytest.mark.usefixtures("one_thread")


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def saved(make_tiny_model: MakeModel, tmp_path: Path) -> Callable[[int], Path]:
    """`saved(seed)`: the directory of a tiny model."""

    def save(seed: int) -> Path:
        directory = tmp_path / f"model-{seed}"
        for component in make_tiny_model(seed=seed, initializer_range=0.3):
            component.save_pretrained(directory)
        return directory

    return save


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """The reference models that runs made, each with its weights at that time."""
    made = []
    original = Trainer.__init__

    def build(self: Trainer, *args: Any, reference: Policy, **settings: Any) -> None:
        made.append((reference, values(reference.model)))
        original(self, *args, reference=reference, **settings)

    monkeypatch.setattr(Trainer, "__init__", build)
    return made


def test_a_reference_inside_the_policys_memory_is_refused(make_tiny_model: MakeModel) -> None:
    policy, reference = Policy(*make_tiny_model()), Policy(*make_tiny_model(seed=1))
    reference.model.model.norm.weight.data = policy.model.model.embed_tokens.weight.data[1]
    with pytest.raises(UserError, match="shares weights with the policy"):
        check_reference(policy, reference)


def test_the_reference_stays_while_the_policy_moves(
    recipe: Recipe, train: Train, make_tiny_model: MakeModel, watch: Any, references: list[Any]
) -> None:
    model, tokenizer = make_tiny_model()
    start, seen = values(model), watch()
    config = recipe(kl={"coefficient": 0.1}, training={"steps": 4})
    train(config, model=model, tokenizer=tokenizer, reward=varied, progress=seen)
    ((reference, made),) = references
    assert same(made, start)
    assert same(values(reference.model), start)
    assert not any(torch.equal(parameter, start[name]) for name, parameter in model.named_parameters())
    kl = seen.values("policy/kl_reference")
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert all(later > 1e-4 for later in kl[1:])


def test_kl_is_logged_without_a_penalty_where_a_reference_is_kept(recipe: Recipe, train: Train, watch: Any) -> None:
    seen = {}
    for keep in (False, True):
        seen[keep] = watch()
        train(recipe(run={"name": f"{keep}"}, reference={"keep": keep}), reward=varied, progress=seen[keep])
    assert all("policy/kl_reference" not in metrics for _, _, metrics in seen[False].rows)
    assert seen[True].values("policy/kl_reference")[1] > 1e-4
    # Watching changes nothing.
    assert seen[False].values("policy/grad_norm") == seen[True].values("policy/grad_norm")


def test_a_penalty_pulls_the_policy_towards_another_model_even_where_rewards_are_equal(
    recipe: Recipe, train: Train, saved: Callable[[int], Path], watch: Any
) -> None:
    seen = watch()
    config = recipe(
        model={"new": None, "path": str(saved(0))},
        reference={"model": str(saved(1))},
        kl={"coefficient": 1.0},
        optimizer={"learning_rate": 2e-2},
        training={"steps": 15},
    )
    train(config, reward=lambda completion: 1.0, progress=seen)
    kl = seen.values("policy/kl_reference")
    assert seen.values("groups/informative_fraction") == [0.0] * 15
    assert kl[0] > 0.1
    assert sum(kl[-3:]) < sum(kl[:3]) / 2


def test_the_start_given_as_reference_model_has_no_kl_at_first(
    recipe: Recipe, train: Train, saved: Callable[[int], Path], watch: Any
) -> None:
    seen = watch()
    config = recipe(model={"new": None, "path": str(saved(0))}, reference={"model": str(saved(0))})
    train(config, reward=varied, progress=seen)
    assert seen.values("policy/kl_reference")[0] == pytest.approx(0.0, abs=1e-9)
    assert seen.values("policy/kl_reference")[1] > 1e-4


def test_kl_in_the_reward_moves_advantages_and_not_the_loss_term(
    recipe: Recipe, train: Train, saved: Callable[[int], Path], watch: Any
) -> None:
    seen = watch()
    config = recipe(
        model={"new": None, "path": str(saved(0))},
        reference={"model": str(saved(1))},
        kl={"coefficient": 1.0, "placement": "reward", "estimator": "k1"},
        advantage={"scale": "none"},
        training={"steps": 1},
    )
    train(config, reward=lambda completion: 1.0, progress=seen)
    # Equal rewards, yet completions that the reference finds less likely are worth less.
    assert seen.values("policy/grad_norm")[0] > 1e-3


@pytest.mark.parametrize("broken", ["missing", "other vocabulary"])
def test_a_reference_that_cannot_be_used_is_refused_before_a_run_begins(
    recipe: Recipe, train: Train, make_tiny_model: MakeModel, tmp_path: Path, broken: str
) -> None:
    directory = tmp_path / "reference"
    if broken == "other vocabulary":
        for component in make_tiny_model(vocab_size=31):
            component.save_pretrained(directory)
    config = recipe(reference={"model": str(directory)}, kl={"coefficient": 0.1})
    with pytest.raises(UserError, match=r"reference\.model"):
        train(config, reward=varied)
    assert not (tmp_path / "runs" / "tiny").exists()
