from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flatpeak.rollout.randomness import completion_keys, uniforms
from flatpeak.rollout.sampling import choose_tokens, draw, filter_weights, scaled_logprobs, scaled_probs

ALMOST_ONE = 1 - 2**-53


def random_logits(rows: int, vocabulary: int, scale: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def exact_probs(logits_RV: torch.Tensor, temperature: float) -> np.ndarray:
    scaled = logits_RV.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def exact_filter(probs: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """By the definition: sort (ties by id), keep k, keep until the share reaches top_p, renormalize."""
    kept = np.zeros_like(probs)
    order = np.lexsort((np.arange(len(probs)), -probs))[: top_k or None]
    share = np.cumsum(probs[order]) / probs[order].sum()
    order = order[: int(np.searchsorted(share, top_p)) + 1] if top_p < 1 else order
    kept[order] = probs[order]
    return kept / kept.sum()


def draws_of_one_row(logits_V: torch.Tensor, n: int, **settings):
    return draw(logits_V.expand(n, -1), uniforms(completion_keys(1, ["p"], n), 0), **settings)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.8), (0.7, 6, 0.9)],
)
@pytest.mark.parametrize("vocabulary", [20, 600])
def test_drawn_tokens_follow_the_exact_distribution(
    temperature: float, top_k: int, top_p: float, vocabulary: int
) -> None:
    logits_V = random_logits(1, vocabulary)[0]
    drawn = draws_of_one_row(logits_V, 20_000, temperature=temperature, top_k=top_k, top_p=top_p)
    expected = 20_000 * exact_filter(exact_probs(logits_V, temperature), top_k, top_p)
    counts = np.bincount(drawn.tokens_R.numpy(), minlength=vocabulary)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    rare = ~common & (expected > 0)
    cells = [(counts[common], expected[common])]
    if rare.any():
        cells.append((counts[rare].sum(keepdims=True), expected[rare].sum(keepdims=True)))
    chi_square = sum(((observed - wanted) ** 2 / wanted).sum() for observed, wanted in cells)
    freedom = int(common.sum()) + bool(rare.any()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocabulary", [1, 20, 512, 513, 640, 1000])
def test_a_token_is_drawn_exactly_where_the_cumulative_probability_passes_u(vocabulary: int) -> None:
    weights_RV = scaled_probs(random_logits(64, vocabulary, seed=2), 1.0)
    uniforms_R = uniforms(completion_keys(0, ["q"], 64), 3)
    tokens_R, totals_R = choose_tokens(weights_RV, uniforms_R)
    cumulative = weights_RV.double().cumsum(-1).numpy()
    totals = cumulative[:, -1]
    np.testing.assert_allclose(totals_R, totals, rtol=1e-6)
    for token, row, u, total in zip(tokens_R.tolist(), cumulative, uniforms_R.tolist(), totals, strict=True):
        before = row[token - 1] if token else 0.0
        assert before - 1e-6 <= u * total <= row[token] + 1e-6


@pytest.mark.parametrize("u", [0.0, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("vocabulary", [7, 1000, 1024])
def test_a_token_of_weight_zero_is_never_chosen(u: float, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights_RV = torch.rand(400, vocabulary, generator=generator)
    positive_RV = torch.rand(400, vocabulary, generator=generator) < 0.01
    positive_RV[torch.arange(400), torch.randint(vocabulary, (400,), generator=generator)] = True
    weights_RV = torch.where(positive_RV, weights_RV + 1e-30, 0.0)
    tokens_R, _ = choose_tokens(weights_RV, torch.full((400,), u, dtype=torch.float64))
    assert (weights_RV.gather(1, tokens_R[:, None]) > 0).all()


def test_the_last_positive_token_is_chosen_just_below_one_and_the_first_at_zero() -> None:
    weights_RV = torch.zeros(1, 1000)
    weights_RV[0, [300, 700]] = 0.5
    assert choose_tokens(weights_RV, torch.tensor([ALMOST_ONE], dtype=torch.float64))[0].item() == 700
    assert choose_tokens(weights_RV, torch.tensor([0.0], dtype=torch.float64))[0].item() == 300
    assert choose_tokens(weights_RV, torch.tensor([0.5], dtype=torch.float64))[0].item() == 700


@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("vocabulary", [20, 3000])
def test_logprobs_are_full_vocabulary_log_softmax_at_the_temperature(temperature: float, vocabulary: int) -> None:
    logits_RV = random_logits(200, vocabulary, seed=3)
    uniforms_R = uniforms(completion_keys(0, ["q"], 200), 0)
    drawn = draw(logits_RV, uniforms_R, temperature=temperature, top_k=4, top_p=0.9)
    exact = np.log(exact_probs(logits_RV, temperature))[np.arange(200), drawn.tokens_R.numpy()]
    assert drawn.logprobs_R.dtype == torch.float32
    np.testing.assert_allclose(drawn.logprobs_R, exact, atol=1e-5, rtol=0)
    np.testing.assert_allclose(
        scaled_logprobs(logits_RV, temperature), np.log(exact_probs(logits_RV, temperature)), atol=1e-4, rtol=0
    )


def test_filtered_logprobs_are_renormalized_over_what_is_kept() -> None:
    logits_V = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    drawn = draws_of_one_row(logits_V, 200, temperature=1.0, top_k=3, top_p=0.7)
    # top-k leaves .4, .3, .2 of .9; their shares .444, .333 reach .7 with two tokens: 4/7 and 3/7.
    assert set(drawn.tokens_R.tolist()) == {0, 1}
    expected = torch.tensor([4 / 7, 3 / 7]).log()[drawn.tokens_R]
    torch.testing.assert_close(drawn.filtered_logprobs_R, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(drawn.logprobs_R, logits_V[drawn.tokens_R], atol=1e-6, rtol=0)


def test_without_filters_there_are_no_filtered_logprobs() -> None:
    assert draws_of_one_row(torch.zeros(4), 3, temperature=1.0).filtered_logprobs_R is None
    assert draws_of_one_row(torch.zeros(4), 3, temperature=0.0, top_k=2).filtered_logprobs_R is None


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.05, [0]),
        (0.5, [0]),
        (0.51, [0, 1]),
        (0.8, [0, 1]),
        (0.81, [0, 1, 2]),
        (0.95, [0, 1, 2]),
        (0.96, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it_with_the_crossing_token(top_p: float, kept: list[int]) -> None:
    weights_RV = filter_weights(torch.tensor([[0.5, 0.3, 0.15, 0.05]]), top_p=top_p)
    assert weights_RV[0].nonzero()[:, 0].tolist() == kept


def test_ties_go_to_lower_ids() -> None:
    equal_RV = torch.full((1, 6), 1 / 6)
    assert filter_weights(equal_RV, top_k=2)[0].nonzero()[:, 0].tolist() == [0, 1]
    assert filter_weights(equal_RV, top_p=0.5)[0].nonzero()[:, 0].tolist() == [0, 1, 2]
    partly = torch.tensor([[0.1, 0.3, 0.1, 0.3, 0.1, 0.1]])
    assert filter_weights(partly, top_k=3)[0].nonzero()[:, 0].tolist() == [0, 1, 3]
    assert draw(torch.tensor([[1.0, 3.0, 3.0]]), torch.zeros(1), temperature=0.0).tokens_R.item() == 1


def test_a_filter_that_keeps_everything_changes_nothing() -> None:
    weights_RV = scaled_probs(random_logits(5, 30), 1.0)
    assert torch.equal(filter_weights(weights_RV, top_k=30), weights_RV)
    assert torch.equal(filter_weights(weights_RV, top_k=99), weights_RV)
    assert torch.equal(filter_weights(weights_RV, top_p=1.0), weights_RV)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(7, 1.0), (1500, 1.0), (0, 0.3), (0, 0.9), (0, 0.999), (50, 0.9), (1500, 0.99)]
)
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_filters_agree_with_the_definition_whether_few_or_all_tokens_must_be_sorted(
    top_k: int, top_p: float, scale: float
) -> None:
    # A flat distribution (scale 0.1) over 3000 needs more than the 128, and the 2048, candidates sorted first.
    probs_RV = scaled_probs(random_logits(4, 3000, scale=scale, seed=7), 1.0)
    kept_RV = filter_weights(probs_RV, top_k=top_k, top_p=top_p)
    for row, kept in zip(probs_RV.double().numpy(), kept_RV.double().numpy(), strict=True):
        np.testing.assert_allclose(
            kept / kept.sum(), exact_filter(row, top_k, top_p - 1e-6 if top_p < 1 else 1), atol=1e-9
        )


def test_a_rows_draw_does_not_depend_on_the_other_rows() -> None:
    logits_RV = torch.cat([random_logits(30, 3000, scale=0.1), random_logits(3, 3000, scale=5.0)])
    uniforms_R = uniforms(completion_keys(0, ["q"], 33), 0)
    for settings in ({}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.9}):
        together = draw(logits_RV, uniforms_R, temperature=0.9, **settings)
        for r in (0, 1, 29, 30, 32):
            alone = draw(logits_RV[r : r + 1], uniforms_R[r : r + 1], temperature=0.9, **settings)
            assert alone.tokens_R[0] == together.tokens_R[r]
            assert alone.logprobs_R[0] == together.logprobs_R[r]


def test_temperature_zero_takes_the_largest_and_stores_its_logprob_at_temperature_one() -> None:
    logits_RV = torch.tensor([[0.1, 0.7, 0.2], [0.6, 0.1, 0.3]]).log()
    drawn = draw(logits_RV, torch.zeros(2, dtype=torch.float64), temperature=0.0)
    assert drawn.tokens_R.tolist() == [1, 0]
    np.testing.assert_allclose(drawn.logprobs_R, np.log([0.7, 0.6]), atol=1e-6)


def test_forbidden_tokens_are_not_drawn_and_stay_in_the_logprob() -> None:
    logits_V = torch.tensor([0.9, 0.06, 0.04]).log()
    forbidden = torch.tensor([True, False, False])
    drawn = draws_of_one_row(logits_V, 5000, temperature=1.0, forbidden=forbidden)
    share = (drawn.tokens_R == 1).double().mean().item()
    assert set(drawn.tokens_R.tolist()) == {1, 2}
    assert abs(share - 0.6) < 4 * math.sqrt(0.6 * 0.4 / 5000)
    torch.testing.assert_close(drawn.logprobs_R, logits_V[drawn.tokens_R], atol=1e-6, rtol=0)
    greedy = draws_of_one_row(logits_V, 1, temperature=0.0, forbidden=forbidden)
    assert greedy.tokens_R.item() == 1
    assert greedy.logprobs_R.item() == pytest.approx(math.log(0.06), abs=1e-6)


def test_a_forbidden_token_with_all_the_probability_leaves_a_finite_logprob() -> None:
    logits_V = torch.tensor([500.0, 1.0, 0.0])
    drawn = draws_of_one_row(logits_V, 1000, temperature=1.0, forbidden=torch.tensor([True, False, False]))
    expected = torch.tensor([0.0, -499.0, -500.0])[drawn.tokens_R]
    torch.testing.assert_close(drawn.logprobs_R, expected, atol=1e-4, rtol=0)
    assert abs((drawn.tokens_R == 1).double().mean().item() - 1 / (1 + math.exp(-1))) < 0.06


def test_bfloat16_logits_give_float32_logprobs() -> None:
    drawn = draw(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), torch.tensor([0.99]).double(), temperature=1.0)
    assert drawn.tokens_R.item() == 1
    assert drawn.logprobs_R.item() == pytest.approx(-math.log(1 + math.exp(-1)), abs=1e-6)


@pytest.mark.parametrize("vocabulary", [5, 1000])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.9}])
def test_nan_logits_give_a_token_in_range_and_a_nan_logprob(vocabulary: int, filters: dict) -> None:
    drawn = draw(torch.full((2, vocabulary), torch.nan), torch.tensor([0.1, 0.9]).double(), temperature=1.0, **filters)
    assert (drawn.tokens_R < vocabulary).all()
    assert drawn.logprobs_R.isnan().all()
