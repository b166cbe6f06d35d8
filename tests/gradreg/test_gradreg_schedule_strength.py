"""Strength by update: delay, warm-ups, and a strength that follows a wanted ratio."""

import math

import pytest
import torch

from support.gradreg import Quadratic, left_in_grad, one, regularizer, relative_error


def run(scales, **changes):
    """Updates at one point, the loss multiplied by each of `scales`: the reports, and the penalty left in `.grad`."""
    model = Quadratic()
    ours = regularizer(model, **{"step": 1e-3} | changes)
    reports, penalties = [], []
    for scale in scales:
        model.zero_grad()
        reports.append(ours.accumulate(one(lambda scale=scale: scale * model.loss())))
        penalties.append(left_in_grad(model.parameters()) - scale * model.gradient(model.x))
    return model, reports, penalties


def test_delayed_updates_are_plain_and_without_metrics():
    _, reports, penalties = run([1.0] * 4, delay_updates=2)
    assert [report.pass_count for report in reports] == [0, 0, 1, 1]
    assert [report.metrics() == {} for report in reports] == [True, True, False, False]
    assert [float(penalty.norm()) > 1e-9 for penalty in penalties] == [False, False, True, True]


def test_the_strength_rises_linearly_after_the_delay():
    model, reports, penalties = run([1.0] * 7, delay_updates=1, warmup_updates=4, strength=2.0)
    wanted = [0.0, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert [report.strength for report in reports] == wanted
    whole = model.A @ model.gradient(model.x)
    for strength, penalty in zip(wanted[1:], penalties[1:], strict=True):
        assert relative_error(penalty, strength * whole) < 1e-9


def test_the_first_update_reaches_a_wanted_ratio_exactly():
    _, reports, penalties = run([1.0], strength="ratio:0.3")
    assert reports[0].penalty_ratio == pytest.approx(0.3, rel=1e-12)
    assert float(penalties[0].norm()) == pytest.approx(0.3 * reports[0].g1_norm, rel=1e-9)


def test_later_updates_move_a_tenth_of_the_way_in_logarithms():
    # k times the loss: k times g1 and k^2 times H g1, so the strength that reaches the ratio is a k-th.
    _, reports, penalties = run([1.0, 1.5, 1.5], strength="ratio:0.3")
    first = reports[0].strength
    assert reports[1].strength == pytest.approx(first * 1.5**-0.1)
    assert reports[2].strength == pytest.approx(first * 1.5**-0.19)
    assert reports[1].penalty_ratio == pytest.approx(0.3 * 1.5**0.9)
    for report, penalty, scale in zip(reports, penalties, (1.0, 1.5, 1.5), strict=True):
        assert float(penalty.norm()) == pytest.approx(report.penalty_ratio * report.g1_norm, rel=1e-8)
        assert report.g1_norm == pytest.approx(reports[0].g1_norm * scale)


def test_an_update_s_penalty_is_at_most_twice_the_wanted_share_of_its_own_gradient():
    scales = [1.0, 1000.0, 1000.0, 1.0]
    model, reports, penalties = run(scales, strength="ratio:0.3")
    assert [report.penalty_ratio for report in reports] == pytest.approx([0.3, 0.6, 0.6, 0.3 * 1000**-0.171])
    for report, penalty, scale in zip(reports, penalties, scales, strict=True):
        wanted = report.penalty_ratio * scale * model.gradient(model.x).norm()
        assert float(penalty.norm()) == pytest.approx(float(wanted), rel=1e-6)


def test_the_cap_holds_for_a_remembered_penalty_and_warms_up_too():
    _, reports, _ = run([1.0, 1000.0, 1000.0], strength="ratio:0.3", every=3)
    assert max(report.penalty_ratio for report in reports) <= 0.6
    _, reports, _ = run([1.0, 1000.0, 1000.0], strength="ratio:0.3", warmup_updates=4)
    assert [report.penalty_ratio for report in reports] == pytest.approx([0.075, 0.3, 0.45])


def test_a_strength_that_is_a_number_has_no_cap():
    _, reports, _ = run([1.0, 1000.0], strength=0.5)
    assert reports[1].penalty_ratio == pytest.approx(1000 * reports[0].penalty_ratio)


def test_an_update_without_advantages_does_not_move_the_tracked_strength():
    # Only rounding, or a KL term's tiny curvature, is behind its gradient: the strength it wants is of another scale.
    model = Quadratic()
    ours = regularizer(model, step=1e-3, strength="ratio:0.3")
    blank = ours.accumulate(one(lambda: 1e-6 * model.loss()), informative=False)
    assert (blank.strength, blank.penalty_ratio, ours.schedule.log_strength) == (0.0, 0.0, None)
    first = ours.accumulate(one(model.loss))
    for _ in range(15):
        blank = ours.accumulate(one(lambda: 1e-6 * model.loss()), informative=False)
        assert blank.strength == first.strength
    assert ours.accumulate(one(model.loss)).penalty_ratio == pytest.approx(0.3)


def test_a_ratio_is_kept_where_nothing_changes():
    _, reports, _ = run([1.0] * 20, strength="ratio:0.05")
    assert [report.penalty_ratio for report in reports] == pytest.approx([0.05] * 20)


def test_a_ratio_warms_up_too_and_tracks_as_if_it_did_not():
    _, plain, _ = run([1.0, 10.0, 10.0], strength="ratio:0.3")
    _, warm, _ = run([1.0, 10.0, 10.0], strength="ratio:0.3", warmup_updates=2)
    assert [report.strength for report in warm] == pytest.approx(
        [factor * report.strength for factor, report in zip((0.5, 1.0, 1.0), plain, strict=True)]
    )


def test_updates_without_a_second_pass_do_not_move_the_tracked_strength():
    _, reports, _ = run([1.0, 1.5, 1.5, 1.5], strength="ratio:0.3", every=3)
    first = reports[0].strength
    assert [report.strength for report in reports] == pytest.approx([first, first, first, first * 1.5**-0.1])
    # What is used again is the penalty without its part along g1.
    sine = math.sqrt(1 - reports[0].cosine ** 2)
    assert [report.penalty_ratio for report in reports[1:3]] == pytest.approx([0.3 * sine] * 2)


def test_a_loss_without_curvature_leaves_a_wanted_ratio_for_later():
    model = Quadratic()
    ours = regularizer(model, step=0.5, strength="ratio:0.3")
    flat = ours.accumulate(one(lambda: model.b @ model.x))
    assert (flat.strength, flat.penalty_ratio) == (0.0, 0.0)
    assert torch.equal(left_in_grad(model.parameters()), model.b)
    model.zero_grad()
    assert ours.accumulate(one(model.loss)).penalty_ratio == pytest.approx(0.3)


def test_skipped_updates_count_for_the_schedule_but_not_for_the_ratio():
    _, reports, _ = run([1.0, 0.0, 1.0], strength="ratio:0.3", warmup_updates=4)
    assert reports[1].skipped == "g1 is zero"
    assert reports[2].strength == pytest.approx(3 * reports[0].strength)
