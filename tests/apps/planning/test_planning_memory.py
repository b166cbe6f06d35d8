"""The memory of a planned run: keys and values as a real cache has them, and phases of items counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flatpeak.apps.planning import memory, rollout_memory
from flatpeak.apps.planning.fake_policy import PassSettings
from flatpeak.apps.planning.inventory import take_inventory
from flatpeak.apps.planning.memory import (
    GAPS,
    KERNELS,
    MemoryEstimate,
    Phase,
    regularization_bytes,
)
from flatpeak.apps.planning.rollout_memory import native_copy, packed_copies, request_memory
from flatpeak.apps.planning.workload import Request
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.kernels import matmul
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.rollout.scheduler import Schedule
from support.plans import CPU, GPU, WORK, config_of, estimated, planned, saved_model


def phase(estimate: MemoryEstimate, name: str) -> Phase:
    return next(one for one in estimate.phases if one.name == name)


@pytest.mark.parametrize("max_rows", [512, 6])
def test_keys_and_values_are_those_of_a_real_request(tmp_path: Path, max_rows: int) -> None:
    base = saved_model(tmp_path, weights=True)
    config = config_of(base, rollout={"max_rows": max_rows})
    settings = PassSettings(model=planned(base), on_cpu=True, recompute=False, accumulated=False, dropout=False)
    request = Request(prompt_lengths=WORK.prompt_lengths, group_size=4, new_tokens=20)
    policy = load_policy(ModelConfig(path=str(base), device="cpu"))
    slots = min(max_rows, 12)
    schedule = Schedule(
        [0, 1, 2], group_size=4, num_slots=slots, batch_sizes=policy.batch_sizes(slots), compact_below=0.95
    )
    cache = policy.open(
        slots=schedule.batch_size, entries=schedule.num_entries, prompt_lengths=[9, 7, 5], new_tokens=20
    )
    with torch.no_grad():
        policy.prefill(cache, [[3] * 9, [3] * 7, [3] * 5], [0, 1, 2])
    memories = [*cache.layers.values(), *cache.prompts.layers.values()]
    real = sum(memory.nbytes for pair in memories for memory in pair)
    assert request_memory(request, config, settings).keys_and_values == real


def test_logits_of_a_request_count_for_every_completion(tmp_path: Path) -> None:
    base = saved_model(tmp_path, vocab_size=50_000)
    settings = PassSettings(model=planned(base), on_cpu=False, recompute=False, accumulated=False, dropout=False)
    request = Request(prompt_lengths=(9, 7, 5), group_size=100, new_tokens=20)
    memory = request_memory(request, config_of(base), settings)
    # 300 completions: their logits and probabilities; logits of 3 prompts, and these stacked.
    assert memory.decoding == pytest.approx(4 * 50_000 * (2 * 300 + 2 * 3), rel=0.02)
    warm = config_of(base, rollout={"temperature": 0.5, "min_new_tokens": 2, "top_p": 0.9})
    assert request_memory(request, warm, settings).decoding == pytest.approx(4 * 50_000 * (7 * 300 + 2 * 3), rel=0.02)


def test_packed_copies_are_of_the_large_matrices_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = saved_model(tmp_path, hidden_size=64, intermediate_size=160, tie_word_embeddings=True)
    monkeypatch.setattr(rollout_memory, "onednn_is_faster", lambda: True)
    # Two layers: gate, up and down; q, k, v and o have less than 8,192 elements, and so has the output layer.
    assert matmul.SMALLEST == 8192
    one = 4 * 64 * 160
    assert packed_copies(planned(base), on_cpu=True) == [2 * one, 2 * one, one, one]  # gate and up share a copy
    assert packed_copies(planned(base, lora={}), on_cpu=True) == [one] * 6  # adapters stand between
    assert packed_copies(planned(base, dtype="bfloat16"), on_cpu=True) == []
    assert packed_copies(planned(base, lora={}, quantization="nf4"), on_cpu=True) == []
    assert packed_copies(planned(base), on_cpu=False) == []
    monkeypatch.setattr(rollout_memory, "onednn_is_faster", lambda: False)
    assert packed_copies(planned(base), on_cpu=True) == []


def test_native_kernels_decode_with_a_copy_of_every_linear_weight(tmp_path: Path) -> None:
    base = saved_model(tmp_path / "qwen2")
    layers = load_policy(ModelConfig(path=str(saved_model(tmp_path / "weights", weights=True)), device="cpu")).causal
    linears = sum(one.weight.nbytes for one in layers.modules() if isinstance(one, torch.nn.Linear))
    assert native_copy(config_of(base), planned(base), on_cpu=True) == linears
    assert native_copy(config_of(base), planned(base, lora={}), on_cpu=True) == linears
    assert phase(estimated(base), "rollout").items["packed copies"] == linears
    assert native_copy(config_of(base), planned(base, dtype="bfloat16"), on_cpu=True) == 0
    assert native_copy(config_of(base), planned(base), on_cpu=False) == 0
    assert native_copy(config_of(base, rollout={"kernels": "torch"}), planned(base), on_cpu=True) == 0
    gemma = saved_model(tmp_path / "gemma3", "gemma3_text")
    assert native_copy(config_of(gemma), planned(gemma), on_cpu=True) == 0


def test_phases_have_the_items_that_are_alive_in_them(tmp_path: Path) -> None:
    base = saved_model(tmp_path, weights=True)
    estimate = estimated(base)
    count = take_inventory(planned(base)).parameters
    assert [one.name for one in estimate.phases] == ["loading", "rollout", "update"]
    loading, rollout, update = (dict(one.items) for one in estimate.phases)
    assert loading == {"weights": 4 * count, "files": (base / "model.safetensors").stat().st_size}
    assert rollout["kernels"] == update["kernels"] == KERNELS
    assert rollout["optimizer"] == 8 * count
    assert "gradients" not in rollout
    assert (update["optimizer"], update["gradients"]) == (8 * count, 4 * count)
    assert update["kept by the C library"] == update["activations"] // GAPS
    assert estimate.peak == max(one.total for one in estimate.phases)


def test_copies_too_small_for_activations_stay_with_the_c_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = saved_model(tmp_path, hidden_size=64, intermediate_size=160, vocab_size=64)
    monkeypatch.setattr(rollout_memory, "onednn_is_faster", lambda: True)
    # Activations of 261 tokens (3 prompts of 21, 12 completions of 20) and 160 units: 167,040 bytes, float32.
    items = phase(estimated(base), "update").items
    single, pair = 4 * 64 * 160, 2 * 4 * 64 * 160
    assert items["kept by the C library"] == items["activations"] // GAPS + 2 * (single + pair)
    few = replace(WORK, prompt_lengths=(9,), group_size=1, new_tokens=20)  # 18,560 bytes fit into either
    small = phase(estimated(base, work=few), "update").items
    assert small["kept by the C library"] == small["activations"] // GAPS


@pytest.mark.slow
def test_quantizing_on_a_cpu_leaves_blocks_with_the_c_library(tmp_path: Path) -> None:
    base = saved_model(tmp_path, hidden_size=64, intermediate_size=160)
    model = {"lora": {}, "quantization": "nf4"}
    items = phase(estimated(base, model=model), "rollout").items
    copies = 9 * 4 * 64 * 160
    assert items["kept by the C library"] == items["decoding"] // GAPS + copies
    assert "kept by the C library" not in phase(estimated(base, GPU, model=model), "rollout").items


def test_a_gpu_keeps_the_memory_of_rollouts_and_reads_files_elsewhere(tmp_path: Path) -> None:
    estimate = estimated(saved_model(tmp_path), GPU)
    assert [one.name for one in estimate.phases] == ["rollout", "update"]
    rollout, update = (one.items for one in estimate.phases)
    for item in ("keys and values", "decoding", "concatenated weights"):
        assert rollout[item] == update[item] > 0
    assert rollout["concatenated weights"] == 2 * 4 * 16 * (16 + 8 + 8)  # layers, bytes, columns, rows
    assert not {"kernels", "kept by the C library", "packed copies"} & {*rollout, *update}


@pytest.mark.slow
def test_an_averaged_reference_has_float32_weights_beside_its_own(tmp_path: Path) -> None:
    base = saved_model(tmp_path)
    estimate = estimated(base, model={"dtype": "bfloat16"}, reference={"ema": 0.9})
    items = phase(estimate, "update").items
    assert items["reference average"] == 2 * items["reference"] == items["masters"]


@pytest.mark.parametrize("sections", [{"kl": {"coefficient": 0.1}}, {"reference": {"keep": True}}])
def test_a_reference_is_a_copy_of_what_is_trained(tmp_path: Path, sections: dict[str, Any]) -> None:
    base = saved_model(tmp_path)
    inventory = take_inventory(planned(base))
    for name in ("rollout", "scoring", "update"):
        assert phase(estimated(base, **sections), name).items["reference"] == inventory.weights
    adapted = estimated(base, **sections, model={"lora": {}})
    adapters = take_inventory(planned(base, lora={})).adapters
    assert phase(adapted, "update").items["reference"] == phase(adapted, "update").items["adapters"] == adapters
    assert "reference" not in phase(estimated(base), "update").items


def test_an_exact_kl_needs_the_states_of_the_reference_and_four_more_arrays_of_a_chunk(tmp_path: Path) -> None:
    base = saved_model(tmp_path)
    plain, exact = (estimated(base, kl={"coefficient": 0.1, "estimator": name}) for name in ("k3", "exact"))
    shape = planned(base).shape
    tokens = exact.micro_batch_tokens
    added = tokens * (4 * shape.hidden_size + 4 * 4 * shape.vocab_size)  # fewer than the tokens of a chunk
    assert phase(exact, "update").items["exact KL"] == added
    assert phase(exact, "update").total == phase(plain, "update").total + added


def test_a_named_reference_is_a_model_of_its_own(tmp_path: Path) -> None:
    base = saved_model(tmp_path / "base")
    other = saved_model(tmp_path / "other", hidden_size=32)
    sections = {"kl": {"coefficient": 0.1}, "reference": {"model": str(other)}}
    estimate = estimated(base, **sections)
    assert phase(estimate, "update").items["reference"] == take_inventory(planned(other)).weights


def test_regularization_holds_a_gradient_a_copy_of_the_weights_and_for_checks_another_gradient(tmp_path: Path) -> None:
    model = planned(saved_model(tmp_path))
    inventory = take_inventory(model)
    blocks = sum(p.numel() for name, p in model.modules.named_parameters() if ".layers." in name)
    whole = inventory.parameters

    def size(transient: int = 10**9, **settings: Any) -> int:
        config = GradientRegularizationConfig(strength=0.1, **settings)
        return regularization_bytes(config, model, inventory, transient=transient)

    assert size(check_every=0) == 4 * (whole + blocks)
    assert size() == 4 * (whole + 2 * blocks)
    assert size(perturbed="all") == 4 * 3 * whole
    assert size(direction="random", difference="central") == 4 * (whole + 3 * blocks)
    assert size(every=2, check_every=0) == 4 * (whole + 2 * blocks)
    # Without activations the penalty and the sum are what counts, were the weights' copies smaller.
    assert size(transient=0, check_every=0, perturbed="all") == 4 * 2 * whole


def test_regularization_is_an_item_of_updates(tmp_path: Path) -> None:
    base = saved_model(tmp_path)
    items = phase(estimated(base, gradient_regularization={"strength": 0.1}), "update").items
    assert items["regularization"] > items["gradients"]
    assert "regularization" not in phase(estimated(base), "update").items


def test_supervised_updates_have_an_optimizer_of_their_own(tmp_path: Path) -> None:
    base = saved_model(tmp_path)
    sections = {"sft": {"steps": 5}, "optimizer": {"name": "sgd"}}
    estimate = estimated(base, work=replace(WORK, sft_steps=5, demonstrations=((9, 20),)), **sections)
    count = estimate.inventory.parameters
    assert phase(estimate, "sft update").items["optimizer"] == 8 * count
    assert "optimizer" not in phase(estimate, "update").items
    alone = estimated(
        base,
        work=replace(WORK, sft_steps=5, demonstrations=((9, 20),), steps=0),
        sft={"steps": 5},
        training={"steps": 0},
    )
    assert [one.name for one in alone.phases] == ["loading", "sft update", "rollout"]


def test_moments_in_8_bits_are_expanded_in_the_step_on_a_cpu(tmp_path: Path) -> None:
    base = saved_model(tmp_path, vocab_size=1000)
    on_cpu = estimated(base, optimizer={"name": "adamw_8bit"})
    assert phase(on_cpu, "step").items["optimizer step"] == 20 * 1000 * 16  # the embeddings
    assert [one.name for one in estimated(base, GPU, optimizer={"name": "adamw_8bit"}).phases] == ["rollout", "update"]


def test_an_architecture_without_a_dry_run_is_estimated_by_a_rule_of_thumb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = saved_model(tmp_path, "gpt_neox")

    def no_dry_run(*args: Any) -> int:
        raise memory.NoDryRunError("values decide")

    monkeypatch.setattr(memory, "update_peak", no_dry_run)
    estimate = estimated(base)
    # 12 completions of 29 tokens, padded; 34 bytes per token, unit and layer in half precision, so 68 in float32.
    assert phase(estimate, "update").items["activations"] == 68 * 12 * 29 * 16 * 2
    assert any("rule of thumb" in note for note in estimate.notes)
    assert any("transformers' generate" in note for note in estimate.notes)


def test_what_is_not_counted_is_said(tmp_path: Path) -> None:
    sections = {"gradient_regularization": {"strength": 0.1, "difference": "exact"}, "training": {"compile": True}}
    notes = estimated(saved_model(tmp_path), **sections).notes
    assert [note.partition(":")[0] for note in notes] == [
        "gradient_regularization.difference=exact",
        "training.compile",
    ]


def test_offloaded_states_are_on_the_device_a_bucket_at_a_time(tmp_path: Path) -> None:
    base = saved_model(tmp_path)
    half = {"model": {"dtype": "bfloat16"}}
    kept, offloaded = (estimated(base, GPU, optimizer={"offload": offload}, **half) for offload in (False, True))
    count = kept.inventory.parameters
    for name in ("rollout", "update"):
        both = phase(kept, name).items, phase(offloaded, name).items
        assert both[0]["masters"] + both[0]["optimizer"] == 12 * count
        assert both[0].keys() - both[1].keys() == {"masters", "optimizer"}
    step = phase(offloaded, "step").items
    assert step["optimizer step"] == 12 * count  # all of so small a model is one bucket
    assert step["gradients"] == 4 * count
    assert (kept.host, offloaded.host > 12 * count) == (0, True)


def test_an_offloaded_reference_is_on_the_device_while_it_scores(tmp_path: Path) -> None:
    base = saved_model(tmp_path)
    kept, offloaded = (
        estimated(base, GPU, kl={"coefficient": 0.1}, reference={"offload": offload}) for offload in (False, True)
    )
    weights = kept.inventory.weights
    assert [one.items.get("reference", 0) for one in kept.phases] == [weights] * 3
    assert {one.name: one.items.get("reference", 0) for one in offloaded.phases} == {
        "rollout": 0,
        "scoring": weights,
        "update": 0,
    }
    assert offloaded.host == 2 * weights


def test_offloading_moves_nothing_on_a_cpu(tmp_path: Path) -> None:
    base = saved_model(tmp_path)
    sections = {"kl": {"coefficient": 0.1}, "optimizer": {"offload": True}, "reference": {"offload": True}}
    estimate = estimated(base, **sections)
    assert estimate.host == 0
    assert [one.total for one in estimate.phases] == [
        one.total for one in estimated(base, kl={"coefficient": 0.1}).phases
    ]


def test_a_reward_model_has_weights_throughout_and_a_phase_of_its_own(tmp_path: Path) -> None:
    base = saved_model(tmp_path)
    rewards = {"preference": {"type": "reward_model", "path": str(base), "dtype": "bfloat16"}}
    sections = {"rewards": rewards, "evaluation": {"accuracy": None, "metric": "reward"}}
    estimate = estimated(base, GPU, **sections)
    # A head of two scores, 2 x 16, in place of the output layer, 24 x 16.
    expected = 2 * (estimate.inventory.parameters - 24 * 16 + 2 * 16)
    assert [one.name for one in estimate.phases] == ["rollout", "rewards", "update"]
    assert {one.items["reward models"] for one in estimate.phases} == {expected}
    # At least two tensors of 12 texts of 29 tokens each, 16 units wide.
    assert phase(estimate, "rewards").items["activations"] > 2 * 2 * 12 * 29 * 16
    elsewhere = {"preference": {**rewards["preference"], "device": "cpu"}}
    others = estimated(base, GPU, **{**sections, "rewards": elsewhere})
    assert [one.items.get("reward models") for one in others.phases] == [None, None]


def test_the_second_copy_of_rollouts_ahead_stays_and_draws_beside_updates(tmp_path: Path) -> None:
    base = saved_model(tmp_path)
    model = planned(base)
    settings = PassSettings(model=model, on_cpu=True, recompute=False, accumulated=False, dropout=False)
    request = Request(prompt_lengths=WORK.prompt_lengths, group_size=4, new_tokens=20)
    drawn = request_memory(request, config_of(base), settings)
    # A float32 model whose weights are all trained: its weights, the file that they come in, and libraries.
    stays = 2 * 4 * take_inventory(model).parameters + KERNELS + CPU.libraries
    copies = native_copy(config_of(base), model, on_cpu=True)
    draws = drawn.keys_and_values + drawn.decoding + drawn.decoding // GAPS + copies
    plain, ahead = estimated(base), estimated(base, rollout={"staleness": 1})
    more = {one.name: one.total - phase(plain, one.name).total for one in ahead.phases}
    assert more == dict.fromkeys(more, 0) | {"rollout": stays, "update": stays + draws}


def test_servers_that_draw_ahead_take_no_memory_for_it(tmp_path: Path) -> None:
    base = saved_model(tmp_path)
    plain, ahead = (
        estimated(base, rollout={"engine": {"type": "vllm"}, "staleness": staleness}) for staleness in (0, 1)
    )
    assert [one.items for one in ahead.phases] == [one.items for one in plain.phases]
