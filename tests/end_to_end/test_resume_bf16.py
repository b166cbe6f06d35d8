"""In bfloat16 too a run that was stopped or killed ends as if it never had been, bit for bit: masters are saved."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import flatpeak.pipeline.train
from flatpeak.training.master_weights import MasterWeights
from support.resumes import Judge, MakeRun, Whole, assert_same
from support.runs import Recipe, Train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
COARSE = {"model": {"dtype": "bfloat16"}, "optimizer": {"learning_rate": 1e-3}}
SPARING = {"gradient_regularization": {"strength": "ratio:0.3", "every": 5, "step": 5e-3, "min_perturbation_kept": 0.5}}
"""With four updates a step, the first of step 4 uses what the third step's remembered."""


@pytest.fixture
def coarse(whole: Whole) -> dict[str, Any]:
    """The outcome of the uninterrupted run in bfloat16."""
    return whole(**COARSE)


def test_the_model_is_saved_in_bfloat16_and_its_masters_beside_it(coarse: dict[str, Any]) -> None:
    assert {tensor.dtype for tensor in coarse["weights"].values()} == {torch.bfloat16}
    masters = {name: tensor for name, tensor in coarse["optimizer"].items() if name.startswith("master.")}
    assert len(masters) == len(coarse["weights"])
    assert {tensor.dtype for tensor in coarse["optimizer"].values()} == {torch.float32}
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
    rounded = sorted(float(master.bfloat16().double().sum()) for master in masters.values())
    assert rounded == sorted(float(weight.double().sum()) for weight in coarse["weights"].values())
    assert (
        min(
            row["policy/kl_reference"]
            for row in coarse["metrics"]
            if row.get("step", 0) > 1 and "policy/kl_reference" in row
        )
        > 0
    )


def test_the_best_model_loads_with_from_pretrained(make_run: MakeRun) -> None:
    run = make_run(**COARSE)
    run.start()
    best = run.path / "checkpoints" / "best"
    model = AutoModelForCausalLM.from_pretrained(best)
    assert model.dtype == torch.bfloat16
    saved = load_file(best / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize(("stage", "step"), [("sft", 2), ("eval", 3), ("train", 3)])
def test_a_run_that_died_ends_the_same(make_run: MakeRun, coarse: dict[str, Any], stage: str, step: int) -> None:
    run = make_run(**COARSE)
    run.die_at(stage, step)
    assert_same(run.go_on(), coarse)


@pytest.mark.parametrize(("stage", "step"), [("sft", 1), ("sft", 3), ("train", 3)])
def test_a_run_stopped_between_steps_ends_the_same(
    make_run: MakeRun, coarse: dict[str, Any], stage: str, step: int
) -> None:
    run = make_run(**COARSE)
    run.stop_at(stage, step)
    assert_same(run.go_on(), coarse)


def test_without_its_masters_a_resumed_run_would_end_elsewhere(
    make_run: MakeRun, coarse: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(**COARSE)
    run.stop_at("train", 3)
    monkeypatch.setattr(MasterWeights, "load", lambda self, tensors: None)
    result = run.go_on()["optimizer"]
    assert any(not torch.equal(result[name], tensor) for name, tensor in coarse["optimizer"].items())


def test_regularization_that_remembers_resumes_to_the_same_bits(make_run: MakeRun, whole: Whole) -> None:
    expected, run = whole(**COARSE, **SPARING), make_run(**COARSE, **SPARING)
    rows = [row for row in expected["metrics"] if "gradreg/perturbation_kept" in row]
    assert min(row["gradreg/perturbation_kept"] for row in rows) > 0.5
    remembered = {tensor.dtype for name, tensor in expected["optimizer"].items() if name.startswith("gradreg.")}
    assert remembered == {torch.float32}
    run.stop_at("train", 3)
    assert_same(run.go_on(), expected)


def test_a_bfloat16_model_of_the_callers_trains_on_masters_and_resumes_to_the_same_bits(
    recipe: Recipe, train: Train, watch: Any, make_tiny_model: Any, send: Any
) -> None:
    ends = []
    for name, stop in (("whole", {}), ("cut", {("train", 2): send(signal.SIGTERM)})):
        config = recipe(
            run={"name": name}, kl={"coefficient": 0.1}, training={"steps": 4}, **{"optimizer": {"learning_rate": 1e-4}}
        )
        for resume in (False, True):
            model, tokenizer = make_tiny_model()
            begun = {key: value.clone() for key, value in model.bfloat16().state_dict().items()}
            given = {"model": model, "tokenizer": tokenizer, "reward": Judge()}
            result = train(config, **given, progress=watch({} if resume else stop), resume=resume)
        ends.append(
            (model.state_dict(), load_file(result.path / "checkpoints" / "last" / "trainer" / "state.safetensors"))
        )
    (weights, trainer), (again, trainer_again) = ends
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert any(not torch.equal(value, begun[name]) for name, value in weights.items())
    assert sum(name.startswith("master.") for name in trainer) == len(list(model.parameters()))
    assert all(torch.equal(value, again[name]) for name, value in weights.items())
    assert all(torch.equal(value, trainer_again[name]) for name, value in trainer.items())


def test_a_callers_float16_model_is_refused_before_there_is_a_run(
    recipe: Recipe, train: Train, make_tiny_model: Any
) -> None:
    model, tokenizer = make_tiny_model()
    config = recipe()
    with pytest.raises(flatpeak.errors.UserError, match=r"float16 weights: .* use bfloat16 or float32"):
        train(config, model=model.half(), tokenizer=tokenizer, reward=Judge())
    assert not (Path(config["run"]["directory"]) / config["run"]["name"]).exists()
