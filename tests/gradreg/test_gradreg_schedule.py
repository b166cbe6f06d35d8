"""`every` above 1: when a second pass runs, what stands in for it in between, and a state that goes on from a file."""

import json

import pytest
import torch
from torch import nn

from flatpeak.gradreg.regularizer import GradientRegularizer
from flatpeak.gradreg.schedule import PenaltyMemory
from support.gradreg import (
    Quadratic,
    joined,
    left_in_grad,
    network,
    one,
    regression,
    regularizer,
    relative_error,
    settings,
    unexpected,
)


def updates(model, ours, count, *, rate=0.01, loss=None):
    """Updates of plain gradient descent: (x, gradient left, report) of each."""
    messages = []
    for _ in range(count):
        model.zero_grad()
        x = joined(model.parameters()).clone()
        report = ours.accumulate(one(loss or model.loss))
        messages.append((x, left_in_grad(model.parameters()).clone(), report))
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(rate * p.grad)
    return messages


@pytest.mark.parametrize(
    ("every", "delay", "passes"),
    [
        (1, 0, [1, 1, 1, 1, 1, 1, 1]),
        (2, 0, [1, 0, 1, 0, 1, 0, 1]),
        (3, 0, [1, 0, 0, 1, 0, 0, 1]),
        (3, 2, [0, 0, 1, 0, 0, 1, 0]),
    ],
)
def test_the_second_pass_runs_every_so_many_updates(every, delay, passes):
    model = Quadratic()
    messages = updates(model, regularizer(model, every=every, delay_updates=delay), 7)
    assert [report.pass_count for _, _, report in messages] == passes


def test_losses_are_asked_for_only_where_a_pass_runs():
    model, calls = Quadratic(), []
    ours = regularizer(model, every=3)

    def losses():
        calls.append(None)
        return [model.loss()]

    counts = []
    for _ in range(4):
        model.zero_grad()
        before = len(calls)
        ours.accumulate(losses)
        counts.append(len(calls) - before)
    assert counts == [2, 1, 1, 2]


def test_in_between_the_orthogonal_part_of_the_last_penalty_is_used_at_the_scale_of_the_gradient():
    model = Quadratic()
    messages = updates(model, regularizer(model, every=3, strength=0.5, step=0.1), 5)
    for start in (0, 3):
        old = model.gradient(messages[start][0])
        penalty = model.A @ old
        orthogonal = penalty - (penalty @ old) / (old @ old) * old
        assert relative_error(messages[start][1], old + 0.5 * penalty) < 1e-10
        for x, left, report in messages[start + 1 : start + 3]:
            g1 = model.gradient(x)
            used = left - g1
            assert relative_error(used, 0.5 * orthogonal * g1.norm() / old.norm()) < 1e-10
            assert abs(float(used @ old)) < 1e-10 * float(used.norm() * old.norm())
            assert report.penalty_ratio == pytest.approx(float(used.norm() / g1.norm()))
            assert report.cosine == pytest.approx(float(used @ g1 / used.norm() / g1.norm()))
            assert report.kept is None
            assert report.skipped is None
            assert "gradreg/perturbation_kept" not in report.metrics()


def test_nothing_to_use_again_means_a_second_pass_after_all():
    model = Quadratic()
    ours = regularizer(model, every=3, step=0.1)
    ours.accumulate(lambda: [0 * model.loss()])  # skipped: nothing to remember
    model.zero_grad()
    assert ours.accumulate(one(model.loss)).pass_count == 1


def test_a_second_pass_that_is_not_finite_is_not_remembered():
    model, calls = Quadratic(), []

    def losses():
        calls.append(None)
        return [model.loss() * (float("inf") if len(calls) == 2 else 1.0)]

    ours = regularizer(model, every=2, step=0.1, notice=lambda text: None)
    assert ours.accumulate(losses).skipped == "the second pass is not finite"
    assert ours.tensors() == {}
    model.zero_grad()
    assert ours.accumulate(losses).pass_count == 1
    g1 = model.gradient(model.x)
    assert relative_error(left_in_grad(model.parameters()), g1 + model.A @ g1) < 1e-10


def in_a_file(state, tensors):
    """What a checkpoint does to them: JSON, and tensors in the order of their names, "10" before "2"."""
    return json.loads(json.dumps(state)), {name: tensors[name].clone() for name in sorted(tensors)}


EVERYTHING = {
    "every": 3,
    "strength": "ratio:0.3",
    "delay_updates": 1,
    "warmup_updates": 4,
    "step": 1e-3,
}


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_a_loaded_state_goes_on_bit_for_bit(stop):
    whole = network(dtype=torch.float32, depth=6)
    loss = regression(whole, dtype=torch.float32, scale=0.1)
    wanted = updates(whole, regularizer(whole, **EVERYTHING), 8, loss=loss)

    first = network(dtype=torch.float32, depth=6)
    ours = regularizer(first, **EVERYTHING)
    messages = updates(first, ours, stop, loss=regression(first, dtype=torch.float32, scale=0.1))
    second = network(dtype=torch.float32, depth=6, seed=1)
    second.load_state_dict(first.state_dict())
    resumed = regularizer(second, **EVERYTHING)
    resumed.load(*in_a_file(ours.state(), ours.tensors()))
    messages += updates(second, resumed, 8 - stop, loss=regression(second, dtype=torch.float32, scale=0.1))

    for (x, left, report), (y, right, other) in zip(wanted, messages, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(left, right)
        assert (report.metrics(), report.pass_count) == (other.metrics(), other.pass_count)
    assert {report.pass_count for _, _, report in messages} == {0, 1}


def test_the_guard_s_start_is_the_run_s_not_the_process_s():
    # A run that was told of a perturbation that drowns goes on; so must the same run after it was resumed.
    model, notices = network(dtype=torch.float32), []

    def update(ours, scale):
        model.zero_grad()
        return ours.accumulate(one(regression(model, dtype=torch.float32, scale=scale)))

    def build():
        return GradientRegularizer(model, settings(step=1e-2), compute_dtype=torch.bfloat16, notice=notices.append)

    ours = build()
    update(ours, 1.0)
    update(ours, 1e-3)
    assert len(notices) == 1
    resumed = build()
    resumed.load(*in_a_file(ours.state(), ours.tensors()))
    assert update(resumed, 1e-3).pass_count == 1


def test_what_is_loaded_goes_where_the_parameters_are():
    # A checkpoint is read on the CPU.
    weight = nn.Parameter(torch.ones(2, device="meta"))
    memory = PenaltyMemory([weight])
    memory.load({"0": torch.ones(2)}, grad_norm=1.0)
    assert memory.orthogonal is not None
    assert memory.orthogonal[weight].device == weight.device


def test_without_memory_there_is_nothing_to_save():
    model = Quadratic()
    ours = regularizer(model, step=0.1)
    ours.accumulate(one(model.loss))
    assert ours.tensors() == {}
    assert ours.state()["updates"] == 1


def test_what_is_saved_is_one_tensor_for_every_perturbed_parameter():
    model = Quadratic()
    ours = GradientRegularizer(model, settings(every=2, step=0.1), notice=unexpected)
    ours.accumulate(one(model.loss))
    saved = ours.tensors()
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {"0": (2,), "1": (2,)}
    g1 = model.gradient(model.x)
    penalty = model.A @ g1
    assert relative_error(torch.cat([saved["0"], saved["1"]]), penalty - (penalty @ g1) / (g1 @ g1) * g1) < 1e-10
