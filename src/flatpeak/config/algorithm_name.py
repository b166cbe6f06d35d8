"""The published algorithm to which a recipe's objective and advantages correspond."""

from __future__ import annotations

from typing import Final

from flatpeak.config.run_config import RunConfig
from flatpeak.training.config import LOSS_SETTINGS, is_reference

PRESETS: Final = {
    ("mean", "std", "token", "clipped_surrogate", "sequence_mean"): "GRPO",
    ("mean", "none", "token", "clipped_surrogate", "constant"): "Dr. GRPO",
    ("mean", "std", "sequence", "clipped_surrogate", "sequence_mean"): "GSPO",
    ("mean", "std", "token", "truncated_policy_gradient", "token_mean"): "CISPO",
    ("leave_one_out", "none", None, "policy_gradient", "sequence_sum"): "RLOO",
    ("none", "none", None, "policy_gradient", "sequence_mean"): "REINFORCE",
}
"""The published algorithm for (baseline, scale, ratio, loss, normalization); the ratio counts if the loss reads it."""


def algorithm_name(config: RunConfig) -> str:
    """The name of the published algorithm with a recipe's objective, else `policy gradient`."""
    objective, advantage = config.objective, config.advantage
    if is_reference(objective.loss) or advantage.function is not None:
        return "policy gradient"
    ratio = objective.ratio if "ratio" in LOSS_SETTINGS[objective.loss] else None
    key = (advantage.baseline, advantage.scale, ratio, objective.loss, objective.normalization)
    if key == ("mean", "std", "token", "clipped_surrogate", "token_mean"):
        whole = objective.truncated == "soft_penalty" and config.training.dynamic_sampling.max_resamples
        return "DAPO" if whole else "GRPO with DAPO's normalization"
    return PRESETS.get(key, "policy gradient")
