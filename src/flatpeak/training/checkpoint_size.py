"""The size of a checkpoint before it is written: the model's weights, the optimizer's moments, and the masters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import nn

from flatpeak.training.config import OptimizerConfig
from flatpeak.training.master_weights import BLOCK
from flatpeak.training.optimizer import SMALLEST_QUANTIZED
from flatpeak.utils.adapter_base import is_of_adapter

FLOAT32: Final = 4
"""Bytes of a number in float32."""


@dataclass(frozen=True, kw_only=True)
class TrainedWeight:
    """A parameter that the optimizer steps."""

    elements: int
    stored: int
    """Bytes as stored in the model."""

    @property
    def gradient(self) -> int:
        """Bytes of its gradient: always float32, as the optimizer uses it."""
        return FLOAT32 * self.elements

    @property
    def master(self) -> int:
        """Bytes of its float32 copy; 0 if it is float32 itself."""
        return FLOAT32 * self.elements if self.stored < FLOAT32 * self.elements else 0

    def moments(self, optimizer: OptimizerConfig) -> int:
        """Bytes of its moments."""
        if optimizer.name == "sgd":
            return 0
        if optimizer.name == "adamw" or self.elements < SMALLEST_QUANTIZED:
            return 2 * FLOAT32 * self.elements
        return 2 * self.elements + 2 * FLOAT32 * -(-self.elements // BLOCK)


@dataclass(frozen=True, kw_only=True)
class CheckpointSize:
    """Bytes of a checkpoint."""

    model: int
    """The weights as saved: under adapters these alone."""
    optimizer: int
    """Masters and moments."""

    @classmethod
    def of(cls, model: nn.Module, optimizer: OptimizerConfig) -> CheckpointSize:
        """The size of the checkpoints of a model that this optimizer trains."""
        weights = dict(model.named_parameters())
        adapters = sum(weight.nbytes for name, weight in weights.items() if is_of_adapter(name))
        return cls(
            model=adapters or sum(weight.nbytes for weight in weights.values()),
            optimizer=sum(one.master + one.moments(optimizer) for one in trained_weights(model)),
        )

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return self.model + self.optimizer


def trained_weights(model: nn.Module) -> tuple[TrainedWeight, ...]:
    """The weights that an optimizer steps, each tied one once."""
    trained = (weight for weight in model.parameters() if weight.requires_grad)
    return tuple(TrainedWeight(elements=weight.numel(), stored=weight.nbytes) for weight in trained)
