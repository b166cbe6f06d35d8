from __future__ import annotations

import copy
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from flatpeak.errors import UserError
from flatpeak.kernels import matmul as products
from flatpeak.kernels.matmul import onednn_is_faster
from flatpeak.policy import linears
from flatpeak.policy.linears import FastConv1D, FastLinear, make_fast, make_plain, packed_weights
from flatpeak.policy.model import Policy
from support.architectures import COMMON
from support.models import tiny_model
from support.policies import Tokenizer, gradients, largest_gap, tokens_and_weights, uneven_batch

WIDE = {
    "llama": {**COMMON, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2},
    "gpt2": {**COMMON, "hidden_size": 128, "num_hidden_layers": 2},
}
"""Wide enough that attention's and the feed-forward layers' weights are worth oneDNN's while."""
PLAIN = {FastLinear: nn.Linear, FastConv1D: Conv1D}


pytestmark = pytest.mark.usefixtures("onednn")


def wide(kind: str) -> Any:
    return tiny_model(kind, scale=2.0, **WIDE[kind]).eval()


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 96), nn.Tanh(), Conv1D(100, 96))


def kinds(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def fast_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module) in PLAIN]


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(2, 40, (3, 11), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return result


@pytest.mark.parametrize("kind", WIDE)
def test_layers_are_exchanged_and_given_back_and_nothing_else_changes(kind: str) -> None:
    model = wide(kind)
    before = kinds(model)
    state = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    names = [name for name, _ in model.named_modules()]
    for step in (make_fast, make_plain, make_fast, make_fast, make_plain):
        step(model)
        if step is make_fast:
            assert {PLAIN.get(result, result) for result in kinds(model).values()} == set(before.values())
            assert len(fast_layers(model)) >= 8
        else:
            assert kinds(model) == before
        assert [name for name, _ in model.named_modules()] == names
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == identities
        assert list(model.state_dict()) == list(state)
        for name, tensor in model.state_dict().items():
            assert tensor.data_ptr() == state[name][0]
            assert torch.equal(tensor, state[name][1])


def test_layers_that_onednn_does_not_serve_keep_their_class() -> None:
    class Own(nn.Linear):
        pass

    layers = {
        "small": nn.Linear(64, 127),
        "smallest": nn.Linear(64, 128),
        "in float64": nn.Linear(128, 128).double(),
        "in bfloat16": nn.Linear(128, 128).bfloat16(),
        "own": Own(128, 128),
        "elsewhere": nn.Linear(128, 128, device="meta"),
        "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(128, 128)),
        "conv": Conv1D(128, 128),
        "small conv": Conv1D(8, 8),
    }
    before = {name: type(layer) for name, layer in layers.items()}
    make_fast(nn.ModuleDict(layers))
    result = {name: type(layer) for name, layer in layers.items()}
    assert result == before | {"smallest": FastLinear, "conv": FastConv1D}


def test_where_mkl_is_chosen_no_layer_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(products.SETTING, "mkl")
    onednn_is_faster.cache_clear()
    model = two_layers()
    make_fast(model)
    assert not fast_layers(model)


@pytest.mark.parametrize("kind", WIDE)
def test_a_models_values_and_gradients_stay_what_they_were(kind: str) -> None:
    model = wide(kind)
    exact = copy.deepcopy(model).double()
    ids = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(3))
    make_fast(model)
    for each in (model, exact):
        each(input_ids=ids, use_cache=False).logits.square().mean().backward()
    torch.testing.assert_close(logits(model).double(), logits(exact), atol=2e-4, rtol=1e-5)
    ours = [parameter.grad.double() for parameter in model.parameters()]
    assert largest_gap(ours, [parameter.grad for parameter in exact.parameters()]) < 1e-4


def test_an_input_of_one_dimension_and_one_of_none_go_through_either_layer() -> None:
    model = two_layers()
    inputs = [torch.randn(128), torch.randn(0, 128), torch.randn(2, 0, 128), torch.randn(2, 3, 128)]
    with torch.no_grad():
        expected = [model[2](model[1](model[0](each.reshape(-1, 128)))).view(*each.shape[:-1], 100) for each in inputs]
    make_fast(model)
    for each, wanted in zip(inputs, expected, strict=True):
        torch.testing.assert_close(model(each).detach(), wanted, atol=1e-5, rtol=1e-5)
        with packed_weights(model), torch.no_grad():
            torch.testing.assert_close(model(each), wanted, atol=1e-5, rtol=1e-5)


def test_a_pruned_layer_is_not_packed_because_its_weight_is_made_at_each_call() -> None:
    model = two_layers()
    prune.random_unstructured(model[0], "weight", amount=0.5)
    make_fast(model)
    with torch.no_grad():
        model[0].weight_orig.add_(1.0)  # an update; the weight is still that of the last call
        with packed_weights(model):
            found = model(torch.ones(4, 128))
        torch.testing.assert_close(found, model(torch.ones(4, 128)), atol=1e-5, rtol=1e-5)


def test_hooks_go_on_being_called() -> None:
    model = two_layers()
    called = []
    model[0].register_forward_pre_hook(lambda module, given: called.append("before"))
    model[0].register_forward_hook(lambda module, given, output: output + 1)
    model[2].register_full_backward_hook(lambda module, given, output: called.append("backward"))
    input_MK = torch.randn(4, 128)
    expected = model(input_MK).detach()
    make_fast(model)
    output = model(input_MK)
    output.sum().backward()
    assert called == ["before", "before", "backward"]
    torch.testing.assert_close(output.detach(), expected, atol=1e-5, rtol=1e-5)


def test_a_deep_copy_runs_on_its_own_weights() -> None:
    model = two_layers()
    make_fast(model)
    with packed_weights(model):
        pass
    twin = copy.deepcopy(model)
    input_MK = torch.randn(4, 128)
    with torch.no_grad():
        before = model(input_MK)
        for parameter in twin.parameters():
            parameter.zero_()
        assert torch.equal(model(input_MK), before)
        assert torch.equal(twin(input_MK), torch.zeros(4, 100))
        with packed_weights(twin):
            assert torch.equal(twin(input_MK), torch.zeros(4, 100))
            assert torch.equal(model(input_MK), before)


def test_what_is_saved_is_what_a_plain_model_saves_and_loads() -> None:
    plain, fast = two_layers(), two_layers()
    make_fast(fast)
    assert repr(list(fast.state_dict())) == repr(list(plain.state_dict()))
    file = io.BytesIO()
    with packed_weights(fast):
        torch.save(fast.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    plain.load_state_dict(torch.load(file))
    with torch.no_grad():
        for ours, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            ours.zero_()
    fast.load_state_dict(plain.state_dict())
    again = pickle.loads(pickle.dumps(fast))
    for ours, theirs in zip(again.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", WIDE)
def test_a_saved_model_loads_in_transformers_alone(kind: str, tmp_path: Path) -> None:
    model = wide(kind)
    expected = logits(model)
    make_fast(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert not fast_layers(loaded)
    assert torch.equal(logits(loaded), expected)


@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("adapted_first", [True, False])
def test_adapters_train_and_merge_as_on_plain_layers(kind: str, adapted_first: bool) -> None:
    peft = pytest.importorskip("peft")
    targets = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}[kind]

    def adapted(*, fast: bool) -> Any:
        base = wide(kind)
        if fast and not adapted_first:
            make_fast(base)
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=64, target_modules=targets, init_lora_weights=False, fan_in_fan_out=kind == "gpt2", lora_dropout=0.0
        )
        model = peft.get_peft_model(base, config)
        if fast and adapted_first:
            make_fast(model)
        return model

    plain, fast = adapted(fast=False), adapted(fast=True)
    served = {name.rsplit(".", 2)[-1] for name, module in fast.named_modules() if type(module) in PLAIN}
    assert "base_layer" in served
    names = [name for name, module in fast.named_modules() if type(module) in PLAIN]
    assert any("lora_" in name for name in names) == adapted_first
    ids = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(3))
    for model in (plain, fast):
        model(input_ids=ids, use_cache=False).logits.square().mean().backward()
    trained = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert trained and all("lora_" in name for name in trained)
    result = {name: p.grad for name, p in fast.named_parameters() if p.grad is not None}
    assert list(result) == list(trained)
    assert largest_gap(list(result.values()), list(trained.values())) < 1e-5
    expected = logits(plain)
    torch.testing.assert_close(logits(fast), expected, atol=2e-4, rtol=1e-5)
    with packed_weights(fast):
        torch.testing.assert_close(logits(fast), expected, atol=2e-4, rtol=1e-5)
    torch.testing.assert_close(logits(fast.merge_and_unload()), expected, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("layer", [0, 2], ids=["linear", "conv1d"])
def test_packed_weights_are_read_only_without_gradients_and_only_inside(layer: int) -> None:
    model = two_layers()
    make_fast(model)
    module: Any = model[layer]
    input_MK = torch.randn(8, 128 if layer == 0 else 96)
    true = module(input_MK).detach()
    with packed_weights(model):
        with torch.no_grad():
            torch.testing.assert_close(module(input_MK), true, atol=1e-5, rtol=1e-5)
            weight = module.weight.clone()
            module.weight.zero_()  # against the rules: so one sees which of the two is read
            torch.testing.assert_close(module(input_MK), true, atol=1e-5, rtol=1e-5)
            with torch.inference_mode():
                torch.testing.assert_close(module(input_MK), true, atol=1e-5, rtol=1e-5)
        assert torch.equal(module(input_MK).detach(), module.bias.detach().expand_as(true))
        with torch.no_grad():
            module.weight.copy_(weight)
            module.weight.mul_(2)
    with torch.no_grad():
        doubled = 2 * (true - module.bias) + module.bias
        torch.testing.assert_close(module(input_MK), doubled, atol=1e-5, rtol=1e-5)
        with packed_weights(model):  # copied anew, as the weights are now
            torch.testing.assert_close(module(input_MK), doubled, atol=1e-5, rtol=1e-5)


def test_the_copies_are_forgotten_also_when_the_body_raises() -> None:
    model = two_layers()
    make_fast(model)
    copies = []
    with packed_weights(model):
        copies += [weakref.ref(layer.packed[0]) for layer in fast_layers(model)]
        assert len(copies) == 2
        assert all(copy_() is not None for copy_ in copies)
    assert [copy_() for copy_ in copies] == [None, None]
    with pytest.raises(ValueError, match="on purpose"), packed_weights(model):
        raise ValueError("on purpose")
    assert [layer.packed for layer in fast_layers(model)] == [None, None]


def test_the_copies_are_forgotten_when_one_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_layers()
    make_fast(model)

    made = []

    def pack_one(weight: torch.Tensor) -> torch.Tensor:
        if made:
            raise MemoryError
        made.append(products.pack(weight))
        return made[0]

    monkeypatch.setattr(linears, "pack", pack_one)
    with pytest.raises(MemoryError), packed_weights(model):
        pytest.fail("the body must not run")
    assert [layer.packed for layer in fast_layers(model)] == [None, None]


@pytest.mark.parametrize("biased", [True, False])
def test_layers_that_read_the_same_input_are_one_product_and_give_each_its_own(
    biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Module()
    torch.manual_seed(0)
    for name, size in (("q_proj", 128), ("k_proj", 64), ("v_proj", 96), ("o_proj", 70)):
        setattr(model, name, nn.Linear(128, size, bias=biased))
    layers = [model.q_proj, model.k_proj, model.v_proj, model.o_proj]
    inputs = [torch.randn(4, 3, 128) for _ in range(3)]
    with torch.no_grad():
        expected = [[layer(each) for layer in layers] for each in inputs]
    make_fast(model)
    shapes = []

    def spy(input: torch.Tensor, *weight_and_bias: Any) -> torch.Tensor:
        shapes.append(tuple(input.shape))
        return products.multiply(input, *weight_and_bias)

    monkeypatch.setattr(linears, "multiply", spy)
    with packed_weights(model), torch.no_grad():
        for each, wanted in zip(inputs, expected, strict=True):
            for layer, output in zip(layers, wanted, strict=True):
                torch.testing.assert_close(layer(each), output, atol=1e-5, rtol=1e-5)
        assert len(shapes) == 2 * len(inputs)
        # Of different tensors each layer reads its own.
        for layer, each, row in zip(layers, [inputs[1], inputs[0], inputs[2], inputs[1]], range(4), strict=True):
            wanted = next(outputs[row] for given, outputs in zip(inputs, expected, strict=True) if given is each)
            torch.testing.assert_close(layer(each), wanted, atol=1e-5, rtol=1e-5)


def test_plain_layers_have_nothing_to_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "pack", lambda weight: pytest.fail("packed"))
    model = two_layers()
    with packed_weights(model):
        assert "packed" not in model[0].__dict__


@pytest.mark.parametrize("kind", WIDE)
def test_a_policy_holds_fast_layers_and_lends_and_leaves_plain_ones(kind: str) -> None:
    model = wide(kind)
    before = kinds(model)
    policy = Policy(model, Tokenizer())
    assert policy.native, policy.notice
    held = kinds(model)
    assert len(fast_layers(model)) >= 8
    with policy.plain_attention():
        assert kinds(model) == before
    assert kinds(model) == held
    policy.release()
    assert kinds(model) == before


@pytest.mark.parametrize("kind", WIDE)
def test_fast_layers_that_a_policy_left_behind_are_taken_by_the_next(kind: str) -> None:
    model = wide(kind)
    before = kinds(model)
    Policy(model, Tokenizer())  # and nobody releases it
    assert len(fast_layers(model)) >= 8
    policy = Policy(model, Tokenizer())
    assert policy.native, policy.notice
    policy.release()
    assert kinds(model) == before


@pytest.mark.parametrize("kind", WIDE)
def test_a_second_policy_over_a_held_model_is_refused_by_that_reason(kind: str) -> None:
    model = wide(kind)
    policy = Policy(model, Tokenizer())
    held = kinds(model)
    with pytest.raises(
        UserError, match=r"another flatpeak Policy holds this .*: call its release\(\) first; .*sampler=lambda"
    ):
        Policy(model, Tokenizer())
    assert kinds(model) == held
    assert policy.token_logprobs(uneven_batch(), temperature=1.0)[0].isfinite().all()
    policy.release()
    Policy(model, Tokenizer()).release()


@pytest.mark.parametrize("kind", WIDE)
def test_a_policy_scores_the_same_by_either_library(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = uneven_batch()
    result = []
    for setting in ("onednn", "mkl"):
        monkeypatch.setenv(products.SETTING, setting)
        onednn_is_faster.cache_clear()
        policy = Policy(wide(kind), Tokenizer())
        assert bool(fast_layers(policy.model)) == (setting == "onednn")
        logprobs_T, _ = policy.token_logprobs(batch, temperature=1.0)
        result.append((logprobs_T.detach(), gradients(policy, (tokens_and_weights(batch) * logprobs_T).sum())))
    torch.testing.assert_close(result[0][0], result[1][0], atol=1e-5, rtol=1e-5)
    assert largest_gap(result[0][1], result[1][1]) < 1e-5


def test_a_policy_decodes_from_packed_weights_what_it_decodes_without() -> None:
    policy = Policy(wide("llama"), Tokenizer())
    policy.kernels.setting = "torch"
    prompts = [(2, 3, 4), (5, 6)]

    def decode() -> list[torch.Tensor]:
        state = policy.open(slots=4, entries=2, prompt_lengths=[3, 2], new_tokens=8)
        result = [policy.prefill(state, prompts, [0, 1])]
        state.admit(range(4), [0, 1, 0, 1])
        return [*result, *(policy.decode(state, torch.tensor([7, 8, 9, step])) for step in range(5))]

    with torch.inference_mode():
        plain = decode()
        with policy.decoding():
            assert all(layer.packed is not None for layer in fast_layers(policy.model))
            packed = decode()
    assert all(layer.packed is None for layer in fast_layers(policy.model))
    for ours, theirs in zip(packed, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
