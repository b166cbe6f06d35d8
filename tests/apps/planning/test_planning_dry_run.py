"""Dry runs: bytes counted by hand, and passes without data that take what real passes take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flatpeak.apps.planning import dry_run
from flatpeak.apps.planning.dry_run import (
    prefill_memory,
    scoring_peak,
    update_peak,
)
from flatpeak.apps.planning.fake_policy import MemoryTracker, PassSettings, _attention_size
from flatpeak.apps.planning.workload import full_batch
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.policy.packing import pack_prompts
from flatpeak.policy.training_attention import PackedContext
from support.plans import planned, real_update_peak, saved_model

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "max_position_embeddings": 512}
BATCH = full_batch([30, 21], 4, 70)


def settings_of(directory: Path, *, on_cpu: bool = True, recompute: bool = False, **model: Any) -> PassSettings:
    return PassSettings(
        model=planned(directory, **model), on_cpu=on_cpu, recompute=recompute, accumulated=False, dropout=False
    )


def test_the_tracker_counts_what_is_alive() -> None:
    before = torch.zeros(1000)
    with MemoryTracker([before]) as memory:
        view = before.view(10, 100)
        assert memory.live == 0
        double = view.double()
        assert memory.live == 8000
        half = double[:5].clone()
        assert (memory.live, memory.peak) == (12_000, 12_000)
        del double
        assert (memory.live, memory.peak) == (4000, 12_000)
        half.add_(1)
        assert (memory.live, memory.peak) == (4000, 12_000)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("accumulated", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"dtype": "bfloat16"},
        {"lora": {}},
        {"lora": {"rank": 4}, "dtype": "bfloat16"},
        {"lora": {}, "quantization": "nf4", "dtype": "bfloat16"},
    ],
    ids=["float32", "bfloat16", "lora", "lora bfloat16", "qlora"],
)
def test_a_dry_run_takes_what_a_real_pass_takes(
    tmp_path: Path, model: dict[str, Any], accumulated: bool, recompute: bool
) -> None:
    base = saved_model(tmp_path, weights=True, scale=1.0, **SIZES)
    settings = replace(settings_of(base, recompute=recompute, **model), accumulated=accumulated)
    policy = load_policy(ModelConfig.model_validate({"path": str(base), "device": "cpu", **model}))
    assert policy.native, policy.notice
    real = real_update_peak(policy, BATCH, recompute=recompute, accumulated=accumulated)
    # The real pass has masks and indices besides, which are small where layers are wide.
    assert update_peak(settings, BATCH) == pytest.approx(real, rel=0.03)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma3_text"])
def test_other_architectures_are_run_as_they_are(tmp_path: Path, architecture: str) -> None:
    base = saved_model(tmp_path, architecture, weights=True, scale=1.0, **SIZES)
    policy = load_policy(ModelConfig(path=str(base), device="cpu"))
    real = real_update_peak(policy, BATCH, recompute=False, accumulated=False)
    assert update_peak(settings_of(base), BATCH) == pytest.approx(real, rel=0.03)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_deep_models_take_what_few_layers_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: bool) -> None:
    base = saved_model(tmp_path, **{**SIZES, "num_hidden_layers": 6})
    along_the_line = update_peak(settings_of(base, recompute=recompute), BATCH)
    monkeypatch.setattr(dry_run, "MORE", 6)
    assert update_peak(settings_of(base, recompute=recompute), BATCH) == along_the_line


def test_without_gradients_a_layer_is_freed_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shallow, deep = (saved_model(tmp_path / str(n), **{**SIZES, "num_hidden_layers": n}) for n in (2, 3))
    monkeypatch.setattr(dry_run, "FEW", 3)
    assert scoring_peak(settings_of(shallow), BATCH) == scoring_peak(settings_of(deep), BATCH)
    monkeypatch.undo()
    assert update_peak(settings_of(deep), BATCH) > 1.3 * update_peak(settings_of(shallow), BATCH)


def test_attention_on_a_gpu_keeps_scores_where_heads_share_keys(tmp_path: Path) -> None:
    base = saved_model(tmp_path, **SIZES)  # 4 query heads share 2 key heads
    cpu, gpu = (update_peak(settings_of(base, on_cpu=on_cpu), BATCH) for on_cpu in (True, False))
    # Of 8 responses over blocks of 64 and 6 positions, float32: what softmax gives, in each of 2 layers.
    scores = 4 * 8 * 4 * (64 * (30 + 64) + 6 * (30 + 70))
    assert gpu - cpu > 2 * scores


def test_recomputed_layers_keep_no_scores_on_a_gpu(tmp_path: Path) -> None:
    _attention_size.cache_clear()  # its first call comes from a layer that is recomputed
    base = saved_model(tmp_path, **SIZES)
    recomputed, kept = (
        update_peak(settings_of(base, on_cpu=False, recompute=recompute), BATCH) for recompute in (True, False)
    )
    assert recomputed < 0.8 * kept


def test_a_prefill_keeps_the_keys_and_values_of_its_prompts(tmp_path: Path) -> None:
    base = saved_model(tmp_path, weights=True, **SIZES)
    reading = prefill_memory(settings_of(base), [30, 21], multiple=16)
    assert reading.per_token == 2 * 2 * 2 * 16 * 4  # layers, keys and values, key heads, dimensions, float32
    policy = load_policy(ModelConfig(path=str(base), device="cpu"))
    policy.model.eval()
    held = [*policy.model.parameters(), *policy.model.buffers()]
    with torch.no_grad(), MemoryTracker(held) as memory:
        row = pack_prompts([[3] * 30, [3] * 21], device=policy.device, multiple=16)
        policy.head.logits(policy.hidden(row, PackedContext(row, keep_prompts=True)))
    assert reading.peak == pytest.approx(memory.peak, rel=0.1)


def test_prefills_of_deep_models_keep_more_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = saved_model(tmp_path, **{**SIZES, "num_hidden_layers": 6})
    by_few_layers = prefill_memory(settings_of(base), [30, 21], multiple=1)
    monkeypatch.setattr(dry_run, "FEW", 6)
    assert prefill_memory(settings_of(base), [30, 21], multiple=1) == by_few_layers


def test_models_without_the_native_engine_are_run_padded(tmp_path: Path) -> None:
    settings = settings_of(saved_model(tmp_path, "gpt_neox", **SIZES))
    assert settings.model.fallback is not None
    assert update_peak(settings, full_batch([30], 8, 70)) > scoring_peak(settings, full_batch([30], 8, 70))


def test_layers_in_4_bits_are_expanded_one_at_a_time(tmp_path: Path) -> None:
    base = saved_model(tmp_path, **{**SIZES, "hidden_size": 1024, "intermediate_size": 8192})
    batch = full_batch([4], 1, 4)
    plain, in_4_bits = (
        scoring_peak(settings_of(base, dtype="bfloat16", lora={"rank": 1}, quantization=quantization), batch)
        for quantization in (None, "nf4")
    )
    widest = 2 * 1024 * 8192  # in bfloat16
    assert 0.5 * widest < in_4_bits - plain < 1.5 * widest
