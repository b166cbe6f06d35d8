"""Dropout probabilities, set on modules that stay in train mode: `eval()` would also switch checkpointing off."""

from __future__ import annotations

from torch import nn


def silence_dropout(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Set every dropout probability to 0: dropout modules (LoRA's too) and attention's plain attributes.

    Returns (module, attribute, probability) of each that was not 0.
    """
    found = [
        (module, name, float(setting))
        for module in model.modules()
        for name, setting in vars(module).items()
        if _is_probability(module, name, setting) and setting
    ]
    for module, name, _ in found:
        setattr(module, name, 0.0)
    return found


def _is_probability(module: nn.Module, name: str, setting: object) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd) and name == "p":
        return True
    return isinstance(setting, float) and ("dropout" in name or name.endswith("_pdrop"))
