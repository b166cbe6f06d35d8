"""The mathematics: tensors in, tensors out."""

from flatpeak.functional.advantages import group_advantages
from flatpeak.functional.bradley_terry import (
    bradley_terry_loss,
    calibration_error,
    centering_penalty,
    preference_accuracy,
)
from flatpeak.functional.curvature import hessian_vector_product, regularized_gradient
from flatpeak.functional.estimators import (
    PairedDifference,
    bootstrap_interval,
    maj_at_k,
    paired_bootstrap,
    pass_at_k,
    wilson_interval,
)
from flatpeak.functional.kl import kl_k1, kl_k2, kl_k3
from flatpeak.functional.logprobs import token_logprobs
from flatpeak.functional.losses import (
    capped_policy_loss,
    clipped_surrogate,
    frozen_policy_loss,
    importance_ratio,
    policy_gradient,
    reweighted_policy_loss,
    sequence_importance_ratio,
    truncated_policy_gradient,
    unclipped_surrogate,
)
from flatpeak.functional.weights import completion_weights

__all__ = [
    "PairedDifference",
    "bootstrap_interval",
    "bradley_terry_loss",
    "calibration_error",
    "capped_policy_loss",
    "centering_penalty",
    "clipped_surrogate",
    "completion_weights",
    "frozen_policy_loss",
    "group_advantages",
    "hessian_vector_product",
    "importance_ratio",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "maj_at_k",
    "paired_bootstrap",
    "pass_at_k",
    "policy_gradient",
    "preference_accuracy",
    "regularized_gradient",
    "reweighted_policy_loss",
    "sequence_importance_ratio",
    "token_logprobs",
    "truncated_policy_gradient",
    "unclipped_surrogate",
    "wilson_interval",
]
