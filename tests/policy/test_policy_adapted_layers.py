"""Layers with adapters: what is one product and what is left to peft, in training passes and from packed weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatpeak.kernels import matmul as products
from flatpeak.kernels.matmul import onednn_is_faster
from flatpeak.policy import adapted_layers, linears
from flatpeak.policy.adapted_layers import AdaptedLayer, AdaptedLinear, make_adapters_fast
from flatpeak.policy.linears import make_fast, make_plain, packed_weights
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import training_layers
from flatpeak.types import SamplingParams
from support.architectures import COMMON
from support.engines import Tokens, sample
from support.models import tiny_model
from support.policies import Tokenizer, gradients, largest_gap, tokens_and_weights, uneven_batch

peft = pytest.importorskip("peft")

WIDE = {**COMMON, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2}
"""Wide enough that the weights are worth oneDNN's while."""
TARGETS = {"llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


pytestmark = pytest.mark.usefixtures("onednn")


def adapted(kind: str = "llama", **settings: Any) -> Any:
    """A model with adapters that have an effect."""
    sizes = {key: value for key, value in WIDE.items() if kind == "llama" or key != "intermediate_size"}
    base = tiny_model(kind, scale=2.0, **sizes)
    config = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS[kind], "init_lora_weights": False, **settings}
    torch.manual_seed(1)
    return peft.get_peft_model(base, peft.LoraConfig(**config, fan_in_fan_out=kind == "gpt2"))


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def logits(model: Any) -> Tensor:
    ids = torch.randint(2, 40, (3, 11), generator=torch.Generator().manual_seed(3))
    output: Tensor = model(input_ids=ids, use_cache=False).logits
    return output


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for every layer that was computed as one product."""
    calls: list[None] = []
    one_product = adapted_layers.adapted_linear

    def spy(*arguments: Any) -> Tensor:
        calls.append(None)
        return one_product(*arguments)

    monkeypatch.setattr(adapted_layers, "adapted_linear", spy)
    return calls


@pytest.mark.parametrize("kind", TARGETS)
def test_layers_are_exchanged_and_given_back_and_nothing_else_changes(kind: str) -> None:
    model = adapted(kind)
    before = {name: type(module) for name, module in model.named_modules()}
    state = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    make_fast(model)
    make_adapters_fast(model)
    assert len(layers(model)) > 3
    assert all(type(layer) is AdaptedLinear and isinstance(layer, peft.tuners.lora.Linear) for layer in layers(model))
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == state[name][0]
        assert torch.equal(tensor, state[name][1])
    assert list(model.state_dict()) == list(state)
    make_plain(model)
    assert {name: type(module) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("kind", TARGETS)
def test_values_and_gradients_are_those_of_peft(kind: str, counted: list[None]) -> None:
    plain = adapted(kind)
    fast = copy.deepcopy(plain)
    exact = copy.deepcopy(plain).double()
    make_fast(fast)
    make_adapters_fast(fast)
    results = []
    for model in (plain, fast, exact):
        output = logits(model)
        output.square().mean().backward()
        results.append((output.detach().double(), [p.grad.double() for p in model.parameters() if p.requires_grad]))
    assert len(counted) == len(layers(fast))
    (plain_logits, plain_grads), (fast_logits, fast_grads), (exact_logits, exact_grads) = results
    assert largest_gap([fast_logits], [exact_logits]) < max(1e-6, 2 * largest_gap([plain_logits], [exact_logits]))
    assert largest_gap(fast_grads, exact_grads) < max(1e-6, 2 * largest_gap(plain_grads, exact_grads))


def test_over_a_base_in_bfloat16_values_and_gradients_are_no_worse_than_those_of_peft(counted: list[None]) -> None:
    plain = adapted()
    for name, parameter in plain.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    exact = copy.deepcopy(plain).double()
    fast = copy.deepcopy(plain)
    make_adapters_fast(fast)
    outputs, grads = [], []
    for model in (plain, fast, exact):
        output = logits(model).double()
        output.square().mean().backward()
        grads.append([p.grad.double() for p in model.parameters() if p.requires_grad])
        outputs.append(output.detach())
    assert len(counted) == len(layers(fast))
    assert {p.dtype for p in fast.parameters() if p.requires_grad} == {torch.float32}
    assert largest_gap([outputs[1]], [outputs[2]]) < 1.3 * largest_gap([outputs[0]], [outputs[2]])
    assert largest_gap(grads[1], grads[2]) < 1.3 * largest_gap(grads[0], grads[2])


def with_two_adapters(model: Any) -> None:
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=TARGETS["llama"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])


def with_a_hook(model: Any) -> None:
    for layer in layers(model):
        layer.lora_A["default"].register_forward_hook(lambda module, given, output: 2 * output)


def with_merged_weights(model: Any) -> None:
    model.merge_adapter()


def with_a_trained_base(model: Any) -> None:
    for layer in layers(model):
        layer.base_layer.weight.requires_grad_(True)


OTHERS: dict[str, tuple[dict[str, Any], Callable[[Any], None] | None]] = {
    "DoRA": ({"use_dora": True}, None),
    "dropout": ({"lora_dropout": 0.5}, None),
    "two active adapters": ({}, with_two_adapters),
    "a hook": ({}, with_a_hook),
    "merged weights": ({}, with_merged_weights),
    "a trained base": ({}, with_a_trained_base),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_plain_lora_over_a_frozen_base_is_left_to_peft(name: str, counted: list[None]) -> None:
    settings, change = OTHERS[name]
    model = adapted(**settings)
    if change is not None:
        change(model)
    model.train()
    torch.manual_seed(4)
    expected = logits(model)
    make_adapters_fast(model)
    torch.manual_seed(4)
    assert torch.equal(logits(model), expected)
    assert counted == []


@pytest.mark.parametrize("context", ["disabled", "autocast"])
def test_disabled_adapters_and_autocast_are_left_to_peft(context: str, counted: list[None]) -> None:
    model = adapted()

    def inside() -> Any:
        return model.disable_adapter() if context == "disabled" else torch.autocast("cpu", torch.bfloat16)

    with inside():
        expected = logits(model)
    make_adapters_fast(model)
    with inside():
        assert torch.equal(logits(model), expected)
    assert counted == []
    logits(model)
    assert len(counted) == len(layers(model))


def test_dropout_that_is_off_is_none(counted: list[None]) -> None:
    model = adapted(lora_dropout=0.5).eval()
    make_adapters_fast(model)
    logits(model)
    assert len(counted) == len(layers(model))


def test_a_deep_copy_runs_on_its_own_weights() -> None:
    model = adapted()
    make_adapters_fast(model)
    before = logits(model).detach()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(logits(model).detach(), before)
    assert not logits(twin).any()


@pytest.mark.parametrize("kind", TARGETS)
def test_packed_weights_hold_the_adapters_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(kind).eval()
    with torch.no_grad():
        expected = logits(model)
    make_fast(model)
    make_adapters_fast(model)
    widths: list[int] = []

    def spy(input: Tensor, *others: Any) -> Tensor:
        output = products.multiply(input, *others)
        widths.append(output.shape[-1])
        return output

    monkeypatch.setattr(linears, "multiply", spy)
    with packed_weights(model), torch.no_grad():
        torch.testing.assert_close(logits(model), expected, atol=2e-4, rtol=1e-5)
        with model.disable_adapter():
            without = logits(model)
    assert (without - expected).abs().max() > 1e-2
    if kind == "llama":  # of three layers and their A matrices, of one, of a pair of which one has an adapter, of one
        heads = {"q": 128, "k": model.config.num_key_value_heads * (128 // model.config.num_attention_heads)}
        attention = heads["q"] + 2 * heads["k"] + 3 * 4
        assert widths[:4] == [attention, 128 + 4, 160 + 160 + 4, 128 + 4]
    with torch.no_grad():
        torch.testing.assert_close(logits(model), expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("variant", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_a_policy_decodes_from_packed_weights_what_it_decodes_without(variant: dict[str, Any]) -> None:
    policy = Policy(adapted(**variant), Tokenizer())
    assert policy.native, policy.notice
    prompts = [(2, 3, 4), (5, 6)]

    def decode() -> list[Tensor]:
        state = policy.open(slots=4, entries=2, prompt_lengths=[3, 2], new_tokens=8)
        result = [policy.prefill(state, prompts, [0, 1])]
        state.admit(range(4), [0, 1, 0, 1])
        return [*result, *(policy.decode(state, torch.tensor([7, 8, 9, step])) for step in range(5))]

    with torch.inference_mode():
        plain = decode()
        with policy.decoding():
            packed = decode()
    assert all(layer.packed is None for layer in layers(policy.model))
    for ours, theirs in zip(packed, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("library", ["mkl", "onednn"])
def test_a_completions_bits_do_not_depend_on_its_company(
    library: str, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(products.SETTING, library)
    onednn_is_faster.cache_clear()
    policy = Policy(adapted(r=16), Tokenizer())
    prompt = (2, 3, 4, 5, 6)

    def decode(slots: int) -> list[Tensor]:
        prompts = [prompt, *((7, *range(2, 2 + n)) for n in range(1, 4))]
        state = policy.open(slots=slots, entries=4, prompt_lengths=[len(p) for p in prompts], new_tokens=8)
        count = min(slots, 4) if slots > 4 else 1
        with torch.inference_mode(), policy.decoding():
            result = [policy.prefill(state, prompts[:count], range(count))[0]]
            state.admit(range(slots), [0, *(n % count for n in range(1, slots))])
            for step in range(5):
                tokens = torch.arange(slots) % 20 + 2
                tokens[0] = 9 + step
                result.append(policy.decode(state, tokens)[0])
        return result

    alone = decode(4)
    for slots in (8, 20, 64):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(decode(slots), alone, strict=True))


def test_dropout_in_training_passes_keeps_no_adapter_out_of_packed_weights() -> None:
    """A resumed run begins with a rollout, where one that goes on has made a training pass before it."""
    policy = Policy(adapted(lora_dropout=0.3), Tokens(), adapter_dropout=True)  # type: ignore[arg-type]
    policy.kernels.setting = "torch"
    drawn = [sample(policy, (3, 20), sampling=SamplingParams(max_new_tokens=12))]
    policy.token_logprobs(uneven_batch(), temperature=1.0)
    assert policy.model.training
    with policy.decoding():
        assert all(layer.packed is not None for layer in layers(policy.model))
    policy.token_logprobs(uneven_batch(), temperature=1.0)
    drawn.append(sample(policy, (3, 20), sampling=SamplingParams(max_new_tokens=12)))
    assert drawn[0] == drawn[1]


def test_a_policy_holds_fast_layers_and_lends_and_leaves_pefts() -> None:
    model = adapted()
    before = {name: type(module) for name, module in model.named_modules()}
    policy = Policy(model, Tokenizer())
    assert all(isinstance(layer, AdaptedLayer) for layer in layers(model))
    with policy.plain_attention():
        assert {name: type(module) for name, module in model.named_modules()} == before
    assert all(isinstance(layer, AdaptedLayer) for layer in layers(model))
    policy.release()
    assert {name: type(module) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("recompute", [False, True])
def test_scoring_gives_the_bits_of_training_passes(recompute: bool) -> None:
    policy = Policy(adapted(), Tokenizer())
    batch = uneven_batch()
    context = training_layers(policy.causal, recompute=True, compiled=False) if recompute else nullcontext()
    plain = policy.token_logprobs(batch, temperature=1.0)[0]
    expected = gradients(policy, (tokens_and_weights(batch) * plain).sum())
    with context:
        trained = policy.token_logprobs(batch, temperature=1.0)[0]
        ours = gradients(policy, (tokens_and_weights(batch) * trained).sum())
        with policy.scoring():
            scored = policy.token_logprobs(batch, temperature=1.0)[0]
    assert torch.equal(scored, trained.detach())
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_merging_unloads_the_layers_of_a_held_model() -> None:
    model = adapted().eval()
    with torch.no_grad():
        expected = logits(model)
    make_fast(model)
    make_adapters_fast(model)
    merged = model.merge_and_unload()
    assert layers(merged) == []
    with torch.no_grad():
        torch.testing.assert_close(logits(merged), expected, atol=2e-3, rtol=1e-4)


def test_compiled_layers_are_left_to_peft(counted: list[None]) -> None:
    model = adapted()
    expected = logits(model).detach()
    make_adapters_fast(model)
    layer = layers(model)[0]
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(6))
    compiled = torch.compile(lambda given: layer(given), backend="eager", fullgraph=True)
    output = compiled(x)
    assert counted == []
    torch.testing.assert_close(output, layer(x), atol=1e-5, rtol=1e-5)
    assert len(counted) == 1
    torch.testing.assert_close(logits(model).detach(), expected, atol=2e-4, rtol=1e-5)
