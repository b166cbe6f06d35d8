"""A random direction in the gradient's place: its norm, its distribution, the product H z, and where its numbers come
from."""

import math

import pytest
import torch
from torch import nn

from flatpeak.gradreg.regularizer import GradientRegularizer
from support.gradreg import (
    Quadratic,
    gradient,
    joined,
    left_in_grad,
    measured_penalty,
    network,
    one,
    regression,
    relative_error,
    settings,
    unexpected,
)

STEP = 0.25


def random_regularizer(model, *, seed=0, **changes):
    config = settings(**{"direction": "random", "step": STEP} | changes)
    return GradientRegularizer(model, config, seed=seed, notice=unexpected)


def drawn(model, ours, updates=1):
    """The direction of each of some updates, from how far the second pass is from theta."""
    seen = []

    def losses():
        seen.append(joined(model.parameters()))
        return [model.loss()]

    for _ in range(updates):
        ours.accumulate(losses)
    return [(second - first) / STEP for first, second in zip(seen[::2], seen[1::2], strict=True)]


def test_a_random_direction_has_the_gradients_norm_over_the_whole_set():
    model = Quadratic()
    (direction,) = drawn(model, random_regularizer(model))
    g1 = model.gradient(model.x)
    assert float(direction.norm()) == pytest.approx(float(g1.norm()), rel=1e-12)
    assert abs(float(direction @ g1)) < 0.99 * float(g1 @ g1)
    halves = [float(half.norm() / whole.norm()) for half, whole in zip(direction.split(2), g1.split(2), strict=True)]
    assert halves[0] != pytest.approx(halves[1])  # not tensor by tensor


@pytest.mark.parametrize("difference", ["forward", "central", "exact"])
def test_the_penalty_along_a_random_direction_is_the_hessians_product_with_it(difference):
    model = Quadratic()
    (direction,) = drawn(model, random_regularizer(model))
    model.zero_grad()
    ours = random_regularizer(model, difference=difference, strength=2.0)
    assert relative_error(measured_penalty(ours, model.loss, strength=2.0), model.A @ direction) < 1e-10


def test_the_norm_as_penalty_takes_a_unit_direction():
    model = Quadratic()
    (direction,) = drawn(model, random_regularizer(model))
    model.zero_grad()
    penalty = measured_penalty(random_regularizer(model, penalty="norm"), model.loss)
    assert relative_error(penalty, model.A @ direction / model.gradient(model.x).norm()) < 1e-10


def test_a_wanted_ratio_is_reached_along_a_random_direction():
    model = Quadratic()
    report = random_regularizer(model, strength="ratio:0.3").accumulate(one(model.loss))
    penalty = left_in_grad(model.parameters()) - model.gradient(model.x)
    assert report.g1_norm == pytest.approx(float(model.gradient(model.x).norm()))
    assert float(penalty.norm()) == pytest.approx(0.3 * report.g1_norm, rel=1e-9)


class Wide(nn.Module):
    """A linear loss over two tensors, of 100,000 and of 25,000 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = (nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (100_000, 25_000))

    def loss(self):
        return self.large.sum() + self.small.sum()


def test_every_number_of_a_random_direction_is_gaussian_with_the_same_spread():
    # ||g||^2 is the number of elements, so z is standard normal: erf(1 / sqrt 2) = 0.683 of it within 1.
    model = Wide()
    (direction,) = drawn(model, random_regularizer(model, perturbed="all"))
    for part in direction.split([100_000, 25_000]):
        error = 4 / math.sqrt(len(part))
        assert float(part.mean()) == pytest.approx(0, abs=error)
        assert float(part.square().mean()) == pytest.approx(1, abs=error * math.sqrt(2))
        assert float((part.abs() < 1).double().mean()) == pytest.approx(math.erf(math.sqrt(0.5)), abs=error / 2)
    assert abs(float(direction[:25_000] @ direction[100_000:])) / 25_000 < 4 / math.sqrt(25_000)


def test_a_direction_is_a_function_of_seed_and_update():
    model = Quadratic()
    first = drawn(model, random_regularizer(model), 3)
    torch.manual_seed(123)
    again = drawn(model, random_regularizer(model), 3)
    other = drawn(model, random_regularizer(model, seed=1), 3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    everything = [*first, *other]
    cosines = [abs(float(a @ b / (a.norm() * b.norm()))) for i, a in enumerate(everything) for b in everything[i + 1 :]]
    assert max(cosines) < 0.999


@pytest.mark.parametrize("seed", [-1, 2**63 - 1, 2**64])
def test_any_integer_is_a_seed(seed):
    model = Quadratic()
    (direction,) = drawn(model, random_regularizer(model, seed=seed))
    assert float(direction.norm()) == pytest.approx(float(model.gradient(model.x).norm()))


def test_torchs_own_generator_stays_where_it_is():
    model = Quadratic()
    before = torch.get_rng_state()
    random_regularizer(model).accumulate(one(model.loss))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_restored_regularizer_draws_the_next_direction():
    model = Quadratic()
    whole = drawn(model, random_regularizer(model), 4)
    first = random_regularizer(model)
    drawn(model, first, 3)
    second = random_regularizer(model)
    second.load(first.state(), first.tensors())
    assert torch.equal(drawn(model, second)[0], whole[3])


def test_dropout_masks_are_replayed_along_a_random_direction():
    results = []
    for difference in ("forward", "exact"):
        model = network(dropout=0.5)
        loss = regression(model, scale=0.05)
        torch.manual_seed(11)
        plain = joined(gradient(model.blocks.parameters(), loss))
        torch.manual_seed(11)
        ours = random_regularizer(model, difference=difference, step=1e-4)
        ours.accumulate(one(loss))
        results.append(joined(p.grad for p in ours.parameters) - plain)
    assert relative_error(*results) < 1e-3


def test_parameters_that_are_not_perturbed_keep_their_gradient():
    model = network()
    loss = regression(model)
    outside = [*model.entry.parameters(), *model.head.parameters()]
    plain = joined(gradient(outside, loss))
    random_regularizer(model, step=1e-4).accumulate(one(loss))
    assert torch.equal(left_in_grad(outside), plain)


def test_half_precision_weights_move_along_the_same_direction_rounded():
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        model = Wide().to(dtype)
        (direction,) = drawn(model, random_regularizer(model, perturbed="all"))
        moved.append(direction.double())
    assert float(moved[0] @ moved[1] / (moved[0].norm() * moved[1].norm())) > 0.99
