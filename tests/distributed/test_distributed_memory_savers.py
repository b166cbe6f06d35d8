"""What saves memory, on two ranks: bfloat16 beside masters, 8-bit moments, a base in 4 bits; and reference resets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flatpeak.distributed.sharding import rounded_dtype
from flatpeak.errors import UserError
from flatpeak.runs.checkpoints import verify_checkpoint
from support.distributed_runs import completions, files, largest_gap, recipe, rows, train, trainer_tensors
from support.distributed_shards import crossed, eight_bit_steps, offloaded_steps, refusals
from support.distributed_training import MATRIX, Case, policy_of, relative_gaps
from support.models import run_model
from support.ranks import Ranks

pytestmark = pytest.mark.slow

SLOWER: dict[str, Any] = {"learning_rate": 1e-3}
EIGHT_BIT: dict[str, Any] = {"name": "adamw_8bit", **SLOWER}
SIZES = {"hidden_size": 64, "intermediate_size": 128}
"""Of a model whose matrices are large enough for 8-bit moments."""
HALF: dict[str, dict[str, Any]] = {
    name: {**MATRIX[name], "dtype": "bfloat16", "optimizer": SLOWER} for name in ("plain", "mu2", "kl", "gr", "lora_gr")
}
STEPS: dict[str, tuple[dict[str, Any], float]] = {
    "bfloat16": (HALF["plain"], 0.05),
    "bfloat16, two epochs of minibatches": (HALF["mu2"], 0.05),
    "bfloat16, KL": (HALF["kl"], 0.05),
    "bfloat16, regularized": (HALF["gr"], 0.2),
    "adapters on a base in bfloat16, regularized": (HALF["lora_gr"], 1e-5),
    "8-bit moments": ({"optimizer": EIGHT_BIT, "sizes": SIZES}, 1e-3),
    "8-bit moments, bfloat16": ({"optimizer": EIGHT_BIT, "sizes": SIZES, "dtype": "bfloat16"}, 0.1),
}
"""Five steps, and the largest distance from the weights of one process, over the way that these have gone."""
BFLOAT16 = 2.0**-8
"""Half the distance of two numbers in bfloat16, relative to them."""
PENALTY = {"strength": "ratio:0.3", "step": 5e-3, "min_perturbation_kept": 0.5}
RESETS = {"reference": {"reset_every": 3, "reset_optimizer": True}, "kl": {"coefficient": 0.05}}


def model_of(directory: Path, kind: str) -> dict[str, Any]:
    """The section of a recipe, for a base in 4 bits with a model that is saved for it."""
    if kind != "nf4":
        return {"dtype": "bfloat16"} if kind == "bfloat16" else {}
    base = directory / "base"
    if not base.exists():
        for part in run_model(**SIZES):
            part.save_pretrained(base)
    return {"new": None, "path": str(base), "quantization": "nf4", "lora": {"rank": 4, "alpha": 8}}


def wanted(directory: Path, name: str, kind: str, **distributed: Any) -> dict[str, Any]:
    """A recipe with a penalty and resets of the reference; without SFT, where nothing is divided."""
    steps = distributed.pop("steps", 4)
    penalty = {**PENALTY, "perturbed": "adapters"} if kind == "nf4" else PENALTY
    return recipe(
        directory,
        name,
        model=model_of(directory, kind),
        optimizer=EIGHT_BIT if kind == "8bit" else SLOWER,
        gradient_regularization=penalty,
        training={"steps": steps},
        sft={"steps": 2 if kind == "bfloat16" else 0},
        **RESETS,
        **distributed,
    )


def saved(run: Path, checkpoint: str = "last") -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, an adapter's or all."""
    (file,) = (run / "checkpoints" / checkpoint).glob("*model.safetensors")
    return load_file(file)


def moved(run: Path) -> float:
    """The largest change of a weight since RL began."""
    return largest_gap(saved(run), saved(run, "step_000000"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("savers")


def done(results: list[dict[str, Any]]) -> bool:
    assert [one.get("code") for one in results] == [0] * len(results), results
    return True


def test_five_steps_on_shards_are_those_of_one_process_to_the_rounding(ranks):
    cases = {name: Case(strategy="fsdp2", **settings) for name, (settings, _) in STEPS.items()}
    first, second = ranks(relative_gaps, cases, timeout=280)
    assert first == second
    assert not {name: found for name, found in first.items() if not found[0] <= STEPS[name][1]}
    assert not {name: found for name, found in first.items() if not found[1] <= BFLOAT16}
    assert first["8-bit moments"][1] < 1e-5


def test_eight_bit_moments_of_parts_have_the_bits_of_the_whole(ranks):
    for found in ranks(eight_bit_steps):
        assert all(found.values()), found


def test_a_weight_that_is_cut_within_a_block_is_refused_by_name(ranks):
    for cut, small, whole in ranks(refusals):
        assert cut == (
            "optimizer.name=adamw_8bit: layer.weight of 130 x 33 is cut within a block of 256 elements with one scale: "
            "shard over another number of processes, or use optimizer.name=adamw"
        )
        assert small == whole == ""


def test_a_model_of_several_types_that_is_trained_below_float32_is_refused():
    policy = policy_of(Case(dtype="bfloat16"))
    assert rounded_dtype(policy) is torch.bfloat16
    next(policy.model.parameters()).data = next(policy.model.parameters()).data.float()
    with pytest.raises(
        UserError, match=r"has bfloat16, float32 weights, which distributed\.strategy shards only if trainable"
    ):
        rounded_dtype(policy)
    assert rounded_dtype(policy_of(Case(dtype="bfloat16", lora=True))) is None


def test_states_on_the_host_have_the_bits_of_those_on_the_device(ranks):
    for found in ranks(offloaded_steps):
        assert all(found.values()), found


@pytest.mark.parametrize(
    ("begin", "end"), [("fsdp2", "alone"), ("alone", "fsdp2"), ("ddp", "fsdp2")], ids=lambda name: name
)
def test_masters_and_moments_are_restored_to_the_bit_under_another_strategy(ranks, begin, end):
    """From fixed rollouts: those of a run part as soon as one token does."""
    case = Case(dtype="bfloat16", optimizer=SLOWER)
    for found in ranks(crossed, case, begin, end):
        assert found["same"]
        assert found["masters"] > 20
        assert found["apart"] < 0.05


@pytest.mark.exhaustive
def test_eight_bit_moments_of_four_parts_or_of_two_held_twice_have_the_bits_of_the_whole():
    four = Ranks(4)
    try:
        for replicas in (1, 2):
            assert all(all(found.values()) for found in four(eight_bit_steps, replicas))
    finally:
        four.close()


@pytest.mark.parametrize(
    ("kind", "strategy"), [("bfloat16", "fsdp2"), ("8bit", "fsdp2"), ("nf4", "ddp"), ("nf4", "fsdp2")]
)
def test_a_run_is_that_of_one_process_and_goes_on_in_the_same_bits(directory, ranks, kind, strategy):
    alone, shared, cut = (directory / f"{kind}_{strategy}_{name}" for name in ("alone", "shared", "cut"))
    assert train(wanted(directory, alone.name, kind)).get("code") == 0
    two = {"distributed": {"processes": 2, "strategy": strategy}}
    assert done(ranks(train, wanted(directory, shared.name, kind, **two)))
    assert files(shared) == files(alone)
    verify_checkpoint(shared / "checkpoints" / "last")
    for mine, theirs in ((saved(shared), saved(alone)), (trainer_tensors(shared), trainer_tensors(alone))):
        assert {n: (t.dtype, t.shape) for n, t in mine.items()} == {n: (t.dtype, t.shape) for n, t in theirs.items()}
    first = len(completions(alone)) // 4
    if kind != "bfloat16":
        assert completions(shared)[:first] == completions(alone)[:first]
        assert largest_gap(saved(shared), saved(alone)) < 0.02 * moved(alone)
    assert [row.get("reference/resets") for row in rows(shared)] == [row.get("reference/resets") for row in rows(alone)]
    assert {row.get("gradreg/skipped") for row in rows(shared)} <= {None, 0.0}

    assert done(ranks(train, wanted(directory, cut.name, kind, steps=3, **two)))
    assert done(ranks(train, wanted(directory, cut.name, kind, **two), resume=True))
    assert largest_gap(saved(cut), saved(shared)) == 0
    assert largest_gap(trainer_tensors(cut), trainer_tensors(shared)) == 0
    assert moved(shared) > 1e-3
    if kind == "bfloat16":
        weights, masters = saved(shared), trainer_tensors(shared)
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
        rounded = {name: t.bfloat16() for name, t in masters.items() if name.startswith("master.")}
        assert sorted(t.double().sum().item() for t in rounded.values()) == sorted(
            t.double().sum().item() for t in weights.values()
        )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_letters_that_ranks_find_most_probable_are_those_of_one_process(directory, ranks, strategy):
    questions = directory / "questions.jsonl"
    row = '{{"question": "{}+{}=", "options": ["1", "2", "3"], "answer": "{}"}}\n'
    questions.write_text("".join(row.format(n % 9, n % 7, "ABC"[n % 3]) for n in range(60)))

    def ranked(name: str, **distributed: Any) -> dict[str, Any]:
        wanted = recipe(directory, name, evaluation={"choices": "rank", "every": 2}, sft={"steps": 0}, **distributed)
        wanted["task"] = {"type": "choices", "train": [{"path": str(questions), "options": "options"}]}
        wanted["rewards"]["correctness"] = {"type": "choice", "extraction": "letter", "weight": 0.0}
        return wanted

    alone, shared = f"ranked_alone_{strategy}", f"ranked_{strategy}"
    assert train(ranked(alone)).get("code") == 0
    assert done(ranks(train, ranked(shared, distributed={"processes": 2, "strategy": strategy})))
    for step in ("train_000002", "train_000004"):
        answers, expected = (
            [json.loads(line) for line in (directory / name / "evaluations" / f"{step}.jsonl").read_text().splitlines()]
            for name in (shared, alone)
        )
        assert len(answers) > 5
        own, theirs = ([one["letter_logprobs"] for one in rows] for rows in (answers, expected))
        assert own == [pytest.approx(logprobs, abs=1e-4) for logprobs in theirs]
        assert len({one["A"] for one in own}) == len(own)  # so that no two questions could be exchanged


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "bound"), [("8bit", 0.02), ("nf4", 0.02)])
def test_what_is_saved_under_one_strategy_goes_on_under_any_other(directory, ranks, kind, bound):
    alone = directory / f"{kind}_over"
    assert train(wanted(directory, alone.name, kind)).get("code") == 0
    shards, replicas, one = {"processes": 2, "strategy": "fsdp2"}, {"processes": 2, "strategy": "ddp"}, {}
    for index, (begin, end) in enumerate(((shards, one), (one, shards), (replicas, shards))):
        run = directory / f"{kind}_{index}"
        for steps, layout, resume in ((3, begin, False), (4, end, True)):
            settings = {**wanted(directory, run.name, kind, steps=steps)}
            settings["distributed"] = {"processes": 1, **layout}
            assert done(ranks(train, settings, resume=resume) if layout else [train(settings, resume=resume)])
        assert largest_gap(saved(run), saved(alone)) < bound * moved(alone)
        assert json.loads((run / "summary.json").read_text())["status"] == "done"
