"""Attention, norms, SwiGLU and GELU of the native training pass beside torch's, and their bits with other threads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatpeak.kernels.native.build import UnavailableError, library
from flatpeak.kernels.native.training_pass import Groups, attention, gelu, rms_norm, swiglu
from support.native_kernels import attend_plainly, random_groups

try:
    library()
except UnavailableError as unavailable:
    pytest.skip(str(unavailable), allow_module_level=True)

FILLER = 5


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    """One thread, or as many as are set, for the length of a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random_states(groups: Groups, heads: int, kv_heads: int, dim: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = int(groups.segments.sum(1).max()) + FILLER
    return [torch.randn(tokens, count, dim, generator=generator) for count in (heads, kv_heads, kv_heads)]


def attended(states: list[Tensor], groups: Groups) -> list[Tensor]:
    """Output and gradients of native attention."""
    leaves = [each.detach().requires_grad_() for each in states]
    output = attention(leaves, groups, leaves[0].shape[-1] ** -0.5)
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
    return [output.detach(), *torch.autograd.grad((weights * output).sum(), leaves)]


def gaps(ours: list[Tensor], theirs: list[Tensor]) -> list[float]:
    """The largest differences, relative to the largest entries."""
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("seed", range(16))
def test_attention_and_its_gradient_are_those_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    groups, kv_heads = random_groups(rng), rng.choice((1, 1, 2, 4))
    heads, dim = kv_heads * rng.choice((1, 2, 3, 8)), (16, 24, 32, 8, 80, 128, 4, 18)[seed % 8]
    states = random_states(groups, heads, kv_heads, dim, seed)
    leaves = [each.double().requires_grad_() for each in states]
    output = attend_plainly(leaves, groups, dim**-0.5)
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
    expected = [output.detach(), *torch.autograd.grad((weights * output).sum(), leaves)]
    assert max(gaps(attended(states, groups), expected)) < 1e-6


def test_one_very_long_row_stands_among_short_ones() -> None:
    groups = Groups(
        bounds=torch.tensor([0, 3, 4, 7]),
        segments=torch.tensor([[0, 1], [3, 1], [4, 1500], [1, 1], [2, 1], [1504, 1], [1505, 2]]),
    )
    states = random_states(groups, 2, 1, 16, 0)
    doubled = [each.double() for each in states]
    assert gaps(attended(states, groups)[:1], [attend_plainly(doubled, groups, 0.25)])[0] < 1e-6
    alone = Groups(bounds=torch.tensor([0, 2]), segments=torch.tensor([[0, 1], [1, 1500]]))
    rows = torch.tensor([0, *range(4, 1504)])
    (output, *_), (other, *_) = attended(states, groups), attended([each[rows] for each in states], alone)
    assert torch.equal(output[4:1504], other[1:])


@pytest.mark.parametrize("seed", range(4))
def test_bits_are_the_same_with_two_threads_and_in_other_company(seed: int, threads: Callable[[int], None]) -> None:
    rng = random.Random(seed)
    groups = random_groups(rng, count=4)
    states = random_states(groups, 6, 3, 40, seed)
    one = attended(states, groups)
    threads(2)
    assert all(torch.equal(a, b) for a, b in zip(one, attended(states, groups), strict=True))
    first, end = groups.bounds[1:3].tolist()
    middle = Groups(bounds=groups.bounds[1:3] - first, segments=groups.segments[first:end])
    for start, length in middle.segments.tolist():
        assert torch.equal(attended(states, middle)[0][start : start + length], one[0][start : start + length])


def test_rows_of_no_group_give_zeros_and_views_are_read_as_they_are() -> None:
    groups = Groups(bounds=torch.tensor([0, 2]), segments=torch.tensor([[0, 3], [3, 20]]))
    joined = torch.randn(28, 3 * 64, generator=torch.Generator().manual_seed(0))
    views = [each.view(28, 4, 16) for each in joined.split(64, 1)]
    output = attended(views, groups)[0]
    assert torch.equal(output, attended([each.contiguous() for each in views], groups)[0])
    assert not bool(output[23:].any())
    across = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in views]
    assert torch.equal(output, attended(across, groups)[0])


def test_what_is_not_a_number_stays_so() -> None:
    groups = Groups(bounds=torch.tensor([0, 1, 2]), segments=torch.tensor([[0, 4], [4, 4]]))
    states = random_states(groups, 1, 1, 16, 0)
    states[1][1] = torch.nan
    output = attended(states, groups)[0]
    assert output[:8].isnan().any(-1)[:, 0].tolist() == [False, True, True, True, False, False, False, False]


@pytest.mark.parametrize(("rows", "size"), [(1, 16), (127, 48), (300, 128)])
def test_norm_swiglu_and_gelu_are_those_of_torch(rows: int, size: int, threads: Callable[[int], None]) -> None:
    generator = torch.Generator().manual_seed(rows)
    given = [torch.randn(2, rows, size, generator=generator) for _ in range(3)]
    weight = torch.randn(size, generator=generator)

    def all_of(dtype: torch.dtype, norm: Any, gated: Any, activation: Any) -> list[Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in (*given[:2], weight)]
        outputs = [norm(leaves[0], leaves[2]), gated(*leaves[:2]), activation(3 * leaves[0])]
        grads = [torch.autograd.grad(each, leaves, given[2].to(dtype), allow_unused=True) for each in outputs]
        return [*(each.detach() for each in outputs), *(g for each in grads for g in each if g is not None)]

    kernels = (lambda x, w: rms_norm(x, w, 1e-6), swiglu, gelu)
    native = all_of(torch.float32, *kernels)
    plain = all_of(
        torch.float64,
        lambda x, w: F.rms_norm(x, (size,), w, 1e-6),
        lambda a, b: F.silu(a) * b,
        lambda x: F.gelu(x, approximate="tanh"),
    )
    assert len(native) == 8
    assert max(gaps(native, plain)) < 5e-7
    threads(2)
    again = all_of(torch.float32, *kernels)
    assert all(torch.equal(a, b) for a, b in zip(native, again, strict=True))


def test_activations_of_extreme_numbers_are_those_of_torch() -> None:
    sizes = torch.tensor([0.0, 1e-30, 20.0, 87.0, 88.0, 1e5, 1e15, 3e38])
    extreme = torch.cat([-sizes.flip(0), sizes[1:]])
    for own, plain in ((lambda x: swiglu(x, torch.ones(16)), F.silu), (gelu, lambda x: F.gelu(x, approximate="tanh"))):
        results = []
        for function in (own, plain):
            states = torch.cat([extreme, torch.tensor([torch.nan])]).requires_grad_()
            output = function(states)
            (gradient,) = torch.autograd.grad(output, states, torch.ones(16))
            results.append((output.detach(), gradient))
        (ours, our_gradient), (theirs, their_gradient) = results
        assert torch.allclose(ours, theirs, atol=1e-6, equal_nan=True)
        known = ~their_gradient.isnan()  # of numbers whose square is infinite, torch has none
        assert torch.allclose(our_gradient[known], their_gradient[known], atol=1e-6)


def test_a_norm_takes_any_number_and_any_weight() -> None:
    states, weight = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)), torch.arange(32.0)[::2]
    assert torch.allclose(rms_norm(states, weight, 1), F.rms_norm(states, (16,), weight, 1.0))


def test_a_second_derivative_is_refused() -> None:
    groups = Groups(bounds=torch.tensor([0, 1]), segments=torch.tensor([[0, 4]]))
    leaves = [each.requires_grad_() for each in random_states(groups, 1, 1, 16, 0)]
    weight = torch.ones(16, requires_grad=True)
    first, second, _ = leaves
    for output in (attention(leaves, groups, 1.0), rms_norm(first, weight, 1e-6), swiglu(first, second), gelu(first)):
        (grad,) = torch.autograd.grad(output.square().sum(), leaves[0], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.square().sum().backward()
