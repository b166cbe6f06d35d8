"""The regularizer's part of a Hugging Face checkpoint: JSON and safetensors, no pickle."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flatpeak.gradreg.regularizer import GradientRegularizer

NAME = "gradient_regularization"


def save_state(regularizer: GradientRegularizer, directory: Path, *, rank: int, first: bool) -> None:
    """Write what the next update depends on. `first`: whether this rank writes what all ranks have alike."""
    directory.mkdir(parents=True, exist_ok=True)  # a rank may come here before the one that writes the model
    tensors = {name: local(tensor).contiguous() for name, tensor in regularizer.tensors().items()}
    if tensors and (first or is_sharded(regularizer)):
        save_file(tensors, memory_path(regularizer, directory, rank=rank))
    if first:
        (directory / f"{NAME}.json").write_text(json.dumps(regularizer.state()), encoding="utf-8")


def load_state(regularizer: GradientRegularizer, directory: Path, *, rank: int) -> bool:
    """Go on from what a checkpoint holds; False where it holds nothing, having been written without regularization."""
    state = directory / f"{NAME}.json"
    if not state.exists():
        return False
    path = memory_path(regularizer, directory, rank=rank)
    tensors = load_file(path) if path.exists() else {}
    parameters = regularizer.parameters
    regularizer.load(
        json.loads(state.read_text(encoding="utf-8")),
        {name: sharded_like(tensor, parameters[int(name)]) for name, tensor in tensors.items()},
    )
    return True


def is_sharded(regularizer: GradientRegularizer) -> bool:
    """Whether ranks hold different parts of the parameters."""
    return any(isinstance(parameter, DTensor) for parameter in regularizer.parameters)


def memory_path(regularizer: GradientRegularizer, directory: Path, *, rank: int) -> Path:
    """One file, or one for each rank's shards."""
    return directory / (f"{NAME}_{rank}.safetensors" if is_sharded(regularizer) else f"{NAME}.safetensors")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """This rank's part of a tensor, placed as the parameter is."""
    here = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return here
    placed: Tensor = DTensor.from_local(
        here,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return placed
