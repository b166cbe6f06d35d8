"""What ends up in `.grad`: inside and outside the perturbed set, with clipping, and where numbers fail."""

import math

import pytest
import torch

from flatpeak.gradreg.config import PublishedBehavior
from support.gradreg import (
    Quadratic,
    cosine,
    exact_penalty,
    gradient,
    joined,
    left_in_grad,
    network,
    one,
    regression,
    regularizer,
    relative_error,
    unchanged,
    values,
)


def second_gradient(model, perturbed, loss, *, step):
    """All gradients at theta + step * g1, by hand."""
    g1 = gradient(perturbed, loss)
    with torch.no_grad():
        saved = [p.clone() for p in perturbed]
        for p, grad in zip(perturbed, g1, strict=True):
            p.add_(step * grad)
    result = gradient(model.parameters(), loss)
    with torch.no_grad():
        for p, value in zip(perturbed, saved, strict=True):
            p.copy_(value)
    return result


@pytest.mark.parametrize("step", [1e-3, 0.1])
def test_a_strength_equal_to_the_absolute_step_gives_the_gradient_at_the_perturbed_weights(step):
    # g1 + step / step * (g2 - g1): plain SAM, unnormalized.
    model = network()
    loss = regression(model)
    ours = regularizer(model, strength=step, step=step, perturbed="all")
    wanted = joined(second_gradient(model, ours.parameters, loss, step=step))
    report = ours.accumulate(one(loss))
    assert relative_error(left_in_grad(model.parameters()), wanted) < 1e-12
    assert report.strength == step


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outside_the_perturbed_set_the_gradient_is_g1_bit_for_bit(dtype):
    model = network(dtype=dtype)
    loss = regression(model, dtype=dtype)
    ours = regularizer(model, step=0.1)
    outside = [p for p in model.parameters() if p not in set(ours.parameters)]
    g1 = gradient(outside, loss)
    ours.accumulate(one(loss))
    assert len(outside) == 4
    assert all(torch.equal(p.grad, grad) for p, grad in zip(outside, g1, strict=True))


@pytest.mark.parametrize("perturbed", ["blocks", "last_block"])
def test_inside_the_perturbed_set_the_penalty_is_that_of_the_set_s_own_gradient_norm(perturbed):
    model = network()
    loss = regression(model)
    ours = regularizer(model, perturbed=perturbed, difference="exact")
    wanted = exact_penalty(ours.parameters, loss)
    g1 = joined(gradient(ours.parameters, loss))
    ours.accumulate(one(loss))
    assert relative_error(left_in_grad(ours.parameters) - g1, wanted) < 1e-12


def test_published_code_s_gradient_outside_is_there_on_request():
    model = network()
    loss = regression(model)
    ours = regularizer(model, step=0.1, behavior=PublishedBehavior(outside="g2"))
    wanted = second_gradient(model, ours.parameters, loss, step=0.1)
    inside = set(ours.parameters)
    ours.accumulate(one(loss))
    for p, grad in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(p.grad, grad, rtol=1e-12) == (p not in inside)


def test_with_a_central_difference_the_gradient_outside_is_still_the_one_a_step_ahead():
    model = network()
    loss = regression(model)
    ours = regularizer(model, step=0.1, behavior=PublishedBehavior(outside="g2"), difference="central")
    wanted = second_gradient(model, ours.parameters, loss, step=0.1)[0]
    ours.accumulate(one(loss))
    assert relative_error(model.entry.weight.grad, wanted) < 1e-12


def large_gradient():
    """A network whose gradient has norm 12, its loss, and the exact penalty."""
    model = network()
    norm = float(joined(gradient(model.parameters(), regression(model))).norm())
    loss = regression(model, scale=12 / norm)
    g1 = joined(gradient(model.parameters(), loss))
    assert float(g1.norm()) == pytest.approx(12)
    return model, loss, g1, exact_penalty(list(model.parameters()), loss)


def test_clipping_afterwards_leaves_the_penalty_parallel_to_the_curvature():
    model, loss, g1, wanted = large_gradient()
    report = regularizer(model, perturbed="all", strength=0.1).accumulate(one(loss))
    total = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0))
    penalty = left_in_grad(model.parameters()) - 10 / total * g1
    assert total > 10
    assert report.g1_norm == pytest.approx(12)
    assert cosine(penalty, wanted) > 0.999
    assert float(penalty.norm()) == pytest.approx(0.1 * 10 / total * float(wanted.norm()), rel=1e-2)


def test_clipping_both_gradients_before_the_difference_bends_the_penalty_as_published_code_does():
    # d/dtheta of 10 g / ||g|| is 10 / ||g|| (1 - u u^T) H with u = g / ||g||, taken along 10 u: what H g has along g is
    # lost, here 21 of each of (6, 12, 18, 48), and the rest shrinks by (10 / 12)^2.
    model = Quadratic(diagonal=[1, 2, 3, 8], gradient=[6, 6, 6, 6])
    regularizer(model, step=1e-6, behavior=PublishedBehavior(g1_clip=10.0, g2_clip=10.0)).accumulate(one(model.loss))
    penalty = left_in_grad(model.parameters()) - 5.0
    wanted = torch.tensor([6.0, 12.0, 18.0, 48.0], dtype=torch.float64)
    assert relative_error(penalty, (10 / 12) ** 2 * (wanted - 21)) < 1e-4
    assert cosine(penalty, wanted) == pytest.approx(math.sqrt(29 / 78), abs=1e-4)  # 0.61
    assert float(penalty.norm() / wanted.norm()) == pytest.approx((10 / 12) ** 2 * math.sqrt(29 / 78), abs=1e-4)  # 0.42
    whole = Quadratic(diagonal=[1, 2, 3, 8], gradient=[6, 6, 6, 6])
    regularizer(whole, step=1e-6).accumulate(one(whole.loss))
    assert cosine(left_in_grad(whole.parameters()) - 6.0, wanted) > 0.999


def test_clipping_g1_alone_makes_the_penalty_a_multiple_of_the_gradient():
    # (g2 - 10 u) / h is (12 - 10) u / h, and nearly nothing else.
    model, loss, g1, wanted = large_gradient()
    regularizer(model, perturbed="all", step=1e-6, behavior=PublishedBehavior(g1_clip=10.0)).accumulate(one(loss))
    penalty = left_in_grad(model.parameters()) - 10 * g1 / g1.norm()
    assert float(penalty.norm()) == pytest.approx(2 / 1e-6, rel=1e-2)
    assert cosine(penalty, g1) > 0.9999
    assert cosine(penalty, wanted) == pytest.approx(cosine(g1, wanted), abs=1e-2)
    assert cosine(penalty, wanted) < 0.5


def test_clips_that_nothing_exceeds_change_nothing():
    model, twin = network(), network()
    regularizer(model, behavior=PublishedBehavior(g1_clip=1e6, g2_clip=1e6)).accumulate(one(regression(model)))
    regularizer(twin).accumulate(one(regression(twin)))
    assert torch.equal(left_in_grad(model.parameters()), left_in_grad(twin.parameters()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_first_gradient_that_is_not_finite_is_reported_and_left_as_it_is(bad):
    model = Quadratic()
    before, calls = values(model), []

    def losses():
        calls.append(None)
        return [model.loss() + bad * model.blocks[1].value[0]]

    report = regularizer(model).accumulate(losses)
    assert report.skipped == "g1 is not finite"
    assert report.metrics()["gradreg/skipped"] == 1
    assert (report.pass_count, len(calls)) == (0, 1)
    result = left_in_grad(model.parameters())
    torch.testing.assert_close(result[[0, 1, 3]], model.gradient(model.x)[[0, 1, 3]])
    assert not math.isfinite(result[2])
    assert unchanged(model, before)


def turning_bad(part, loss, bad):
    """Losses that are fine in the first pass; in the second their gradient at this part of a model is not finite."""
    calls = []

    def losses():
        calls.append(None)
        extra = sum(p.sum() for p in part.parameters())
        return [loss() + (bad * extra if len(calls) == 2 else 0 * extra)]

    return losses


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("part", "outside"), [("blocks", "g1"), ("blocks", "g2"), ("head", "g2")])
def test_a_second_pass_that_is_not_finite_leaves_g1_everywhere(bad, part, outside):
    model = network()
    loss = regression(model)
    before, g1 = values(model), joined(gradient(model.parameters(), loss))
    notices = []
    ours = regularizer(model, behavior=PublishedBehavior(outside=outside), notice=notices.append)
    report = ours.accumulate(turning_bad(getattr(model, part), loss, bad))
    assert notices == [
        "gradient regularization: 1 penalty so far left out (now in update 1), because the second pass was NaN or "
        "infinite; lower gradient_regularization.step if gradreg/skipped keeps rising"
    ]
    assert ours.state()["guard_lost"] == 1
    assert report.skipped == "the second pass is not finite"
    assert report.pass_count == 1
    assert report.metrics()["gradreg/skipped"] == 1
    torch.testing.assert_close(left_in_grad(model.parameters()), g1)
    assert unchanged(model, before)


def test_a_gradient_of_exactly_0_has_no_direction_and_is_skipped():
    model = Quadratic()
    calls = []

    def losses():
        calls.append(None)
        return [0 * model.loss()]

    report = regularizer(model, step_scale="relative").accumulate(losses)
    assert report.skipped == "g1 is zero"
    assert len(calls) == 1
    assert not left_in_grad(model.parameters()).any()
