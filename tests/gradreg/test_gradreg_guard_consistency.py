"""The guard's second eye: the penalty at a step against that at its opposite, which sees what spoils the difference."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from flatpeak.errors import UserError
from flatpeak.gradreg.config import PublishedBehavior
from flatpeak.gradreg.directions import step_consistency
from flatpeak.gradreg.guard import Guard
from flatpeak.gradreg.perturbation import PerturbationFidelity
from flatpeak.gradreg.regularizer import GradientRegularizer
from support.gradreg import (
    Quadratic,
    Sharp,
    cosine,
    gradient,
    joined,
    language,
    left_in_grad,
    network,
    one,
    regression,
    regularizer,
    settings,
    transformer,
    unchanged,
    values,
)

CHECKED = {"check_every": 100}


def gradients(*rows):
    """Gradients of one parameter each, with the parameter as their common key."""
    parameter = nn.Parameter(torch.zeros(len(rows[0]), dtype=torch.float64))
    return [{parameter: torch.as_tensor(row, dtype=torch.float64)} for row in rows]


def test_the_consistency_is_the_cosine_of_both_differences():
    assert step_consistency(*gradients([1, 1], [3, 1], [1, -2])) == pytest.approx(0.0)
    assert step_consistency(*gradients([1, 1], [2, 3], [0, -1])) == pytest.approx(1.0)
    assert step_consistency(*gradients([1, 1], [4, 5], [1, -4])) == pytest.approx(0.8)


def test_independent_errors_of_all_three_gradients_give_minus_a_half():
    noise = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert step_consistency(*gradients(*noise)) == pytest.approx(-0.5, abs=0.02)


def test_no_difference_at_all_is_consistent_and_one_that_is_not_finite_is_no_number():
    assert step_consistency(*gradients([1, 1], [1, 1], [1, 1])) == 1.0
    assert step_consistency(*gradients([1, 1], [1, 2], [1, 1])) == 0.0
    assert math.isnan(step_consistency(*gradients([1, 1], [math.inf, 1], [1, 0])))


def test_the_metric_is_the_cosine_by_hand_and_the_update_is_the_one_without_a_check():
    model, twin = network(), network()
    loss = regression(model)
    ours = regularizer(model, step=0.02, **CHECKED)
    before = values(model)
    torch.manual_seed(4)
    report = ours.accumulate(one(loss))
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(4)))
    assert unchanged(model, before)
    g1 = gradient(ours.parameters, loss)
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, grad in zip(ours.parameters, g1, strict=True):
                p.add_(sign * 0.02 * grad)
        sides.append(sign * (joined(gradient(ours.parameters, loss)) - joined(g1)))
        with torch.no_grad():
            for p, value in zip(model.parameters(), before, strict=True):
                p.copy_(value)
    assert 0.9 < cosine(*sides) < 0.9999
    assert report.metrics()["gradreg/step_consistency"] == pytest.approx(cosine(*sides), rel=1e-9)
    assert report.pass_count == 2
    unchecked = regularizer(twin, step=0.02).accumulate(one(regression(twin)))
    assert (unchecked.pass_count, unchecked.consistency) == (1, None)
    assert torch.equal(left_in_grad(model.parameters()), left_in_grad(twin.parameters()))
    assert report.kept == unchecked.kept


def checks(ours, model, *, updates, informative=lambda update: True):
    """The updates, counted from 1, in which the penalty's consistency was measured."""
    result = []
    for update in range(1, updates + 1):
        model.zero_grad()
        if ours.accumulate(one(model.loss), informative=informative(update)).consistency is not None:
            result.append(update)
    return result


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"check_every": 4}, [1, 5, 9]),
        ({"check_every": 1}, list(range(1, 11))),
        ({"check_every": 0}, []),
        ({"check_every": 100}, [1]),
        ({"check_every": 4, "delay_updates": 2}, [3, 7]),
        ({"check_every": 4, "every": 3}, [1, 7]),
        ({"check_every": 4, "difference": "exact"}, []),
    ],
    ids=str,
)
def test_it_is_checked_at_the_first_penalty_and_every_so_many_updates(given, expected):
    model = Quadratic()
    assert checks(regularizer(model, **given), model, updates=10) == expected


def test_updates_without_advantages_are_not_checked():
    model = Quadratic()
    ours = regularizer(model, check_every=4)
    assert checks(ours, model, updates=10, informative=lambda update: update in (3, 4, 8, 9)) == [3, 8]


def test_a_resumed_run_goes_on_counting_and_has_begun():
    model, notices = Quadratic(), []
    first = regularizer(model, check_every=4)
    assert checks(first, model, updates=2) == [1]
    second = GradientRegularizer(model, settings(check_every=4), notice=notices.append)
    second.load(first.state(), first.tensors())
    assert second.state() == first.state()
    assert checks(second, model, updates=4) == [3]  # the fifth
    # What would be refused in a first update is told in a later one.
    guard = Guard(settings(check_every=1), notice=notices.append)
    guard.load(first.state())
    check_consistency(guard, 0.1)
    assert len(notices) == 1


def check_consistency(guard, consistency, *, update=7):
    """A measurement of a plain quadratic."""
    model = Quadratic()
    ours = regularizer(model, perturbed="all")
    guard.check_consistency(
        consistency,
        PerturbationFidelity(cosine=1.0, norm=1.0),
        measure=lambda factor: math.nan,
        update=update,
        size=1e-4,
        perturbation=ours.perturbation,
    )


@pytest.mark.parametrize("consistency", [0.49, 0.0, -0.6, -1.0])
def test_below_a_half_the_first_is_refused_again_and_again(consistency):
    guard = Guard(settings(check_every=100), notice=print)
    for update in (1, 2):
        assert guard.is_due(update)
        with pytest.raises(UserError, match=rf"have a cosine of {consistency:.2f}, wanted 0.9 \(0.5 to begin\)"):
            check_consistency(guard, consistency, update=update)


def test_below_nine_tenths_it_is_told_and_later_ones_are_counted():
    messages = []
    guard = Guard(settings(check_every=1), notice=messages.append)
    check_consistency(guard, 0.89, update=1)
    check_consistency(guard, 0.95, update=2)
    for update in range(3, 13):
        check_consistency(guard, -0.3, update=update)
    assert guard.inconsistent == 11
    assert [message[message.rindex("(update") :] for message in messages] == [
        "(update 1; seen 1 times)",
        "(update 11; seen 10 times)",
    ]


def test_a_check_without_a_number_is_none_and_the_next_update_is_asked():
    guard = Guard(settings(check_every=100), notice=print)
    check_consistency(guard, math.nan, update=3)
    assert guard.is_due(4)
    check_consistency(guard, 1.0, update=4)
    assert not guard.is_due(103)
    assert guard.is_due(104)


def test_a_step_over_which_the_gradient_bends_is_refused_with_the_other_way_out():
    model = transformer(dtype=torch.float32)
    ours = regularizer(model, step=0.1, step_scale="relative", **CHECKED)
    with pytest.raises(UserError, match=r"is not linear over so long a step: lower gradient_regularization\.step"):
        ours.accumulate(one(language(model)))


@pytest.mark.parametrize("step", [3e-5, 3e-6])
def test_a_step_that_is_usual_or_shorter_is_lowered_where_the_gradient_bends_over_it(step):
    model = Sharp(k=1 / step)
    ours = regularizer(model, perturbed="all", step=step, step_scale="relative", **CHECKED)
    with pytest.raises(UserError) as messages:
        ours.accumulate(one(model.loss))
    assert re.search(
        r"cosine of -?0\.\d\d, wanted 0\.9 \(0\.5 to begin\), at a tenth of the step 0\.9\d, at ten times the step "
        r"-?0\.\d\d; .* the gradient is not linear over so long a step: lower gradient_regularization\.step to "
        rf"{step / 10:.2g};",
        str(messages.value),
    )


@pytest.mark.parametrize(
    ("step", "other", "fix"), [(1e-8, r"0\.9\d", "to 1e-07;"), (1e-9, r"0\.[2-8]\d", "to 1e-08 or more;")]
)
def test_a_step_that_rounding_drowns_is_raised_where_a_longer_one_measured_better(step, other, fix):
    model = transformer(dtype=torch.float32)
    ours = regularizer(model, step=step, step_scale="relative", min_perturbation_kept=0, **CHECKED)
    with pytest.raises(UserError) as messages:
        ours.accumulate(one(language(model)))
    assert re.search(rf"\(0\.5 to begin\), at ten times the step {other}; ", str(messages.value))
    assert f"rounding swamps the difference of two gradients: raise gradient_regularization.step {fix}" in str(
        messages.value
    )


@pytest.mark.parametrize("changes", [{}, {"difference": "central"}], ids=str)
def test_a_notice_that_measured_other_steps_leaves_the_update_as_it_is(changes):
    updates, messages = [], []
    for check in (1, 0):
        model = network(dropout=0.2)
        loss = regression(model)
        given = settings(step=0.05, check_every=check, **changes)
        ours = GradientRegularizer(model, given, notice=messages.append)
        ours.guard.checked = 0  # the run has begun
        torch.manual_seed(3)
        ours.accumulate(one(loss))
        updates.append((left_in_grad(model.parameters()), torch.rand(3)))
    assert len(messages) == 1
    assert "at a tenth of the step 0.99" in messages[0]
    assert all(torch.equal(left, right) for left, right in zip(*updates, strict=True))


def test_the_default_step_of_float32_passes_without_a_word():
    model = transformer(dtype=torch.float32)
    report = regularizer(model, step=None, step_scale="relative", **CHECKED).accumulate(one(language(model)))
    assert report.consistency > 0.99


def test_a_central_difference_is_checked_without_another_pass():
    model, twin = network(), network()
    report = regularizer(model, step=0.02, difference="central", **CHECKED).accumulate(one(regression(model)))
    plain = regularizer(twin, step=0.02, difference="central").accumulate(one(regression(twin)))
    assert (report.pass_count, plain.pass_count) == (2, 2)
    assert 0.9 < report.consistency < 1
    assert torch.equal(left_in_grad(model.parameters()), left_in_grad(twin.parameters()))


class BrokenError(Exception):
    """What a pass raises."""


@pytest.mark.parametrize("error", [BrokenError(), KeyboardInterrupt()])
def test_an_error_in_the_checking_pass_leaves_weights_statistics_and_first_gradient(error):
    model, twin = network(normalize=True, dtype=torch.float32), network(normalize=True, dtype=torch.float32)
    loss = regression(model, dtype=torch.float32)
    regression(twin, dtype=torch.float32)().backward()
    pass_count = []

    def losses():
        pass_count.append(None)
        yield loss()
        if len(pass_count) == 3:
            raise error

    ours = regularizer(model, **CHECKED)
    with pytest.raises(type(error)):
        ours.accumulate(losses)
    assert len(pass_count) == 3
    assert unchanged(model, values(twin))
    assert torch.equal(left_in_grad(model.parameters()), left_in_grad(twin.parameters()))
    assert ours.guard.is_due(2)


def test_a_checking_pass_that_is_not_finite_refuses_nothing_and_leaves_the_penalty():
    model, twin, pass_count = network(), network(), []

    def losses():
        pass_count.append(None)
        return [regression(model)() * (math.nan if len(pass_count) == 3 else 1.0)]

    ours = regularizer(model, **CHECKED)
    report = ours.accumulate(losses)
    regularizer(twin).accumulate(one(regression(twin)))
    assert math.isnan(report.consistency)
    assert report.skipped is None
    assert torch.equal(left_in_grad(model.parameters()), left_in_grad(twin.parameters()))
    model.zero_grad()
    assert ours.accumulate(one(regression(model))).consistency > 0.99


def test_a_second_pass_that_is_not_finite_is_left_out_and_checked_another_time():
    model, pass_count = network(), []

    def losses():
        pass_count.append(None)
        return [regression(model)() * (math.nan if len(pass_count) == 2 else 1.0)]

    ours = regularizer(model, **CHECKED, notice=lambda text: None)
    assert ours.accumulate(losses).skipped == "the second pass is not finite"
    model.zero_grad()
    assert ours.accumulate(one(regression(model))).consistency > 0.99


def test_dropout_that_is_not_replayed_is_refused_for_what_it_is():
    model = network(dropout=0.5, width=16)
    torch.manual_seed(0)
    fresh_masks = PublishedBehavior(replay_randomness=False)
    ours = regularizer(model, behavior=fresh_masks, step=None, step_scale="relative", **CHECKED)
    with pytest.raises(UserError, match="random numbers that are not replayed"):
        ours.accumulate(one(regression(model)))
