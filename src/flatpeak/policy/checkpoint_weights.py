"""A model's weights under their checkpoint names, as files or as tensors for servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from flatpeak.utils.huggingface import no_progress_bar


def save_model(model: Any, directory: Path, *, head: nn.Linear | None) -> None:
    """Write a model in Hugging Face format; `head`: a tied output layer to write separately as well."""
    with no_progress_bar():
        model.save_pretrained(directory)
    if tied := tied_head(model, head):
        save_file(
            {name: weight.cpu().contiguous() for name, weight in tied},
            directory / "head.safetensors",
            metadata={"format": "pt"},
        )


def named_weights(model: Any, *, head: nn.Linear | None) -> list[tuple[str, Tensor]]:
    """The tensors that `save_model` writes, as views of the model's tensors; tied tensors once."""
    weights: dict[str, Tensor] = {}
    seen = set[int]()
    for name, weight in model.state_dict().items():
        if weight.data_ptr() not in seen:
            weights[name] = weight
            seen.add(weight.data_ptr())
    return [*revert_weight_conversion(model, weights).items(), *tied_head(model, head)]


def tied_head(model: Any, head: nn.Linear | None) -> list[tuple[str, Tensor]]:
    """The output layer under its own name if it is tied to the embeddings."""
    if head is None or head.weight is not model.get_input_embeddings().weight:
        return []
    name = next(name for name, module in model.named_modules() if module is head)
    return [(f"{name}.weight", head.weight.detach())]
