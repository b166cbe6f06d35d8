"""What rounds on the way through the model is seen wherever it is, and a penalty that it spoils does not pass."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from flatpeak.errors import UserError
from flatpeak.gradreg.directions import default_step
from flatpeak.gradreg.guard_messages import rounding_message
from flatpeak.gradreg.parameters import observe_precision
from flatpeak.gradreg.perturbation import PerturbationFidelity
from flatpeak.gradreg.regularizer import GradientRegularizer
from support.gradreg import (
    joined,
    left_in_grad,
    network,
    one,
    regression,
    regularizer,
    relative_error,
    settings,
    unchanged,
    values,
)

BF16 = torch.bfloat16
TOKENS = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(5))
ADVANTAGES = torch.randn(8, 1, generator=torch.Generator().manual_seed(6))


def llm(*, seed=0):
    """A random Qwen2 of three layers, wide enough that rounding errors average a little."""
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def adapted(base, *, seed=0):
    """Float32 adapters that have moved from where they begin."""
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1)
        model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"]))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float() + 0.05 * torch.randn(parameter.shape)
    return model


def policy_gradient(model, *, autocast=False):
    """The loss of REINFORCE on fixed tokens."""

    def loss():
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            logits = model(input_ids=TOKENS).logits
        logprobs = torch.log_softmax(logits[:, 5:-1].float(), -1).gather(-1, TOKENS[:, 6:, None])[..., 0]
        return -(ADVANTAGES * logprobs).mean()

    return loss


def setting(name, *, seed):
    """(regularized model, its loss, masters; the same function in float32, its loss)."""
    if name == "adapters":
        model, precise = (
            adapted(llm(seed=seed).to(BF16), seed=seed),
            adapted(llm(seed=seed).to(BF16).float(), seed=seed),
        )
        return model, policy_gradient(model), None, precise, policy_gradient(precise)
    precise = llm(seed=seed)
    if name == "autocast":
        model = llm(seed=seed)
        return model, policy_gradient(model, autocast=True), None, precise, policy_gradient(precise)
    if name == "fresh masters":  # as when a bfloat16 model has just been loaded
        precise = precise.to(BF16).float()
    model = copy.deepcopy(precise).to(BF16)
    masters = {p: q.detach().clone() for p, q in zip(model.parameters(), precise.parameters(), strict=True)}
    return model, policy_gradient(model), masters, precise, policy_gradient(precise)


def penalty(model, loss, *, masters=None, notice=None, **changes):
    """(the penalty's gradient at strength 1, the report) of one update; the first gradient is taken out in full."""
    config = settings(**{"step": None, "step_scale": "relative", "check_every": 0} | changes)
    ours = GradientRegularizer(model, config, masters=masters, notice=notice or print)
    loss().backward()
    first = left_in_grad(ours.parameters).float()
    model.zero_grad()
    report = ours.accumulate(one(loss))
    result = left_in_grad(ours.parameters).float() - first
    model.zero_grad()
    return result, report, default_step(ours.perturbation)


STEPS = (3e-5, 3e-4, 1e-3, 3e-3, 1e-2)


@pytest.mark.parametrize("name", ["masters", "fresh masters", "adapters", "autocast"])
def test_where_the_guard_says_nothing_the_penalty_is_within_a_quarter_of_float32_s(name):
    passed, refused = [], []
    for seed in (0, 1):
        model, loss, masters, precise, precise_loss = setting(name, seed=seed)
        for step in STEPS:
            messages: list[str] = []
            try:
                result, report, _ = penalty(
                    model, loss, masters=masters, notice=messages.append, step=step, check_every=100
                )
            except UserError:
                refused.append(step)
                continue
            if messages:
                continue
            wanted, _, _ = penalty(precise, precise_loss, step=step)
            assert report.consistency >= 0.9
            passed.append(relative_error(result, wanted))
    assert passed
    # Of independent errors a consistency of 0.9 is one of 0.27: sqrt(2 x) with 1 - x = 0.9 (1 + 2 x).
    assert max(passed) <= 0.27
    assert 3e-5 in refused


@pytest.mark.parametrize(
    ("name", "step"), [("masters", 3e-4), ("fresh masters", 3e-4), ("autocast", 3e-4), ("adapters", 3e-3)]
)
def test_the_default_step_is_accepted_in_every_setting(name, step):
    for seed in (0, 1):
        model, loss, masters, _, _ = setting(name, seed=seed)
        before = values(model)
        _, report, default = penalty(model, loss, masters=masters, check_every=100, notice=lambda message: None)
        assert default == step
        assert report.consistency > 0.8
        assert report.kept.cosine > 0.3
        assert unchanged(model, before)


def test_a_random_direction_that_rounding_drowns_asks_for_a_much_longer_step():
    model, loss, *_ = setting("adapters", seed=0)
    ours = regularizer(model, step=3e-5, step_scale="relative", check_every=100, direction="random")
    with pytest.raises(UserError, match=r"along a random direction .* rounding to bfloat16 .* tenfold or more"):
        ours.accumulate(one(loss))


def test_adapters_over_a_half_precision_base_are_refused_at_the_step_of_float32():
    model, loss, _, precise, precise_loss = setting("adapters", seed=0)
    before = values(model)
    ours = regularizer(model, step=3e-5, step_scale="relative", check_every=100)
    with pytest.raises(
        UserError, match=r"rounding to bfloat16 swamps .* raise gradient_regularization\.step"
    ) as messages:
        ours.accumulate(one(loss))
    assert "\n" not in str(messages.value)
    assert "3e-03 is usual in bfloat16" in str(messages.value)
    assert unchanged(model, before)
    model.zero_grad()
    loss().backward()
    wanted = left_in_grad(ours.parameters)
    model.zero_grad()
    with pytest.raises(UserError):
        ours.accumulate(one(loss))
    assert torch.equal(left_in_grad(ours.parameters), wanted)
    # Nothing but noise, though every weight moves as intended.
    model.zero_grad()
    noise, report, _ = penalty(model, loss, step=3e-5)
    assert report.kept.cosine > 0.99
    assert relative_error(noise, penalty(precise, precise_loss, step=3e-5)[0]) > 3


def test_what_is_rounded_away_alike_in_both_directions_is_told_once():
    # The consistency does not see it: a bfloat16 model that has just been loaded lies on the numbers that bfloat16 has,
    # and the smaller part of every perturbation is lost.
    messages: list[str] = []
    model = wide(BF16)
    masters = {p: p.detach().float() for p in model.parameters()}
    config = settings(step=2e-4, step_scale="relative", check_every=1)
    ours = GradientRegularizer(model, config, masters=masters, notice=messages.append)
    for _ in range(2):
        model.zero_grad()
        report = ours.accumulate(one(policy_gradient(model)))
        assert report.consistency > 0.9
        assert report.kept.along == report.kept.cosine * report.kept.norm < 0.75
    assert len(messages) == 1
    assert f"rounding leaves {report.kept.along:.2f} of the perturbation's length along the gradient" in messages[0]


@pytest.mark.parametrize(("through", "silent"), [(torch.float32, True), (BF16, False)])
def test_a_step_far_below_the_usual_one_is_told_where_something_rounds(through, silent):
    model = network(dtype=torch.float32)
    ours = regularizer(model, step=1e-6, step_scale="relative")
    ours.perturbation.coarsest_dtype = through
    said = rounding_message(PerturbationFidelity(cosine=1.0, norm=1.0), size=1e-6, perturbation=ours.perturbation)
    assert (said is None) == silent
    assert silent or "the step is 1.0e-06 of the weights' norm (3e-04 is usual in bfloat16)" in said


def wide(dtype):
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).to(dtype)


def mixed(where):
    """Three layers, some of them under autocast."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 1))

        def forward(self, x):
            for index, layer in enumerate(self.layers):
                with torch.autocast("cpu", dtype=BF16, enabled=index in where):
                    x = torch.tanh(layer(x)).float()
            return x

    model = Mixed()
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(16, 32, generator=generator), torch.randn(16, 1, generator=generator)
    return model, lambda: (model(inputs).float() - targets).square().mean()


@pytest.mark.parametrize("where", [(0,), (1,), (2,), (1, 2)])
def test_autocast_of_any_layer_is_seen(where):
    model, loss = mixed(where)
    messages: list[str] = []
    config = settings(perturbed="all", step=None, step_scale="relative", min_perturbation_kept=0)
    ours = GradientRegularizer(model, config, notice=messages.append)
    ours.accumulate(one(loss))
    assert ours.perturbation.compute_dtype is BF16
    assert default_step(ours.perturbation) == 3e-4


def test_in_a_resumed_run_step_and_guard_are_those_of_before():
    model, loss = mixed((0, 1, 2))
    config = settings(perturbed="all", step=None, step_scale="relative", min_perturbation_kept=0)
    first = GradientRegularizer(model, config, notice=print)
    reports, gradients, state = [], [], first.state()
    for ours in (first, first, None):
        if ours is None:
            ours = GradientRegularizer(model, config, notice=print)
            ours.load(state, first.tensors())
        model.zero_grad()
        reports.append(ours.accumulate(one(loss)))
        gradients.append(left_in_grad(model.parameters()))
        state = first.state()
    assert state["compute_dtype"] == "bfloat16"
    assert reports[2].kept == reports[1].kept
    assert torch.equal(gradients[2], gradients[1])


def test_a_state_from_before_an_update_with_a_penalty_leaves_the_looking_to_the_resumed_run():
    model, loss = mixed((0, 1, 2))
    config = settings(perturbed="all", delay_updates=1, min_perturbation_kept=0)
    first = GradientRegularizer(model, config, notice=print)
    first.accumulate(one(loss))
    second = GradientRegularizer(model, config, notice=print)
    second.load(first.state(), first.tensors())
    second.accumulate(one(loss))
    assert second.perturbation.compute_dtype is BF16


def test_watching_runs_no_parametrization_and_leaves_no_hooks():
    model = network()
    for block in model.blocks:
        nn.utils.parametrizations.spectral_norm(block.linear)
    before = values(model)
    with observe_precision(model, list(model.blocks.parameters())) as seen:
        pass
    assert unchanged(model, before)
    with observe_precision(model, list(model.blocks.parameters())) as seen:
        regression(model)()
    assert seen.weights == seen.anywhere == {torch.float64}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_a_quantized_layer_computes_in_is_seen_though_it_gives_back_float32():
    model = network(dtype=torch.float32)
    model.entry.requires_grad_(False).compute_dtype = BF16
    ours = regularizer(model)
    ours.accumulate(one(regression(model, dtype=torch.float32)))
    assert ours.perturbation.coarsest_dtype is BF16
    assert ours.perturbation.compute_dtype is None


def test_float32_throughout_keeps_the_fine_step():
    model = network(dtype=torch.float32)
    ours = regularizer(model)
    ours.accumulate(one(regression(model, dtype=torch.float32)))
    assert default_step(ours.perturbation) == 3e-5
    assert joined(model.parameters()).dtype == torch.float32
