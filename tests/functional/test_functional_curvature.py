"""The regularized gradient against closed forms and against exact curvature."""

import math

import pytest
import torch

from flatpeak.functional import hessian_vector_product, regularized_gradient


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def test_regularized_gradient_adds_the_scaled_difference():
    # 1 + 0.5 / 0.1 * (3 - 1) = 11 and 2 + 5 * (1 - 2) = -3.
    combined = regularized_gradient(double([1.0, 2.0]), double([3.0, 1.0]), strength=0.5, step=0.1)
    torch.testing.assert_close(combined, double([11.0, -3.0]))


def test_strength_zero_returns_the_gradient_bit_for_bit():
    grad = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(regularized_gradient(grad, grad.flip(0), strength=0.0, step=1e-3), grad)


def test_strength_equal_to_step_returns_the_perturbed_gradient():
    grad, perturbed = double([1.0, -2.0, 0.1]), double([0.3, 5.0, 0.2])
    torch.testing.assert_close(regularized_gradient(grad, perturbed, strength=1e-3, step=1e-3), perturbed)


def test_a_step_of_zero_is_refused():
    with pytest.raises(ValueError, match="give a step above 0"):
        regularized_gradient(torch.ones(1), torch.ones(1), strength=0.1, step=0.0)


@pytest.mark.parametrize("step", [1e-3, 0.1, 10.0])
def test_on_a_quadratic_the_penalty_is_exact_at_any_step(step):
    # L = x^T A x / 2 + b^T x: gradient A x + b, and of ||A x + b||^2 / 2 it is A (A x + b).
    A, b, x = double([[2.0, 1.0], [1.0, -3.0]]), double([1.0, 0.5]), double([0.25, -1.0])
    grad = A @ x + b
    combined = regularized_gradient(grad, A @ (x + step * grad) + b, strength=0.7, step=step)
    torch.testing.assert_close(combined, grad + 0.7 * A @ grad, rtol=1e-10, atol=1e-12)


def small_network():
    """The loss of a tanh network, its two parameters, and the inputs of a closed graph."""
    generator = torch.Generator().manual_seed(1)
    inputs_TD = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    first, last = (torch.randn(n, generator=generator, dtype=torch.float64).requires_grad_() for n in (12, 4))

    def loss_of(first, last):
        return (torch.tanh(inputs_TD @ first.view(3, 4)) @ last).square().mean()

    return loss_of, [first, last]


def test_hessian_vector_product_of_a_cubic_by_hand():
    # L = x^2 y: H = [[2 y, 2 x], [2 x, 0]].
    x, y = double(3.0).requires_grad_(), double(-2.0).requires_grad_()
    result = hessian_vector_product(lambda: x**2 * y, [x, y], [double(1.0), double(0.5)])
    assert [t.item() for t in result] == [-4.0 * 1.0 + 6.0 * 0.5, 6.0]


def test_hessian_vector_product_equals_the_full_hessian():
    loss_of, params = small_network()
    vector = [torch.linspace(-1, 1, p.numel(), dtype=torch.float64) for p in params]
    blocks = torch.autograd.functional.hessian(loss_of, tuple(params))
    result = hessian_vector_product(lambda: loss_of(*params), params, vector)
    for row, ours in zip(blocks, result, strict=True):
        torch.testing.assert_close(ours, sum(block @ v for block, v in zip(row, vector, strict=True)))
    assert all(not t.requires_grad for t in result)


def test_the_vector_is_a_constant_even_where_it_is_the_parameters():
    # L = x^3: H x = 6 x * x. Were the vector differentiated too, 3 x^2 more.
    x = double(2.0).requires_grad_()
    assert [t.item() for t in hessian_vector_product(lambda: x**3, [x], [x])] == [24.0]


def test_the_penalty_term_converges_to_the_exact_one_linearly_in_the_step():
    loss_of, params = small_network()
    grads = torch.autograd.grad(loss_of(*params), params)
    exact = torch.cat(hessian_vector_product(lambda: loss_of(*params), params, grads))
    errors = []
    for step in (1e-3, 1e-5):
        moved = [(p + step * g).detach().requires_grad_() for p, g in zip(params, grads, strict=True)]
        perturbed = torch.autograd.grad(loss_of(*moved), moved)
        combined = [regularized_gradient(g, q, strength=1.0, step=step) for g, q in zip(grads, perturbed, strict=True)]
        penalty = torch.cat([c - g for c, g in zip(combined, grads, strict=True)])
        errors.append(((penalty - exact).norm() / exact.norm()).item())
    assert errors[1] < 1e-3
    assert math.log10(errors[0] / errors[1]) / 2 == pytest.approx(1.0, abs=0.1)


def test_linear_and_unused_parameters_have_no_curvature():
    x, y, unused = (double([1.0, 2.0]).requires_grad_() for _ in range(3))
    ones = [torch.ones(2, dtype=torch.float64)] * 3
    for loss_fn, expected in ((lambda: x.sum() + 3 * y.sum(), 0.0), (lambda: (x**2).sum() + y.sum(), 2.0)):
        result = hessian_vector_product(loss_fn, [x, y, unused], ones)
        assert [t.tolist() for t in result] == [[expected] * 2, [0.0] * 2, [0.0] * 2]


def test_a_vector_of_another_shape_is_refused():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="one tensor of the same shape per parameter"):
        hessian_vector_product(lambda: x.sum(), [x], [torch.ones(3)])
