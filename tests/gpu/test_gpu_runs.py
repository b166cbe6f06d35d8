"""Whole runs on a GPU: skipped where there is none."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flatpeak import train
from support.runs import tiny_recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODEL: dict[str, Any] = {
    "new": {
        "architecture": "qwen2",
        "config": {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
        },
    },
    "device": "cuda",
}


def uneven(completion: str, **_: Any) -> float:
    """A reward that differs within groups from the first step on."""
    return float(sum(map(ord, completion)) % 7)


def metrics(directory: Path, *, reward: Any = None, **sections: Any) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that have a step of training."""
    sections["model"] = {**MODEL, **sections.get("model", {})}
    path = Path(train(tiny_recipe(directory, **sections), reward=reward, progress=False).path)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "policy/loss" in row]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_learns_and_is_right_about_its_own_logprobs(dtype: str, tmp_path: Path) -> None:
    rows = metrics(
        tmp_path,
        model={"dtype": dtype},
        rollout={"prompts_per_step": 16, "group_size": 8},
        optimizer={"learning_rate": 3e-3},
        training={"steps": 40},
    )
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    gaps = [row["rollout/logprob_gap_mean"] for row in rows if "rollout/logprob_gap_mean" in row]
    assert max(gaps) < (1e-4 if dtype == "float32" else 0.02)


def test_regularization_in_bfloat16_with_masters_is_that_in_float32(tmp_path: Path) -> None:
    first: dict[str, dict[str, Any]] = {}
    for dtype in ("float32", "bfloat16"):
        (first[dtype],) = metrics(
            tmp_path / dtype,
            reward=uneven,
            model={"dtype": dtype},
            rollout={"prompts_per_step": 16, "group_size": 8, "max_new_tokens": 8},
            optimizer={"learning_rate": 1e-5},
            gradient_regularization={"strength": 0.1},
            training={"steps": 1},
        )
    assert first["bfloat16"]["gradreg/step_consistency"] > 0.9
    precise, coarse = (first[dtype]["gradreg/penalty_ratio"] for dtype in ("float32", "bfloat16"))
    assert coarse == pytest.approx(precise, rel=0.25)


def test_memory_stays_flat_over_50_steps(tmp_path: Path) -> None:
    allocated: list[int] = []

    def reward(completion: Any, **_: Any) -> float:
        allocated.append(torch.cuda.memory_allocated())
        return uneven(completion)

    recipe = tiny_recipe(
        tmp_path,
        model={**MODEL, "dtype": "bfloat16"},
        rollout={"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 32},
        gradient_regularization={"strength": "ratio:0.3"},
        training={"steps": 50},
    )
    train(recipe, reward=reward, progress=False)
    gc.collect()
    begin = len(allocated) // 5
    assert begin > 500
    assert max(allocated[begin:]) <= 1.02 * max(allocated[:begin])
