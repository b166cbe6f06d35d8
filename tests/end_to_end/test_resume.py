"""Stopped anywhere and resumed, a run ends as if it had never been interrupted, bit for bit."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model

import flatpeak
from flatpeak.errors import UserError
from support.resumes import Judge, Run, assert_same, outcome
from support.runs import Recipe, Train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
MakeRun = Callable[..., Run]


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
    make_run: MakeRun, uninterrupted: dict[str, Any], send: Any, stage: str, step: int
) -> None:
    run = make_run()
    stopped = run.start(stop={(stage, step): send(signal.SIGTERM)})
    assert stopped.exit_code == 143
    assert (stopped.summary.status, stopped.summary.signal) == ("stopped", signal.SIGTERM)
    if stage == "train":
        assert stopped.summary.last_step == step
    assert run.start(resume=True).exit_code == 0
    assert_same(outcome(run.path), uninterrupted)


def test_an_interrupt_in_the_middle_of_a_step_lets_the_step_end(
    make_run: MakeRun, uninterrupted: dict[str, Any], send: Any
) -> None:
    class Interrupting(Judge):
        rollouts = 0

        def __call__(self, group: Any) -> list[float]:
            self.rollouts += len(group.completions) > 1
            if self.rollouts == 10:
                send(signal.SIGINT)()
            return super().__call__(group)

    run = make_run()
    stopped = run.start(judge=Interrupting())
    assert (stopped.exit_code, stopped.summary.signal) == (130, signal.SIGINT)
    assert 0 < stopped.summary.last_step < 5
    assert run.start(resume=True).exit_code == 0
    assert_same(outcome(run.path), uninterrupted)


def test_a_run_stopped_twice_ends_the_same(make_run: MakeRun, uninterrupted: dict[str, Any], send: Any) -> None:
    run = make_run()
    assert run.start(stop={("sft", 2): send(signal.SIGTERM)}).exit_code == 143
    assert run.start(stop={("train", 4): send(signal.SIGINT)}, resume=True).exit_code == 130
    assert run.start(resume=True).exit_code == 0
    assert_same(outcome(run.path), uninterrupted)


def test_sft_alone_then_training_is_the_same_as_both_at_once(make_run: MakeRun, uninterrupted: dict[str, Any]) -> None:
    run = make_run()
    first = flatpeak.sft(run.config, reward=Judge())
    assert [row.stage for row in first.summary.evaluations] == ["start", "sft"]
    assert (first.best / "model.safetensors").exists()
    assert run.start(resume=True).exit_code == 0
    assert_same(outcome(run.path), uninterrupted)


def resumed_and_whole(make_run: MakeRun, send: Any, **sections: Any) -> list[dict[str, Any]]:
    ends = []
    for name, stop in (("whole", {}), ("cut", {("train", 3): send(signal.SIGTERM)})):
        run = make_run(name, **sections)
        assert run.start(stop=stop).exit_code == (143 if stop else 0)
        run.start(resume=True)
        ends.append(outcome(run.path))
    return ends


def test_shuffled_completions_resume_to_the_same_bits(make_run: MakeRun, send: Any) -> None:
    training = {"minibatches": 5, "minibatch_of": "completions"}  # more than the four groups
    whole, cut = resumed_and_whole(make_run, send, training=training)
    assert all(row["optimizer/updates"] == 10 for row in whole["metrics"] if row["stage"] == "train")
    assert_same(cut, whole)


def test_two_threads_resume_to_the_same_bits(make_run: MakeRun, send: Any) -> None:
    # Large enough that torch gives both threads work, with each prompt's last position repeated for 16 completions.
    whole, cut = resumed_and_whole(
        make_run,
        send,
        run={"threads": 2},
        model={"new": {"config": {"hidden_size": 128, "intermediate_size": 256}}},
        rollout={"prompts_per_step": 2, "group_size": 16},
        training={"micro_batch_tokens": 16384},
        sft={"steps": 1},
    )
    assert torch.get_num_threads() == 2
    assert_same(cut, whole)


def test_dropout_resumes_to_the_same_bits(make_run: MakeRun, send: Any) -> None:
    model = {"dropout": True, "new": {"config": {"attention_dropout": 0.2}}}
    whole, cut = resumed_and_whole(make_run, send, model=model)
    assert max(row["policy/ratio_max_gap"] for row in whole["metrics"] if row["stage"] == "train") > 1e-4
    assert_same(cut, whole)


@pytest.mark.parametrize("adapter", [False, True], ids=["full model", "LoRA"])
def test_a_model_of_the_callers_resumes_to_the_same_bits(
    recipe: Recipe,
    train: Train,
    watch: Any,
    make_tiny_model: Any,
    send: Any,
    monkeypatch: pytest.MonkeyPatch,
    adapter: bool,
) -> None:
    # An adapter's checkpoint names no base model here; nothing is to be looked for on the Hub.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ends = []
    for name, stop in (("whole", {}), ("cut", {("train", 2): send(signal.SIGTERM)})):
        config = recipe(run={"name": name}, kl={"coefficient": 0.1}, training={"steps": 4})
        for resume in (False, True):
            model, tokenizer = make_tiny_model()
            if adapter:
                torch.manual_seed(0)
                model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
            given = {"model": model, "tokenizer": tokenizer, "reward": Judge()}
            train(config, **given, progress=watch({} if resume else stop), resume=resume)
        ends.append({key: value.clone() for key, value in model.state_dict().items()})
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_a_run_that_is_done_stays_as_it_is(make_run: MakeRun, uninterrupted: dict[str, Any]) -> None:
    run = make_run()
    run.start()
    assert run.start(resume=True).exit_code == 0
    assert_same(outcome(run.path), uninterrupted)


def test_a_run_that_reached_its_goal_stays_as_it_is(make_run: MakeRun) -> None:
    run = make_run(training={"stop_at": 0.8})
    assert run.start().summary.last_step == 2
    before = outcome(run.path)
    assert run.start(resume=True).summary.last_step == 2
    assert_same(outcome(run.path), before)


def test_resume_starts_a_run_that_does_not_exist_yet(make_run: MakeRun, uninterrupted: dict[str, Any]) -> None:
    run = make_run()
    assert run.start(resume=True).exit_code == 0
    assert_same(outcome(run.path), uninterrupted)


def test_a_changed_recipe_is_refused_by_the_key_that_changed(make_run: MakeRun, send: Any) -> None:
    make_run().start(stop={("train", 1): send(signal.SIGTERM)})
    with pytest.raises(UserError, match=r"kl\.coefficient: 0\.05 -> 0\.5"):
        make_run(kl={"coefficient": 0.5}).start(resume=True)
