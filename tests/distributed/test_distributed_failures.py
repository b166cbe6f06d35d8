"""Gradient regularization on two ranks where something is wrong: refused on all of them, and nothing left changed."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from flatpeak.gradreg.config import GradientRegularizationConfig
from support.distributed import Case, distance, run, same_bits
from support.distributed_gradreg import (
    broken,
    gathered,
    known_by_some,
    mixed,
    never_synchronized,
    plain,
    refused,
    remembered,
    squared_norms,
    wrapped_late,
)

pytestmark = pytest.mark.slow


def case(task, *, dtype=torch.float64, steps=2, **settings):
    given = {"strength": 0.05, "step": 1e-2, "perturbed": "all", "check_every": 0, **settings}
    config = GradientRegularizationConfig(**given)
    return Case(task=task, config=config, dtype=dtype, steps=steps)


RECOVERS = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot drop what a broken pass had gathered"
)
BREAKS = [
    pytest.param("ddp", "forward", 1, True, id="replicas, forward"),
    pytest.param("ddp", "forward", 2, True, id="replicas, second forward"),
    pytest.param("ddp", "backward", 1, True, id="replicas, backward"),
    # DDP itself refuses to go on after a synchronized backward pass that broke off.
    pytest.param("ddp", "backward", 2, False, id="replicas, second backward"),
    pytest.param("fsdp", "forward", 1, True, id="shards, forward", marks=RECOVERS),
    # FSDP2 keeps what a broken pass had accumulated before: the weights are right, the process is to end.
    pytest.param("fsdp", "forward", 2, False, id="shards, second forward", marks=RECOVERS),
    pytest.param("fsdp", "backward", 1, False, id="shards, backward"),
    pytest.param("fsdp", "backward", 2, False, id="shards, second backward"),
]


@pytest.mark.parametrize(("way", "moment", "micro_batch", "resume"), BREAKS)
def test_a_second_pass_that_raises_leaves_weights_and_first_gradient(ranks, way, moment, micro_batch, resume):
    wanted = case("llama")
    one = run(wanted, "single")
    first = plain(wanted, "single")
    for left in ranks(broken, wanted, way, moment=moment, micro_batch=micro_batch, resume=resume):
        assert left.intact
        assert distance(left.gradient, first) < 1e-12
        if resume:
            for mine, theirs in zip(left.resumed.gradients, one.gradients, strict=True):
                assert distance(mine, theirs) < 1e-12
            assert distance(left.resumed.changes, one.changes) < 1e-12


@pytest.mark.parametrize("odd", [1.0, 0.0, float("nan")], ids=["unlike", "zero on one", "not finite on one"])
def test_gradients_of_each_rank_alone_are_refused_on_both_and_nobody_waits(ranks, odd):
    for answer in ranks(never_synchronized, case("mlp"), "ddp", odd=odd):
        assert isinstance(answer, str)
        assert "the ranks' gradients differ" in answer
        assert "no_sync only before" in answer


def test_shards_that_were_never_synchronized_are_refused(ranks):
    for answer in ranks(never_synchronized, case("mlp"), "fsdp"):
        assert "no perturbed parameter has a gradient" in answer
        assert "synchronize gradients in the last micro-batch" in answer


def test_a_regularizer_made_before_the_model_was_sharded_is_refused(ranks):
    for answer in ranks(wrapped_late, case("mlp")):
        assert "create the regularizer after wrapping the model" in answer


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_the_exact_reference_is_refused_on_two_ranks(ranks, way):
    for answer in ranks(refused, case("mlp", difference="exact"), way):
        assert "does not average second derivatives over ranks: use forward or central" in answer


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_penalty_that_is_none_is_refused_on_both_ranks_alike(ranks, way):
    answers = ranks(refused, case("llama", step=1.0, check_every=1), way)
    assert all("have a cosine of" in answer and "is not linear over so long a step" in answer for answer in answers)
    assert len(set(answers)) == 1


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_an_update_that_one_rank_knows_to_be_informative_is_so_for_both(ranks, way):
    wanted = case("llama", strength="ratio:0.3", step=1e-4, check_every=1)
    for informative in ((False, True), (False, False)):
        first, second = ranks(known_by_some, wanted, way, informative=informative)
        assert first == second
        consistency, strength = first
        assert (consistency is not None) == any(informative)
        assert (strength > 0) == any(informative)


@pytest.mark.parametrize("how", ["backward", "evaluation"])
def test_the_second_pass_sees_the_perturbed_weights_though_the_first_left_gathered_ones(ranks, how):
    wanted = case("llama")
    one = run(wanted, "single")
    fresh, stale = (ranks(gathered, wanted, how, reshards=reshards)[0] for reshards in (True, False))
    for mine, theirs in zip(fresh.gradients, one.gradients, strict=True):
        assert distance(mine, theirs) < 1e-12
    # The copies are really there: whoever keeps them computes the second gradient at weights that did not all move.
    assert distance(stale.gradients[0], one.gradients[0]) > 0.1


def test_bfloat16_compute_over_float32_shards_is_refused_at_a_step_that_rounding_swallows(ranks):
    plain_gradient = ranks(mixed, case("llama", dtype=torch.float32, strength=0))[0][2]
    for messages, intact, gradient in ranks(
        mixed, case("llama", dtype=torch.float32, step=3e-4, min_perturbation_kept=0.7)
    ):
        assert "rounding keeps too little of the perturbation" in messages
        assert "weights in float32, computed in bfloat16" in messages
        assert intact
        assert same_bits(gradient, plain_gradient)


def test_bfloat16_compute_at_a_step_that_survives_it_gives_about_the_penalty_of_float32(ranks):
    wanted, off = (case("llama", dtype=torch.float32, strength=strength) for strength in (0.05, 0))
    (report, intact, result), (_, _, found_g1) = ranks(mixed, wanted)[0], ranks(mixed, off)[0]
    one, g1 = run(wanted, "single").gradients[0], plain(off, "single")
    assert intact
    assert 0.95 < report.kept.cosine < 0.999
    penalties = [{name: a[name] - b[name] for name in b} for a, b in ((result, found_g1), (one, g1))]
    assert distance(*penalties) < 0.1


def test_norms_are_over_all_shards_strided_ones_too(ranks):
    # Three 1s on one rank, three 2s on the other.
    assert ranks(squared_norms) == [[15.0, 15.0], [15.0, 15.0]]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_checkpoint_of_the_memory_is_that_of_one_process_and_loads_onto_shards(ranks, way):
    wanted = case("mlp", every=2, steps=1)
    tensors_alone, next_alone, _ = remembered(wanted, "single")
    for tensors, following, resumed in ranks(remembered, wanted, way):
        assert all(type(tensor) is torch.Tensor for tensor in tensors.values())
        assert distance(tensors, tensors_alone) < 1e-12
        assert distance(following, next_alone) < 1e-12
        assert same_bits(resumed, following)
