"""The public list: names, argument names and defaults that users write. Losses and sampler weights have their own."""

import inspect

import pytest

from flatpeak import functional
from flatpeak.functional import advantage_functions, losses, policy_losses, sampler_correction, token_weights

SIGNATURES = {
    "bootstrap_interval": "values, *, weights=None, confidence=0.95, num_resamples=10000, seed=0",
    "bradley_terry_loss": "chosen_P, rejected_P, *, margin=0.0",
    "calibration_error": "probabilities_N, outcomes_N, *, bins=10",
    "centering_penalty": "chosen_P, rejected_P",
    "completion_weights": "lengths_N, normalization, *, max_tokens=None, valid_N=None",
    "exact_kl": "scores_TV, targets_T, kl, *, kept_T=None",
    "group_advantages": "rewards_PG, *, baseline='mean', scale='std', eps=1e-06, valid_PG=None",
    "hessian_vector_product": "loss_fn, params, vector",
    "kl_k1": "logprobs, ref_logprobs",
    "kl_k2": "logprobs, ref_logprobs",
    "kl_k3": "logprobs, ref_logprobs",
    "maj_at_k": "answers, correct, k",
    "paired_bootstrap": "a, b, *, confidence=0.95, num_resamples=10000, seed=0",
    "pass_at_k": "num_samples, num_correct, k",
    "preference_accuracy": "chosen_P, rejected_P",
    "regularized_gradient": "grad, perturbed_grad, *, strength, step",
    "returns_to_go": "rewards_PGK, rest_PG",
    "token_logprobs": "hidden_TD, output_weight_VD, targets_T, *, bias_V=None, softcap=None, logit_scale=1.0, "
    "temperature=1.0, chunk_size=None, kept_T=None",
    "top_eigenvalue": "product, like, *, iterations=100, tolerance=0.001, seed=0",
    "wilson_interval": "successes, total, confidence=0.95",
}


def test_the_public_list_is_exactly_this():
    assert set(functional.__all__) == {
        *SIGNATURES,
        *advantage_functions.__all__,
        *policy_losses.__all__,
        *losses.__all__,
        *sampler_correction.__all__,
        *token_weights.__all__,
        "ExactKL",
        "PairedDifference",
        "PolicyLoss",
        "Eigenvalue",
    }


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults_are_as_published(name):
    signature = inspect.signature(getattr(functional, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    displayed = str(inspect.Signature(bare)).strip("()")
    assert displayed == SIGNATURES[name]
