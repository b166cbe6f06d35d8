"""The fallback engine for architectures that the native engine does not support: transformers' `generate`, left-padded.

A request is cut into chunks, one call of `generate` each. A logits processor samples tokens and leaves `generate` no
other choice; a stopping criterion ends completions. Both use the native engine's `CompletionBuffer`, so the two engines
share everything except the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from flatpeak.errors import StoppedError
from flatpeak.protocols import Sampler
from flatpeak.rollout.randomness import completion_keys
from flatpeak.rollout.slots import MAX_ROWS, CompletionBuffer, check_request
from flatpeak.rollout.stopping import StopStrings
from flatpeak.types import Completion, Group, Prompt, SamplingParams
from flatpeak.utils.out_of_memory import Halvings, MemoryBound

if TYPE_CHECKING:
    from flatpeak.protocols import Tokenizer


class GenerateEngine(Sampler):
    """A Sampler over any causal model of transformers.

    `generate` runs the model and its cache; the native engine's code samples tokens and ends completions, with the same
    random numbers, filters, stop strings and log-probs, and without keeping `[N, T, V]` logits. The model's generation
    config (temperature, penalties, suppressed tokens, ...) has no effect. The caller's random state is neither read nor
    changed.

    Prompts are left-padded and read once per completion, so the last bits of logits depend on the batch, and in rare
    cases a token does too; use the native engine if that matters.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, *, eos_token_ids: Set[int], max_rows: int = 512):
        """`model` is a PreTrainedModel or a PEFT model around one; `eos_token_ids` are all tokens that end a
        completion."""
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._rows = MemoryBound(MAX_ROWS, max_rows)
        self._stopping: Callable[[], bool] = lambda: False

    def stop_when(self, stopping: Callable[[], bool]) -> None:
        """Raise StoppedError between two tokens once `stopping()` is true."""
        self._stopping = stopping

    def halve_with(self, halvings: Halvings) -> None:
        """Draw fewer completions at once where memory runs out."""
        halvings.apply(self._rows)

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in order; at most `max_rows` completions at a time."""
        check_request(prompts, group_size, sampling, self._rows.value)
        stop_strings = StopStrings(sampling.stop, self._tokenizer) if sampling.stop else None
        keys_PG = completion_keys(seed, [prompt.id for prompt in prompts], group_size).view(len(prompts), group_size)
        completions: dict[tuple[int, int], Completion] = {}

        def draw(chunk: Chunk) -> None:
            buffer = CompletionBuffer(
                keys_PG[list(chunk.prompts)][:, chunk.copies.start : chunk.copies.stop].flatten(),
                sampling=sampling,
                eos_token_ids=self._eos_token_ids,
                tokenizer=self._tokenizer,
                stop_strings=stop_strings,
                device=self._model.device,
            )
            self._decode(buffer, [prompts[p].token_ids for p in chunk.prompts], len(chunk.copies))
            indices = [(p, g) for p in chunk.prompts for g in chunk.copies]
            completions.update(zip(indices, buffer.completions(range(buffer.count)), strict=True))

        lengths = [len(prompt.token_ids) for prompt in prompts]
        for attempt in self._rows.attempts(
            lambda rows: len(plan_chunks(lengths, group_size=group_size, max_rows=rows))
        ):
            with attempt, torch.no_grad(), _evaluation_mode(self._model), _default_generation_config(self._model):
                for chunk in plan_chunks(lengths, group_size=group_size, max_rows=self._rows.value):
                    if (chunk.prompts[-1], chunk.copies[-1]) not in completions:
                        draw(chunk)
        return [
            Group(prompt=prompt, completions=tuple(completions[p, g] for g in range(group_size)))
            for p, prompt in enumerate(prompts)
        ]

    def _decode(self, buffer: CompletionBuffer, prompts_P: list[tuple[int, ...]], copies: int) -> None:
        ids_PL, mask_PL = _left_padded(prompts_P)
        device = self._model.device
        self._model.generate(
            input_ids=ids_PL.repeat_interleave(copies, dim=0).to(device),
            attention_mask=mask_PL.repeat_interleave(copies, dim=0).to(device),
            # No end-of-sequence token here: the buffer ends completions, and generate would require a pad token, which
            # some tokenizers lack.
            generation_config=GenerationConfig(max_new_tokens=buffer.max_new_tokens, do_sample=False, use_cache=True),
            logits_processor=LogitsProcessorList([_DrawnToken(buffer)]),
            stopping_criteria=StoppingCriteriaList([_EndedCompletions(buffer, self._stopping)]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Completions decoded in one call: the same number of copies of each of several prompts."""

    prompts: tuple[int, ...]
    copies: range
    """Indices within their groups."""


def plan_chunks(prompt_lengths: Sequence[int], *, group_size: int, max_rows: int) -> list[Chunk]:
    """Cut P * G completions into chunks of at most `max_rows`, with prompts of similar length together, longest first.

    A group is cut only if it alone is larger than `max_rows`.
    """
    order = sorted(range(len(prompt_lengths)), key=lambda p: -prompt_lengths[p])
    copies_at_once = min(group_size, max_rows)
    prompts_at_once = max_rows // copies_at_once if copies_at_once == group_size else 1
    return [
        Chunk(
            prompts=tuple(order[first : first + prompts_at_once]),
            copies=range(copy, min(copy + copies_at_once, group_size)),
        )
        for first in range(0, len(order), prompts_at_once)
        for copy in range(0, group_size, copies_at_once)
    ]


class _DrawnToken(LogitsProcessor):
    """Samples each next token, and leaves generate's argmax no other choice."""

    def __init__(self, buffer: CompletionBuffer):
        self._buffer = buffer

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        completion_N = torch.arange(len(scores), device=scores.device)
        completion_N = completion_N.masked_fill(self._buffer.ended_N[:-1], len(scores))
        tokens_N = self._buffer.draw(scores, completion_N)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens_N[:, None], 0.0)


class _EndedCompletions(StoppingCriteria):
    """Ends the same completions as the native engine, and raises StoppedError once `stopping()` is true."""

    def __init__(self, buffer: CompletionBuffer, stopping: Callable[[], bool]):
        self._buffer = buffer
        self._stopping = stopping
        self._unfinished = list(range(buffer.count))

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self._stopping():
            raise StoppedError("a signal asked to stop while completions were sampled")
        self._buffer.end_at_stop_strings(self._unfinished)
        ended = self._buffer.ended_N[:-1].tolist()
        self._unfinished = [completion for completion in self._unfinished if not ended[completion]]
        return self._buffer.ended_N[:-1]


def _left_padded(prompts_P: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64 [P, L]; padding is masked, so its id does not matter."""
    longest = max(len(ids) for ids in prompts_P)
    ids_PL = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts_P])
    mask_PL = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts_P])
    return ids_PL, mask_PL


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    """A context with all modules in evaluation mode; on exit each module's previous mode is restored."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _default_generation_config(model: Any) -> Iterator[None]:
    """Hide the model's generation config, because generate reads every setting from it that the caller leaves unset."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
