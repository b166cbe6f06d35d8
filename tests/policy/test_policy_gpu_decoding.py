"""Which models take the fused decoding step of a GPU: those that compute nothing but the usual layers of their type."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import nn

from flatpeak.policy.gpu_decoding import KINDS, FusedDecoding, _is_usual
from flatpeak.policy.model_settings import make_adapted_layers_fast
from support.models import tiny_model


def is_usual_on_a_gpu(causal: Any) -> bool:
    """`_is_usual` of a model in float32, as if its weights were on a GPU."""
    weight = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    given = SimpleNamespace(config=causal.config, parameters=lambda: [weight], base_model_prefix="model")
    given.model = causal.model
    return _is_usual(given)


def add_adapter(causal: Any) -> None:
    peft.get_peft_model(causal, peft.LoraConfig(target_modules=["q_proj"]))


def add_fast_adapter(causal: Any) -> None:
    add_adapter(causal)
    make_adapted_layers_fast(causal)


def change_gate(causal: Any) -> None:
    causal.model.layers[1].mlp.act_fn = nn.GELU()


def add_hook(causal: Any) -> None:
    causal.model.layers[1].register_forward_hook(lambda module, arguments, output: output)


@pytest.mark.parametrize("kind", KINDS)
def test_the_usual_layers_are_fused(kind: str) -> None:
    assert is_usual_on_a_gpu(tiny_model(kind))


@pytest.mark.parametrize("change", [add_adapter, add_fast_adapter, change_gate, add_hook])
def test_layers_that_compute_something_else_are_not_fused(change: Callable[[Any], None]) -> None:
    causal = tiny_model("qwen2")
    change(causal)
    assert not is_usual_on_a_gpu(causal)


def test_layers_with_a_merged_adapter_are_fused() -> None:
    adapted: Any = peft.get_peft_model(tiny_model("qwen2"), peft.LoraConfig(target_modules=["q_proj"]))
    assert is_usual_on_a_gpu(adapted.merge_and_unload())


@pytest.mark.parametrize("biases", [False, True])
def test_refreshing_copies_the_changed_weights_into_the_same_memory(biases: bool) -> None:
    model = tiny_model("llama", attention_bias=biases)
    fused = FusedDecoding(model)
    addresses = [each.data_ptr() for each in fused.tensors]
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    with torch.inference_mode():
        fused.refresh()
    assert [each.data_ptr() for each in fused.tensors] == addresses
    assert all(map(torch.equal, fused.tensors, FusedDecoding(model).tensors))
    assert len(fused.tensors) == 2 * (1 + biases)
