"""A tiny model writer and trainer state, told apart by step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flatpeak.runs.checkpoints import write_checkpoint


def state_of(step: int) -> dict[str, Tensor]:
    return {
        "moment": torch.arange(24, dtype=torch.float32).reshape(4, 6) / 7 + step,
        "half": torch.tensor([0.1, -3.0, float("inf")], dtype=torch.bfloat16) * step,
        "count": torch.tensor(step, dtype=torch.int64),
    }


def save_model(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "tiny"}\n')
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 4)
    (directory / "extra").mkdir()
    (directory / "extra" / "tokenizer.json").write_text('{"vocab": ["a", "b"]}\n')


@pytest.fixture
def write() -> Callable[[Path, int], Path]:
    def write_one(parent: Path, step: int) -> Path:
        state = {"cursor": step * 3, "note": "später", "best": float("-inf")}
        return write_checkpoint(parent, step, save_model=save_model, tensors=state_of(step), state=state)

    return write_one
