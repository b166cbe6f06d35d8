from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatpeak.kernels import matmul as products
from flatpeak.kernels.low_rank import Adapter, adapted_linear
from flatpeak.kernels.matmul import onednn_is_faster

M, K, N, R = 12, 128, 96, 4
SCALING = 1.7
TOLERANCE = 5e-6
"""Of float32 against float64, relative to the largest entry, as in the tests of plain products."""


@pytest.fixture(params=["mkl", "onednn"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each of the two in turn; no test sees the choice made for another."""
    if request.param == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setenv(products.SETTING, request.param)
    onednn_is_faster.cache_clear()
    yield
    onednn_is_faster.cache_clear()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


class Case:
    """A layer, its adapter and an input, all but the layer with gradients."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, base: torch.dtype | None = None) -> None:
        self.x = normal(M, K, dtype=base or dtype).requires_grad_()
        self.weight = normal(N, K, dtype=base or dtype)
        self.bias = normal(N, dtype=base or dtype)
        self.down = normal(R, K, dtype=dtype).requires_grad_()
        self.up = normal(N, R, dtype=dtype).requires_grad_()
        self.dequantized = 0

    def matrix(self) -> Tensor:
        self.dequantized += 1
        return self.weight

    def __call__(self, x: Tensor | None = None, *, bias: bool = True) -> Tensor:
        adapter = Adapter(down_RK=self.down, up_NR=self.up, scaling=SCALING)
        return adapted_linear(self.x if x is None else x, self.matrix, self.bias if bias else None, adapter)

    def exact(self) -> tuple[Any, ...]:
        x, weight, bias, down, up = (
            t.detach().double().numpy() for t in (self.x, self.weight, self.bias, self.down, self.up)
        )
        return x, weight, bias, down, up


def gap(ours: Tensor | None, exact: Any) -> float:
    assert ours is not None
    return float(np.abs(ours.detach().double().numpy() - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize("bias", [True, False])
def test_the_output_is_that_of_the_changed_weight(bias: bool) -> None:
    case = Case()
    x, weight, shift, down, up = case.exact()
    assert gap(case(bias=bias), x @ (weight + SCALING * up @ down).T + (shift if bias else 0)) < TOLERANCE


def test_the_gradients_are_those_by_hand() -> None:
    case = Case()
    grad = normal(M, N, seed=1)
    case().backward(grad)
    x, weight, _, down, up = case.exact()
    g = grad.double().numpy()
    assert gap(case.x.grad, g @ (weight + SCALING * up @ down)) < TOLERANCE
    assert gap(case.down.grad, SCALING * (g @ up).T @ x) < TOLERANCE
    assert gap(case.up.grad, SCALING * g.T @ (x @ down.T)) < TOLERANCE


def test_it_can_be_differentiated_twice() -> None:
    case = Case(dtype=torch.float64)

    def product(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        adapter = Adapter(down_RK=down, up_NR=up, scaling=SCALING)
        return adapted_linear(x, lambda: case.weight[:3, :5], case.bias[:3], adapter)

    inputs = tuple(normal(*shape, dtype=torch.float64).requires_grad_() for shape in ((4, 5), (R, 5), (3, R)))
    assert torch.autograd.gradcheck(product, inputs)
    assert torch.autograd.gradgradcheck(product, inputs)


def test_without_gradients_the_bits_are_the_same() -> None:
    case = Case()
    with torch.no_grad():
        assert torch.equal(case(), case().detach())
    trained = case().detach()
    with torch.no_grad():
        assert torch.equal(case(), trained)


@pytest.mark.parametrize("shape", [(K,), (0, K), (2, 0, K), (2, 3, K)], ids=str)
def test_an_input_of_any_shape_is_multiplied_row_by_row(shape: tuple[int, ...]) -> None:
    case = Case()
    x = normal(*shape, seed=2).requires_grad_()
    output = case(x)
    assert output.shape == (*shape[:-1], N)
    torch.testing.assert_close(output, case(x.reshape(-1, K)).view_as(output), atol=1e-4, rtol=1e-5)
    output.sum().backward()
    assert x.grad is not None and x.grad.shape == shape


def test_over_a_layer_in_bfloat16_the_adapter_is_computed_in_float32_and_rounded_once() -> None:
    case = Case(base=torch.bfloat16)
    with torch.no_grad():
        case.up.mul_(0.01)
    output = case()
    base = torch.nn.functional.linear(case.x, case.weight, case.bias)
    x, _, _, down, up = case.exact()
    change = torch.from_numpy(SCALING * (x @ down.T) @ up.T).float()
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, (base.float() + change).bfloat16())
    output.float().sum().backward()
    assert case.x.grad is not None and case.down.grad is not None
    assert (case.x.grad.dtype, case.down.grad.dtype) == (torch.bfloat16, torch.float32)
    assert gap(case.down.grad, SCALING * (np.ones((M, N)) @ up).T @ x) < TOLERANCE


def test_the_weight_is_asked_for_in_each_pass_and_not_for_an_input_without_gradient() -> None:
    case = Case()
    case().sum().backward()
    assert case.dequantized == 2
    case(case.x.detach()).sum().backward()
    assert case.dequantized == 3


def test_what_is_kept_for_the_backward_pass_is_the_input_and_its_low_rank_image() -> None:
    case = Case()
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        case()
    assert sorted(kept) == sorted([(M, K), (M, R), (R, K), (N, R)])
