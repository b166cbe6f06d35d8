"""The GPU benchmark: its arithmetic by hand, and every part of it on tiny shapes on a CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import SHAPES, Peaks, Shape, build_model, decode_ceiling, training_flops
from benchmarks.gpu.trl import StepClock

PUBLISHED = {"0.5B": 494_032_768, "1.5B": 1_543_714_304, "7B": 7_615_616_512}
H200 = Peaks(bytes_per_second=4.3e12, flops_per_second=792e12, dtype=torch.bfloat16)


def bench(**fields: Any) -> Bench:
    settings: dict[str, Any] = {"seconds": 60.0, "save": lambda: None} | fields
    return Bench(device="cpu", dtype=torch.float32, tiny=True, **settings)


@pytest.mark.parametrize("size", PUBLISHED)
def test_models_have_the_published_number_of_parameters(size: str) -> None:
    model = build_model(size, device="meta", dtype=torch.bfloat16, mean_length=100, longest=64)
    assert sum(p.numel() for p in model.parameters()) - model.lm_head.bias.numel() == PUBLISHED[size]
    multiplied = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert SHAPES[size].layer_parameters + SHAPES[size].head_parameters == multiplied


@pytest.mark.parametrize(("batch", "ceiling"), [(1, 1.39e3), (64, 68.4e3), (128, 111e3), (256, 137e3)])
def test_the_ceiling_of_decoding_is_the_computed_roofline(batch: int, ceiling: float) -> None:
    # performance.md's table, which takes 989 TFLOPS at 80%.
    tokens = decode_ceiling(SHAPES["1.5B"], H200, batch=batch, group=1, prompt=400, own=112)
    assert tokens == pytest.approx(ceiling, rel=0.02)


def test_a_shared_prompt_is_read_once_per_group() -> None:
    shape = Shape(hidden=1, intermediate=0, layers=1, heads=1, kv_heads=1, vocabulary=0, tied=True)
    slow = Peaks(bytes_per_second=1.0, flops_per_second=1e9, dtype=torch.float32)
    seconds = 8 / decode_ceiling(shape, slow, batch=8, group=4, prompt=100, own=10)
    weights = 4 * 1  # query, key, value and output products of one number each
    assert seconds == 4 * (weights + 2 * (8 * 10 + 2 * 100))


def test_training_operations_are_counted_by_hand() -> None:
    shape = Shape(hidden=4, intermediate=6, layers=3, heads=2, kv_heads=1, vocabulary=10, tied=True)
    per_layer = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6
    # A prompt of 2 tokens, answers of 3 and 1: token by token, what each attends to.
    prompt, first, second = [1, 2], [3, 4, 5], [3]
    shared = 2 * 6 * 3 * per_layer + 2 * 4 * 10 * 4 + 4 * 3 * 2 * 2 * sum(prompt + first + second)
    twice = 2 * 8 * 3 * per_layer + 2 * 4 * 10 * 4 + 4 * 3 * 2 * 2 * sum(prompt + prompt + first + second)
    assert training_flops(shape, prompts=[2], responses=[[3, 1]], shared=True) == 3 * shared
    assert training_flops(shape, prompts=[2], responses=[[3, 1]], shared=False) == 3 * twice


def test_steps_of_trl_are_the_time_between_two_batches_of_completions() -> None:
    clock = StepClock(bench(), until=math.inf)
    clock.calls = [(0.0, 10), (5.0, 20), (7.0, 40), (10.0, 20)]
    assert clock.rows() == [
        {"step_seconds": 5.0, "response_tokens": 15.0, "response_tokens_per_second": 3.0},
        {"step_seconds": 2.0, "response_tokens": 30.0, "response_tokens_per_second": 15.0},
        {"step_seconds": 3.0, "response_tokens": 30.0, "response_tokens_per_second": 10.0},
    ]


def test_without_a_gpu_the_script_says_what_it_can_do_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cpu --tiny"):
        gpu.main(["--json", str(tmp_path / "gpu.json")])


def run(path: Path, *arguments: str) -> dict[str, list[dict[str, Any]]]:
    gpu.main(["--json", str(path), "--device", "cpu", "--tiny", *arguments])
    content = json.loads(path.read_text())
    assert content["facts"]["versions"]["torch"] == torch.__version__
    parts: dict[str, list[dict[str, Any]]] = content["parts"]
    for rows in parts.values():
        numbers = [value for row in rows for value in row.values() if isinstance(value, float)]
        assert all(math.isfinite(number) for number in numbers)
    return parts


@pytest.mark.slow
def test_every_part_runs_on_tiny_shapes(tmp_path: Path, one_thread: None) -> None:
    parts = run(tmp_path / "gpu.json", "--dtype", "float32")
    assert list(parts) == ["roofline", "decode", "train", "step", "gr", "trl"]
    memory, product = parts["roofline"]
    assert memory["read_gb_per_second"] > 0.1 and product["tflops"] > 0.001
    *points, large, attention = parts["decode"]
    assert "do not fit" in large["skipped"]
    for row, batch in zip(points, (4, 8), strict=True):
        assert row["tokens_per_second"] * row["milliseconds_per_token"] == pytest.approx(1000 * batch)
        assert row["share_of_ceiling"] * row["ceiling_tokens_per_second"] == pytest.approx(row["tokens_per_second"])
    assert attention["chosen_gb_per_second"] > 0
    assert len(parts["train"]) == 10
    assert all(row["mfu"] > 0 for row in parts["train"])
    assert parts["train"][4]["packed_tokens"] > parts["train"][0]["packed_tokens"]
    for row in parts["step"][1:]:
        assert row["completions"] == 8
        assert row["logprob_gap_max"] < 1e-4
        assert row["step_seconds"] == pytest.approx(
            row["rollout_seconds"] + row["collate_seconds"] + row["update_seconds"]
        )
    assert len({row["response_tokens"] for row in parts["step"][1:]}) > 1
    assert parts["gr"][0]["regularized_seconds"] > 0
    generate, batching = parts["trl"]
    assert generate["stopped"] is None
    assert len(generate["steps"]) == 3
    assert "memory" in batching["skipped"]
