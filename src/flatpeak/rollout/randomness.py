"""Random numbers as a function of their purpose, so that no number depends on earlier ones.

A completion's key hashes (seed, prompt id, index in group). The number at a position is the key's SplitMix64 stream at
that position (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"; finalizer: Stafford's
variant 13). No state passes from call to call, so batch size, order and device cannot change a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit integer: torch's int64 arithmetic is modulo 2^64."""
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) from integers and strings: equal on every machine, different for different parts.

    The hash (BLAKE2b) covers each part's type and length, so ("ab", "c") and ("a", "bc"), and (1,) and ("1",), differ.
    """
    digest = blake2b(digest_size=8)
    for value in parts:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise TypeError(f"derive_seed takes integers and strings, not {type(value).__name__}: {value!r}")
        kind, data = ("i", str(value)) if isinstance(value, int) else ("s", value)
        encoded = data.encode("utf-8", "surrogatepass")
        digest.update(f"{kind}{len(encoded)}:".encode() + encoded)
    return int.from_bytes(digest.digest(), "big") >> 1


def completion_keys(seed: int, prompt_ids: Sequence[str], group_size: int) -> Tensor:
    """int64 [P * G]: each completion's key, prompt by prompt, from only (seed, prompt id, index in group).

    Repeated ids would have repeated keys: ids must be unique within a task.
    """
    bases_P = torch.tensor([derive_seed("row", seed, prompt_id) for prompt_id in prompt_ids], dtype=torch.int64)
    index_G = torch.arange(1, group_size + 1, dtype=torch.int64)
    return _mix(bases_P[:, None] + index_G * _GOLDEN).flatten()


def keys_from(keys_N: Tensor, positions_N: Tensor) -> Tensor:
    """int64 [N]: keys whose numbers from these positions on are those of `keys_N` from position 0 on."""
    return keys_N - positions_N * _GOLDEN


def uniforms(keys_R: Tensor, positions_R: Tensor | int) -> Tensor:
    """float64 [R] in [0, 1), multiples of 2^-53: each completion's number at its token position (int64, from 0)."""
    bits_R = _mix(keys_R + (torch.as_tensor(positions_R) + 1) * _GOLDEN)
    return _shift(bits_R, 11).to(torch.float64) * 2.0**-53


def _mix(values: Tensor) -> Tensor:
    """SplitMix64's finalizer, a bijection of 64-bit integers in which every input bit affects every output bit."""
    values = (values ^ _shift(values, 30)) * _MULTIPLIER_1
    values = (values ^ _shift(values, 27)) * _MULTIPLIER_2
    return values ^ _shift(values, 31)


def _shift(values: Tensor, bits: int) -> Tensor:
    """A right shift that fills with zeros; torch's shift of an int64 copies the sign bit."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
