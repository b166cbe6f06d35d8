"""A strength that is tracked over the first informative updates and then stays the number that it came to."""

import math

import pytest
import torch

from flatpeak.gradreg import schedule
from flatpeak.gradreg.schedule import CALIBRATION_UPDATES
from support.gradreg import Quadratic, left_in_grad, one, regularizer

SCALES = [1.5 ** (index % 3) for index in range(CALIBRATION_UPDATES)]


def updates(ours, model, scales, *, informative=True):
    """Updates at one point, the loss multiplied by each of `scales`."""
    reports = []
    for scale in scales:
        model.zero_grad()
        reports.append(ours.accumulate(one(lambda scale=scale: scale * model.loss()), informative=informative))
    return reports


def run(scales, **changes):
    model = Quadratic()
    ours = regularizer(model, **{"step": 1e-3} | changes)
    return model, ours, updates(ours, model, scales)


def test_calibrating_updates_are_those_of_a_tracked_ratio_bit_for_bit():
    _, _, tracked = run(SCALES, strength="ratio:0.3")
    _, _, calibrated = run(SCALES, strength="calibrated:0.3")
    assert [report.strength for report in calibrated] == [report.strength for report in tracked]
    assert [report.penalty_ratio for report in calibrated] == [report.penalty_ratio for report in tracked]


def test_after_calibration_the_strength_is_the_average_it_came_to():
    model, _, reports = run([*SCALES, 1.0, 7.0, 0.1], strength="calibrated:0.3")
    # k times the loss wants a k-th of the strength: the average of -log k, a tenth of the way with each update.
    curvature = float((model.A @ model.gradient(model.x)).norm())
    average = 0.0
    for scale in SCALES[1:]:
        average = 0.9 * average + 0.1 * -math.log(scale)
    frozen = 0.3 * reports[0].g1_norm / curvature * math.exp(average)
    assert [report.strength for report in reports[-3:]] == pytest.approx([frozen] * 3, rel=1e-6)
    assert len({report.strength for report in reports[CALIBRATION_UPDATES - 1 :]}) == 1


def test_a_frozen_strength_has_no_cap():
    # A tracked one would give at most 0.6 of the update's own gradient.
    model, _, reports = run([1.0] * CALIBRATION_UPDATES + [1000.0], strength="calibrated:0.3")
    assert reports[-1].penalty_ratio == pytest.approx(300.0)
    gradient, strength = model.gradient(model.x), reports[0].strength
    penalty = left_in_grad(model.parameters()) - 1000.0 * gradient
    torch.testing.assert_close(penalty, strength * 1000.0**2 * (model.A @ gradient), rtol=1e-6, atol=0)


def test_only_updates_that_move_the_average_count_towards_the_calibration():
    model = Quadratic()
    ours = regularizer(model, step=1e-3, strength="calibrated:0.3")
    updates(ours, model, [1e-6] * 30, informative=False)
    updates(ours, model, [0.0] * 5)  # no gradient, so that nothing is measured
    assert (ours.schedule.tracked, ours.schedule.frozen) == (0, False)
    updates(ours, model, [1.0] * (CALIBRATION_UPDATES - 1))
    assert not ours.schedule.frozen
    updates(ours, model, [1.0])
    assert ours.schedule.frozen


def test_updates_between_second_passes_do_not_count_towards_the_calibration():
    _, ours, reports = run([1.0] * 58, strength="calibrated:0.3", every=3)
    assert ours.schedule.tracked == 20
    assert ours.schedule.frozen
    assert [report.pass_count for report in reports] == [1, 0, 0] * 19 + [1]
    _, ours, _ = run([1.0] * 57, strength="calibrated:0.3", every=3)
    assert not ours.schedule.frozen


def test_delay_and_warm_up_act_on_a_calibrated_strength_as_on_a_number():
    _, _, reports = run([1.0] * 28, strength="calibrated:0.3", delay_updates=2, warmup_updates=25)
    full = reports[-1].strength
    assert reports[-1].penalty_ratio == pytest.approx(0.3)
    assert [report.strength / full for report in reports] == pytest.approx(
        [0.0] * 2 + [min(1.0, update / 25) for update in range(1, 27)]
    )


@pytest.mark.parametrize("saved_after", [0, 7, 20, 24])
@pytest.mark.parametrize("changes", [{}, {"every": 2}, {"delay_updates": 3, "warmup_updates": 9}], ids=str)
def test_a_restored_calibration_goes_on_bit_for_bit(saved_after, changes, monkeypatch):
    monkeypatch.setattr(schedule, "CALIBRATION_UPDATES", 9)
    scales = [1.0 + 0.1 * (index % 5) for index in range(30)]
    _, _, undisturbed = run(scales, strength="calibrated:0.3", **changes)
    model, first, before = run(scales[:saved_after], strength="calibrated:0.3", **changes)
    second = regularizer(model, step=1e-3, strength="calibrated:0.3", **changes)
    second.load(first.state(), first.tensors())
    after = updates(second, model, scales[saved_after:])
    for one_report, other in zip([*before, *after], undisturbed, strict=True):
        assert one_report.strength == other.strength
        assert one_report.penalty_ratio == other.penalty_ratio or math.isnan(other.penalty_ratio)


@pytest.mark.parametrize(
    "saved",
    [
        {"strength": "calibrated:0.6"},
        {"strength": "ratio:0.3"},
        {"penalty": "norm"},
        {"direction": "random", "check_every": 0},
    ],
    ids=str,
)
def test_another_penalty_than_the_saved_one_is_calibrated_anew(saved):
    model, first, _ = run([1.0] * 25, **{"strength": "calibrated:0.3"} | saved)
    fork = regularizer(model, step=1e-3, strength="calibrated:0.3")
    fork.load(first.state(), first.tensors())
    assert not fork.schedule.frozen
    (report,) = updates(fork, model, [1.0])
    assert report.penalty_ratio == pytest.approx(0.3)
