"""Bradley-Terry and what goes with it, against numbers worked out by hand and by autograd."""

from math import exp, log

import pytest
import torch

from flatpeak.functional import bradley_terry_loss, calibration_error, centering_penalty, preference_accuracy


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def test_the_loss_is_minus_log_sigmoid_of_the_difference() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0, -1.0]), torch.tensor([1.0, 0.0, 3.0])
    expected = [-log(sigmoid(difference)) for difference in (1.0, 0.0, -4.0)]
    assert bradley_terry_loss(chosen, rejected).tolist() == pytest.approx(expected)
    assert bradley_terry_loss(chosen, rejected)[1].item() == pytest.approx(log(2))


def test_the_same_number_added_to_both_scores_changes_no_loss() -> None:
    chosen, rejected = torch.tensor([2.0, -0.5]), torch.tensor([1.0, 4.0])
    assert torch.equal(bradley_terry_loss(chosen + 8, rejected + 8), bradley_terry_loss(chosen, rejected))


def test_a_margin_is_what_the_chosen_answer_has_to_win_by() -> None:
    chosen, rejected = torch.tensor([2.0, 2.0]), torch.tensor([1.0, 1.0])
    assert bradley_terry_loss(chosen, rejected, margin=1.0).tolist() == pytest.approx([log(2)] * 2)
    margins = bradley_terry_loss(chosen, rejected, margin=torch.tensor([0.0, 3.0]))
    assert margins.tolist() == pytest.approx([-log(sigmoid(1)), -log(sigmoid(-2))])


def test_the_gradient_is_the_probability_of_being_wrong() -> None:
    chosen = torch.tensor([0.3, -2.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.1, 1.0], dtype=torch.float64, requires_grad=True)
    bradley_terry_loss(chosen, rejected).sum().backward()
    wrong = [sigmoid(-0.2), sigmoid(3.0)]
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-p for p in wrong])
    assert rejected.grad.tolist() == pytest.approx(wrong)


def test_scores_far_apart_make_a_finite_loss() -> None:
    losses = bradley_terry_loss(torch.tensor([-1e4, 1e4]), torch.tensor([1e4, -1e4]))
    assert losses.tolist() == [2e4, 0.0]


def test_the_centering_penalty_is_zero_where_the_scores_are_opposite() -> None:
    penalty = centering_penalty(torch.tensor([1.5, 1.0]), torch.tensor([-1.5, 2.0]))
    assert penalty.tolist() == [0.0, 9.0]


def test_equal_scores_are_half_right_and_nan_is_nothing() -> None:
    result = preference_accuracy(torch.tensor([1.0, 0.0, 2.0, float("nan")]), torch.tensor([0.0, 1.0, 2.0, 0.0]))
    assert result[:3].tolist() == [1.0, 0.0, 0.5]
    assert result[3].isnan()


def test_calibration_is_the_mean_gap_of_the_bins() -> None:
    # Three in the last bin, of mean 0.95, two of them right; one in the sixth, 0.55, right.
    probabilities = torch.tensor([0.95, 0.92, 0.98, 0.55], dtype=torch.float64)
    outcomes = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    expected = 3 / 4 * abs(0.95 - 2 / 3) + 1 / 4 * abs(0.55 - 1)
    assert calibration_error(probabilities, outcomes).item() == pytest.approx(expected)


def test_what_is_calibrated_has_no_error_and_certainty_has_a_bin() -> None:
    probabilities = torch.tensor([1.0, 1.0, 0.0, 0.25, 0.25, 0.25, 0.25])
    outcomes = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert calibration_error(probabilities, outcomes).item() == 0
    assert calibration_error(torch.zeros(0), torch.zeros(0)).isnan()


def test_no_bins_are_refused() -> None:
    with pytest.raises(ValueError, match="bins=0"):
        calibration_error(torch.zeros(1), torch.zeros(1), bins=0)


def test_calibration_is_measured_on_the_values_own_device() -> None:
    values = torch.zeros(3, device="meta")
    assert calibration_error(values, values).device.type == "meta"
