"""Stopped anywhere and resumed, a run ends as if it had never been interrupted, bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

import flatpeak
from flatpeak.errors import UserError
from support.resumes import Judge, MakeRun, Whole, assert_same, outcome
from support.runs import Recipe, Train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def test_the_uninterrupted_run_has_all_that_a_resumed_one_could_lose(uninterrupted: dict[str, Any]) -> None:
    rows = [row for row in uninterrupted["metrics"] if row["stage"] == "train"]
    assert uninterrupted["links"] == {"best": Path("step_000002"), "last": Path("step_000005")}
    assert max(row["groups/drawn"] for row in rows) > 4
    assert all(row["optimizer/updates"] == 4 for row in rows)
    assert min(row["policy/kl_reference"] for row in rows[1:]) > 0
    # Step 2 is in its second pass over the first task's 5 prompts, step 3 at the main task.
    groups = {
        step: {json.loads(line)["group"] for line in uninterrupted["rollouts"][f"step_{step:06d}.jsonl"].splitlines()}
        for step in (2, 3)
    }
    assert any(id.endswith("@1") for id in groups[2])
    assert not any("@" in id for id in groups[3])
    assert [(row.stage, row.step) for row in uninterrupted["summary"][3]] == [
        ("start", 0),
        ("sft", 3),
        ("train", 2),
        ("train", 4),
        ("train", 5),
    ]


@pytest.mark.parametrize(
    ("stage", "step"),
    [("eval", 0), ("sft", 1), ("sft", 3), ("eval", 3), ("train", 1), ("train", 2), ("train", 3), ("train", 5)],
)
def test_a_run_stopped_between_steps_ends_the_same(
    make_run: MakeRun, uninterrupted: dict[str, Any], stage: str, step: int
) -> None:
    run = make_run()
    stopped = run.stop_at(stage, step)
    assert (stopped.summary.status, stopped.summary.signal) == ("stopped", signal.SIGTERM)
    if stage == "train":
        assert stopped.summary.last_step == step
    assert_same(run.go_on(), uninterrupted)


def test_a_run_stopped_twice_ends_the_same(make_run: MakeRun, uninterrupted: dict[str, Any], send: Any) -> None:
    run = make_run()
    run.stop_at("sft", 2)
    assert run.start(stop={("train", 4): send(signal.SIGINT)}, resume=True).exit_code == 130
    assert_same(run.go_on(), uninterrupted)


def test_sft_alone_then_training_is_the_same_as_both_at_once(make_run: MakeRun, uninterrupted: dict[str, Any]) -> None:
    run = make_run()
    first = flatpeak.sft(run.config, reward=Judge())
    assert [row.stage for row in first.summary.evaluations] == ["start", "sft"]
    assert (first.best / "model.safetensors").exists()
    assert_same(run.go_on(), uninterrupted)


SECTIONS: dict[str, dict[str, Any]] = {
    # More minibatches than the four groups.
    "shuffled completions": {"training": {"minibatches": 5, "minibatch_of": "completions"}},
    # Large enough that torch gives both threads work, with each prompt's last position repeated for 16 completions.
    "two threads": {
        "run": {"threads": 2},
        "model": {"new": {"config": {"hidden_size": 128, "intermediate_size": 256}}},
        "rollout": {"prompts_per_step": 2, "group_size": 16},
        "training": {"micro_batch_tokens": 16384},
        "sft": {"steps": 1},
    },
    "dropout": {"model": {"dropout": True, "new": {"config": {"attention_dropout": 0.2}}}},
}


@pytest.mark.parametrize("name", SECTIONS)
def test_what_draws_random_numbers_or_adds_in_threads_resumes_to_the_same_bits(
    make_run: MakeRun, whole: Whole, name: str
) -> None:
    expected, run = whole(**SECTIONS[name]), make_run(**SECTIONS[name])
    rows = [row for row in expected["metrics"] if row["stage"] == "train"]
    if name == "shuffled completions":
        assert all(row["optimizer/updates"] == 10 for row in rows)
    elif name == "two threads":
        assert torch.get_num_threads() == 1  # the caller's again
    else:
        assert max(row["policy/ratio_max_gap"] for row in rows) > 1e-4
    run.stop_at("train", 3)
    assert_same(run.go_on(), expected)


@pytest.mark.parametrize("adapter", [False, True], ids=["full model", "LoRA"])
@pytest.mark.parametrize("resets", [None, 2])
def test_a_model_of_the_callers_resumes_to_the_same_bits_and_only_what_is_trained_is_stored(
    recipe: Recipe,
    train: Train,
    watch: Any,
    make_tiny_model: Any,
    send: Any,
    monkeypatch: pytest.MonkeyPatch,
    adapter: bool,
    resets: int | None,
) -> None:
    # An adapter's checkpoint names no base model here; nothing is to be looked for on the Hub.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ends = []
    for name, stop in (("whole", {}), ("cut", {("train", 3): send(signal.SIGTERM)})):
        config = recipe(
            run={"name": name}, kl={"coefficient": 0.1}, reference={"reset_every": resets}, training={"steps": 5}
        )
        for resume in (False, True):
            model, tokenizer = make_tiny_model()
            if adapter:
                torch.manual_seed(0)
                model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
            given = {"model": model, "tokenizer": tokenizer, "reward": Judge()}
            result = train(config, **given, progress=watch({} if resume else stop), resume=resume)
        saved = load_file(result.path / "checkpoints" / "last" / "trainer" / "state.safetensors")
        reference = {key: tensor for key, tensor in saved.items() if key.startswith("reference.")}
        ends.append({key: value.clone() for key, value in model.state_dict().items()} | reference)
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    trained = {f"reference.{key}" for key, weight in model.named_parameters() if weight.requires_grad}
    assert reference.keys() == (trained if resets else set())
    assert not adapter or all("lora" in key for key in reference)


def test_a_run_that_is_done_stays_as_it_is(make_run: MakeRun, uninterrupted: dict[str, Any]) -> None:
    run = make_run()
    run.finish()
    assert_same(run.go_on(), uninterrupted)


def test_a_run_that_reached_its_goal_stays_as_it_is(make_run: MakeRun) -> None:
    run = make_run(training={"stop_at": 0.8})
    assert run.start().summary.last_step == 2
    before = outcome(run.path)
    assert run.start(resume=True).summary.last_step == 2
    assert_same(outcome(run.path), before)


def test_resume_starts_a_run_that_does_not_exist_yet(make_run: MakeRun, uninterrupted: dict[str, Any]) -> None:
    run = make_run()
    assert_same(run.go_on(), uninterrupted)


def test_a_changed_recipe_is_refused_by_the_key_that_changed(make_run: MakeRun) -> None:
    make_run().stop_at("train", 1)
    with pytest.raises(UserError, match=r"kl\.coefficient: 0\.05 -> 0\.5"):
        make_run(kl={"coefficient": 0.5}).start(resume=True)
