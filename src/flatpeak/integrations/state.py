"""The regularizer's part of a Hugging Face checkpoint: JSON and safetensors, no pickle."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from flatpeak.gradreg.regularizer import GradientRegularizer

STATE = "gradient_regularization.json"
MEMORY = "gradient_regularization/memory.safetensors"
"""In a folder of its own: vLLM, SGLang and others load every `*.safetensors` file beside config.json as weights."""
FORMER_MEMORY = "gradient_regularization.safetensors"
"""Its place in checkpoints of earlier versions."""


def save_state(regularizer: GradientRegularizer, directory: Path, *, writes: bool) -> None:
    """Write what the next update depends on. Every rank has to come here; the one that `writes` does."""
    tensors = {name: tensor.contiguous() for name, tensor in regularizer.tensors().items()}
    if not writes:
        return
    directory.mkdir(parents=True, exist_ok=True)
    if tensors:
        (directory / MEMORY).parent.mkdir(exist_ok=True)
        save_file(tensors, directory / MEMORY)
    (directory / STATE).write_text(json.dumps(regularizer.state()), encoding="utf-8")


def load_state(regularizer: GradientRegularizer, directory: Path) -> bool:
    """Go on from what a checkpoint holds; False where it holds nothing, having been written without regularization."""
    if not (directory / STATE).exists():
        return False
    memory = next((directory / name for name in (MEMORY, FORMER_MEMORY) if (directory / name).exists()), None)
    tensors = load_file(memory) if memory is not None else {}
    regularizer.load(json.loads((directory / STATE).read_text(encoding="utf-8")), tensors)
    return True
