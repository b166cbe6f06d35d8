"""The choice between Triton's kernels and torch, with checks that stand in for a GPU's."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flatpeak.kernels import gpu_kernels
from flatpeak.kernels.gpu_kernels import kernel_notices, works

GPU = torch.device("cuda", 0)


@pytest.fixture
def check_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., float]], None]]:
    """`check_with(check)`: the check of the output layer's kernels on a machine with Triton."""
    works.cache_clear()
    monkeypatch.setattr(gpu_kernels, "_FAULTS", [])
    monkeypatch.setattr(gpu_kernels, "find_spec", lambda name: object())

    def use(check: Callable[..., float]) -> None:
        monkeypatch.setitem(gpu_kernels._CHECKS, "token_logprobs", ("the output layer runs", check))

    yield use
    works.cache_clear()


def in_bfloat16() -> bool:
    return works("token_logprobs", device=GPU, dtype=torch.bfloat16)


def test_kernels_that_agree_are_used_and_checked_once(check_with: Callable[..., None]) -> None:
    calls: list[torch.dtype] = []

    def check(device: torch.device, dtype: torch.dtype) -> float:
        calls.append(dtype)
        return 1e-3

    check_with(check)
    assert in_bfloat16() and in_bfloat16()
    assert calls == [torch.bfloat16]
    assert kernel_notices() == []


@pytest.mark.parametrize("gap", [0.2, float("nan")])
def test_kernels_that_are_off_are_not_used_and_a_notice_says_so(gap: float, check_with: Callable[..., None]) -> None:
    check_with(lambda device, dtype: gap)
    assert not in_bfloat16()
    (notice,) = kernel_notices()
    assert "the output layer runs without the Triton kernel, and is slower: its results are off by" in notice


def test_the_check_of_a_decoding_step_sees_results_that_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(update: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return residual.add_(update) * torch.nan

    def rotate(
        states: Tensor, cosines: Tensor, sines: Tensor, keys: Tensor, values: Tensor, *_: object, heads: int
    ) -> Tensor:
        keys.fill_(torch.nan)
        values.fill_(torch.nan)
        return states.new_full((3, heads, 64), torch.nan)

    kernels = {
        "add_and_normalize": add,
        "rotate_and_store": rotate,
        "gated": lambda states: states[:, :200] * torch.nan,
    }
    monkeypatch.setitem(sys.modules, "flatpeak.kernels.decode_layer_triton", SimpleNamespace(**kernels))
    assert math.isnan(gpu_kernels._check_decode_layer(torch.device("cpu"), torch.float32))


def test_without_a_compiler_torch_computes_and_the_notice_has_the_reason(check_with: Callable[..., None]) -> None:
    def fail(device: torch.device, dtype: torch.dtype) -> float:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    check_with(fail)
    assert not in_bfloat16()
    assert kernel_notices()[0].endswith("it failed: RuntimeError: Failed to find C compiler.")


def test_without_triton_torch_computes(check_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "find_spec", lambda name: None)
    check_with(lambda device, dtype: pytest.fail("checked"))
    assert not in_bfloat16()
    assert kernel_notices()[0].endswith("triton is not installed")


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.float64)])
def test_on_a_cpu_and_in_double_precision_no_kernel_is_asked_for(
    device: str, dtype: torch.dtype, check_with: Callable[..., None]
) -> None:
    check_with(lambda device, dtype: pytest.fail("checked"))
    assert not works("token_logprobs", device=torch.device(device), dtype=dtype)
    assert kernel_notices() == []
