"""The KL estimators: values and gradients by hand, on both sides of the reference."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatpeak.functional import importance_ratio, kl_k1, kl_k2, kl_k3
from support.properties import repeatable

# log p - log ref is ln 2, then -ln 2, then 0.
LOGPROBS = [-1.0, -1.0 - math.log(2), -3.0]
REF_LOGPROBS = [-1.0 - math.log(2), -1.0, -3.0]


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        (kl_k1, [math.log(2), -math.log(2), 0.0], [1.0, 1.0, 1.0]),
        (kl_k2, [math.log(2) ** 2 / 2] * 2 + [0.0], [math.log(2), -math.log(2), 0.0]),
        # d = -ln 2: 1/2 + ln 2 - 1; d = ln 2: 2 - ln 2 - 1. The gradient is 1 - exp(d).
        (kl_k3, [math.log(2) - 0.5, 1 - math.log(2), 0.0], [0.5, -1.0, 0.0]),
    ],
)
def test_values_and_gradients(estimator, values, gradients):
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    kl = estimator(logprobs, torch.tensor(REF_LOGPROBS, dtype=torch.float64))
    torch.testing.assert_close(kl, torch.tensor(values, dtype=torch.float64))
    (grad,) = torch.autograd.grad(kl.sum(), logprobs)
    torch.testing.assert_close(grad, torch.tensor(gradients, dtype=torch.float64))


@given(logprob=st.floats(-30, 0), reference=st.floats(-30, 0))
@repeatable
def test_estimators_are_zero_at_equality_and_k2_and_k3_nowhere_negative(logprob, reference):
    logprobs = torch.tensor([logprob, reference], dtype=torch.float64, requires_grad=True)
    references = torch.tensor([reference, reference], dtype=torch.float64)
    for estimator in (kl_k1, kl_k2, kl_k3):
        kl = estimator(logprobs, references)
        (grad,) = torch.autograd.grad(kl.sum(), logprobs)
        assert kl[1] == 0
        assert estimator is kl_k1 or (kl[0] >= 0 and grad[1] == 0)
        # Towards the reference the divergence falls.
        assert estimator is kl_k1 or grad[0] * (logprob - reference) >= 0


@pytest.mark.parametrize(("d", "expected"), [(200.0, math.exp(20) - 21), (-200.0, math.exp(-20) + 19)])
def test_k3_of_extreme_log_ratios_is_finite_and_has_no_gradient(d, expected):
    logprobs = torch.tensor([-300.0], requires_grad=True)
    kl = kl_k3(logprobs, torch.tensor([-300.0 + d]))
    torch.testing.assert_close(kl, torch.tensor([expected]))
    assert torch.autograd.grad(kl.sum(), logprobs)[0].tolist() == [0.0]


def test_k3_of_a_small_log_ratio_survives_float32():
    # d^2 / 2 + d^3 / 6, far below the rounding of exp(d) - d - 1 in float32.
    d = 2.0**-13
    kl = kl_k3(torch.tensor([0.0]), torch.tensor([d]))
    assert kl.item() == pytest.approx(d**2 / 2 + d**3 / 6, rel=1e-3)


def test_k1_and_k3_are_unbiased_for_the_exact_kl():
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = sum(a * math.log(a / b) for a, b in zip(p.tolist(), reference.tolist(), strict=True))
    for estimator in (kl_k1, kl_k3):
        assert (p * estimator(p.log(), reference.log())).sum().item() == pytest.approx(exact, rel=1e-12)


def test_the_expected_gradient_of_k1_is_zero_and_of_k2_that_of_the_kl():
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    p = torch.softmax(logits, -1)
    (exact,) = torch.autograd.grad((p * (p / reference).log()).sum(), logits, retain_graph=True)

    def expected_gradient(estimator):
        logprobs = torch.log_softmax(logits, -1)
        return torch.autograd.grad((p.detach() * estimator(logprobs, reference.log())).sum(), logits)[0]

    torch.testing.assert_close(expected_gradient(kl_k1), torch.zeros(3, dtype=torch.float64), atol=1e-15, rtol=0)
    torch.testing.assert_close(expected_gradient(kl_k2), exact)


@pytest.mark.parametrize(("estimator", "is_exact"), [(kl_k1, True), (kl_k2, False), (kl_k3, True)])
def test_the_ratio_makes_the_expected_gradient_of_k1_and_k3_that_of_the_kl_and_not_that_of_k2(estimator, is_exact):
    """What `kl.ratio_weighted` says of itself."""
    logits = torch.tensor([0.5, -1.0, 0.3], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.7, -0.4], dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    ratio = importance_ratio(logprobs, logprobs.detach())
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    expected = (logprobs.detach().exp() * ratio * estimator(logprobs, reference)).sum()
    gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (exact, expected)]
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12) is is_exact
