from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatpeak.kernels import matmul as products
from flatpeak.kernels.matmul import add_linear, linear, multiply, onednn_is_faster, pack

TOLERANCE = 5e-6
"""Of float32 against float64, relative to the largest entry. Sums have up to 192 terms of size one, each rounded to
6e-8 of itself; 1.2e-6 is what they come to."""
M, K, N = 12, 128, 96
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def fresh_choice() -> Iterator[None]:
    """No test sees the choice made for another."""
    onednn_is_faster.cache_clear()
    yield
    onednn_is_faster.cache_clear()


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by oneDNN, on any CPU."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setenv(products.SETTING, "onednn")


@pytest.fixture(params=["mkl", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the two in turn."""
    if request.param == "onednn":
        request.getfixturevalue("onednn")
    monkeypatch.setenv(products.SETTING, request.param)
    return str(request.param)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that went through oneDNN."""
    shapes: list[tuple[int, ...]] = []

    def spy(input_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        shapes.append(tuple(weight_NK.shape))
        return multiply(input_MK, weight_NK, bias_N)

    monkeypatch.setattr(products, "multiply", spy)
    return shapes


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def assert_near(ours: Tensor, exact: Tensor, *, times: int = 1) -> None:
    assert ours.dtype == torch.float32
    assert ours.shape == exact.shape
    ours, exact = ours.detach().double(), exact.detach()
    assert float((ours - exact).abs().max()) <= times * TOLERANCE * float(exact.abs().max())


LAYOUTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "plain": lambda: (normal(M, K), normal(N, K)),
    "transposed weight": lambda: (normal(M, K), normal(K, N).t()),
    "transposed input": lambda: (normal(K, M).t(), normal(N, K)),
    "both transposed": lambda: (normal(K, M).t(), normal(K, N).t()),
    "a part of a larger weight": lambda: (normal(M, K), normal(N + 5, K + 3)[2 : N + 2, 1 : K + 1]),
    "every other row": lambda: (normal(2 * M, K)[::2], normal(2 * N, K)[::2]),
    "one row repeated": lambda: (normal(1, K).expand(M, K), normal(N, K)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_the_exact_ones_whatever_the_strides(library: str, layout: str, calls: list) -> None:
    input_MK, weight_NK = LAYOUTS[layout]()
    bias_N = normal(N)
    exact_MN = input_MK.double() @ weight_NK.double().t()
    assert_near(linear(input_MK, weight_NK), exact_MN)
    assert_near(linear(input_MK, weight_NK, bias_N), exact_MN + bias_N.double())
    assert calls == ([(N, K)] * 2 if library == "onednn" else [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_added_to_a_sum_is_the_exact_one_and_to_zeros_has_the_bits_of_the_product(
    library: str, layout: str
) -> None:
    input_MK, weight_NK = LAYOUTS[layout]()
    sum_MN, zeros_MN = normal(M, N), torch.zeros(M, N)
    exact_MN = sum_MN.double() + input_MK.double() @ weight_NK.double().t()
    add_linear(sum_MN, input_MK, weight_NK)
    assert_near(sum_MN, exact_MN)
    add_linear(zeros_MN, input_MK, weight_NK)
    assert torch.equal(zeros_MN, linear(input_MK, weight_NK))


@pytest.mark.parametrize("shape", [(K,), (1, K), (3, K), (3, 5, K), (2, 3, 2, K)])
@pytest.mark.parametrize("biased", [True, False])
def test_inputs_of_any_number_of_dimensions_keep_them(library: str, shape: tuple[int, ...], biased: bool) -> None:
    input_K, weight_NK = normal(*shape).requires_grad_(), normal(N, K).requires_grad_()
    bias_N = normal(N).requires_grad_() if biased else None
    output_N = linear(input_K, weight_NK, bias_N)
    leaves = [input_K, weight_NK] if bias_N is None else [input_K, weight_NK, bias_N]
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_N = F.linear(*exact_leaves)
    assert_near(output_N, exact_N)
    scales = normal(*output_N.shape)
    ours = torch.autograd.grad((output_N * scales).sum(), leaves)
    exact = torch.autograd.grad((exact_N * scales).sum(), exact_leaves)
    for result, wanted in zip(ours, exact, strict=True):
        assert_near(result, wanted)


@pytest.mark.parametrize("rows", [4, 192], ids=["few rows", "as many rows as make oneDNN take the weight's gradient"])
@pytest.mark.parametrize("transposed", [True, False])
def test_first_and_second_derivatives_are_the_exact_ones(
    library: str, rows: int, transposed: bool, calls: list
) -> None:
    def derivatives(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (normal(rows, K), normal(*weight_shape) / 8, normal(N))]
        weight_NK = leaves[1].t() if transposed else leaves[1]
        output_MN = function(leaves[0], weight_NK, leaves[2])
        first = torch.autograd.grad((output_MN.sin() * normal(rows, N)).sum(), leaves, create_graph=True)
        directions = [normal(*leaf.shape, seed=1) for leaf in leaves]
        along = sum(((g * d).sum() for g, d in zip(first, directions, strict=True)), start=torch.zeros((), dtype=dtype))
        return [*first, *torch.autograd.grad(along, leaves)]

    weight_shape = (K, N) if transposed else (N, K)
    exact = derivatives(F.linear, torch.float64)
    assert all(float(gradient.detach().abs().max()) > 0.1 for gradient in exact)
    for result, wanted in zip(derivatives(linear, torch.float32), exact, strict=True):
        # A gradient is a sum of products that cancel in part, and the second ones sum such sums.
        assert_near(result, wanted, times=4)
    if library == "onednn":
        assert (K, N) in calls
        assert ((K, rows) in calls) == (K * rows >= products.SMALLEST)
    else:
        assert calls == []


@pytest.mark.parametrize(("wide", "rows", "swapped"), [(512, 512, True), (512, 64, False), (64, 512, False)])
def test_of_a_weights_gradient_the_narrower_factor_is_copied_and_the_result_is_exact(
    library: str, wide: int, rows: int, swapped: bool
) -> None:
    grad_MN, input_MK = normal(rows, wide), normal(rows, K)
    gradient_NK = linear(grad_MN.t(), input_MK.t())
    assert_near(gradient_NK, grad_MN.double().t() @ input_MK.double(), times=4)
    assert gradient_NK.is_contiguous() != (swapped and library == "onednn")


def test_the_gradient_of_a_sum_whose_rows_are_one_number_repeated_is_exact(library: str) -> None:
    input_MK, weight_NK = normal(M, K).requires_grad_(), normal(N, K).requires_grad_()
    linear(input_MK, weight_NK).sum().backward()
    assert input_MK.grad is not None and weight_NK.grad is not None
    assert_near(input_MK.grad, weight_NK.detach().double().sum(0).expand(M, K))
    assert_near(weight_NK.grad, input_MK.detach().double().sum(0).expand(N, K))


@pytest.mark.parametrize(
    ("wanted", "products_done"),
    [((True, False, False), 2), ((False, True, False), 2), ((False, False, True), 1), ((True, True, True), 3)],
)
def test_only_what_needs_a_gradient_gets_one_and_costs_one(
    onednn: None, wanted: tuple[bool, ...], products_done: int, calls: list
) -> None:
    leaves = [normal(96, K), normal(N, K), normal(N)]
    for leaf, needed in zip(leaves, wanted, strict=True):
        leaf.requires_grad_(needed)
    linear(*leaves).sum().backward()
    assert tuple(leaf.grad is not None for leaf in leaves) == wanted
    assert len(calls) == products_done


def test_without_gradients_no_graph_is_kept_and_the_bits_are_the_same(onednn: None) -> None:
    input_MK, weight_NK, bias_N = normal(M, K), normal(N, K).requires_grad_(), normal(N)
    with torch.no_grad():
        plain_MN = linear(input_MK, weight_NK, bias_N)
    with torch.inference_mode():
        inference_MN = linear(input_MK, weight_NK, bias_N)
    recorded_MN = linear(input_MK, weight_NK, bias_N)
    assert not plain_MN.requires_grad
    assert recorded_MN.requires_grad
    assert torch.equal(plain_MN, recorded_MN)
    assert torch.equal(plain_MN, inference_MN)


@pytest.mark.parametrize("shape", [(0, K), (3, 0, K)])
def test_no_rows_give_no_rows_and_zero_gradients(library: str, shape: tuple[int, ...]) -> None:
    input_MK, weight_NK, bias_N = normal(*shape).requires_grad_(), normal(N, K).requires_grad_(), normal(N)
    output_MN = linear(input_MK, weight_NK, bias_N)
    assert output_MN.shape == (*shape[:-1], N)
    output_MN.sum().backward()
    assert weight_NK.grad is not None and input_MK.grad is not None
    assert torch.equal(weight_NK.grad, torch.zeros(N, K))
    assert input_MK.grad.shape == shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_torch(onednn: None, dtype: torch.dtype, calls: list) -> None:
    input_MK, weight_NK, bias_N = normal(M, K).to(dtype), normal(N, K).to(dtype), normal(N).to(dtype)
    assert torch.equal(linear(input_MK, weight_NK, bias_N), F.linear(input_MK, weight_NK, bias_N))
    assert calls == []


def test_an_input_of_another_type_than_the_weight_raises_as_in_torch(onednn: None) -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        linear(normal(M, K).double(), normal(N, K))


def test_weights_of_few_entries_are_left_to_torch(onednn: None, calls: list) -> None:
    smallest = products.SMALLEST // 64
    input_MK = normal(M, 64)
    below_NK, at_NK = normal(smallest - 1, 64), normal(smallest, 64)
    assert torch.equal(linear(input_MK, below_NK), F.linear(input_MK, below_NK))
    assert calls == []
    linear(input_MK, at_NK)
    assert calls == [(smallest, 64)]


def test_a_weight_is_served_by_its_type_device_and_size(onednn: None) -> None:
    weight_NK = normal(N, K)
    assert products.served(weight_NK)
    assert products.served(weight_NK.t())
    for other in (weight_NK.double(), weight_NK.bfloat16(), weight_NK.to("meta"), weight_NK[:32]):
        assert not products.served(other)


def test_under_autocast_all_is_left_to_torch(onednn: None, calls: list) -> None:
    input_MK, weight_NK = normal(M, K), normal(N, K)
    with torch.autocast("cpu", torch.bfloat16):
        output_MN, expected_MN = linear(input_MK, weight_NK), F.linear(input_MK, weight_NK)
    assert output_MN.dtype == torch.bfloat16
    assert torch.equal(output_MN, expected_MN)
    assert calls == []


def test_while_torch_compiles_all_is_left_to_torch(onednn: None, calls: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    linear(normal(M, K), normal(N, K))
    assert calls == []


def test_a_rows_bits_do_not_depend_on_how_many_rows_stand_beside_it(library: str, one_thread: None) -> None:
    for columns, outputs in ((128, 96), (256, 64), (96, 300)):
        input_MK, weight_NK, bias_N = normal(160, columns), normal(outputs, columns), normal(outputs)
        linear_MN, unbiased_MN = linear(input_MK, weight_NK, bias_N), linear(input_MK, weight_NK)
        for rows in (4, 8, 12, 16, 28, 64, 100, 128):
            assert torch.equal(linear(input_MK[:rows], weight_NK, bias_N), linear_MN[:rows])
            assert torch.equal(linear(input_MK[-rows:], weight_NK, bias_N), linear_MN[-rows:])
            assert torch.equal(linear(input_MK[:rows], weight_NK), unbiased_MN[:rows])


@needs_onednn
def test_with_packed_weights_too_a_rows_bits_do_not_depend_on_the_others(one_thread: None) -> None:
    for columns, outputs in ((128, 96), (256, 64), (96, 300)):
        input_MK, weight_NK, bias_N = normal(160, columns), normal(outputs, columns), normal(outputs)
        packed = pack(weight_NK)
        output_MN = multiply(input_MK, packed, bias_N)
        assert_near(output_MN, F.linear(input_MK.double(), weight_NK.double(), bias_N.double()))
        for rows in (4, 8, 12, 16, 28, 64, 100, 128):
            assert torch.equal(multiply(input_MK[:rows], packed, bias_N), output_MN[:rows])


@needs_onednn
def test_a_packed_copy_does_not_follow_the_weight() -> None:
    input_MK, weight_NK = normal(M, K), normal(N, K).requires_grad_()
    before_MN = F.linear(input_MK.double(), weight_NK.detach().double())
    packed = pack(weight_NK)
    with torch.no_grad():
        weight_NK.mul_(3)
    output_MN = multiply(input_MK, packed, None)
    assert not output_MN.requires_grad
    assert_near(output_MN, before_MN)


@pytest.mark.parametrize(
    ("setting", "capability", "intel", "mkl", "chosen"),
    [
        (None, "AVX512", False, True, True),
        ("auto", "AVX512_VNNI", False, True, True),
        (None, "AVX2", False, True, False),
        (None, "AVX512", True, True, False),
        (None, "AVX512", False, False, False),
        ("mkl", "AVX512", False, True, False),
        ("onednn", "AVX2", True, False, True),
    ],
)
def test_onednn_is_chosen_where_avx512_is_no_intels_or_where_the_setting_says_so(
    setting: str | None, capability: str, intel: bool, mkl: bool, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting is None:
        monkeypatch.delenv(products.SETTING, raising=False)
    else:
        monkeypatch.setenv(products.SETTING, setting)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(products, "_is_intel", lambda: intel)
    assert onednn_is_faster() == (chosen and hasattr(torch.ops.mkldnn, "_linear_pointwise"))


@pytest.mark.parametrize("setting", ["auto", "onednn"])
def test_a_torch_without_onednn_never_chooses_it(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(products.SETTING, setting)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(products, "_is_intel", lambda: False)
    assert not onednn_is_faster()
    input_MK, weight_NK = normal(M, K), normal(N, K)
    assert torch.equal(linear(input_MK, weight_NK), F.linear(input_MK, weight_NK))


def test_a_processor_of_unknown_make_is_left_to_torch_as_intels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, intel in (("GenuineIntel", True), ("AuthenticAMD", False), ("", True)):
        monkeypatch.setattr(products, "vendor", lambda name=name: name)
        assert products._is_intel() == intel


@needs_onednn
def test_the_gradient_of_a_weight_of_one_column_has_the_bits_of_the_product_as_it_is_written() -> None:
    grad_TO, input_TI = normal(100, 31), normal(100, 1)
    written = torch.ops.mkldnn._linear_pointwise(grad_TO.t(), input_TI.t(), None, "none", [], "")
    assert torch.equal(multiply(grad_TO.t(), input_TI.t(), None), written)
