"""Recomputed and compiled layers: the same gradients, in passes with gradients alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from flatpeak.errors import UserError
from flatpeak.policy import model_settings as passes
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import TrainingForward, decoder_layers, training_layers
from flatpeak.policy.reference import snapshot
from flatpeak.rollout.engine import NativeEngine
from flatpeak.training.objective_config import ObjectiveConfig
from flatpeak.types import Batch, Group, SamplingParams
from support.models import letter_tokenizer, tiny_model
from support.regularized_training import Gradient, double_qwen2, gradient_of, make_learner, off_policy
from support.training import (
    completion,
    largest_difference,
    make_batch,
    plain_logprobs,
    prompt,
    scored,
    tiny_policy,
    weights,
)

PLAIN = ObjectiveConfig(loss="policy_gradient")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def deep_policy(*, layers: int = 6) -> Policy:
    """A random Qwen2 of so many layers."""
    policy = Policy(tiny_model(num_hidden_layers=layers), letter_tokenizer())
    assert policy.native, policy.notice
    return policy


def some_batch() -> Batch:
    return make_batch([4, 3, 5, 2], prompts=[[3, 7, 12], [20, 5], [8]], prompt_N=[0, 0, 1, 2])


def other_batch() -> Batch:
    return make_batch([6, 1, 7, 2, 3], prompts=[[3], [20, 5, 9, 9], [8, 4], [11]], prompt_N=[0, 1, 1, 2, 3])


def relative_gap(found: Gradient, expected: Gradient) -> float:
    largest = max(float(component.abs().max()) for component in expected.values())
    return largest_difference(found, expected) / largest


def with_option(policy: Policy, batch: Batch, *, compiled: bool = False, **settings: Any) -> Gradient:
    with training_layers(policy.causal, recompute=not compiled, compiled=compiled):
        return gradient_of(policy, batch, **settings)


@pytest.fixture
def recomputed(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The layers that were checkpointed, in order."""
    calls: list[nn.Module] = []
    original = passes.checkpoint

    def counted(run: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(layer)
        return original(run, layer, *args, **kwargs)

    monkeypatch.setattr(passes, "checkpoint", counted)
    return calls


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 6])
def test_recomputed_layers_give_the_same_gradient_to_the_bit(
    recomputed: list[nn.Module], micro_batch_tokens: int
) -> None:
    policy, batch = deep_policy(), some_batch()
    settings: dict[str, Any] = {"objective": PLAIN, "micro_batch_tokens": micro_batch_tokens}
    expected = gradient_of(policy, batch, **settings)
    assert recomputed == []
    assert largest_difference(with_option(policy, batch, **settings), expected) == 0
    assert recomputed[:6] == list(policy.causal.model.layers)
    assert max(float(component.abs().max()) for component in expected.values()) > 0.1


def saved_bytes(policy: Policy) -> int:
    """What one forward pass keeps for the backward pass, without the weights.

    A pass before it, since the first one of a model's shape checks the training kernels too.
    """
    policy.token_logprobs(some_batch(), temperature=1.0)
    held = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs_T, _ = policy.token_logprobs(some_batch(), temperature=1.0)
    assert logprobs_T.requires_grad
    return sum(storages.values())


def test_recomputed_layers_keep_their_inputs_alone() -> None:
    plain, recomputed = [], []
    for layers in (2, 8):
        policy = deep_policy(layers=layers)
        plain.append(saved_bytes(policy))
        with training_layers(policy.causal, recompute=True, compiled=False):
            recomputed.append(saved_bytes(policy))
    row = 64  # 23 prompt and response tokens, rounded up
    hidden = row * 16 * 4
    assert (plain[1] - plain[0]) / 6 > 10 * hidden
    assert (recomputed[1] - recomputed[0]) / 6 <= 1.1 * hidden


def test_scoring_and_sampling_recompute_nothing(recomputed: list[nn.Module]) -> None:
    policy = tiny_policy()
    groups = [Group(prompt=prompt("p", (3, 7)), completions=(completion((5, 9, 1), limit=5),))]
    sampling = SamplingParams(max_new_tokens=8)

    def outputs() -> tuple[list[Group], Tensor, list[Group]]:
        with torch.no_grad():
            logprobs_T, _ = policy.token_logprobs(some_batch(), temperature=1.0)
        return (
            scored(policy, groups),
            logprobs_T,
            NativeEngine(policy).generate([groups[0].prompt], group_size=3, sampling=sampling, seed=0),
        )

    plain = outputs()
    with training_layers(policy.causal, recompute=True, compiled=False):
        result = outputs()
        assert recomputed == []
        policy.token_logprobs(some_batch(), temperature=1.0)
        assert len(recomputed) == 2
    assert (result[0], result[2]) == (plain[0], plain[2])
    assert torch.equal(result[1], plain[1])


@pytest.mark.parametrize("dropout", [0.2, 0.0])
@pytest.mark.parametrize("difference", ["forward", "exact"])
def test_regularization_is_the_same_to_the_bit_also_with_dropout(difference: str, dropout: float) -> None:
    policy = double_qwen2(dropout=dropout)
    batch, result = off_policy(policy), []
    for option, seed in ((gradient_of, 5), (with_option, 5), (with_option, 6)):
        torch.manual_seed(seed)
        result.append(option(policy, batch, strength=0.3, difference=difference, micro_batch_tokens=20))
    assert largest_difference(result[0], result[1]) == 0
    assert (largest_difference(result[0], result[2]) > 1e-3) == (dropout > 0)


@pytest.mark.parametrize("strength", [0.0, 0.3])
def test_adapters_get_the_same_gradient_through_recomputed_layers(strength: float) -> None:
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    policy = Policy(model, letter_tokenizer())
    settings: dict[str, Any] = {"objective": PLAIN, "strength": strength, "perturbed": "adapters"}
    expected = gradient_of(policy, some_batch(), **settings)
    assert relative_gap(with_option(policy, some_batch(), **settings), expected) == 0
    assert max(float(g.abs().max()) for name, g in expected.items() if "lora_" in name) > 1e-3


def test_a_copy_of_the_policy_runs_on_its_own_weights() -> None:
    policy, batch = tiny_policy(), some_batch()
    with training_layers(policy.causal, recompute=True, compiled=False):
        names = list(policy.model.state_dict())
        reference = snapshot(policy)
        with torch.no_grad():
            before_T = policy.token_logprobs(batch, temperature=1.0)[0]
            for parameter in policy.parameters():
                parameter.mul_(1.5)
            assert torch.equal(reference.token_logprobs(batch, temperature=1.0)[0], before_T)
            assert not torch.equal(policy.token_logprobs(batch, temperature=1.0)[0], before_T)
        for layer in decoder_layers_of(reference):
            assert isinstance(layer.forward, TrainingForward)
            assert layer.forward.layer is layer
    assert names == list(tiny_policy().model.state_dict())
    assert not any("forward" in layer.__dict__ for layer in policy.causal.model.layers)


def decoder_layers_of(policy: Policy) -> list[nn.Module]:
    return list(policy.causal.model.layers)


def test_layers_that_are_not_known_or_not_their_own_are_refused() -> None:
    with pytest.raises(UserError, match="transformers cannot recompute the layers of Linear"):
        decoder_layers(nn.Linear(2, 2))
    policy = tiny_policy()
    first = decoder_layers_of(policy)[0]
    first.forward = first.forward
    with (
        pytest.raises(UserError, match="other code has replaced the forward of"),
        training_layers(policy.causal, recompute=True, compiled=False),
    ):
        pass


def test_a_recipe_with_activation_checkpointing_trains_to_the_same_bits(
    recipe: Callable[..., Any], train: Callable[..., Any], recomputed: list[nn.Module], make_tiny_model: Any
) -> None:
    ends, counts = [], []
    for name in ("plain", "recomputed"):
        training = {"steps": 2, "activation_checkpointing": name == "recomputed"}
        model, given = make_tiny_model()
        train(recipe(run={"name": name}, training=training, sft={"steps": 1}), model=model, tokenizer=given)
        ends.append({key: value.clone() for key, value in model.state_dict().items()})
        counts.append(len(recomputed))
        assert not any("forward" in layer.__dict__ for layer in model.model.layers)
    assert counts[0] == 0
    assert counts[1] >= 2  # two layers in every pass with a gradient
    assert largest_difference(*ends) == 0


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_compiled_layers_give_the_same_gradient_at_every_shape_from_one_compilation(recompute: bool) -> None:
    policy = deep_policy(layers=3)
    batches = (some_batch(), other_batch())
    expected = [gradient_of(policy, batch, objective=PLAIN) for batch in batches]
    with training_layers(policy.causal, recompute=recompute, compiled=True):
        gap = relative_gap(gradient_of(policy, batches[0], objective=PLAIN), expected[0])
        assert 0 < gap < 1e-5
        with torch.compiler.set_stance("fail_on_recompile"):
            assert relative_gap(gradient_of(policy, batches[1], objective=PLAIN), expected[1]) < 1e-5
        tiny_policy()  # registers flatpeak's attention again
        with torch.compiler.set_stance("fail_on_recompile"):
            assert relative_gap(gradient_of(policy, batches[0], objective=PLAIN), expected[0]) < 1e-5
            # Policy and reference are scored by the graph that trains.
            trained_T = policy.token_logprobs(batches[0], temperature=1.0)[0].detach()
            reference, learner = snapshot(policy), make_learner(policy)
            assert torch.equal(learner.score(policy, batches[0]), trained_T)
            assert torch.equal(learner.score(reference, batches[0]), trained_T)
        assert not any(weight.requires_grad for weight in reference.model.parameters())
    assert largest_difference(gradient_of(policy, batches[0], objective=PLAIN), expected[0]) == 0


@pytest.fixture
def compiled_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[nn.Module]]:
    """The layers that ran through a stand-in for what torch.compile returns."""
    calls: list[nn.Module] = []

    def compile(forward: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        def run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append(layer)
            return forward(layer, *args, **kwargs)

        assert dynamic
        return run

    with monkeypatch.context() as patch:
        patch.setattr(passes, "check_compiler", lambda device: None)
        patch.setattr(torch, "compile", compile)
        yield calls


def test_compiled_layers_serve_passes_with_gradients_alone(compiled_calls: list[nn.Module]) -> None:
    policy = tiny_policy()
    layers = decoder_layers_of(policy)
    with training_layers(policy.causal, recompute=False, compiled=True):
        with torch.no_grad():
            policy.token_logprobs(some_batch(), temperature=1.0)
        plain_logprobs(policy, (3, 7), (5, 9), temperature=1.0)
        NativeEngine(policy).generate(
            [prompt("p", (3, 7))], group_size=2, sampling=SamplingParams(max_new_tokens=3), seed=0
        )
        assert compiled_calls == []
        policy.token_logprobs(some_batch(), temperature=1.0)[0].sum().backward()
        assert compiled_calls == layers
        policy.token_logprobs(some_batch(), temperature=1.0, twice_differentiable=True)
        assert compiled_calls == layers
    policy.token_logprobs(some_batch(), temperature=1.0)
    assert compiled_calls == layers


def test_compiled_and_recomputed_layers_run_compiled_both_times(compiled_calls: list[nn.Module]) -> None:
    policy = tiny_policy()
    first, second = decoder_layers_of(policy)
    with training_layers(policy.causal, recompute=True, compiled=True):
        policy.token_logprobs(some_batch(), temperature=1.0)[0].sum().backward()
    assert compiled_calls == [first, second, second, first]


def test_a_missing_compiler_is_named_before_there_is_a_run(
    recipe: Callable[..., Any], train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = recipe(training={"compile": True})
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler, but no-such-compiler .*: install"):
        train(config)
    assert not (Path(config["run"]["directory"]) / config["run"]["name"]).exists()


@needs_compiler
def test_a_compiler_that_fails_is_reported_with_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(_: Any) -> Any:
        raise RuntimeError("Python.h: No such file\nand much more")

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(torch, "compile", compile)
    with pytest.raises(UserError, match=r"fails here \(Python\.h: No such file\): install .* training\.compile=false"):
        passes.check_compiler(torch.device("cpu"))


def test_both_options_leave_float32_training_alone_where_they_are_off() -> None:
    policy = tiny_policy()
    before = weights(policy)
    with training_layers(policy.causal, recompute=False, compiled=False):
        assert not any("forward" in layer.__dict__ for layer in decoder_layers_of(policy))
    assert largest_difference(weights(policy), before) == 0
