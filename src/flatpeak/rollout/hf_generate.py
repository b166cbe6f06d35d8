"""The fallback engine for architectures that the native one refuses: transformers' `generate`, left-padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from flatpeak.rollout.slots import Rows, generate_in_chunks
from flatpeak.types import Group, Prompt, SamplingParams

if TYPE_CHECKING:
    from flatpeak.protocols import Tokenizer


class GenerateEngine:
    """A Sampler over any causal model of transformers.

    `generate` runs the model and its cache; tokens are chosen, and completions ended, by the same code as in the native
    engine: same random numbers, filters, stop strings and log-probs, and no `[N, T, V]` logits kept. The model's own
    generation config (its temperature, penalties, suppressed tokens, ...) has no say. The caller's random state is
    not read or changed.

    Prompts are padded on the left and each is read once per completion, so logits depend on the batch in their last
    bits, and a token may rarely differ with it; where that matters use the native engine.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, *, eos_token_ids: Set[int], max_rows: int = 512):
        """`model` is a PreTrainedModel or a PEFT model around one; `eos_token_ids` are all that end a completion."""
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_rows = max_rows

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in order; at most `max_rows` completions at once."""
        with torch.no_grad(), _evaluation_mode(self._model), _own_generation_config(self._model):
            return generate_in_chunks(
                self._decode,
                prompts,
                group_size=group_size,
                sampling=sampling,
                seed=seed,
                max_rows=self._max_rows,
                eos_token_ids=self._eos_token_ids,
                tokenizer=self._tokenizer,
                device=self._model.device,
            )

    def _decode(self, rows: Rows, prompts_P: list[tuple[int, ...]], copies: int) -> None:
        ids_PL, mask_PL = _left_padded(prompts_P)
        device = self._model.device
        self._model.generate(
            input_ids=ids_PL.repeat_interleave(copies, dim=0).to(device),
            attention_mask=mask_PL.repeat_interleave(copies, dim=0).to(device),
            # No end-of-sequence token here: rows ends completions, and the pad token that generate asks for with one
            # does not exist in every tokenizer.
            generation_config=GenerationConfig(max_new_tokens=rows.max_new_tokens, do_sample=False, use_cache=True),
            logits_processor=LogitsProcessorList([_Draws(rows)]),
            stopping_criteria=StoppingCriteriaList([_Stops(rows)]),
        )


class _Draws(LogitsProcessor):
    """Leaves generate's argmax one choice: the token that was drawn."""

    def __init__(self, rows: Rows):
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows_N = torch.arange(len(scores), device=scores.device)
        rows_N = rows_N.masked_fill(self._rows.ended_N[:-1], len(scores))
        tokens_N = self._rows.draw(scores, rows_N)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens_N[:, None], 0.0)


class _Stops(StoppingCriteria):
    """Ends rows where the native engine would."""

    def __init__(self, rows: Rows):
        self._rows = rows
        self._live = list(range(rows.count))

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._rows.heed_stop_strings(self._live)
        ended = self._rows.ended_N[:-1].tolist()
        self._live = [row for row in self._live if not ended[row]]
        return self._rows.ended_N[:-1]


def _left_padded(prompts_P: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64 [P, L]; what fills the left is masked, so that any id will do."""
    longest = max(len(ids) for ids in prompts_P)
    ids_PL = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts_P])
    mask_PL = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts_P])
    return ids_PL, mask_PL


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    """Evaluation mode for all modules, and afterwards each module's own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _own_generation_config(model: Any) -> Iterator[None]:
    """Hide the model's generation config: generate fills every setting that a caller leaves unset from it."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
