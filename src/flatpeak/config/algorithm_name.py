"""The published algorithm to which a recipe's objective and advantages correspond."""

from __future__ import annotations

from typing import Final

from flatpeak.config.run_config import RunConfig
from flatpeak.training.objective_config import LOSS_SETTINGS, is_reference

PRESETS: Final = {
    ("mean", "std", "token", "clipped_surrogate", "sequence_mean"): "GRPO",
    ("mean", "none", "token", "clipped_surrogate", "constant"): "Dr. GRPO",
    ("mean", "std", "sequence", "clipped_surrogate", "sequence_mean"): "GSPO",
    ("mean", "std", "sequence", "clipped_surrogate", "sequence_sum"): "LUSPO",
    ("mean", "std", "token", "truncated_policy_gradient", "token_mean"): "CISPO",
    ("leave_one_out", "none", None, "policy_gradient", "sequence_sum"): "RLOO",
    ("none", "none", None, "policy_gradient", "sequence_mean"): "REINFORCE",
}
"""The published algorithm for (baseline, scale, ratio, loss, normalization); the ratio counts if the loss reads it."""
NAMES: Final = {
    "sapo": "SAPO",
    "vespo": "VESPO",
    "topr": "TOPR",
    "gmpo": "GMPO",
    "dppo_tv": "DPPO",
    "dppo_kl": "DPPO by KL",
    "opo": "OPO",
    "remax": "ReMax",
    "max_rl": "MaxRL",
    "pass_at_k": "pass@k training",
    "gdpo": "GDPO",
}
"""The names of losses and advantage functions that make an algorithm by themselves."""


def algorithm_name(config: RunConfig) -> str:
    """The name of the published algorithm with a recipe's objective, else `policy gradient`."""
    name = _published_name(config)
    return name if config.advantage.credit == "episode" else f"{name} with credit by turn"


def _published_name(config: RunConfig) -> str:
    objective, advantage = config.objective, config.advantage
    if is_reference(objective.loss) or is_reference(advantage.function or ""):
        return "policy gradient"
    own = [NAMES[name] for name in (objective.loss, advantage.function) if name in NAMES]
    if own:
        return " with ".join(own)
    if advantage.whiten == "tokens":
        return "REINFORCE++" if advantage.baseline == "none" else "REINFORCE++ with a baseline"
    ratio = objective.ratio if "ratio" in LOSS_SETTINGS[objective.loss] else None
    key = (advantage.baseline, advantage.scale, ratio, objective.loss, objective.normalization)
    if key == ("mean", "std", "token", "clipped_surrogate", "token_mean"):
        whole = objective.truncated == "soft_penalty" and config.training.dynamic_sampling.max_resamples
        return "DAPO" if whole else "GRPO with DAPO's normalization"
    return PRESETS.get(key, "policy gradient")
