"""Gradient regularization for TRL's trainers: change the import and set a strength.

```
from flatpeak.integrations.trl import GradientRegularizedGRPOConfig, GradientRegularizedGRPOTrainer

args = GradientRegularizedGRPOConfig(grad_reg_strength="calibrated:3", grad_reg_ratio_mode="reuse", output_dir="run")
GradientRegularizedGRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=dataset).train()
```

For any other trainer, list `GradientRegularizationMixin` before the trainer, and `GradientRegularizationArguments`
before its config.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatpeak.integrations.arguments import GradientRegularizationArguments
from flatpeak.integrations.hf_trainer import (
    GradientRegularizationMixin,
    GradientRegularizedTrainer,
    GradientRegularizedTrainingArguments,
)

try:
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise ImportError("flatpeak.integrations.trl needs TRL: pip install flatpeak[trl]") from error


@dataclass
class GradientRegularizedGRPOConfig(GradientRegularizationArguments, GRPOConfig):
    """TRL's GRPOConfig with the arguments of gradient regularization."""


class GradientRegularizedGRPOTrainer(GradientRegularizationMixin, GRPOTrainer):
    """TRL's GRPOTrainer with gradient regularization."""


__all__ = [
    "GradientRegularizationArguments",
    "GradientRegularizationMixin",
    "GradientRegularizedGRPOConfig",
    "GradientRegularizedGRPOTrainer",
    "GradientRegularizedTrainer",
    "GradientRegularizedTrainingArguments",
]
