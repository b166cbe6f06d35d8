"""What the passes draw: a part of the batch, the same loss in other words, and losses that do not come back."""

import pytest
import torch

from flatpeak.errors import UserError
from flatpeak.gradreg.config import PublishedBehavior
from support.gradreg import (
    Quadratic,
    cosine,
    left_in_grad,
    one,
    regularizer,
    relative_error,
    unchanged,
    values,
)


def parts_of(model):
    """A quadratic loss of three examples c_i with weights a_i: sum_i a_i / 2 ||x - c_i||^2."""
    centers = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0], [0.0, 0.0, -3.0, 1.0]], dtype=torch.float64)
    factors = torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)

    def losses(*chosen):
        return lambda: (factors[i] / 2 * (model.x - centers[i]).square().sum() for i in chosen)

    def gradient_of(*chosen):
        return sum(factors[i] * (model.x.detach() - centers[i]) for i in chosen)

    return losses, gradient_of


@pytest.mark.parametrize("difference", ["forward", "exact"])
def test_of_a_part_of_the_batch_both_gradients_of_the_difference_are_that_part_s(difference):
    # Examples 0 and 2 stand for all three: L' = 3/2 (L_0 + L_2), H' = 3/2 (0.5 + 1.5) = 3, penalty 3 grad L'.
    model = Quadratic()
    losses, gradient_of = parts_of(model)
    ours = regularizer(model, strength=0.7, step=0.1, difference=difference)
    report = ours.accumulate(losses(0, 2), rest=losses(1), scale=1.5)
    component = 1.5 * gradient_of(0, 2)
    wanted = gradient_of(0, 1, 2) + 0.7 * 3.0 * component
    assert relative_error(left_in_grad(model.parameters()), wanted) < 1e-12
    assert report.g1_norm == pytest.approx(float(component.norm()))
    assert report.penalty_ratio == pytest.approx(0.7 * 3.0)
    assert report.cosine == pytest.approx(1.0)


@pytest.mark.parametrize("changes", [{"strength": 0}, {"delay_updates": 1}])
def test_where_nothing_is_regularized_the_parts_make_the_whole(changes):
    model = Quadratic()
    losses, gradient_of = parts_of(model)
    regularizer(model, **changes).accumulate(losses(0, 2), rest=losses(1), scale=1.5)
    torch.testing.assert_close(left_in_grad(model.parameters()), gradient_of(0, 1, 2))


def test_where_the_chosen_part_has_no_gradient_there_is_no_penalty():
    # A sub-batch without a loss has the gradient 0, not that of the rest.
    model = Quadratic()
    losses, gradient_of = parts_of(model)
    report = regularizer(model, step=0.1).accumulate(losses(), rest=losses(0, 1, 2), scale=1.5)
    assert torch.equal(left_in_grad(model.parameters()), gradient_of(0, 1, 2))
    assert report.skipped == "g1 is zero"


def test_the_clips_of_published_code_treat_a_part_s_two_gradients_alike():
    # H is a multiple of the identity: the part's gradients at both points, clipped alike, are equal, and so is nothing
    # left to add.
    model = Quadratic()
    losses, gradient_of = parts_of(model)
    limit = 0.1 * float(gradient_of(0, 2).norm())
    ours = regularizer(model, step=0.1, behavior=PublishedBehavior(g1_clip=limit, g2_clip=limit))
    ours.accumulate(losses(0, 2), rest=losses(1), scale=1.5)
    whole = gradient_of(0, 1, 2)
    assert cosine(left_in_grad(model.parameters()), whole) == pytest.approx(1.0)
    assert float(left_in_grad(model.parameters()).norm()) == pytest.approx(limit, rel=1e-3)


def test_a_second_pass_may_write_the_same_loss_in_another_way():
    model = Quadratic()
    calls = []

    def again():
        calls.append(None)
        return [model.loss() + 1.0]

    regularizer(model, step=0.1).accumulate(one(model.loss), again=again)
    g1 = model.gradient(model.x)
    assert len(calls) == 1
    assert relative_error(left_in_grad(model.parameters()), g1 + model.A @ g1) < 1e-12


def test_what_stood_in_grad_before_is_added_to_and_no_part_of_the_difference():
    # As at strength 0; taken for a part of g1, it would come back in the difference divided by the step.
    model = Quadratic()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    report = regularizer(model, step=0.1).accumulate(one(model.loss))
    g1 = model.gradient(model.x)
    assert relative_error(left_in_grad(model.parameters()), 1 + g1 + model.A @ g1) < 1e-12
    assert report.g1_norm == pytest.approx(float(g1.norm()))


@pytest.mark.parametrize("kept", [0, 1])
def test_losses_that_give_less_in_the_second_pass_are_an_error(kept):
    # Without a second gradient the "difference" would be -g1 / h, thousands of times the gradient itself.
    model = Quadratic()
    counts = [2, kept]
    before, g1 = values(model), model.gradient(model.x)
    with pytest.raises(UserError, match="losses"):
        regularizer(model).accumulate(lambda: (model.loss() / 2 for _ in range(counts.pop(0))))
    assert unchanged(model, before)
    torch.testing.assert_close(left_in_grad(model.parameters()), g1)


def test_a_replay_that_leaves_no_gradient_is_an_error_too():
    model = Quadratic()
    model.loss().backward()
    g1 = left_in_grad(model.parameters())
    with pytest.raises(UserError, match="replay"):
        regularizer(model).regularize(lambda: None)
    assert torch.equal(left_in_grad(model.parameters()), g1)
