"""completion_weights on uneven lengths, with an empty and a missing completion."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatpeak.functional import completion_weights
from support.properties import repeatable

LENGTHS_N = torch.tensor([2, 0, 5, 9, 1])
VALID_N = torch.tensor([True, True, True, False, True])
NORMALIZATIONS = ["sequence_mean", "constant", "token_mean", "longest", "sequence_sum"]


@pytest.mark.parametrize(
    ("normalization", "expected_N"),
    [
        # N = 4 (the empty one counts, the missing one of length 9 does not), sum = 8, max = 5.
        ("sequence_mean", [1 / 8, 0, 1 / 20, 0, 1 / 4]),
        ("constant", [1 / 40, 0, 1 / 40, 0, 1 / 40]),
        ("token_mean", [1 / 8, 0, 1 / 8, 0, 1 / 8]),
        ("longest", [1 / 20, 0, 1 / 20, 0, 1 / 20]),
        ("sequence_sum", [1 / 4, 0, 1 / 4, 0, 1 / 4]),
    ],
)
def test_weights_are_those_of_the_table(normalization, expected_N):
    weights_N = completion_weights(LENGTHS_N, normalization, max_tokens=10, valid_N=VALID_N)
    assert weights_N.dtype == torch.float32
    torch.testing.assert_close(weights_N, torch.tensor(expected_N))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@given(completions=st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=8), known=st.booleans())
@repeatable
def test_every_token_of_a_valid_completion_weighs_its_share(completions, known, normalization):
    if not known:  # every completion counts
        completions = [(length, True) for length, _ in completions]
    counted = [length for length, valid in completions if valid]
    shares = {
        "sequence_mean": lambda length: 1 / (len(counted) * length),
        "constant": lambda length: 1 / (len(counted) * 12),
        "token_mean": lambda length: 1 / sum(counted),
        "longest": lambda length: 1 / (len(counted) * max(counted)),
        "sequence_sum": lambda length: 1 / len(counted),
    }
    expected_N = [shares[normalization](length) if valid and length else 0.0 for length, valid in completions]
    lengths_N = torch.tensor([length for length, _ in completions], dtype=torch.int64)
    valid_N = torch.tensor([valid for _, valid in completions], dtype=torch.bool) if known else None
    weights_N = completion_weights(lengths_N, normalization, max_tokens=12, valid_N=valid_N)
    torch.testing.assert_close(weights_N, torch.tensor(expected_N))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("split", [[5], [2, 3], [1, 1, 2, 1]])
def test_micro_batches_of_any_cut_have_the_gradient_of_the_whole(normalization, split):
    weights_N = completion_weights(LENGTHS_N, normalization, max_tokens=10).double()
    sequence_T = torch.repeat_interleave(torch.arange(5), LENGTHS_N)
    inputs_T = torch.linspace(-1, 2, len(sequence_T), dtype=torch.float64)

    def gradient(parts):
        parameter = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        for members in parts:
            mine_T = torch.isin(sequence_T, members)
            losses_T = torch.tanh(parameter * inputs_T[mine_T])
            (weights_N[sequence_T[mine_T]] * losses_T).sum().backward()
        return parameter.grad.item()

    whole = sum(
        weights_N[i].item() * (x * (1 - torch.tanh(0.3 * x) ** 2)).item()
        for i, x in zip(sequence_T.tolist(), inputs_T, strict=True)
    )
    assert gradient(torch.arange(5).split(split)) == pytest.approx(whole, rel=1e-12)


def test_constant_needs_the_generation_limit():
    for max_tokens in (None, 0):
        with pytest.raises(ValueError, match="give the generation limit"):
            completion_weights(LENGTHS_N, "constant", max_tokens=max_tokens)


def test_unknown_names_and_wrong_tensors_are_refused():
    with pytest.raises(ValueError, match="sequence_mean, constant, token_mean, longest, sequence_sum"):
        completion_weights(LENGTHS_N, "mean")
    with pytest.raises(ValueError, match="whole numbers"):
        completion_weights(LENGTHS_N.float(), "token_mean")
    with pytest.raises(ValueError, match="negative length"):
        completion_weights(torch.tensor([3, -1]), "token_mean")
    with pytest.raises(ValueError, match=r"give torch.bool \[5\]"):
        completion_weights(LENGTHS_N, "token_mean", valid_N=VALID_N[:2])
