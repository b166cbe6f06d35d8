"""Dropout probabilities, set on modules that stay in train mode: `eval()` would also switch checkpointing off."""

from __future__ import annotations

from torch import nn


def silence_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0: dropout modules (LoRA's too) and attention's plain attributes."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, setting in vars(module).items():
            if isinstance(setting, float) and ("dropout" in name or name.endswith("_pdrop")):
                setattr(module, name, 0.0)
