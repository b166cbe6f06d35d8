"""Dry runs: flatpeak's own passes on tensors that have shapes and no data, and the bytes that are alive meanwhile.

Activations depend on what each layer of an architecture keeps for its backward pass, on adapters, which cast their
inputs, and on kernels. Formulas for all of that would be guesses, so the passes are run (`fake_policy`), and every
allocation is counted. Layers repeat: what few of them take says what all do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flatpeak.apps.planning.fake_policy import FakeContext, PassSettings, fake_policy
from flatpeak.apps.planning.memory_tracker import MemoryTracker
from flatpeak.apps.planning.planned_model import PlannedModel
from flatpeak.errors import UserError, brief
from flatpeak.policy.loading import misfit
from flatpeak.policy.packing import fill, pack_prompts
from flatpeak.types import Batch

FEW, MORE = 2, 3
"""The numbers of layers that are run. Memory is linear in their number from the second on: the first has the embeddings
for its input."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The memory of a prefill."""

    peak: int
    """Bytes that are alive at most, the keys and values of the prompts among them."""
    per_token: int
    """Bytes of the keys and values of one token."""


class NoDryRunError(Exception):
    """A model whose passes cannot be run without data, as where values decide which expert reads a token."""


def update_peak(settings: PassSettings, batch: Batch) -> int:
    """Bytes alive at most in the forward and backward pass of one micro-batch: gradients, activations, logits."""

    def measure(layers: int) -> int:
        with fake_policy(settings, layers) as policy, MemoryTracker(policy.tensors) as memory:
            if settings.accumulated:
                for parameter in policy.trained:
                    parameter.grad = torch.empty_like(parameter, dtype=torch.float32)
            policy.score(batch).sum().backward()
            for parameter in policy.trained:
                parameter.grad = None
        return int(memory.peak)

    key = ("update", settings.on_cpu, settings.recompute, settings.accumulated, settings.dropout, *_lengths(batch))
    return _at_depth(settings.model, key, measure)


def scoring_peak(settings: PassSettings, batch: Batch) -> int:
    """Bytes alive at most where a micro-batch is scored without gradients."""

    def measure(layers: int) -> int:
        with fake_policy(settings, layers) as policy, torch.no_grad(), MemoryTracker(policy.tensors) as memory:
            policy.score(batch)
        return int(memory.peak)

    return _at_depth(settings.model, ("scoring", settings.on_cpu, *_lengths(batch)), measure)


def logits_peak(settings: PassSettings, tokens: int) -> int:
    """Bytes alive at most in the chunks of logits of so many tokens, forward and backward, gradients aside."""

    def measure(layers: int) -> int:
        with fake_policy(settings, layers) as policy:
            weight = policy.head.linear.weight
            hidden_TD = torch.empty(tokens, weight.shape[1], dtype=settings.model.dtype, requires_grad=True)
            targets_T = torch.zeros(tokens, dtype=torch.int64)
            with MemoryTracker([*policy.tensors, hidden_TD, targets_T]) as memory:
                policy.logprobs(hidden_TD, targets_T).sum().backward()
            gradients = [one.grad for one in (hidden_TD, *policy.trained)]
            return max(0, int(memory.peak) - sum(grad.nbytes for grad in gradients if grad is not None))

    return _remembered(settings.model, ("logits", settings.on_cpu, tokens), lambda: measure(1))


def prefill_memory(
    settings: PassSettings, lengths: Sequence[int], *, multiple: int, with_logits: bool = True
) -> Reading:
    """The memory of reading prompts of these lengths in one pass, the logits of their last tokens included or not."""
    row = pack_prompts([[0] * length for length in lengths], device=torch.device("cpu"), multiple=multiple)
    tokens = sum(lengths)
    key = (settings.on_cpu, multiple, with_logits, *lengths)

    def measure(layers: int) -> int:
        with fake_policy(settings, layers) as policy, torch.no_grad(), MemoryTracker(policy.tensors) as memory:
            context = FakeContext(row, keep_prompts=True, on_cpu=settings.on_cpu)
            hidden_PD = policy.hidden(row, context).index_select(0, row.source_T)
            if with_logits:
                policy.head.logits(fill(hidden_PD))
            kept = sum(states.nbytes for pair in (context.kept or {}).values() for states in pair)
            settings.model.measured["kept", layers, *key] = kept // tokens
        return int(memory.peak)

    def per_token(layers: int) -> int:
        return settings.model.measured["kept", layers, *key]

    peak = _at_depth(settings.model, ("prefill", *key), measure)
    return Reading(peak=peak, per_token=_at_depth(settings.model, ("prefill, a token", *key), per_token))


def _lengths(batch: Batch) -> tuple[object, ...]:
    """The lengths of a batch's prompts and completions, on which alone its memory depends."""
    return tuple(map(len, batch.prompts)), tuple(batch.lengths_N.tolist()), tuple(batch.prompt_N.tolist())


def _remembered(model: PlannedModel, key: tuple[object, ...], compute: Callable[[], int]) -> int:
    """The result under this key, computed the first time."""
    if key not in model.measured:
        model.measured[key] = compute()
    return model.measured[key]


def _at_depth(model: PlannedModel, key: tuple[object, ...], measure: Callable[[int], int]) -> int:
    """Measure at the model's depth, or along the line through two smaller ones; once for each key."""
    return _remembered(model, key, lambda: _extrapolate(model, measure))


def _extrapolate(model: PlannedModel, measure: Callable[[int], int]) -> int:
    try:
        with quiet_fake_tensors():
            if model.layers <= MORE:
                return measure(model.layers)
            few, more = measure(FEW), measure(MORE)
    except (RuntimeError, NotImplementedError) as error:
        new = model.config.new
        if new is not None:
            reason = misfit(model.shape, new.config) or brief(error)
            raise UserError(f"model.new cannot be built: {reason}") from error
        if model.fallback is None:
            raise
        raise NoDryRunError(brief(error)) from error
    return few + (more - few) * (model.layers - FEW) // (MORE - FEW)


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """A context in which torch does not log the traceback of an error in a dry run, which is caught."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
