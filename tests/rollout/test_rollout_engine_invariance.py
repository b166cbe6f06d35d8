from __future__ import annotations

import torch
from torch import Tensor

from flatpeak.pipeline.rollout_engines import batch_invariant
from flatpeak.rollout.engine import NativeEngine
from support.fake_decoders import HistoryDecoder, HistoryState, make_prompt

PROMPTS = [make_prompt(f"p{n}", range(1, 2 + n)) for n in range(3)]


class Leaky(HistoryDecoder):
    """Logits move in the last bits with the number of rows, as a matrix product's may."""

    def decode(self, state: HistoryState, tokens_R: Tensor) -> Tensor:
        return super().decode(state, tokens_R) * (1 + 1e-6 * (len(tokens_R) > 4))


class LeakyWhenAlone(HistoryDecoder):
    def decode(self, state: HistoryState, tokens_R: Tensor) -> Tensor:
        return super().decode(state, tokens_R) * (1 + 1e-6 * (len(tokens_R) == 1))


def test_a_decoder_of_independent_rows_is_batch_invariant() -> None:
    assert batch_invariant(NativeEngine(HistoryDecoder()), PROMPTS)


def test_a_difference_in_the_last_bits_is_seen() -> None:
    assert not batch_invariant(NativeEngine(Leaky(eos_token_ids=())), PROMPTS)
    assert not batch_invariant(NativeEngine(LeakyWhenAlone(eos_token_ids=())), PROMPTS)
    assert batch_invariant(NativeEngine(Leaky(eos_token_ids=())), PROMPTS[:1])


def test_the_test_is_the_same_whatever_the_random_state() -> None:
    torch.manual_seed(1)
    first = torch.random.get_rng_state()
    batch_invariant(NativeEngine(HistoryDecoder()), PROMPTS)
    assert torch.equal(first, torch.random.get_rng_state())
