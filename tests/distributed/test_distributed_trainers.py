"""The Hugging Face drop-in under DDP and under accelerate's FSDP2: two gloo ranks, each with half of the fixed data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.distributed import same_bits
from support.distributed_trainers import CASES, Outcome, Way, cross_entropy, load, refused, run, save_models, start
from support.manual_step import Hand, in_blocks, regularized_step
from support.ranks import Ranks
from support.trl import EPS, RATE, SETTINGS, STRENGTH, distance, weights

pytestmark = pytest.mark.slow

WAYS: tuple[Way, ...] = ("ddp", "fsdp")
STEPS = SETTINGS["max_steps"]
EQUAL = ("plain", "all perturbed", "checkpointed", "adapters", "grpo", "dapo with KL")
PERTURBED = {"all perturbed": lambda name: True, "adapters": lambda name: "lora_" in name}
HANDS = {
    "grpo": Hand(loss_type="grpo", mode="importance"),
    "grpo bf16": Hand(loss_type="grpo", mode="importance"),
    "dapo with KL": Hand(loss_type="dapo", mode="reuse", beta=0.3),
}
Outputs = Callable[[str, Way], Path]
Alone = Callable[[str], Outcome]
Both = Callable[[str, Way], list[Outcome]]
ByHand = Callable[[str], tuple[list[dict[str, Tensor]], list[float]]]


@pytest.fixture(scope="module", autouse=True)
def one_thread_here() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are that all runs begin with."""
    directory = tmp_path_factory.mktemp("models")
    save_models(directory)
    return directory


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """The directory a case writes to."""
    return cache(lambda name, way: tmp_path_factory.mktemp("output"))


@pytest.fixture(scope="module")
def alone(models: Path, outputs: Outputs) -> Alone:
    """A case in this process, on all of the data; run once, however many tests ask."""
    return cache(lambda name: run(name, "single", models, outputs(name, "single")))


@pytest.fixture(scope="module")
def both(ranks: Ranks, models: Path, outputs: Outputs) -> Both:
    """What each rank saw of a case, likewise."""
    return cache(lambda name, way: ranks(run, name, way, models, outputs(name, way)))


@pytest.fixture(scope="module")
def by_hand(models: Path) -> ByHand:
    """The weights after each step written out by hand, and how far each step's penalty moved any weight."""

    @cache
    def steps(name: str) -> tuple[list[dict[str, Tensor]], list[float]]:
        case = CASES[name]
        model: Any = start(case, models)
        result, moves = [], []
        if case.loss == "plain":
            loss = partial(cross_entropy, model)
            rate = case.settings.get("learning_rate", RATE)
            size = {"strength": STRENGTH, "eps": EPS, "rate": rate, "perturbed": PERTURBED.get(name, in_blocks)}
            for _ in range(STEPS):
                moves.append(regularized_step(model, loss, loss, **size))
                result.append(weights(model))
            return result, moves
        mu = case.settings.get("num_iterations", 1)
        reference = load(models, "reference") if HANDS[name].beta else None
        size = {"steps": STEPS, "strength": STRENGTH, "eps": EPS, "rate": RATE, "mu": mu}
        for move, _ in HANDS[name].run(model, **size, reference=reference):
            moves.append(move)
            result.append(weights(model))
        return result, moves

    return steps


def without_time(log: dict[str, float]) -> dict[str, float]:
    """What is logged of the penalty, and the norm of the whole gradient."""
    return {
        k: v for k, v in log.items() if k == "grad_norm" or (k.startswith("gradreg/") and k != "gradreg/time_share")
    }


@pytest.mark.filterwarnings("ignore:regularized steps run in float32")
@pytest.mark.parametrize(("name", "way"), [*((name, way) for name in EQUAL for way in WAYS), ("grpo bf16", "ddp")])
def test_steps_on_two_ranks_are_those_of_one_process_and_those_by_hand(
    name: str, way: Way, both: Both, alone: Alone, by_hand: ByHand
) -> None:
    first, second = both(name, way)
    expected, moves = by_hand(name)
    assert len(first.steps) == len(expected) == STEPS
    assert moves[0] > 1e-3
    for index in (0, STEPS - 1):
        tolerance = max(1e-6, 1e-3 * max(moves[: index + 1]))
        assert distance(first.steps[index], alone(name).steps[index]) <= tolerance
        assert distance(first.steps[index], expected[index]) <= tolerance
        assert same_bits(first.steps[index], second.steps[index])


@pytest.mark.parametrize("name", EQUAL)
def test_both_ranks_log_the_figures_of_one_process(name: str, both: Both, alone: Alone) -> None:
    one = [without_time(log) for log in alone(name).logs]
    assert len(one) == STEPS
    assert all({"gradreg/penalty_ratio", "gradreg/cosine", "grad_norm"} <= log.keys() for log in one)
    for way in WAYS:
        first, second = ([without_time(log) for log in outcome.logs] for outcome in both(name, way))
        assert first == second
        # A cosine near 0 errs by as much as one near 1.
        assert first == [pytest.approx(log, rel=1e-3, abs=1e-4) for log in one]


@pytest.mark.parametrize("name", EQUAL)
def test_ddp_replicates_and_fsdp2_shards_every_parameter(name: str, both: Both) -> None:
    for outcome in both(name, "ddp"):
        assert outcome.wrapper == "DistributedDataParallel"
        assert not outcome.shard_sizes
    first, second = both(name, "fsdp")
    assert first.wrapper == second.wrapper
    assert first.wrapper in ("FSDPGPT2LMHeadModel", "FSDPQwen2ForCausalLM", "FSDPPeftModel")
    assert first.shard_sizes.keys() == second.shard_sizes.keys() == first.before.keys()
    for parameter, (here, whole) in first.shard_sizes.items():
        assert 0 < here < whole
        assert here + second.shard_sizes[parameter][0] == whole == first.before[parameter].numel()


@pytest.mark.parametrize("way", WAYS)
def test_the_second_pass_costs_one_more_and_recomputes_checkpointed_activations(way: Way, both: Both) -> None:
    for plain, off, checkpointed in zip(*(both(n, way) for n in ("plain", "plain off", "checkpointed")), strict=True):
        assert off.forwards == 2 * STEPS  # two micro-batches
        assert plain.forwards == 2 * off.forwards + 2  # and the pass that checks the first update
        assert checkpointed.forwards == 2 * plain.forwards


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", ["plain", "grpo"])
def test_strength_0_is_the_plain_trainer_bit_for_bit_and_runs_nothing_twice(loss: str, way: Way, both: Both) -> None:
    for ours, theirs in zip(both(f"{loss} off", way), both(f"{loss} stock", way), strict=True):
        assert len(ours.steps) == len(theirs.steps) == STEPS
        assert all(same_bits(*step) for step in zip(ours.steps, theirs.steps, strict=True))
        assert distance(ours.steps[-1], ours.before) > 1e-2
        assert ours.forwards == theirs.forwards
        assert not any("gradreg" in key for log in ours.logs for key in log)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", ["plain", "grpo"])
def test_at_learning_rate_0_the_parameters_stay_bit_for_bit(loss: str, way: Way, both: Both) -> None:
    for outcome in both(f"{loss} at rate 0", way):
        assert min(outcome.logged("gradreg/penalty_ratio")) > 0.1
        assert outcome.logged("gradreg/perturbation_kept") == pytest.approx([1.0] * STEPS, abs=1e-3)
        assert all(same_bits(step, outcome.before) for step in outcome.steps)


@pytest.mark.parametrize("way", WAYS)
def test_one_clip_comes_after_the_penalty(way: Way, both: Both) -> None:
    for limited, unlimited in zip(both("clipped", way), both("plain", way), strict=True):
        shrunk = CASES["clipped"].settings["max_grad_norm"] / limited.logged("grad_norm")[0]
        assert shrunk < 0.5
        assert limited.logged("grad_norm")[0] == pytest.approx(unlimited.logged("grad_norm")[0], rel=1e-5)
        start = limited.before
        expected = {name: at + (unlimited.steps[0][name] - at) * shrunk for name, at in start.items()}
        assert distance(limited.steps[0], expected) <= 1e-5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "replayed"), [("breaks off", 1), ("breaks off later", 2)])
def test_a_second_pass_that_raises_leaves_parameters_and_first_gradient(
    name: str, replayed: int, way: Way, both: Both
) -> None:
    for left, off in zip(both(name, way), both("plain off", way), strict=True):
        assert left.failure == "out of memory"
        assert left.forwards == 2 + replayed
        assert len(left.steps) == 1
        assert same_bits(left.steps[0], left.before)
        assert left.recovered
        plain_step = {parameter: value - RATE * left.gradient[parameter] for parameter, value in left.before.items()}
        assert distance(plain_step, off.steps[0]) <= 1e-6
        assert set(left.shard_sizes) == (set(left.before) if way == "fsdp" else set())


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_is_not_finite_on_one_rank_drops_the_update_on_both(way: Way, both: Both) -> None:
    for outcome in both("explodes", way):
        assert outcome.logged("gradreg/skipped") == [0.0, 1.0]
        assert distance(outcome.steps[0], outcome.before) > 1e-2
        assert same_bits(outcome.steps[1], outcome.steps[0])


@pytest.mark.parametrize("way", WAYS)
def test_a_second_pass_that_is_not_finite_on_one_rank_leaves_both_the_plain_gradient(way: Way, both: Both) -> None:
    for outcome, expected in zip(both("explodes later", way), both("first update only", way), strict=True):
        assert outcome.logged("gradreg/skipped") == [0.0, 1.0]
        assert len(expected.logged("gradreg/penalty_ratio")) == 1
        assert all(same_bits(*step) for step in zip(outcome.steps, expected.steps, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_is_the_uninterrupted_one(
    way: Way, ranks: Ranks, both: Both, models: Path, outputs: Outputs
) -> None:
    """It saves after the third update, whose penalty the fourth uses again instead of a second pass of its own."""
    name = "looksam with AdamW"  # torch cannot load onto shards what an optimizer without a state had saved
    whole = both(name, way)
    checkpoint = outputs(name, way) / "checkpoint-3"
    resumed = ranks(run, name, way, models, outputs(f"{name}, resumed", way), resume=str(checkpoint))
    for before, after in zip(whole, resumed, strict=True):
        assert len(before.logged("gradreg/perturbation_kept")) == 2
        assert len(before.logged("gradreg/penalty_ratio")) == 4
        assert [without_time(log) for log in after.logs] == [without_time(log) for log in before.logs]
        assert len(after.steps) == 1
        assert same_bits(after.steps[0], before.steps[3])
        assert distance(before.steps[3], before.steps[2]) > 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_a_penalty_that_is_used_again_and_what_is_saved_of_it_are_those_of_one_process(
    way: Way, both: Both, alone: Alone, outputs: Outputs
) -> None:
    first, second = both("looksam", way)
    for step, other, one in zip(first.steps, second.steps, alone("looksam").steps, strict=True):
        assert distance(step, one) <= 1e-6
        assert same_bits(step, other)
    one, result = (outputs("looksam", where) / "checkpoint-3" for where in ("single", way))
    assert kept(result) == kept(one) == ["gradient_regularization", "gradient_regularization.json"]
    positions = (directory / "gradient_regularization" / "memory.safetensors" for directory in (one, result))
    wanted, memory = map(load_file, positions)
    assert len(wanted) > 10
    assert distance(memory, wanted) <= 1e-3 * max(tensor.abs().max().item() for tensor in wanted.values())


def kept(checkpoint: Path) -> list[str]:
    """The regularizer's files."""
    return sorted(file.name for file in checkpoint.glob("gradient_regularization*"))


@pytest.mark.parametrize("way", WAYS)
def test_autocast_that_swallows_the_perturbation_is_refused_on_both_ranks(way: Way, both: Both) -> None:
    for outcome in both("rounded", way):
        assert "rounding keeps too little of the perturbation" in outcome.failure
        assert "weights in float32, computed in bfloat16" in outcome.failure
        assert len(outcome.steps) == 1
        assert same_bits(outcome.steps[0], outcome.before)


def test_bf16_under_fsdp2_is_refused_at_float32_precision(ranks: Ranks, models: Path, outputs: Outputs) -> None:
    for messages in ranks(refused, "grpo bf16", "fsdp", models, outputs("grpo bf16", "fsdp")):
        assert "FSDP2 casts weights to bfloat16, which rounds the perturbation away; set bf16=False" in messages
