"""The native engine: one prefill per prompt, then one token at a time for the rows that have not ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flatpeak.rollout.chunks import generate_in_chunks
from flatpeak.rollout.rows import Rows
from flatpeak.types import Group, Prompt, SamplingParams

if TYPE_CHECKING:
    from flatpeak.protocols import Decoder


class NativeEngine:
    """A Sampler over a Decoder, on the trainer's own weights.

    A token depends on its row's logits and on (seed, prompt id, index in group, position). Where the decoder's logits
    do not depend on the batch (see `batch_invariant`), neither do completions: not on the other prompts, their order,
    `max_rows` or `compact_below`.

    While `min_new_tokens` forbids end-of-sequence tokens, the stored log-prob stays the full-vocabulary one that the
    trainer recomputes, although the token was drawn from the other tokens only. The same goes for top-p and top-k,
    for which the completion has `filtered_logprobs` too. At temperature 0 log-probs are those at temperature 1.
    """

    def __init__(
        self, decoder: Decoder, *, max_rows: int = 512, compact_below: float = 0.85, read_every: int | None = None
    ):
        """Finished rows are dropped once no more than `compact_below` of the rows are live.

        `read_every`: look for ended rows every so many tokens. On a GPU each look waits for the device, and so costs
        more than a few tokens too many for the last rows; None is 1 on a CPU and 8 elsewhere.
        """
        self._decoder = decoder
        self._device = torch.device(decoder.device)
        self._max_rows = max_rows
        self._compact_below = compact_below
        self._read_every = read_every or (1 if self._device.type == "cpu" else 8)

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in order; at most `max_rows` completions at once."""
        with torch.inference_mode():
            return generate_in_chunks(
                self._decode,
                prompts,
                group_size=group_size,
                sampling=sampling,
                seed=seed,
                max_rows=self._max_rows,
                eos_token_ids=self._decoder.eos_token_ids,
                tokenizer=self._decoder.tokenizer,
                device=self._device,
            )

    def _decode(self, rows: Rows, prompts_P: list[tuple[int, ...]], copies: int) -> None:
        state, logits_PV = self._decoder.prefill(prompts_P, copies=copies, max_new_tokens=rows.max_new_tokens)
        logits_RV = logits_PV.repeat_interleave(copies, dim=0)
        rows_R = torch.arange(len(logits_RV), device=self._device)
        live_R = torch.ones_like(rows_R, dtype=torch.bool)
        read_until = 0
        for position in range(rows.max_new_tokens):
            tokens_R = rows.draw(logits_RV, rows_R, position)
            drawn = position + 1
            if drawn == rows.max_new_tokens or drawn % self._read_every == 0:
                live_R = rows.still_live(live_R, rows_R, read_until, drawn)
                read_until = drawn
                num_live = int(live_R.sum())
                if num_live == 0 or drawn == rows.max_new_tokens:
                    return
                if num_live <= self._compact_below * len(rows_R):
                    kept = live_R.nonzero()[:, 0]
                    state.keep(kept)
                    rows_R, tokens_R, live_R = rows_R[kept], tokens_R[kept], live_R[kept]
            logits_RV = self._decoder.decode(state, tokens_R)
