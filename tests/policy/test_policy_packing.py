"""The packed row, by hand."""

from __future__ import annotations

import torch

from flatpeak.policy.packing import offsets, pack_batch, pack_prompts, segments
from flatpeak.types import Batch
from support.policies import uneven_batch


def tiny() -> Batch:
    """Prompts [7 8] with responses [1] and [2 3], and prompt [9] with response [4]."""
    lengths_N = torch.tensor([1, 2, 1])
    return Batch(
        prompts=((7, 8), (9,)),
        prompt_N=torch.tensor([0, 0, 1]),
        lengths_N=lengths_N,
        tokens_T=torch.tensor([1, 2, 3, 4]),
        sequence_T=torch.tensor([0, 1, 1, 2]),
        advantages_T=torch.zeros(4),
        weights_N=torch.zeros(3),
        old_logprobs_T=torch.zeros(4),
    )


def test_prompts_stand_once_then_their_responses_then_filler_to_a_multiple_of_64() -> None:
    row = pack_batch(tiny())
    assert row.token_ids_S.tolist() == [7, 8, 9, 1, 2, 3, 4, *[7] * 57]
    assert row.positions_S.tolist() == [0, 1, 0, 2, 2, 3, 1, *[0] * 57]


def test_first_response_tokens_are_predicted_from_the_last_prompt_token_and_others_from_their_predecessor() -> None:
    # row: 7 8 | 9 | 1 | 2 3 | 4
    assert pack_batch(tiny()).source_T.tolist() == [1, 1, 4, 2]


def test_prefill_keeps_each_prompts_last_position() -> None:
    row = pack_prompts([[5, 6, 7], [8]], device="cpu", multiple=64)
    assert row.token_ids_S.tolist() == [5, 6, 7, 8]
    assert row.source_T.tolist() == [2, 3]
    assert [group.longest for group in row.prompts] == [64]


def test_padding_and_unpadding_are_inverse() -> None:
    lengths = torch.tensor([2, 1, 3])
    flat = torch.arange(12.0).view(6, 2, 1)
    laid_out = segments(lengths)
    padded = laid_out.pad(flat)
    assert padded.shape == (3, 2, 3, 1)
    assert padded[1, 0, :, 0].tolist() == [4.0, 0.0, 0.0]
    assert torch.equal(laid_out.unpad(padded), flat)
    assert offsets(lengths).tolist() == [0, 1, 0, 0, 1, 2]


def test_every_response_token_has_a_source_before_it() -> None:
    batch = uneven_batch()
    row = pack_batch(batch)
    assert len(row.source_T) == len(batch.tokens_T)
    prompt_tokens = sum(map(len, batch.prompts))
    own = [prompt_tokens + index for index in range(len(batch.tokens_T))]
    assert all(source < position for source, position in zip(row.source_T.tolist(), own, strict=True))


def test_groups_of_prompts_of_similar_length_stand_one_after_the_other_and_so_do_their_responses() -> None:
    # Prompts of 2, 100 and 1 tokens; responses [1] and [2] to the first, [3 4] to the second, [] and [5] to the third.
    lengths_N = torch.tensor([1, 2, 1, 0, 1])
    batch = Batch(
        prompts=((7, 8), (6,) * 100, (9,)),
        prompt_N=torch.tensor([0, 1, 0, 2, 2]),
        lengths_N=lengths_N,
        tokens_T=torch.tensor([1, 3, 4, 2, 5]),
        sequence_T=torch.tensor([0, 1, 1, 2, 4]),
        advantages_T=torch.zeros(5),
        weights_N=torch.zeros(5),
        old_logprobs_T=torch.zeros(5),
    )
    row = pack_batch(batch)
    assert row.order_P == (1, 0, 2)
    assert row.token_ids_S[:108].tolist() == [*[6] * 100, 7, 8, 9, 3, 4, 1, 2, 5]
    assert row.positions_S[98:108].tolist() == [98, 99, 0, 1, 0, 100, 101, 2, 2, 1]
    assert [(group.count, group.longest) for group in row.prompts] == [(1, 100), (2, 2)]
    assert [(r.group, r.segments.lengths.tolist(), r.prompt_N.tolist()) for r in row.responses] == [
        (0, [2], [0]),
        (1, [1, 1, 1], [0, 0, 1]),
    ]
    assert row.source_T.tolist() == [101, 99, 103, 101, 102]


def test_prefill_names_the_order_of_prompts_in_the_row() -> None:
    row = pack_prompts([[5], [6] * 90, [7, 8]], device="cpu", multiple=16)
    assert row.order_P == (1, 0, 2)
    assert row.token_ids_S[89:93].tolist() == [6, 5, 7, 8]
    assert row.source_T.tolist() == [90, 89, 92]
    assert [group.longest for group in row.prompts] == [96, 16]
