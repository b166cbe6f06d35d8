"""Parameters and buffers come back bit for bit, whatever happens in between, and no perturbed copies stay."""

import copy

import pytest
import torch
from torch import nn

from flatpeak.gradreg import perturbation
from flatpeak.gradreg.perturbation import Perturbation
from support.gradreg import (
    Quadratic,
    gradient,
    joined,
    language,
    left_in_grad,
    network,
    one,
    regression,
    regularizer,
    transformer,
    unchanged,
    values,
)


class BrokenError(Exception):
    """What a second pass raises."""


def failing(loss, error, *, after: int = 1):
    """Losses whose pass number `after` + 1 raises in the middle of its second micro-batch."""
    pass_count = []

    def losses():
        pass_count.append(None)
        yield loss()
        if len(pass_count) > after:
            loss().backward()
            raise error
        yield loss()

    return losses


def plain_gradient(model, loss):
    """Of two micro-batches of the same loss."""
    return 2 * joined(gradient(model.parameters(), loss))


@pytest.mark.parametrize("difference", ["forward", "central"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parameters_are_bit_equal_after_an_update(difference, dtype):
    for model, loss in (
        (m := network(dtype=dtype), regression(m, dtype=dtype)),
        (t := transformer(dtype=dtype), language(t)),
    ):
        before = values(model)
        regularizer(model, difference=difference, step=0.1).accumulate(one(loss))
        assert unchanged(model, before)


def test_inside_they_are_moved_by_the_step_along_the_direction_and_only_they():
    model = network()
    loss = regression(model)
    g1 = gradient(model.parameters(), loss)
    before = values(model)
    seen = []

    def losses():
        seen.append(values(model))
        return [loss()]

    regularizer(model, step=0.25).accumulate(losses)
    inside = set(model.blocks.parameters())
    assert unchanged(model, before)
    for p, old, new, grad in zip(model.parameters(), before, seen[1], g1, strict=True):
        assert torch.equal(new, old + 0.25 * grad if p in inside else old)


def test_running_statistics_are_those_of_the_first_pass():
    model, plain = network(normalize=True), network(normalize=True)
    regression(plain)().backward()
    regularizer(model, difference="central", step=0.1).accumulate(one(regression(model)))
    assert model.norm.num_batches_tracked == 1
    assert unchanged(model, values(plain))


@pytest.mark.parametrize("error", [BrokenError(), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [1, 2])
def test_an_error_in_a_later_pass_leaves_weights_statistics_and_gradient_of_the_first(error, after):
    model = network(normalize=True, dtype=torch.float32)
    loss = regression(model, dtype=torch.float32)
    twin = copy.deepcopy(model)
    ours = regularizer(model, difference="central", step=0.1)
    g1 = plain_gradient(twin, regression(twin, dtype=torch.float32))
    regression(twin, dtype=torch.float32)()
    expected = values(twin)  # the statistics of two forward passes
    with pytest.raises(type(error)):
        ours.accumulate(failing(loss, error, after=after))
    assert unchanged(model, expected)
    assert torch.equal(left_in_grad(model.parameters()), g1)


def test_an_interrupt_in_the_perturbation_itself_is_undone(monkeypatch):
    model = network(dtype=torch.float32)
    loss = regression(model, dtype=torch.float32)
    before, g1 = values(model), joined(gradient(model.parameters(), loss))
    moved = []

    def interrupt(self, value):
        moved.append(not unchanged(model, before))
        if len(moved) == 4:
            raise KeyboardInterrupt
        return value

    monkeypatch.setattr(Perturbation, "_computed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        regularizer(model).accumulate(one(loss))
    assert moved[-1]
    assert unchanged(model, before)
    assert torch.equal(left_in_grad(model.parameters()), g1)


def interrupted_copy_back(monkeypatch, seen):
    """The first restoration stops half-way, as a signal would stop it."""
    original = perturbation.copy_back

    def copy_back(saved):
        seen.append(len(saved))
        if len(seen) == 1:
            original(saved[: len(saved) // 2])
            raise KeyboardInterrupt
        original(saved)

    monkeypatch.setattr(perturbation, "copy_back", copy_back)


def test_an_interrupt_in_the_middle_of_restoring_does_not_stop_it(monkeypatch):
    model = network(normalize=True, dtype=torch.float32)
    loss = regression(model, dtype=torch.float32)
    loss()
    ours, seen = regularizer(model, step=0.1), []
    twin = copy.deepcopy(model)
    g1 = joined(gradient(twin.parameters(), regression(twin, dtype=torch.float32)))
    interrupted_copy_back(monkeypatch, seen)
    with pytest.raises(KeyboardInterrupt):
        ours.accumulate(one(loss))
    assert seen == [7, 7]  # four parameters of the blocks, three buffers of the norm
    assert unchanged(model, values(twin))
    assert torch.equal(left_in_grad(model.parameters()), g1)


def test_an_interrupt_while_gradient_and_penalty_are_added_leaves_g1(monkeypatch):
    model = Quadratic()
    calls, original = [], torch.add

    def add(*args, **keywords):
        calls.append(None)
        if len(calls) == 4:  # two moves, then one sum of two
            raise KeyboardInterrupt
        return original(*args, **keywords)

    monkeypatch.setattr(torch, "add", add)
    with pytest.raises(KeyboardInterrupt):
        regularizer(model).accumulate(one(model.loss))
    assert len(calls) == 4
    assert torch.equal(left_in_grad(model.parameters()), joined(gradient(model.parameters(), model.loss)))


def test_a_first_pass_that_raises_moves_nothing():
    model = network()
    before = values(model)
    with pytest.raises(BrokenError):
        regularizer(model).accumulate(failing(regression(model), BrokenError(), after=0))
    assert unchanged(model, before)


def autocast_update(model, loss, **changes):
    """Both passes inside one autocast context, as a trainer would have them."""
    ours = regularizer(model, step=0.05, compute_dtype=torch.bfloat16, **changes)
    g1 = joined(gradient(ours.parameters, loss))
    report = ours.accumulate(one(loss))
    return report, left_in_grad(ours.parameters) - g1


def test_under_autocast_the_second_pass_sees_the_perturbed_weights():
    model = network(dtype=torch.float32)
    loss = regression(model, dtype=torch.float32)
    exact = network()
    wanted = joined(gradient(exact.blocks.parameters(), regression(exact)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report, penalty = autocast_update(model, loss)
    assert report.g1_norm == pytest.approx(float(wanted.norm()), rel=0.05)
    assert float(penalty.norm()) > 0.1 * report.g1_norm


def test_with_a_stale_autocast_cache_there_would_be_no_penalty_at_all(monkeypatch):
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    model = network(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, penalty = autocast_update(model, regression(model, dtype=torch.float32))
    assert not penalty.any()


def test_under_autocast_what_is_computed_afterwards_is_computed_from_the_restored_weights():
    model = network(dtype=torch.float32)
    loss = regression(model, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = loss().detach()
        autocast_update(model, loss)
        assert torch.equal(loss(), before)


def test_under_autocast_an_interrupted_restoration_leaves_no_perturbed_copies_either(monkeypatch):
    model = network(dtype=torch.float32)
    loss = regression(model, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = loss().detach()
        interrupted_copy_back(monkeypatch, [])
        with pytest.raises(KeyboardInterrupt):
            autocast_update(model, loss)
        assert torch.equal(loss(), before)


def test_shared_and_empty_parameters_move_once_and_come_back():
    model = Quadratic()
    model.blocks[1].value = model.blocks[0].value
    model.empty = nn.Parameter(torch.empty(0, dtype=torch.float64))
    before = values(model)
    seen = []

    def losses():
        seen.append(model.x.detach())
        return [model.loss() + model.empty.sum()]

    g1 = gradient([model.blocks[0].value], model.loss)[0]
    regularizer(model, perturbed="all", step=0.5).accumulate(losses)
    assert torch.equal(seen[1], seen[0] + 0.5 * torch.cat([g1, g1]))
    assert unchanged(model, before)
