from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flatpeak.rollout.randomness import completion_keys, derive_seed, uniforms


def uniform_grid(num_keys: int, num_positions: int) -> torch.Tensor:
    keys = completion_keys(3, [str(n) for n in range(num_keys // 8)], 8)
    return torch.stack([uniforms(keys, position) for position in range(num_positions)])


def test_numbers_are_the_published_splitmix64_stream() -> None:
    # The first outputs of SplitMix64 seeded with 1234567, as its test vectors give them.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    numbers = [uniforms(torch.tensor([1234567]), position).item() for position in range(4)]
    assert numbers == [(value >> 11) / 2**53 for value in published]


def test_negative_keys_shift_in_zeros() -> None:
    mask = (1 << 64) - 1
    for key in (-1, -(2**63), 2**63 - 1, -987654321):
        for position in (0, 1, 5000):
            z = (key + 0x9E3779B97F4A7C15 * (position + 1)) & mask
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            z ^= z >> 31
            assert uniforms(torch.tensor([key]), position).item() == (z >> 11) / 2**53


def test_seeds_and_keys_are_pinned() -> None:
    assert derive_seed(0) == 6148773199958884930
    assert derive_seed(7, "sft", 12) == 2486140532043808379
    assert completion_keys(0, ["a", "b"], 2).tolist() == [
        -1671839041181108895,
        -3786374419600856268,
        2341313469755764116,
        8201605147358743210,
    ]


def test_derived_seeds_tell_types_and_borders_apart() -> None:
    parts = [(1,), ("1",), (1, 1), (11,), ("ab", "c"), ("a", "bc"), ("abc",), (), ("",), (-1,), ("\ud800",)]
    seeds = [derive_seed(*component) for component in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("part", [1.0, True, None])
def test_derive_seed_refuses_what_is_neither_integer_nor_string(part: object) -> None:
    with pytest.raises(TypeError, match="integers and strings"):
        derive_seed(part)  # type: ignore[arg-type]


def test_a_key_depends_on_seed_prompt_and_index_and_not_on_company() -> None:
    together = completion_keys(9, ["x", "y", "z"], 4)
    assert torch.equal(completion_keys(9, ["z"], 4), together[8:])
    assert torch.equal(completion_keys(9, ["y"], 2), together[4:6])
    assert len(set(together.tolist()) | set(completion_keys(10, ["x", "y", "z"], 4).tolist())) == 24


def test_numbers_repeat_exactly_and_stay_below_one() -> None:
    grid = uniform_grid(800, 50)
    assert torch.equal(grid, uniform_grid(800, 50))
    assert grid.dtype == torch.float64
    assert grid.min() >= 0
    assert grid.max() <= 1 - 2**-53


def test_numbers_are_uniform_by_chi_square() -> None:
    counts, _ = np.histogram(uniform_grid(800, 500).numpy(), bins=256, range=(0, 1))
    expected = 800 * 500 / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255)


def test_each_bit_is_set_half_of_the_time() -> None:
    bits = (uniform_grid(800, 100) * 2**53).to(torch.int64).flatten()
    shares = torch.stack([(bits >> b & 1).double().mean() for b in range(53)])
    assert (shares - 0.5).abs().max() < 5 * 0.5 / math.sqrt(80_000)


@pytest.mark.parametrize("axis", ["index in group", "prompt", "position"])
def test_neighbours_are_uncorrelated(axis: str) -> None:
    cube = uniform_grid(800, 500).view(500, 100, 8)
    first, second = {
        "index in group": (cube[:, :, :-1], cube[:, :, 1:]),
        "prompt": (cube[:, :-1], cube[:, 1:]),
        "position": (cube[:-1], cube[1:]),
    }[axis]
    correlation = np.corrcoef(first.flatten().numpy(), second.flatten().numpy())[0, 1]
    assert abs(correlation) < 4 / math.sqrt(first.numel())
    # Joint uniformity of neighbours sees dependence that correlation does not.
    counts, *_ = np.histogram2d(first.flatten().numpy(), second.flatten().numpy(), bins=16, range=((0, 1), (0, 1)))
    expected = first.numel() / 256
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * math.sqrt(2 * 255)
