"""Whether Triton's kernels work on a device: each is compared with torch before its first use there.

Triton compiles with a C compiler of the machine, which may be missing, and new devices and versions have their faults.
Torch computes what a kernel cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kernels = Literal["decode_layer", "token_logprobs"]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest allowed difference from torch for N(0, 1) inputs; above it the kernels are not used."""
_FAULTS: list[str] = []


def kernel_notices() -> list[str]:
    """Reasons why a GPU computed without kernels, one line each."""
    return sorted(set(_FAULTS))


def report_fault(what: str, fault: str) -> None:
    """Keep the reason why torch computes something in place of a kernel, for `kernel_notices`."""
    _FAULTS.append(f"{what} without the Triton kernel, and is slower: {fault}")


def first_line(error: Exception) -> str:
    """The error's type and the first line of its text."""
    return f"it failed: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


@cache
def works(kernels: Kernels, *, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these kernels compute what torch computes for tensors of this kind."""
    if device.type != "cuda" or dtype not in TOLERANCES:
        return False
    what, check = _CHECKS[kernels]
    fault = "triton is not installed"
    if find_spec("triton") is not None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                gap = check(device, dtype)
        except Exception as error:  # compilers and drivers raise various types of errors; torch is the fallback
            fault = first_line(error)
        else:
            if gap <= TOLERANCES[dtype]:
                return True
            fault = f"its results are off by {gap:.1e} (allowed: {TOLERANCES[dtype]:.0e})"
    report_fault(what, fault)
    return False


def _check_decode_layer(device: torch.device, dtype: torch.dtype) -> float:
    from flatpeak.kernels.decode_layer_triton import add_and_normalize, gated, rotate_and_store

    normal = _normal(device, dtype)
    update, residual, weight, gate_up = normal(3, 96), normal(3, 96), normal(96), normal(3, 400)
    total = update + residual
    normed = add_and_normalize(update, residual, weight, 1e-6)
    gate, up = gate_up.chunk(2, 1)
    states, (cosines, sines), (keys, values) = normal(3, 4, 64), normal(2, 3, 64), normal(2, 3, 1, 5, 64)
    lengths = torch.tensor([4, 0, 2], device=device)
    query = rotate_and_store(states.flatten(1), cosines, sines, keys, values, lengths, None, heads=2)
    turned = torch.cat([-states[..., 32:], states[..., :32]], -1)
    rotated = states * cosines[:, None] + turned * sines[:, None]
    pairs = [
        (residual, total),
        (normed, F.rms_norm(total.float(), (96,), weight.float(), 1e-6)),
        (gated(gate_up), F.silu(gate) * up),
        (query, rotated[:, :2]),
        (keys[1, 0, 0], rotated[1, 2]),
        (values[2, 0, 2], states[2, 3]),
    ]
    return _largest_gap(pairs)


def _check_token_logprobs(device: torch.device, dtype: torch.dtype) -> float:
    from flatpeak.kernels.token_logprobs_triton import differentiate_, read_logits

    logits, targets = _normal(device, dtype)(3, 5000), torch.tensor([0, 4999, 7], device=device)
    logprobs, entropy, logsum = read_logits(logits, targets, factor=0.7, softcap=0.0)
    exact = (0.7 * logits.float()).log_softmax(-1)
    weights = torch.tensor([1.0, -2.0, 0.5], device=device)
    gradient = F.one_hot(targets, 5000) - exact.exp()
    ours = differentiate_(logits, targets, logsum, entropy, weights, None, factor=0.7, softcap=0.0)
    pairs = [
        (logprobs, exact.gather(1, targets[:, None])[:, 0]),
        (entropy, -(exact.exp() * exact).sum(-1)),
        (ours.float(), 0.7 * weights[:, None] * gradient),
    ]
    return _largest_gap(pairs)


def _largest_gap(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The largest difference, relative to the values where they are large; NaN if any is NaN."""
    gaps = [(ours.float() - theirs.float()).abs().max() / (1 + theirs.abs().max()) for ours, theirs in pairs]
    return float(torch.stack(gaps).max())


def _normal(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)


_CHECKS: dict[Kernels, tuple[str, Callable[[torch.device, torch.dtype], float]]] = {
    "decode_layer": ("a decoding step runs", _check_decode_layer),
    "token_logprobs": ("the output layer runs", _check_token_logprobs),
}
"""For each kind, what runs slower without it, and its comparison with torch."""
