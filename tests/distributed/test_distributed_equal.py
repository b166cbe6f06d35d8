"""Gradient regularization on two ranks, each with half of the data in two micro-batches, against one process."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from flatpeak.gradreg.config import GradientRegularizationConfig
from support.distributed import MICRO_BATCHES, Case, distance, run, same_bits
from support.distributed_gradreg import chosen, over_mesh, plain

pytestmark = pytest.mark.slow

PERTURBED = {"mlp": "all", "waves": "all", "llama": "blocks", "lora": "adapters"}
WAYS = ("ddp", "ddp_view", "fsdp")
OPTIONS = {
    "central difference": {"difference": "central"},
    "the norm as penalty, within a radius": {"penalty": "norm", "step_scale": "radius", "step": 0.05},
    "an absolute step": {"step_scale": "absolute", "step": 1e-3},
    "every second update": {"every": 2},
    "a wanted ratio": {"strength": "ratio:0.3"},
    "a random direction": {"direction": "random"},
}


def case(task, *, optimizer="sgd", steps=3, dtype=torch.float64, learning_rate=0.05, **settings):
    """A step of 1e-2 of the weights' norm: the rounding of both gradients reaches the penalty divided by it."""
    config = {"strength": 0.05, "step": 1e-2, "perturbed": PERTURBED[task], **settings}
    return Case(
        task=task,
        config=GradientRegularizationConfig(**{"check_every": 0, **config}),
        optimizer=optimizer,
        steps=steps,
        dtype=dtype,
        learning_rate=learning_rate,
    )


@cache
def alone(wanted):
    """The same case in this process, on the whole batch at once."""
    return run(wanted, "single")


@pytest.fixture(scope="module")
def both(ranks):
    """`both(case, way)`: what each rank saw; run once, however many tests ask."""
    return cache(lambda wanted, way: ranks(run, wanted, way))


def assert_equal(found, wanted, tolerance):
    assert len(found.gradients) == len(wanted.gradients) > 0
    for mine, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert distance(mine, theirs) < tolerance
    assert distance(found.changes, wanted.changes) < tolerance
    assert wanted.reports[0].penalty_ratio > 0.02  # or the gradient without penalty would pass too


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", ["mlp", "llama", "lora"])
def test_three_updates_on_two_ranks_are_those_of_one_process(both, task, way, optimizer):
    wanted = case(task, optimizer=optimizer)
    first, second = both(wanted, way)
    assert_equal(first, alone(wanted), 1e-12)
    assert same_bits(first.after, second.after)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("task", ["mlp", "llama"])
def test_in_float32_they_differ_by_its_rounding(ranks, task, way):
    wanted = case(task, dtype=torch.float32)
    # The penalty divides the rounding of two gradients by a short step; how much that is depends on the processor.
    assert_equal(ranks(run, wanted, way)[0], alone(wanted), 1e-5)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS)
def test_every_option_is_the_same_on_shards_and_replicas(ranks, settings, way):
    wanted = case("llama", **settings)
    assert_equal(ranks(run, wanted, way)[0], alone(wanted), 1e-12)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["one replica of two shards", "two replicas of one shard"])
def test_sharding_in_two_dimensions_is_the_same(ranks, shape):
    wanted = case("mlp")
    assert_equal(ranks(over_mesh, wanted, shape)[0], alone(wanted), 1e-12)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("task", ["mlp", "llama"])
def test_both_ranks_report_the_figures_of_one_process(both, task, way):
    wanted = case(task)
    first, second = both(wanted, way)
    for mine, theirs, one in zip(first.reports, second.reports, alone(wanted).reports, strict=True):
        assert replace(mine, seconds=0.0) == replace(theirs, seconds=0.0)
        for name in ("g1_norm", "strength", "penalty_ratio", "cosine"):
            assert math.isclose(getattr(mine, name), getattr(one, name), rel_tol=1e-10)
        assert math.isclose(mine.kept.cosine, one.kept.cosine, rel_tol=1e-10)
        assert math.isclose(mine.kept.norm, one.kept.norm, rel_tol=1e-10)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("settings", "passes"),
    [({}, [1, 1, 1]), ({"difference": "central"}, [2, 2, 2]), ({"every": 2}, [1, 0, 1]), ({"strength": 0}, [0, 0, 0])],
    ids=["forward", "central", "every second update", "strength 0"],
)
def test_a_second_pass_runs_exactly_when_it_is_needed(both, way, settings, passes):
    for outcome in both(case("mlp", **settings), way):
        assert [report.pass_count for report in outcome.reports] == passes
        assert outcome.forwards == len(MICRO_BATCHES) * (len(passes) + sum(passes))


@pytest.mark.parametrize("way", WAYS)
def test_strength_zero_is_the_plain_gradient_bit_for_bit(ranks, way):
    wanted = case("llama", strength=0, steps=1)
    for result, gradient in zip(ranks(run, wanted, way), ranks(plain, wanted, way), strict=True):
        assert same_bits(result.gradients[0], gradient)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("task", ["mlp", "llama", "lora"])
def test_with_a_learning_rate_of_zero_every_bit_of_the_parameters_stays(ranks, task, way):
    for outcome in ranks(run, case(task, learning_rate=0.0, steps=2, difference="central"), way):
        assert [report.kept is not None for report in outcome.reports] == [True, True]
        assert same_bits(outcome.after, outcome.before)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_only_adapters_move(both, way, optimizer):
    outcome = both(case("lora", optimizer=optimizer), way)[0]
    moved = {name for name, change in outcome.changes.items() if change.any()}
    assert moved == {name for name in outcome.after if "lora_" in name}
    assert set(outcome.gradients[0]) == moved


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("task", "perturbed"),
    [
        ("llama", "blocks"),
        ("llama", "all"),
        ("llama", "last_layer"),
        ("llama", "last_block"),
        ("llama", ("model.layers.0.*", "model.embed_tokens.*")),
        ("lora", "adapters"),
    ],
)
def test_wrappers_do_not_change_which_parameters_are_perturbed(ranks, task, perturbed, way):
    wanted = chosen(task, "single", perturbed)
    assert wanted
    assert ranks(chosen, task, way, perturbed) == [wanted, wanted]


@pytest.mark.filterwarnings("ignore:gradient regularization. the step is now")
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_both_ranks_find_the_step_of_one_process(both, way):
    wanted = case("waves", steps=1, step=None, check_every=1, strength="ratio:0.3")
    (one,) = alone(wanted).reports
    for found in both(wanted, way):
        (report,) = found.reports
        assert report.step == one.step < 3e-5
        assert report.consistency == pytest.approx(one.consistency, rel=1e-4)
        assert report.consistency > 0.9
        assert distance(found.gradients[0], alone(wanted).gradients[0]) < 1e-5
