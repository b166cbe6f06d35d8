"""A caller's own model comes back as it was, but for what training made of its weights, whatever ends the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flatpeak.pipeline.train
from flatpeak.errors import UserError
from flatpeak.pipeline import build as pipeline_build
from flatpeak.pipeline import run_components
from flatpeak.policy import model as policy_model
from flatpeak.policy.model import Policy
from flatpeak.rewards.reward_set import RewardSet
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.training import learner
from flatpeak.training.learner import Learner
from support.reward_functions import odd
from support.runs import MakeModel, Recipe, Train

IDS = torch.tensor([[3, 4, 5]])


class ForeignError(Exception):
    """What no code of ours raises."""


def raising(error: BaseException) -> Callable[..., Any]:
    def act(*args: Any, **settings: Any) -> Any:
        raise error

    return act


def described(model: Any) -> dict[str, Any]:
    """All of a model that a run might change, but for its weights."""
    return {
        "attention": model.config._attn_implementation,
        "classes": [type(module) for module in model.modules()],
        "modes": [module.training for module in model.modules()],
        "dropout": [layer.self_attn.attention_dropout for layer in model.model.layers],
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "trainable": {name: weight.requires_grad for name, weight in model.named_parameters()},
        "grad_dtypes": {name: weight.grad_dtype for name, weight in model.named_parameters()},
        "gradients": {name: weight.grad is not None for name, weight in model.named_parameters()},
    }


def callers_model(make: Callable[..., Any], *, gradients: bool = False) -> tuple[Any, Any]:
    """A model in bfloat16 with dropout, a frozen layer, and parts in different modes."""
    model, tokenizer = make(attention_dropout=0.1)
    model.to(torch.bfloat16).train()
    model.model.layers[0].eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    if gradients:
        model(input_ids=IDS).logits.sum().backward()
    return model, tokenizer


# What is wrong, and where: in a check of the recipe, in one of the model, before the first step, in it, nowhere.
ENDINGS: dict[str, tuple[dict[str, Any], tuple[Any, str] | None, BaseException | None]] = {
    "check of a split": ({"sft": {"steps": 2, "stop_at": 0.5, "check_size": 500}}, None, UserError()),
    "missing reference": ({"reference": {"model": "./nowhere"}, "kl": {"coefficient": 0.1}}, None, UserError()),
    "probe": ({}, (policy_model, "probe"), ForeignError()),
    "interrupted probe": ({}, (policy_model, "probe"), KeyboardInterrupt()),
    "trial of the engine": ({}, (run_components, "announce_decoding"), ForeignError()),
    "evaluation": ({}, (pipeline_build, "build_evaluator"), ForeignError()),
    "first update": ({}, (Learner, "update"), ForeignError()),
    "interrupted update": ({}, (Learner, "update"), KeyboardInterrupt()),
    "interrupted backward pass": ({}, (learner, "weighted_sum"), KeyboardInterrupt()),
    "recomputed layers": (
        {"training": {"activation_checkpointing": True}},
        (Learner, "update"),
        ForeignError(),
    ),
    "nothing": ({}, None, None),
    "nothing, with dropout": ({"model": {"dropout": True}}, None, None),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_callers_model_comes_back_as_it_was(
    recipe: Recipe, train: Train, make_tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    sections, place, error = ENDINGS[ending]
    config = recipe(**sections)
    config["model"]["new"] = None
    model, tokenizer = callers_model(make_tiny_model)
    before = described(model)
    if place is not None and error is not None:
        monkeypatch.setattr(*place, raising(error))
    if error is None:
        train(config, model=model, tokenizer=tokenizer, reward=odd)
    else:
        with pytest.raises(type(error)):
            train(config, model=model, tokenizer=tokenizer, reward=odd)
    assert described(model) == before
    assert model(input_ids=IDS).logits.shape[:2] == (1, 3)


def test_gradients_from_before_a_run_that_did_not_begin_are_kept_and_those_of_training_are_not(
    recipe: Recipe, train: Train, make_tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = callers_model(make_tiny_model, gradients=True)
    own = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert own
    config = recipe(sft={"steps": 2, "stop_at": 0.5, "check_size": 500})
    config["model"]["new"] = None
    with pytest.raises(UserError):
        train(config, model=model, tokenizer=tokenizer)
    assert all(weight.grad is own.get(name) for name, weight in model.named_parameters())
    monkeypatch.setattr(Learner, "zero_grad", lambda self: None)  # so that something is left over
    train(recipe(model={"new": None}), model=model, tokenizer=tokenizer, reward=odd)
    assert all(weight.grad is None for weight in model.parameters())


def test_a_second_run_trains_a_model_that_the_first_could_not(
    recipe: Recipe, train: Train, make_tiny_model: MakeModel
) -> None:
    model, tokenizer = make_tiny_model()
    wrong = recipe(sft={"steps": 2, "stop_at": 0.5, "check_size": 500})
    wrong["model"]["new"] = None
    with pytest.raises(UserError, match="check_size"):
        train(wrong, model=model, tokenizer=tokenizer)
    right = recipe(model={"new": None})
    assert train(right, model=model, tokenizer=tokenizer).summary.status == "done"


def test_a_model_that_was_left_held_gets_an_attention_of_transformers(make_tiny_model: MakeModel) -> None:
    model, tokenizer = make_tiny_model()
    plain = model(input_ids=IDS).logits
    Policy(model, tokenizer)  # and nobody releases it
    assert model.config._attn_implementation == "flatpeak"
    Policy(model, tokenizer).release()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(input_ids=IDS).logits, plain)


def test_the_processes_that_grade_end_where_the_parts_do_not_fit_together(
    recipe: Recipe, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []
    monkeypatch.setattr(WorkerPool, "close", lambda self: closed.append(self))
    monkeypatch.setattr(RewardSet, "close", lambda self: closed.append(self))
    with pytest.raises(UserError):
        flatpeak.pipeline.train.train(recipe(sft={"steps": 2, "stop_at": 0.5, "check_size": 500}))
    assert sorted(type(one).__name__ for one in closed) == ["RewardSet", "WorkerPool"]
