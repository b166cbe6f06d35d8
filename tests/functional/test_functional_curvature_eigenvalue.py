"""The largest eigenvalue by power iteration, against spectra that are chosen and explicit Hessians."""

import math

import pytest
import torch

from flatpeak.functional import hessian_vector_product, top_eigenvalue


def symmetric(spectrum, *, seed=0):
    """A float64 matrix with this spectrum, its eigenvectors random."""
    generator = torch.Generator().manual_seed(seed)
    size = len(spectrum)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return basis @ torch.tensor(spectrum, dtype=torch.float64).diag() @ basis.T


def top(matrix, *, dtype=torch.float64, **settings):
    """The estimate for a matrix, its rows in two tensors."""
    half = len(matrix) // 2
    like = [torch.zeros(half, dtype=dtype), torch.zeros(len(matrix) - half, 1, dtype=dtype)]

    def product(vector):
        whole = matrix.to(dtype) @ torch.cat([one.flatten() for one in vector])
        return [whole[:half], whole[half:, None]]

    return top_eigenvalue(product, like, **settings)


@pytest.mark.parametrize(
    "spectrum",
    [
        [7.0, 3.0, 1.0, -2.0],
        [-10.0, 2.0, 1.0, 0.5],
        [5.0, -5.0, 1.0],
        [10.0, -11.0, 3.0, 2.0, 1.0],
        [-3.0, -2.0, -1.0],
        [1e-3, -10.0, -5.0, -1.0],
        [-1.0, -1.0, -1.0],
        [2.0, 2.0, 2.0],
        [4.0, 0.0],
        [-4.0, 0.0],
    ],
)
def test_the_largest_eigenvalue_is_found_whatever_dominates(spectrum):
    for seed in range(5):
        found = top(symmetric(spectrum, seed=seed), iterations=30, tolerance=1e-6, seed=seed)
        assert found.converged
        assert found.residual <= 1e-6 or max(spectrum) == 0
        assert found.value == pytest.approx(max(spectrum), abs=1e-6 * max(map(abs, spectrum)))


@pytest.mark.parametrize("seed", range(20))
def test_random_matrices_agree_with_their_full_decomposition(seed):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    matrix = root + root.T
    found = top(matrix, iterations=100, tolerance=1e-5)
    assert found.converged
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-8)


@pytest.mark.parametrize("spectrum", [[66.0, 43.0, 25.0, -21.0, -12.0], [5.0, 3.0, -66.0, -40.0, -8.0]])
def test_a_hessian_that_is_nearly_zero_in_most_directions_is_not_taken_for_zero(spectrum):
    # As networks have them: of 20,000 dimensions five matter, of which a random vector has hardly any.
    generator = torch.Generator().manual_seed(3)
    basis, _ = torch.linalg.qr(torch.randn(20_000, len(spectrum), generator=generator))
    scale = torch.tensor(spectrum)
    found = top_eigenvalue(
        lambda v: [basis @ (scale * (basis.T @ v[0]))], [torch.zeros(20_000)], iterations=20, tolerance=0.01
    )
    assert found.converged
    assert found.value == pytest.approx(max(spectrum), rel=1e-3)


def test_the_zero_matrix_has_eigenvalue_zero_at_once():
    found = top(torch.zeros(4, 4, dtype=torch.float64))
    assert (found.value, found.residual, found.iterations, found.converged) == (0.0, 0.0, 1, True)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("seed", range(6))
def test_a_residual_of_rounding_converges_where_the_largest_eigenvalue_is_zero(seed, dtype, bound):
    # Relative to the value no residual is small enough; relative to the products of size 4 it is rounding. Steps within
    # rounding add up: 50 of them made 37 of the eigenvalue 0.
    found = top(symmetric([0.0, -1.0, -2.0, -4.0], seed=seed), dtype=dtype, iterations=50, seed=seed)
    assert found.converged
    assert found.iterations < 30
    assert abs(found.value) < bound


@pytest.mark.parametrize("seed", range(3))
def test_an_eigenvalue_beside_one_that_is_a_million_times_larger_is_found_in_float32(seed):
    matrix = symmetric([1.0, *[0.0] * 18, -1e6], seed=seed)
    found = top(matrix, dtype=torch.float32, iterations=20, seed=seed)
    assert found.converged
    assert found.residual <= 1
    assert found.value == pytest.approx(1.0, abs=0.3)
    assert not top(matrix, dtype=torch.float32, iterations=2, seed=seed).converged


def test_each_iteration_asks_for_one_product():
    asked = []

    def product(vector):
        asked.append(vector)
        return [torch.arange(50.0) * vector[0]]

    found = top_eigenvalue(product, [torch.zeros(50)], iterations=7, tolerance=1e-9)
    assert found.iterations == len(asked) == 7


def test_too_few_iterations_are_told_and_leave_a_lower_bound():
    spectrum = [1.0, 0.99, 0.98, 0.5, 0.0, -0.9]
    for seed in range(10):
        found = top(symmetric(spectrum, seed=seed), iterations=3, tolerance=1e-4, seed=seed)
        assert not found.converged
        assert found.iterations == 3
        assert found.residual > 1e-4
        assert found.value <= 1.0
        assert min(abs(found.value - one) for one in spectrum) <= found.residual * abs(found.value) + 1e-12


def test_the_residual_is_that_of_the_value():
    # The first unit vector v gives value v . H v and residual ||H v - value v|| / |value|.
    matrix = symmetric([3.0, 1.0, -1.0, 0.5])
    seen = []

    def product(vector):
        seen.append(vector[0])
        return [matrix @ vector[0]]

    found = top_eigenvalue(product, [torch.zeros(4, dtype=torch.float64)], iterations=1, tolerance=1e-9)
    (v,) = seen
    assert float(v.norm()) == pytest.approx(1.0)
    assert found.value == pytest.approx(float(v @ matrix @ v), rel=1e-12)
    expected = (matrix @ v - (v @ matrix @ v) * v).norm() / (v @ matrix @ v).abs()
    assert found.residual == pytest.approx(float(expected), rel=1e-12)


def test_half_precision_parameters_are_iterated_in_float32():
    found = top(symmetric([4.0, 1.0, -2.0, 0.0]), dtype=torch.float32, iterations=200, tolerance=1e-5)
    assert found.value == pytest.approx(4.0, rel=1e-5)
    dtypes = set()

    def product(vector):
        dtypes.add(vector[0].dtype)
        return [(2 * vector[0]).bfloat16()]

    assert top_eigenvalue(product, [torch.zeros(5, dtype=torch.bfloat16)], tolerance=0.01).value == pytest.approx(
        2.0, rel=0.01
    )
    assert dtypes == {torch.float32}


def test_products_that_are_not_finite_give_no_value():
    found = top_eigenvalue(lambda vector: [vector[0] * math.nan], [torch.zeros(3)])
    assert math.isnan(found.value)
    assert not found.converged


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        top_eigenvalue(lambda vector: vector, [torch.zeros(3)], iterations=0)
    with pytest.raises(ValueError, match="more than 0"):
        top_eigenvalue(lambda vector: vector, [torch.zeros(3)], tolerance=0.0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_network_agrees_with_its_explicit_hessian(sign):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    first, last = (torch.randn(n, generator=generator, dtype=torch.float64).requires_grad_() for n in (12, 4))

    def loss_of(first, last):
        return sign * (torch.tanh(inputs @ first.view(3, 4)) @ last).square().mean()

    blocks = torch.autograd.functional.hessian(loss_of, (first, last))
    hessian = torch.cat([torch.cat(list(row), dim=1) for row in blocks])
    found = top_eigenvalue(
        lambda vector: hessian_vector_product(lambda: loss_of(first, last), [first, last], vector),
        [first, last],
        iterations=200,
        tolerance=1e-6,
    )
    assert found.converged
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-6)
