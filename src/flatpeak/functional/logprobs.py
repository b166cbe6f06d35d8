"""Log-probabilities and entropy from hidden states, in chunks, so that no [T, V] tensor is allocated.

For 32k tokens and a vocabulary of 150k, the logits alone would take 20 GB. The backward pass recomputes each chunk's
logits, at the cost of one more matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatpeak.functional.kept_tokens import KeptTokens
from flatpeak.kernels.gpu_kernels import works
from flatpeak.kernels.matmul import add_linear, linear

_LOGITS_PER_CHUNK_CPU = 1 << 22
"""16 MiB of float32: fits large caches, and still needs few passes over the gradient of a large output layer."""
_LOGITS_PER_CHUNK = 1 << 26
"""256 MiB of float32."""
_LOGITS_PER_FUSED_CHUNK = 1 << 28
"""Twice the memory in bfloat16, where the kernels need a chunk's logits alone."""
_ROWS_CPU = 256
"""The least rows of a chunk on a CPU: with fewer, the product with a large output layer is slower."""
_ROW_MULTIPLE = 64
"""Whole tiles of the matrix product, so that every chunk but the last computes a token's row in the same way."""


def token_logprobs(
    hidden_TD: Tensor,
    output_weight_VD: Tensor,
    targets_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    kept_T: KeptTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """(logprobs_T, entropy_T) of softmax(z) over the whole vocabulary, in nats; with `kept_T` logprobs_T are of softmax
    over these tokens.

    z = s (h W^T + b) / temperature with logit_scale s; with softcap c, z = c tanh(s (h W^T + b) / c) / temperature.
    logprobs_t = z_y - log sum_v exp(z_v), entropy_t = -sum_v p_v log p_v. Logits must be finite.

    Matrix products run in the inputs' dtype, or in autocast's. Everything else, results included, is float32, or
    float64 for float64 inputs. Both outputs can be differentiated once, with respect to hidden, weight and bias; a
    second differentiation raises RuntimeError. `chunk_size`, in tokens, changes only memory and speed; None chooses it.
    Raises ValueError for shapes or dtypes that do not match.
    """
    hidden_TD, output_weight_VD, bias_V = cast_by_autocast(hidden_TD, output_weight_VD, bias_V)
    _check(hidden_TD, output_weight_VD, targets_T, bias_V, chunk_size)
    if temperature <= 0 or (softcap is not None and softcap <= 0):
        raise ValueError(f"temperature={temperature}, softcap={softcap}: give values above 0 (softcap=None is off)")
    on_cpu = hidden_TD.device.type == "cpu"
    fused = kept_T is None and works("token_logprobs", device=hidden_TD.device, dtype=hidden_TD.dtype)
    head = Head(
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        chunk_size=chunk_size or chunk_tokens(len(output_weight_VD), on_cpu=on_cpu, fused=fused),
        kept_T=kept_T,
        fused=fused,
    )
    logprobs_T, entropy_T = _TokenLogprobs.apply(hidden_TD, output_weight_VD, targets_T.contiguous(), bias_V, head)
    return logprobs_T, entropy_T


def chunk_tokens(vocabulary: int, *, on_cpu: bool, fused: bool = False) -> int:
    """The tokens per chunk if the caller of `token_logprobs` gives none; `fused`: by kernels."""
    on_gpu = _LOGITS_PER_FUSED_CHUNK if fused else _LOGITS_PER_CHUNK
    budget, least = (_LOGITS_PER_CHUNK_CPU, _ROWS_CPU) if on_cpu else (on_gpu, _ROW_MULTIPLE)
    return max(least, budget // (vocabulary * _ROW_MULTIPLE) * _ROW_MULTIPLE)


def cast_by_autocast(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as autocast does for a linear layer, so that the backward pass recomputes in the same dtype."""
    device = hidden_TD.device.type
    if not torch.is_autocast_enabled(device) or hidden_TD.dtype == torch.float64:
        return hidden_TD, weight_VD, bias_V
    dtype = torch.get_autocast_dtype(device)
    return hidden_TD.to(dtype), weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)


def _check(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, bias_V: Tensor | None, chunk_size: int | None
) -> None:
    if hidden_TD.ndim != 2 or weight_VD.ndim != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(f"hidden {list(hidden_TD.shape)} and weight {list(weight_VD.shape)}: give [T, D] and [V, D]")
    if targets_T.shape != hidden_TD.shape[:1] or targets_T.dtype != torch.int64:
        raise ValueError(
            f"targets are {targets_T.dtype} {list(targets_T.shape)}: give int64 [{len(hidden_TD)}], one per state"
        )
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ValueError(f"bias {list(bias_V.shape)}: give [{len(weight_VD)}], one per row of the weight")
    if len({hidden_TD.dtype, weight_VD.dtype, hidden_TD.dtype if bias_V is None else bias_V.dtype}) > 1:
        raise ValueError(
            f"hidden is {hidden_TD.dtype} but the head {weight_VD.dtype}: cast one of them, or use autocast"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: give at least 1 token, or None to choose")


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The transformation from hidden states to the inputs of softmax, for chunks of tokens."""

    softcap: float | None
    logit_scale: float
    temperature: float
    chunk_size: int
    kept_T: KeptTokens | None
    fused: bool = False
    """Whether kernels compute from the logits on."""

    @property
    def kernel_settings(self) -> dict[str, float]:
        """The factor of z and the soft cap of the logits, as the kernels take them."""
        softcap = 0.0 if self.softcap is None else self.softcap / self.logit_scale
        return {"factor": self.logit_scale / self.temperature, "softcap": softcap}

    def mask(self, rows: slice, vocabulary: int) -> Tensor | None:
        """bool [C, V]: the tokens that each of a chunk's tokens was drawn from; None: all."""
        return None if self.kept_T is None else self.kept_T.mask(rows, vocabulary)

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """Slices that cover the tokens in order."""
        return (slice(start, start + self.chunk_size) for start in range(0, num_tokens, self.chunk_size))

    def scores(self, hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        """The chunk's z, [C, V] in at least float32, newly allocated."""
        scores_CV = linear(hidden_CD, weight_VD, bias_V)
        scores_CV = scores_CV.to(_result_dtype(scores_CV))
        if self.logit_scale != 1:
            scores_CV.mul_(self.logit_scale)
        if self.softcap is not None:
            scores_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1:
            scores_CV.div_(self.temperature)
        return scores_CV

    def slope(self, scores_CV: Tensor) -> Tensor | float:
        """d z / d (h W^T + b), from z: tanh' = 1 - tanh^2."""
        slope = self.logit_scale / self.temperature
        if self.softcap is None:
            return slope
        return (scores_CV * (self.temperature / self.softcap)).square_().neg_().add_(1).mul_(slope)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, bias_V: Tensor | None, head: Head
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        logprobs_T = hidden_TD.new_empty(len(hidden_TD), dtype=_result_dtype(hidden_TD))
        entropy_T = torch.empty_like(logprobs_T)
        logsum_T = torch.empty_like(logprobs_T) if head.fused else None
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for rows in head.chunks(len(hidden_TD)):
                if logsum_T is not None:
                    from flatpeak.kernels.token_logprobs_triton import read_logits

                    logits_CV = linear(hidden_TD[rows], weight_VD, bias_V)
                    results = read_logits(logits_CV, targets_T[rows], **head.kernel_settings)
                    logprobs_T[rows], entropy_T[rows], logsum_T[rows] = results
                    continue
                scores_CV = head.scores(hidden_TD[rows], weight_VD, bias_V)
                logprobs_CV = torch.log_softmax(scores_CV, -1)
                logprobs_T[rows] = logprobs_CV.gather(1, targets_T[rows, None]).squeeze(1)
                kept_CV = head.mask(rows, len(weight_VD))
                if kept_CV is not None:
                    logprobs_T[rows] -= logprobs_CV.masked_fill(~kept_CV, -torch.inf).logsumexp(-1)
                entropy_T[rows] = torch.exp(logprobs_CV, out=scores_CV).mul_(logprobs_CV).sum(-1).neg_()
                del scores_CV, logprobs_CV  # free them before the next chunk allocates its tensors
        ctx.head = head
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, bias_V, entropy_T, logsum_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, targets_T, bias_V, entropy_T, logsum_T = ctx.saved_tensors
        if grad_logprobs_T is None:
            grad_logprobs_T = torch.zeros_like(entropy_T)
        if grad_entropy_T is not None and not bool(grad_entropy_T.any()):
            grad_entropy_T = None

        def logit_gradient(rows: slice) -> Tensor:
            from flatpeak.kernels.token_logprobs_triton import differentiate_

            return differentiate_(
                linear(hidden_TD[rows], weight_VD, bias_V),
                targets_T[rows],
                logsum_T[rows],
                entropy_T[rows],
                grad_logprobs_T[rows],
                None if grad_entropy_T is None else grad_entropy_T[rows],
                **ctx.head.kernel_settings,
            )

        def score_gradient(rows: slice, scores_CV: Tensor) -> Tensor:
            return _score_gradient(
                scores_CV,
                targets_T[rows],
                entropy_T[rows],
                grad_logprobs_T[rows],
                None if grad_entropy_T is None else grad_entropy_T[rows],
                ctx.head.mask(rows, len(weight_VD)),
            )

        needs_hidden, needs_weight, _, needs_bias, _ = ctx.needs_input_grad
        needs = (needs_hidden, needs_weight, needs_bias)
        grad_hidden_TD, grad_weight_VD, grad_bias_V = head_gradients(
            *(ctx.head, hidden_TD, weight_VD, bias_V),
            needs=needs,
            score_gradient=score_gradient,
            logit_gradient=None if logsum_T is None else logit_gradient,
        )
        return grad_hidden_TD, grad_weight_VD, None, grad_bias_V, None


def head_gradients(
    head: Head,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    *,
    needs: tuple[bool, bool, bool],
    score_gradient: Callable[[slice, Tensor], Tensor],
    logit_gradient: Callable[[slice], Tensor] | None = None,
) -> list[Tensor | None]:
    """The gradients of hidden states, weight and bias, where `needs` asks for them.

    `score_gradient` gives d loss / d z [C, V] of a chunk, from its slice and its z, which it may overwrite;
    `logit_gradient`, in its place, d loss / d (h W^T + b), from the slice alone.
    """
    needs_hidden, needs_weight, needs_bias = needs
    with torch.no_grad(), torch.autocast(hidden_TD.device.type, enabled=False):
        grads = _Gradients(
            hidden_TD=torch.empty_like(hidden_TD) if needs_hidden else None,
            weight_VD=_zeros_like(weight_VD) if needs_weight else None,
            bias_V=_zeros_like(bias_V) if bias_V is not None and needs_bias else None,
        )
        for rows in head.chunks(len(hidden_TD)):
            if logit_gradient is not None:
                grads.add(logit_gradient(rows), hidden_TD[rows], weight_VD, rows)
                continue
            scores_CV = head.scores(hidden_TD[rows], weight_VD, bias_V)
            slope = head.slope(scores_CV)
            grad_CV = score_gradient(rows, scores_CV)
            grads.add(grad_CV.mul_(slope), hidden_TD[rows], weight_VD, rows)
            del scores_CV, slope, grad_CV
        cast = [g if g is None else g.to(hidden_TD.dtype) for g in (grads.hidden_TD, grads.weight_VD, grads.bias_V)]
    if torch.is_grad_enabled():
        sources = [t for t in (hidden_TD, weight_VD, bias_V) if t is not None]
        cast = [g if g is None else _DifferentiatedOnce.apply(g, *sources) for g in cast]
    return cast


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gradients:
    """The requested gradients, filled chunk by chunk; weight and bias are summed in at least float32."""

    hidden_TD: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None

    def add(self, grad_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor, rows: slice) -> None:
        """Add a chunk's contribution, given its gradient with respect to h W^T + b."""
        if self.bias_V is not None:
            self.bias_V.add_(grad_CV.sum(0))
        grad_CV = grad_CV.to(hidden_CD.dtype)
        if self.hidden_TD is not None:
            self.hidden_TD[rows] = linear(grad_CV, weight_VD.t())
        if self.weight_VD is not None:
            add_linear(self.weight_VD, grad_CV.t(), hidden_CD.t())


class _DifferentiatedOnce(torch.autograd.Function):
    """Passes a gradient through, and raises an error in a second derivative.

    torch's `once_differentiable` treats a constant incoming gradient as a constant in a second derivative too: a
    Hessian would be wrong without any error.
    """

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("token_logprobs has no second derivative: use log_softmax of full logits")


def _score_gradient(
    scores_CV: Tensor,
    targets_C: Tensor,
    entropy_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
    kept_CV: Tensor | None,
) -> Tensor:
    """d loss / d z = g_logp (1[v = y] - q_v) - g_H p_v (log p_v + H), q = p over the kept tokens, 0 elsewhere."""
    if kept_CV is not None:
        grad_CV = torch.softmax(scores_CV.masked_fill(~kept_CV, -torch.inf), -1).mul_(-grad_logprobs_C[:, None])
        if grad_entropy_C is not None:
            logprobs_CV = torch.log_softmax(scores_CV, -1)
            grad_CV.sub_(logprobs_CV.exp() * (logprobs_CV + entropy_C[:, None]) * grad_entropy_C[:, None])
    elif grad_entropy_C is None:
        grad_CV = torch.softmax(scores_CV, -1).mul_(-grad_logprobs_C[:, None])
    else:
        logprobs_CV = torch.log_softmax(scores_CV, -1)
        p_CV = torch.exp(logprobs_CV, out=scores_CV)
        factors_CV = logprobs_CV.add_(entropy_C[:, None]).mul_(-grad_entropy_C[:, None]).sub_(grad_logprobs_C[:, None])
        grad_CV = factors_CV.mul_(p_CV)
    # Each row is written once, so unlike scatter_add_ this is deterministic on every device.
    rows_C = torch.arange(len(targets_C), device=targets_C.device)
    grad_CV[rows_C, targets_C] += grad_logprobs_C
    return grad_CV


def _result_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _zeros_like(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, dtype=_result_dtype(tensor))
