"""completion_weights on uneven lengths, with an empty and a missing completion."""

import pytest
import torch

from flatpeak.functional import completion_weights

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


@pytest.mark.parametrize(
    ("normalization", "expected_N"),
    [
        ("sequence_mean", [1 / 10, 0, 1 / 25, 1 / 45, 1 / 5]),
        ("constant", [1 / 50, 0, 1 / 50, 1 / 50, 1 / 50]),
        ("token_mean", [1 / 17, 0, 1 / 17, 1 / 17, 1 / 17]),
        ("longest", [1 / 45, 0, 1 / 45, 1 / 45, 1 / 45]),
        ("sequence_sum", [1 / 5, 0, 1 / 5, 1 / 5, 1 / 5]),
    ],
)
def test_without_validity_every_completion_counts(normalization, expected_N):
    weights_N = completion_weights(LENGTHS_N, normalization, max_tokens=10)
    torch.testing.assert_close(weights_N, torch.tensor(expected_N))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(
    ("lengths", "valid"), [([3, 4], [False, False]), ([0, 0], [True, True]), ([0, 5], [True, False])]
)
def test_nothing_to_weigh_gives_zeros_and_never_nan(normalization, lengths, valid):
    weights_N = completion_weights(
        torch.tensor(lengths), normalization, max_tokens=10, valid_N=torch.tensor(valid, dtype=torch.bool)
    )
    assert weights_N.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_no_completions_have_no_weights(normalization):
    lengths_N = torch.zeros(0, dtype=torch.int64)
    assert completion_weights(lengths_N, normalization, max_tokens=10).tolist() == []


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
