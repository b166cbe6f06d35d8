"""Dropout: the second pass draws the first one's masks, and the stream goes on as if it had never run."""

import pytest
import torch

from flatpeak.gradreg.config import PublishedBehavior
from support.gradreg import (
    exact_penalty,
    gradient,
    joined,
    measured_penalty,
    network,
    one,
    regression,
    regularizer,
    relative_error,
    unchanged,
    values,
)


class Masked:
    """A network with dropout 0.5, and the exact penalty under the masks that seed 11 draws."""

    def __init__(self) -> None:
        self.model = network(dropout=0.5)
        self.loss = regression(self.model, scale=0.05)  # a small gradient, so that 1e-4 is a small step

    def seeded_loss(self):
        """The loss under the masks of two micro-batches."""
        torch.manual_seed(11)
        return self.loss() + self.loss()

    def error(self, **changes):
        ours = regularizer(self.model, **changes)
        wanted = exact_penalty(ours.parameters, self.seeded_loss)
        torch.manual_seed(11)
        plain = joined(gradient(ours.parameters, self.seeded_loss))
        torch.manual_seed(11)
        ours.accumulate(lambda: (self.loss() for _ in range(2)))
        result = joined(p.grad for p in ours.parameters) - plain
        self.model.zero_grad()
        return relative_error(result, wanted)


@pytest.mark.parametrize("difference", ["forward", "central", "exact"])
def test_with_replayed_masks_the_penalty_is_that_of_the_frozen_masks(difference):
    assert Masked().error(difference=difference) < 1e-3


@pytest.mark.parametrize("difference", ["forward", "central"])
def test_with_fresh_masks_in_the_second_pass_it_is_noise(difference):
    assert Masked().error(difference=difference, behavior=PublishedBehavior(replay_randomness=False)) > 10


def test_without_dropout_replaying_changes_nothing():
    model = network()
    loss = regression(model)
    first = measured_penalty(regularizer(model), loss)
    model.zero_grad()
    assert torch.equal(
        first, measured_penalty(regularizer(model, behavior=PublishedBehavior(replay_randomness=False)), loss)
    )


def next_numbers(model, **changes):
    """What torch draws after an update."""
    torch.manual_seed(5)
    regularizer(model, **changes).accumulate(one(regression(model)))
    return torch.rand(4)


@pytest.mark.parametrize(
    ("replay", "difference"),
    [(True, "forward"), (True, "central"), (True, "exact"), (False, "forward"), (False, "central")],
)
def test_the_random_stream_goes_on_as_without_regularization(replay, difference):
    model = network(dropout=0.5)
    torch.manual_seed(5)
    regression(model)()
    plain = torch.rand(4)
    assert torch.equal(
        next_numbers(model, difference=difference, behavior=PublishedBehavior(replay_randomness=replay)), plain
    )
    assert torch.equal(next_numbers(model, strength=0), plain)


def test_the_random_stream_goes_on_also_after_a_second_pass_that_raises():
    model = network(dropout=0.5)
    loss = regression(model)
    pass_count = []

    def losses():
        pass_count.append(None)
        yield loss()
        if len(pass_count) == 2:
            raise KeyboardInterrupt

    torch.manual_seed(5)
    loss()
    plain = torch.rand(4)
    torch.manual_seed(5)
    with pytest.raises(KeyboardInterrupt):
        regularizer(model).accumulate(losses)
    assert torch.equal(torch.rand(4), plain)


def test_of_a_part_of_the_batch_the_second_pass_draws_that_part_s_masks():
    model = network(dropout=0.5)
    loss = regression(model)
    drawn = []

    def losses():
        drawn.append(torch.rand(3))
        return [loss()]

    regularizer(model).accumulate(losses, rest=losses)
    first, rest, second = drawn
    assert torch.equal(second, first)
    assert not torch.equal(second, rest)


def test_a_strength_of_0_is_the_plain_update_bit_for_bit_in_one_pass():
    model, twin = network(dtype=torch.float32, dropout=0.5), network(dtype=torch.float32, dropout=0.5)
    loss, calls = regression(model, dtype=torch.float32), []
    before = values(model)

    def losses():
        calls.append(None)
        yield loss()
        yield loss()

    torch.manual_seed(5)
    plain = regression(twin, dtype=torch.float32)
    for _ in range(2):
        plain().backward()
    torch.manual_seed(5)
    report = regularizer(model, strength=0).accumulate(losses)
    assert len(calls) == 1
    assert (report.pass_count, report.metrics()) == (0, {})
    assert unchanged(model, before)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
