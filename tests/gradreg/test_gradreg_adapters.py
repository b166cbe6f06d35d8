"""LoRA: the base stays as it is, the adapters move, and the penalty acts from the first step on."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from flatpeak.errors import UserError
from flatpeak.gradreg.regularizer import GradientRegularizer
from support.gradreg import (
    chosen,
    exact_penalty,
    gradient,
    joined,
    language,
    left_in_grad,
    one,
    regularizer,
    relative_error,
    settings,
    transformer,
)


def adapted(**changes):
    """A tiny transformer with LoRA on the attention of its blocks, in float64 throughout."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return get_peft_model(
            transformer(), LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]} | changes)
        ).double()


def adapters(model):
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("perturbed", ["blocks", "adapters", "all", ("*.lora_?.*",)])
def test_the_adapters_are_selected_and_nothing_else(perturbed):
    model = adapted()
    assert chosen(model, perturbed) == list(adapters(model))
    assert len(adapters(model)) == 8


def test_adapters_outside_the_blocks_are_adapters_all_the_same():
    model = adapted(target_modules=["q_proj", "embed_tokens", "lm_head"])
    assert chosen(model, "adapters") == list(adapters(model))
    assert chosen(model, "blocks") == [name for name in adapters(model) if ".layers." in name]


def test_modules_that_are_trained_whole_are_no_adapters():
    model = adapted(modules_to_save=["lm_head"])
    assert any("modules_to_save" in name for name, p in model.named_parameters() if p.requires_grad)
    assert chosen(model, "adapters") == list(adapters(model))


def test_over_three_steps_the_base_stays_bit_for_bit_and_every_adapter_moves():
    model = adapted()
    loss = language(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ours = regularizer(model, step=1e-3, step_scale="relative", strength="ratio:0.3")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        assert ours.accumulate(one(loss)).pass_count == 1
        optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(adapters(model))
    assert all(p.grad is None for name, p in model.named_parameters() if name not in moved)


@pytest.mark.parametrize("difference", ["forward", "exact"])
def test_at_the_first_step_the_penalty_moves_what_the_gradient_cannot(difference):
    # B = 0: the product B A does not depend on A, so d L / d A = 0; but ||d L / d B||^2 does.
    model = adapted()
    loss = language(model)
    ours = regularizer(model, difference=difference)
    first = dict(zip(adapters(model), gradient(ours.parameters, loss), strict=True))
    wanted = exact_penalty(ours.parameters, loss)
    ours.accumulate(one(loss))
    for name, p in adapters(model).items():
        if "lora_A" in name:
            assert not first[name].any()
            assert float(p.grad.norm()) > 1e-3
    assert relative_error(left_in_grad(ours.parameters) - joined(first.values()), wanted) < 1e-3


def test_a_peft_model_whose_adapters_are_frozen_is_refused_with_the_way_out():
    model = adapted()
    for p in adapters(model).values():
        p.requires_grad_(False)
    for perturbed in ("adapters", "blocks"):
        with pytest.raises(UserError, match="the model has no trainable parameter"):
            GradientRegularizer(model, settings(perturbed=perturbed))
    model.base_model.model.lm_head.weight.requires_grad_(True)
    with pytest.raises(UserError, match="no trainable adapter; add one with peft, or use blocks"):
        GradientRegularizer(model, settings(perturbed="adapters"))


def test_a_model_without_adapters_is_refused_with_the_way_out():
    with pytest.raises(UserError, match=r"perturbed=adapters: .* add one with peft, or use blocks"):
        GradientRegularizer(transformer(), settings(perturbed="adapters"))
