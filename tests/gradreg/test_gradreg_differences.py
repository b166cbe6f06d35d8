"""The penalty's gradient against closed forms and against double backward; never the sum, in which g1 hides errors."""

import copy
import math

import pytest
import torch
from torch import nn

from flatpeak.errors import UserError
from support.gradreg import (
    Quadratic,
    exact_penalty,
    examples,
    gradient,
    joined,
    language,
    left_in_grad,
    measured_penalty,
    network,
    one,
    regression,
    regularizer,
    relative_error,
    transformer,
)


def mlp(*, dtype=torch.float64):
    model = network(dtype=dtype)
    return model, regression(model, dtype=dtype)


def attention(*, dtype=torch.float64):
    model = transformer(dtype=dtype)
    return model, language(model)


BOTH = pytest.mark.parametrize("make", [mlp, attention])


def error(model, loss, **changes):
    """Relative error of the penalty's gradient against double backward."""
    ours = regularizer(model, **changes)
    wanted = exact_penalty(ours.parameters, loss)
    model.zero_grad()
    return relative_error(measured_penalty(ours, loss), wanted)


@pytest.mark.parametrize("difference", ["forward", "central"])
@pytest.mark.parametrize("step", [1e-4, 0.1, 10.0])
def test_on_a_quadratic_the_penalty_is_exact_at_any_step(difference, step):
    model = Quadratic()
    wanted = model.A @ model.gradient(model.x)
    assert relative_error(
        measured_penalty(regularizer(model, step=step, difference=difference), model.loss), wanted
    ) < (1e-10)


def test_on_a_quadratic_double_backward_is_exact():
    model = Quadratic()
    wanted = model.A @ model.gradient(model.x)
    assert relative_error(measured_penalty(regularizer(model, difference="exact"), model.loss), wanted) < 1e-14


@BOTH
def test_a_forward_difference_at_a_small_step_is_the_exact_penalty(make):
    assert error(*make(), step=1e-4) < 1e-3


@BOTH
@pytest.mark.parametrize(("difference", "slope"), [("forward", 1.0), ("central", 2.0)])
def test_the_error_falls_with_the_step_by_the_order_of_the_difference(make, difference, slope):
    model, loss = make()
    coarse, fine = (error(model, loss, difference=difference, step=step) for step in (1e-3, 1e-4))
    assert math.log10(coarse / fine) == pytest.approx(slope, abs=0.1)


@BOTH
def test_difference_exact_equals_double_backward_to_rounding(make):
    assert error(*make(), difference="exact") < 1e-10


@BOTH
@pytest.mark.parametrize("difference", ["forward", "central"])
def test_in_float32_at_a_suitable_step_the_penalty_keeps_three_digits(make, difference):
    model, loss = make()
    ours = regularizer(model)
    wanted = exact_penalty(ours.parameters, loss)
    norm = float(joined(gradient(ours.parameters, loss)).norm())
    single, loss = make(dtype=torch.float32)
    result = measured_penalty(regularizer(single, step=3e-4 / norm, difference=difference), loss)
    assert result.dtype == torch.float32
    assert relative_error(result, wanted) < 5e-3


@BOTH
def test_the_default_step_suits_float32(make):
    model, loss = make()
    wanted = exact_penalty(regularizer(model).parameters, loss)
    single, loss = make(dtype=torch.float32)
    assert relative_error(measured_penalty(regularizer(single, step=None, step_scale="relative"), loss), wanted) < 5e-3


@pytest.mark.parametrize("difference", ["forward", "central", "exact"])
def test_micro_batches_add_up_to_one_batch(difference):
    whole, _ = mlp()
    parts = copy.deepcopy(whole)
    inputs, targets = examples(8)

    def losses(model, *slices):
        return lambda: ((model(inputs[s]) - targets[s]).square().sum() / 8 for s in slices)

    regularizer(whole, difference=difference).accumulate(losses(whole, slice(0, 8)))
    regularizer(parts, difference=difference).accumulate(losses(parts, slice(0, 1), slice(1, 6), slice(6, 8)))
    assert relative_error(left_in_grad(parts.parameters()), left_in_grad(whole.parameters())) < 1e-12


def test_passes_are_counted_by_the_difference():
    model, loss = mlp()
    assert [
        regularizer(model, difference=name).accumulate(one(loss)).pass_count for name in ("forward", "central", "exact")
    ] == [1, 2, 1]


def test_the_exact_pass_leaves_running_statistics_as_the_first_pass_left_them():
    # As much a replay as the others: the statistics of a batch are not to be counted twice.
    plain = network(normalize=True)
    exact = copy.deepcopy(plain)
    regression(plain)().backward()
    regularizer(exact, difference="exact").accumulate(one(regression(exact)))
    assert torch.equal(exact.norm.running_mean, plain.norm.running_mean)
    assert exact.norm.num_batches_tracked == plain.norm.num_batches_tracked == 1


def test_exact_curvature_without_the_losses_is_refused():
    model, loss = mlp()
    loss().backward()
    with pytest.raises(UserError, match="use accumulate, or difference=central"):
        regularizer(model, difference="exact").regularize(lambda: loss().backward())


def test_regularize_takes_a_gradient_that_is_there_already():
    model, loss = mlp()
    twin = copy.deepcopy(model)
    regularizer(twin).accumulate(one(regression(twin)))
    loss().backward()
    report = regularizer(model).regularize(lambda: loss().backward())
    assert report.pass_count == 1
    assert torch.equal(left_in_grad(model.parameters()), left_in_grad(twin.parameters()))


def test_a_loss_that_is_linear_in_the_parameters_has_no_penalty():
    model = Quadratic()
    report = regularizer(model, step=0.5).accumulate(one(lambda: model.b @ model.x))
    assert torch.equal(left_in_grad(model.parameters()), model.b)
    assert report.penalty_ratio == 0
    assert math.isnan(report.cosine)


def test_a_parameter_that_only_the_second_pass_uses_gets_its_penalty():
    # As an expert to which the first pass routes nothing. Here u (x_0 - its value at theta), at u = 0: its gradient
    # is 0 at theta, and h g_0 after the move.
    model, calls = Quadratic(), []
    model.u = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    start = model.x.detach()[0]

    def losses():
        calls.append(None)
        return [model.loss() + (model.u.sum() * (model.x[0] - start) if len(calls) == 2 else 0)]

    regularizer(model, perturbed="all", step=0.1, strength=0.5).accumulate(losses)
    assert float(model.u.grad) == pytest.approx(0.5 * float(model.gradient(model.x)[0]))


def test_a_parameter_that_the_loss_does_not_use_is_left_alone():
    # Zeros in place of None would have AdamW decay it, which it does not do without regularization.
    model = Quadratic()
    model.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    regularizer(model, perturbed="all", step=0.1).accumulate(one(model.loss))
    g1 = model.gradient(model.x)
    assert relative_error(left_in_grad(block.value for block in model.blocks), g1 + model.A @ g1) < 1e-12
    assert model.unused.grad is None
