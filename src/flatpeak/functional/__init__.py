"""The mathematics of the library: pure functions of tensors and numbers."""

from flatpeak.functional import advantage_functions, losses, policy_losses, sampler_correction, token_weights
from flatpeak.functional.advantage_functions import *  # noqa: F403
from flatpeak.functional.advantages import group_advantages, returns_to_go
from flatpeak.functional.bradley_terry import (
    bradley_terry_loss,
    calibration_error,
    centering_penalty,
    preference_accuracy,
)
from flatpeak.functional.curvature import Eigenvalue, hessian_vector_product, regularized_gradient, top_eigenvalue
from flatpeak.functional.estimators import (
    PairedDifference,
    bootstrap_interval,
    maj_at_k,
    paired_bootstrap,
    pass_at_k,
    wilson_interval,
)
from flatpeak.functional.exact_kl import ExactKL, exact_kl
from flatpeak.functional.kl import kl_k1, kl_k2, kl_k3
from flatpeak.functional.logprobs import token_logprobs
from flatpeak.functional.losses import *  # noqa: F403 - `__all__` of losses is the only list of losses
from flatpeak.functional.policy_losses import *  # noqa: F403
from flatpeak.functional.sampler_correction import *  # noqa: F403
from flatpeak.functional.token_weights import *  # noqa: F403
from flatpeak.functional.weights import completion_weights

__all__ = [
    *advantage_functions.__all__,
    *losses.__all__,
    *policy_losses.__all__,
    *sampler_correction.__all__,
    *token_weights.__all__,
    "Eigenvalue",
    "ExactKL",
    "PairedDifference",
    "bootstrap_interval",
    "bradley_terry_loss",
    "calibration_error",
    "centering_penalty",
    "completion_weights",
    "exact_kl",
    "group_advantages",
    "hessian_vector_product",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "maj_at_k",
    "paired_bootstrap",
    "pass_at_k",
    "preference_accuracy",
    "regularized_gradient",
    "returns_to_go",
    "token_logprobs",
    "top_eigenvalue",
    "wilson_interval",
]
