"""The search for a step where none is set: shorter over sharp functions, longer in low precision, kept from then on."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from torch import nn

from flatpeak.errors import UserError
from flatpeak.gradreg import directions
from flatpeak.gradreg.guard import Guard
from flatpeak.gradreg.perturbation import Perturbation, PerturbationFidelity
from flatpeak.gradreg.regularizer import GradientRegularizer
from support.gradreg import (
    Quadratic,
    Sharp,
    language,
    left_in_grad,
    network,
    one,
    regression,
    relative_error,
    settings,
    transformer,
    unchanged,
    values,
)

AUTO = {"step": None, "step_scale": "relative", "check_every": 100}
WHOLE = PerturbationFidelity(cosine=1.0, norm=1.0)


def automatic(model, **changes):
    """A regularizer without a step of the user's, and its notices."""
    notices: list[str] = []
    return GradientRegularizer(model, settings(**AUTO | changes), notice=notices.append), notices


@pytest.mark.parametrize(("bend", "found", "trials"), [(1.2e-4, 3e-6, 1), (3e-5, 3e-7, 2), (3e-6, 3e-8, 3)])
def test_over_a_sharp_function_the_step_is_shortened_until_the_gradient_is_linear(bend, found, trials):
    model, twin = Sharp(k=1 / bend), Sharp(k=1 / bend)
    ours, notices = automatic(model, perturbed="all")
    report = ours.accumulate(one(model.loss))
    assert report.metrics()["gradreg/step"] == pytest.approx(found)
    assert report.metrics()["gradreg/step_consistency"] > 0.9
    # The pass at the default step and its opposite, two at each step that is tried, and the penalty's own.
    assert report.pass_count == 2 + 2 * trials + 1
    assert len(notices) == 1
    assert re.search(
        rf"step is now {found:.1e} .* agree \({found:.1e}: (0\.99|1\.00), .*3\.0e-05: -?0\.\d\d\)", notices[0]
    )
    given = GradientRegularizer(twin, settings(**AUTO | {"step": found, "perturbed": "all"}), notice=notices.append)
    given.accumulate(one(twin.loss))
    assert relative_error(left_in_grad(model.parameters()), left_in_grad(twin.parameters())) < 1e-6


def test_the_step_that_was_found_stays_and_is_not_looked_for_again():
    model = Sharp(k=1 / 3e-6)
    ours, notices = automatic(model, perturbed="all", check_every=2)
    steps, pass_counts = [], []
    for _ in range(4):
        model.zero_grad()
        report = ours.accumulate(one(model.loss))
        steps.append(report.step)
        pass_counts.append(report.pass_count)
    assert len(set(steps)) == 1
    assert pass_counts == [9, 1, 2, 1]
    assert len(notices) == 1


def test_a_later_check_looks_for_another_step_where_the_loss_has_become_sharper():
    model = Sharp(k=1)
    ours, notices = automatic(model, perturbed="all", check_every=1)
    steps = []
    for k in (1, 1 / 1.2e-4, 1 / 1.2e-5):
        model.k = k
        model.zero_grad()
        steps.append(ours.accumulate(one(model.loss)).step)
    assert steps == pytest.approx([3e-5, 3e-6, 3e-7])
    assert [notice[notice.rindex("(update") :] for notice in notices] == ["(update 2)", "(update 3)"]


@pytest.mark.parametrize("changes", [{}, {"difference": "central"}], ids=str)
def test_where_the_default_step_is_consistent_the_update_is_that_of_this_step(changes):
    results = []
    for step in (None, 3e-5):
        model = network(dropout=0.2)
        ours = GradientRegularizer(model, settings(**AUTO | {"step": step} | changes), notice=pytest.fail)
        torch.manual_seed(3)
        report = ours.accumulate(one(regression(model)))
        results.append((left_in_grad(model.parameters()), torch.rand(3)))
        assert (report.pass_count, report.step) == (2, 3e-5)
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


@pytest.mark.parametrize("changes", [{}, {"difference": "central"}], ids=str)
def test_a_search_leaves_weights_and_random_numbers_as_an_update_without_it(changes):
    states = []
    for check_every in (100, 0):
        model = Sharp(k=1 / 3e-6)
        ours, _ = automatic(model, perturbed="all", check_every=check_every, **changes)
        before = values(model)
        torch.manual_seed(3)
        ours.accumulate(lambda model=model: [model.loss() * (1 + 1e-3 * torch.rand(()))])
        assert unchanged(model, before)
        states.append(torch.rand(3))
    assert torch.equal(*states)


def test_in_float32_a_step_that_rounding_drowns_is_lengthened(monkeypatch):
    monkeypatch.setattr(directions, "FLOAT32_STEP", 1e-8)
    model = transformer(dtype=torch.float32)
    ours, notices = automatic(model, min_perturbation_kept=0)
    report = ours.accumulate(one(language(model)))
    # Processors round differently: on one the next longer step is consistent, on another the one after it.
    assert report.step in (pytest.approx(1e-8 * 10**0.5), pytest.approx(1e-7))
    assert report.consistency > 0.9
    assert len(notices) == 1


def test_a_perturbation_that_rounding_swallows_is_lengthened():
    # As many weights of the size of a language model's as a small matrix has, and a gradient on all of them.
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter((0.02 * torch.randn(100_000, generator=generator)).bfloat16())
    wanted = torch.randn(100_000, generator=generator)
    ours, notices = automatic(model, perturbed="all", min_perturbation_kept=0.5)
    report = ours.accumulate(one(lambda: (model.weight.float() * wanted).sum()))
    assert report.step == pytest.approx(3e-4 * 10**0.5)
    assert report.kept.cosine > 0.5
    assert "3.0e-04: rounded away" in notices[0]


def test_a_resumed_run_goes_on_with_the_step_that_was_found_to_the_bit():
    model = Sharp(k=1 / 3e-6)
    first, _ = automatic(model, perturbed="all")
    first.accumulate(one(model.loss))
    state = json.loads(json.dumps(first.state()))
    second, notices = automatic(model, perturbed="all")
    second.load(state, first.tensors())
    results = []
    for ours in (first, second):
        model.zero_grad()
        report = ours.accumulate(one(model.loss))
        results.append(left_in_grad(model.parameters()))
        assert report.step == pytest.approx(3e-8)
    assert torch.equal(*results)
    assert notices == []
    # A run that goes on with a step of the user's takes this one.
    fork, _ = automatic(model, perturbed="all", step=1e-7)
    fork.load(state, {})
    model.zero_grad()
    assert fork.accumulate(one(model.loss)).step == 1e-7


def measured(consistency, others, *, half=False, checked=None, **changes):
    """(the consistency that a check returns, the factor, the factors it tried, its notices), from a table."""
    tried, notices = [], []
    guard = Guard(settings(**AUTO | changes), notice=notices.append)
    guard.checked = checked
    perturbation = Perturbation(model := Quadratic(), list(model.parameters()))
    perturbation.coarsest_dtype = torch.bfloat16 if half else torch.float32

    def measure(factor):
        tried.append(round(factor, 4))
        return others.get(tried[-1], math.nan)

    result = guard.check_consistency(
        consistency, WHOLE, measure=measure, update=7, size=3e-5, perturbation=perturbation
    )
    return result, round(guard.factor, 4), tried, notices


def test_shorter_steps_come_first_in_float32_and_longer_ones_in_half_precision():
    table = {10: 0.95, 0.1: 0.92}
    assert measured(0.2, table)[1:3] == (0.1, [0.1, 0.01])
    assert measured(0.2, table, half=True)[1:3] == (10, [3.1623, 10])


def test_shorter_steps_go_on_to_a_consistency_of_99_percent_or_beyond_the_best():
    assert measured(0.2, {0.1: 0.92, 0.01: 0.991})[:3] == (0.991, 0.01, [0.1, 0.01])
    assert measured(0.2, {0.1: 0.92, 0.01: 0.91})[:3] == (0.92, 0.1, [0.1, 0.01])


def test_beyond_the_best_step_a_direction_is_left_and_the_steps_between_are_tried():
    table = {0.1: 0.3, 3.1623: 0.7, 10: 0.6, 0.3162: 0.4}
    assert measured(0.6, table)[:3] == (0.7, 3.1623, [0.1, 3.1623, 10])
    table = {3.1623: 0.3, 0.1: 0.8, 0.01: 0.6, 0.0316: 0.7, 0.3162: 0.92}
    assert measured(0.6, table, half=True)[:3] == (0.92, 0.3162, [3.1623, 0.1, 0.01, 0.0316, 0.3162])


def test_the_best_of_all_is_kept_with_a_notice_where_none_is_consistent():
    consistency, factor, tried, notices = measured(0.2, {0.1: 0.4, 0.01: 0.7, 0.001: 0.6})
    assert (consistency, factor) == (0.7, 0.01)
    assert tried == [0.1, 0.01, 0.001, 3.1623, 0.0032, 0.0316]
    assert "3.0e-08: 0.60, " in notices[0]
    assert "the step is 3.0e-07 of the weights' norm" in notices[0]


@pytest.mark.parametrize(("half", "fix"), [(False, "fix the loss"), (True, "compute in float32")])
def test_where_no_step_works_the_first_check_names_them_all_and_a_later_one_keeps_the_step(half, fix):
    table = dict.fromkeys((0.1, 0.01, 10, 100), -0.4)
    with pytest.raises(UserError, match=fix) as messages:
        measured(-0.5, table, half=half)
    assert "3.0e-08: rounded away, " in str(messages.value)
    assert "3.0e-06: -0.40, " in str(messages.value)
    assert "3.0e-05: -0.50, " in str(messages.value)
    consistency, factor, tried, notices = measured(-0.5, table, half=half, checked=1)
    assert (consistency, factor, len(tried), len(notices)) == (-0.5, 1.0, 7 if half else 9, 1)


def test_a_step_that_is_set_is_checked_and_not_changed():
    assert measured(0.6, {0.1: 0.95, 10: 0.2}, step=3e-5)[:3] == (0.6, 1.0, [0.1, 10])


def test_before_a_run_only_a_perturbation_that_no_step_of_the_search_keeps_is_refused():
    for step, minimum, passes in ((3e-4, 0.9, False), (None, 0.9, True), (None, 1.0, False)):
        ours, _ = automatic(network(dtype=torch.bfloat16), step=step, min_perturbation_kept=minimum)
        if passes:
            ours.guard.probe(ours.perturbation, ours.config)
            continue
        with pytest.raises(UserError, match="rounding keeps too little of the perturbation"):
            ours.guard.probe(ours.perturbation, ours.config)
