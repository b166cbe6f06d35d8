"""State that a pass changes and uses: every pass begins with the first one's, and what the first one left stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatpeak.errors import UserError
from flatpeak.gradreg.config import PublishedBehavior
from support.gradreg import (
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


class Counting(nn.Module):
    """A network whose output depends on how often it was called: in a buffer that is written to, or bound anew."""

    def __init__(self, *, rebinds: bool) -> None:
        super().__init__()
        self.inner = network()
        self.blocks = self.inner.blocks
        self.rebinds = rebinds
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, x):
        if self.rebinds:
            self.calls = self.calls + 1
        else:
            self.calls.add_(1)
        return self.inner(x) * (1 + self.calls.clone())


def frozen(model, *, calls):
    """The penalty of the function that a pass with these many calls before it computes."""
    loss = regression(model)

    def at_calls():
        model.calls = torch.full((), float(calls), dtype=torch.float64)
        return loss()

    return exact_penalty(list(model.inner.blocks.parameters()), at_calls)


@pytest.mark.parametrize("rebinds", [False, True])
@pytest.mark.parametrize("difference", ["forward", "central", "exact"])
def test_a_counter_that_the_forward_pass_uses_is_rewound(rebinds, difference):
    model = Counting(rebinds=rebinds)
    ours = regularizer(model, perturbed=("inner.blocks.*",), difference=difference, step=1e-6, check_every=1)
    for calls in range(2):
        held = model.calls
        wanted = frozen(Counting(rebinds=rebinds), calls=calls)
        first = joined(gradient(ours.parameters, twin_loss(model, calls)))
        model.calls = held
        model.zero_grad()
        ours.accumulate(one(regression(model)))
        assert model.calls == calls + 1
        assert relative_error(left_in_grad(ours.parameters) - first, wanted) < 1e-3


def twin_loss(model, calls):
    """The loss with this count, without counting."""
    loss = regression(model)

    def at_calls():
        model.calls = torch.full((), float(calls), dtype=torch.float64)
        return loss()

    return at_calls


def test_where_the_first_pass_is_over_its_buffers_can_be_given():
    model = Counting(rebinds=False)
    wanted = frozen(Counting(rebinds=False), calls=0)
    ours = regularizer(model, perturbed=("inner.blocks.*",), step=1e-6)
    loss = regression(model)
    start = ours.buffers()
    loss().backward()
    first = left_in_grad(ours.parameters)
    ours.regularize(lambda: loss().backward(), start=start)
    assert model.calls == 1
    assert relative_error(left_in_grad(ours.parameters) - first, wanted) < 1e-3


def test_a_buffer_that_is_bound_anew_is_afterwards_that_of_the_first_pass():
    model = Counting(rebinds=True)
    bound = []
    model.inner.register_forward_hook(lambda *_: bound.append(model.calls))
    regularizer(model, perturbed=("inner.blocks.*",), difference="central").accumulate(one(regression(model)))
    assert len(bound) == 3
    assert model.calls is bound[0]
    assert model.calls == 1


def spectral():
    """A network whose blocks have spectral norms: two vectors each, iterated in every forward pass and used in it."""
    model = network()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for block in model.blocks:
            nn.utils.parametrizations.spectral_norm(block.linear)
    return model


def test_spectral_norm_iterates_once_per_update_as_without_regularization():
    model, plain, twin = spectral(), spectral(), spectral()
    regression(plain)().backward()
    ours = regularizer(model, step=1e-6, check_every=1)
    ours.accumulate(one(regression(model)))
    assert unchanged(model, values(plain))
    # The second pass iterates from where the first did. What is left of a difference is that the vectors follow the
    # weights, detached: no double backward sees it.
    penalty = left_in_grad(ours.parameters) - left_in_grad(plain.blocks.parameters())
    assert relative_error(penalty, exact_penalty(list(twin.blocks.parameters()), regression(twin))) < 0.02


class Hidden(nn.Module):
    """A counter that is no buffer, so that nobody can rewind it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * self.calls


def test_state_that_cannot_be_rewound_is_refused_in_words():
    model = Hidden()
    before = values(model)
    with pytest.raises(UserError, match=r"computes another function than the first: .* such as a counter"):
        regularizer(model, step=1e-6, check_every=100).accumulate(one(regression(model)))
    assert unchanged(model, before)


class Tabled(nn.Module):
    """A table of vectors with sparse gradients before a network."""

    def __init__(self, *, functional: bool = False) -> None:
        super().__init__()
        self.functional = functional
        self.table = nn.Embedding(5, 4, sparse=not functional, dtype=torch.float64)
        self.network = network()

    def forward(self, rows):
        if self.functional:
            return self.network(nn.functional.embedding(rows, self.table.weight, sparse=True))
        return self.network(self.table(rows))

    def loss(self):
        return self(torch.tensor([0, 3, 3])).square().mean()


@pytest.mark.parametrize("functional", [False, True])
def test_sparse_gradients_in_the_perturbed_set_are_refused_with_the_embedding_s_name(functional):
    model = Tabled(functional=functional)
    with pytest.raises(UserError, match=r"table\.weight has sparse gradients.*sparse=False.*perturbed=blocks"):
        regularizer(model, perturbed="all").accumulate(one(model.loss))


@pytest.mark.parametrize("outside", ["g1", "g2"])
def test_sparse_gradients_outside_of_it_stay_as_they_are(outside):
    model = Tabled()
    ours = regularizer(model, perturbed=("network.blocks.*",), behavior=PublishedBehavior(outside=outside), step=1e-6)
    report = ours.accumulate(one(model.loss))
    assert report.pass_count == 1
    assert model.table.weight.grad.is_sparse
    (wanted,) = gradient([model.table.weight], model.loss)
    torch.testing.assert_close(model.table.weight.grad.to_dense(), wanted.to_dense(), rtol=1e-4, atol=1e-6)
