# mypy: disable-error-code="no-untyped-def,untyped-decorator,unused-ignore"
"""From a chunk's logits to log-probabilities and entropy, and to the gradient of the logits, in one pass each.

Logits are read in the type of the matrix product, and everything is computed in float32. C: tokens, V: vocabulary.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped]
import triton.language as tl  # type: ignore[import-not-found,import-untyped]
from torch import Tensor

BLOCK = 4096


def read_logits(
    logits_CV: Tensor, targets_C: Tensor, *, factor: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target, entropy, and log-sum-exp of z: three float32 [C].

    z = factor * logits; with a soft cap c above 0, z = factor * c tanh(logits / c).
    """
    rows, vocabulary = logits_CV.shape
    results = logits_CV.new_empty(3, rows, dtype=torch.float32)
    _read[(rows,)](
        logits_CV, targets_C, *results, vocabulary, factor, softcap, CAPPED=softcap > 0, BLOCK=BLOCK, num_warps=8
    )
    logprobs_C, entropy_C, logsum_C = results
    return logprobs_C, entropy_C, logsum_C


def differentiate_(
    logits_CV: Tensor,
    targets_C: Tensor,
    logsum_C: Tensor,
    entropy_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
    *,
    factor: float,
    softcap: float,
) -> Tensor:
    """Replace the logits by the gradient with respect to them: g_logp (1[v = y] - p_v) - g_H p_v (log p_v + H)."""
    rows, vocabulary = logits_CV.shape
    # Gradients of a sum are one number, expanded.
    grads = [(grad_logprobs_C if each is None else each).contiguous() for each in (grad_logprobs_C, grad_entropy_C)]
    _differentiate[(rows, triton.cdiv(vocabulary, BLOCK))](
        *(logits_CV, targets_C, logsum_C, entropy_C, *grads),
        *(vocabulary, factor, softcap),
        CAPPED=softcap > 0,
        ENTROPY=grad_entropy_C is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return logits_CV


# fmt: off
@triton.jit
def _scores(raw, factor, softcap, CAPPED: tl.constexpr):
    """z, and its derivative with respect to the logits."""
    x = raw.to(tl.float32)
    if CAPPED:
        tanh = 2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0
        return factor * softcap * tanh, factor * (1.0 - tanh * tanh)
    return factor * x, factor + 0.0 * x


@triton.jit
def _read(
    logits, targets, logprobs, entropies, logsums, vocabulary, factor, softcap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top = float("-inf")
    total = 0.0
    weighted = 0.0  # sum of exp(z - top) z
    for first in range(0, vocabulary, BLOCK):
        v = first + tl.arange(0, BLOCK)
        inside = v < vocabulary
        z, _ = _scores(tl.load(logits + row * vocabulary + v, mask=inside, other=0.0), factor, softcap, CAPPED)
        new = tl.maximum(top, tl.max(tl.where(inside, z, float("-inf")), 0))
        weight = tl.where(inside, tl.exp(z - new), 0.0)
        decay = tl.exp(top - new)
        total = total * decay + tl.sum(weight, 0)
        weighted = weighted * decay + tl.sum(weight * z, 0)
        top = new
    logsum = top + tl.log(total)
    target, _ = _scores(tl.load(logits + row * vocabulary + tl.load(targets + row)), factor, softcap, CAPPED)
    tl.store(logprobs + row, target - logsum)
    tl.store(entropies + row, logsum - weighted / total)
    tl.store(logsums + row, logsum)


@triton.jit
def _differentiate(
    logits, targets, logsums, entropies, grad_logprobs, grad_entropies, vocabulary, factor, softcap,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < vocabulary
    place = logits + row * vocabulary + v
    raw = tl.load(place, mask=inside, other=0.0)
    z, slope = _scores(raw, factor, softcap, CAPPED)
    logprob = z - tl.load(logsums + row)
    p = tl.exp(logprob)
    g = tl.load(grad_logprobs + row)
    grad = tl.where(v == tl.load(targets + row), g, 0.0) - g * p
    if ENTROPY:
        grad -= tl.load(grad_entropies + row) * p * (logprob + tl.load(entropies + row))
    tl.store(place, (grad * slope).to(raw.dtype), mask=inside)
# fmt: on
