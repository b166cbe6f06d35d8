"""Counts of a planned model: parameters as real models have them, bytes of moments and 4-bit layers by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flatpeak.apps.planning.inventory import Inventory, nf4_bytes, take_inventory
from flatpeak.errors import UserError
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.master_weights import TrainedWeight
from flatpeak.training.optimizer import build_optimizer
from support.architectures import ARCHITECTURES
from support.models import tiny_model
from support.plans import planned, saved_model


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma3", "phi3", "starcoder2"])
def test_parameters_are_those_of_the_real_model(tmp_path: Path, name: str) -> None:
    architecture, settings = ARCHITECTURES[name]
    settings = {**settings, "vocab_size": 24}
    inventory = take_inventory(planned(saved_model(tmp_path, architecture, **settings)))
    real = tiny_model(architecture, **settings)
    assert inventory.parameters == inventory.trained_parameters == sum(p.numel() for p in real.parameters())
    assert inventory.weights == inventory.gradients == 4 * inventory.parameters
    assert (inventory.masters, inventory.adapters, inventory.quantized) == (0, 0, 0)


def test_tied_weights_count_once(tmp_path: Path) -> None:
    tied, free = (
        take_inventory(planned(saved_model(tmp_path / str(tie), tie_word_embeddings=tie))).parameters
        for tie in (True, False)
    )
    assert free - tied == 24 * 16


def test_bfloat16_weights_have_masters_and_gradients_in_float32(tmp_path: Path) -> None:
    inventory = take_inventory(planned(saved_model(tmp_path), dtype="bfloat16"))
    count = inventory.parameters
    assert (inventory.weights, inventory.masters, inventory.gradients) == (2 * count, 4 * count, 4 * count)
    assert inventory.moments(OptimizerConfig()) == 8 * count


@pytest.mark.parametrize("lora", [{}, {"rank": 2, "target_modules": ["q_proj"]}, {"dora": True}])
def test_adapters_are_those_that_peft_makes(tmp_path: Path, lora: dict[str, Any]) -> None:
    base = saved_model(tmp_path, weights=True)
    inventory = take_inventory(planned(base, lora=lora, dtype="bfloat16"))
    policy = load_policy(ModelConfig.model_validate({"path": str(base), "device": "cpu", "lora": lora}))
    real = sum(parameter.numel() for parameter in policy.parameters())
    assert (inventory.trained_parameters, inventory.adapters, inventory.masters) == (real, 4 * real, 0)
    assert inventory.weights == 2 * inventory.parameters


def test_one_projection_of_rank_2_has_two_small_matrices(tmp_path: Path) -> None:
    lora = {"rank": 2, "target_modules": ["k_proj"]}
    inventory = take_inventory(planned(saved_model(tmp_path), lora=lora))
    assert inventory.trained_parameters == 2 * (2 * 16 + 8 * 2)  # two layers; k_proj is 16 -> 2 heads of 4
    assert inventory.moments(OptimizerConfig()) == 8 * inventory.trained_parameters


def test_a_large_matrix_in_4_bits_has_4_127_bits_per_weight() -> None:
    elements = 4096 * 4096
    # 64 weights share a byte, and 256 of these bytes share a float32 (QLoRA, section 3: 0.127 bits).
    assert nf4_bytes(elements) == elements // 2 + elements // 64 + 4 * elements // 64 // 256 + 4 * 273
    assert 8 * nf4_bytes(elements) / elements == pytest.approx(4.127, abs=1e-3)


def test_quantized_layers_take_the_bytes_that_bitsandbytes_takes(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base = saved_model(tmp_path, weights=True, hidden_size=64, intermediate_size=128)
    settings = {"quantization": "nf4", "lora": {"rank": 4}, "dtype": "bfloat16"}
    inventory = take_inventory(planned(base, **settings))
    policy = load_policy(ModelConfig.model_validate({"path": str(base), "device": "cpu", **settings}))
    in_4_bits = [p for p in policy.model.parameters() if type(p).__name__ == "Params4bit"]
    states = [p.quant_state for p in in_4_bits]
    real = sum(p.nbytes for p in in_4_bits) + sum(
        tensor.nbytes for s in states for tensor in (s.absmax, s.code, s.offset, s.state2.absmax, s.state2.code)
    )
    assert inventory.quantized == real
    others = [p for p in policy.model.parameters() if type(p).__name__ != "Params4bit" and not p.requires_grad]
    assert inventory.weights == sum(p.nbytes for p in others)


def test_moments_in_8_bits_are_those_of_bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes")
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((70, 100), (64, 64), (4095,))]
    config = OptimizerConfig(name="adamw_8bit")
    optimizer = build_optimizer(weights, config)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    names = ("state1", "state2", "absmax1", "absmax2")
    states = [optimizer.state[weight] for weight in weights]
    real = sum(state[name].nbytes for state in states for name in names if name in state)
    by_hand = (2 * 7000 + 8 * 28) + (2 * 4096 + 8 * 16) + 8 * 4095  # the last is too small for 8 bits
    assert real == by_hand
    inventory = _inventory_of((7000, 4096, 4095))
    assert inventory.moments(config) == by_hand
    assert inventory.moments(OptimizerConfig(name="sgd")) == 0
    assert (inventory.step_scratch(config, on_cpu=True), inventory.step_scratch(config, on_cpu=False)) == (140_000, 0)


def _inventory_of(sizes: tuple[int, ...], *, itemsize: int = 4) -> Inventory:
    trained = tuple(TrainedWeight(elements=size, stored=itemsize * size) for size in sizes)
    return Inventory(parameters=0, weights=0, quantized=0, adapters=0, files=0, trained=trained)


def test_offloading_has_a_bucket_of_masters_and_moments_on_the_device_at_a_time() -> None:
    million = 1 << 20
    sizes = (20 * million, 10 * million, 10 * million, 40 * million)
    half = _inventory_of(sizes, itemsize=2)
    # At most 32 Mi weights to a bucket: 30, 10, and 40 by themselves; a master and two moments of 4 bytes each.
    assert half.bucket(OptimizerConfig()) == 12 * 40 * million
    assert _inventory_of(sizes[:3], itemsize=2).bucket(OptimizerConfig()) == 12 * 30 * million
    assert _inventory_of(sizes[:3]).bucket(OptimizerConfig()) == 8 * 30 * million  # weights in float32 have no masters


def test_pinned_memory_is_rounded_up_to_powers_of_two() -> None:
    # A master and two moments of 12,000 bytes each, 16,384 once they are pinned.
    assert _inventory_of((3000,), itemsize=2).pinned(OptimizerConfig()) == 3 * 16_384
    assert _inventory_of((3000,)).pinned(OptimizerConfig(name="sgd")) == 0


def test_files_that_weights_are_read_from_count_where_there_are_any(tmp_path: Path) -> None:
    base = saved_model(tmp_path, weights=True)
    size = (base / "model.safetensors").stat().st_size
    assert take_inventory(planned(base)).files == size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": {"target_modules": ["q_proi"]}}, "no module is called q_proi"),
        ({"lora": {"adapter": "nowhere/there"}}, "model.lora.adapter=nowhere/there does not load as an adapter"),
    ],
)
def test_adapters_that_fit_nothing_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        take_inventory(planned(saved_model(tmp_path), **settings))


def test_a_configuration_of_no_causal_model_is_refused(tmp_path: Path) -> None:
    saved_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(UserError, match=r"its config.json has no num_hidden_layers"):
        planned(tmp_path)
