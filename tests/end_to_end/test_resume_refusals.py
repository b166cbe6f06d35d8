"""What a resumed run verifies before it goes on, and what it does not keep in memory."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import pytest
import torch

from flatpeak.apps.chat import chat_loop
from flatpeak.apps.compare import compare_checkpoints
from flatpeak.errors import UserError
from flatpeak.pipeline.model_source import locate_model
from flatpeak.policy import model as policy_model
from flatpeak.policy.model import Policy
from flatpeak.policy.native_decoding import SETTING, KernelChoice
from flatpeak.runs.checkpoints import CheckpointState
from flatpeak.training.sft import SFTTrainer
from support.models import run_model
from support.reward_functions import odd
from support.runs import Finished, MakeModel, Recipe, Train, Watch

pytestmark = pytest.mark.slow


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def test_a_damaged_or_missing_reference_is_refused_by_its_name(recipe: Recipe, train: Train) -> None:
    config = recipe(kl={"coefficient": 0.1})
    start = train(config, reward=odd).path / "checkpoints" / "step_000000"
    config["training"]["steps"] = 3
    kept = start.with_name("kept")
    shutil.copytree(start, kept)
    flip(start / "model.safetensors")
    with pytest.raises(UserError, match=r"step_000000/model\.safetensors: damaged: .*; KL is measured .*put it back"):
        train(config, reward=odd, resume=True)
    shutil.rmtree(start)
    with pytest.raises(UserError, match=r"step_000000 is missing; KL is measured .*put it back"):
        train(config, reward=odd, resume=True)
    kept.rename(start)
    assert train(config, reward=odd, resume=True).summary.last_step == 3


def test_without_a_reference_nobody_asks_for_the_first_checkpoint(
    recipe: Recipe, train: Train, finished: Finished
) -> None:
    path = finished(odd)
    shutil.rmtree(path / "checkpoints" / "step_000000")
    assert train(recipe(training={"steps": 3}), reward=odd, resume=True).summary.last_step == 3


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_left_as_it_is(
    recipe: Recipe, train: Train, finished: Finished
) -> None:
    path = finished(odd)
    for step in (0, 2):
        flip(path / "checkpoints" / f"step_{step:06d}" / "model.safetensors")
    before = (path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"no checkpoint of the run is intact \(.*step_000002.*step_000000"):
        train(recipe(training={"steps": 3}), reward=odd, resume=True)
    assert (path / "metrics.jsonl").read_bytes() == before


def test_what_bounds_memory_may_change_as_the_error_advises(recipe: Recipe, train: Train, finished: Finished) -> None:
    finished(odd)
    smaller = recipe(
        training={"steps": 3, "micro_batch_tokens": 20, "activation_checkpointing": True},
        rollout={"max_rows": 4},
        optimizer={"offload": True},
        reference={"offload": True},
    )
    assert train(smaller, reward=odd, resume=True).summary.last_step == 3


@pytest.mark.parametrize("named", ["best", "checkpoints/last"])
def test_a_damaged_checkpoint_is_neither_evaluated_nor_talked_to(finished: Finished, named: str) -> None:
    path = finished(odd)
    for step in (0, 2):
        flip(path / "checkpoints" / f"step_{step:06d}" / "model.safetensors")
    name = str(path if named == "best" else path / named)
    for use in (lambda: locate_model(name), lambda: chat_loop(name)):
        with pytest.raises(UserError, match=r"model\.safetensors: damaged: .*; use another checkpoint of the run"):
            use()
    with pytest.raises(UserError, match=r"model\.safetensors: damaged"):
        compare_checkpoints([str(path)], stages=True)


def test_a_run_of_a_class_of_the_models_own_goes_on(recipe: Recipe, train: Train, tmp_path: Path) -> None:
    model, tokenizer = run_model()
    model.save_pretrained(tmp_path / "own")
    tokenizer.save_pretrained(tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    config |= {
        "model_type": "of_its_own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    }
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    (tmp_path / "own" / "modeling_own.py").write_text(
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "class OwnConfig(Qwen2Config):\n    model_type = 'of_its_own'\n"
        "class OwnForCausalLM(Qwen2ForCausalLM):\n    config_class = OwnConfig\n"
    )
    section = {"new": None, "path": str(tmp_path / "own"), "trust_remote_code": True}
    for steps in (1, 2):
        settings = recipe(model=section, kl={"coefficient": 0.1}, training={"steps": steps})
        assert train(settings, reward=odd, resume=steps == 2).summary.last_step == steps


def test_a_run_that_goes_on_with_another_engine_says_so(
    recipe: Recipe, train: Train, finished: Finished, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(odd)
    same, other = watch(), watch()
    train(recipe(training={"steps": 3}), reward=odd, resume=True, progress=same)
    monkeypatch.setattr(policy_model, "probe", lambda policy: "logits differ by 0.1")
    train(recipe(training={"steps": 4}), reward=odd, resume=True, progress=other)
    messages = [[notice for notice in watcher.notices if "another engine" in notice] for watcher in (same, other)]
    assert messages[0] == []
    assert messages[1][0].startswith(
        "the run goes on with another engine than it had, generate in place of native (logits differ by 0.1)"
    )


def test_a_run_that_goes_on_on_another_processor_says_so(
    recipe: Recipe, train: Train, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, "torch")  # whose name is the same on every processor
    train(recipe(), reward=odd)
    same, other = watch(), watch()
    train(recipe(training={"steps": 3}), reward=odd, resume=True, progress=same)
    had = torch.backends.cpu.get_cpu_capability()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    train(recipe(training={"steps": 4}), reward=odd, resume=True, progress=other)
    messages = [[notice for notice in watcher.notices if "in place of" in notice] for watcher in (same, other)]
    assert messages[0] == []
    (notice,) = messages[1]
    assert notice.startswith(f"the run goes on with torch {torch.__version__} on ")
    assert "(another) in place of torch" in notice
    assert f"({had}): from here on its results may differ in their last bits" in notice


def test_a_run_that_goes_on_with_other_kernels_says_so(
    recipe: Recipe, train: Train, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, "torch")
    train(recipe(), reward=odd)
    same, other = watch(), watch()
    train(recipe(training={"steps": 3}), reward=odd, resume=True, progress=same)
    monkeypatch.setattr(KernelChoice, "name", lambda choice, policy: "kernels-a (GCC 14)")
    train(recipe(training={"steps": 4}), reward=odd, resume=True, progress=other)
    messages = [[notice for notice in watcher.notices if "other kernels" in notice] for watcher in (same, other)]
    assert messages[0] == []
    assert messages[1] == [
        "the run goes on with other kernels than it had, kernels-a (GCC 14) in rollouts, torch in training passes in "
        "place of torch: from here on its results may differ in their last bits from an uninterrupted run's"
    ]
    with pytest.raises(UserError, match=r"changed recipe \(rollout\.kernels: auto -> torch\)"):
        train(recipe(training={"steps": 5}, rollout={"kernels": "torch"}), reward=odd, resume=True)


def test_what_sft_needed_is_freed_before_rl_begins(recipe: Recipe, train: Train, watch: Watch) -> None:
    seen: list[tuple[int, int]] = []

    def look() -> None:
        gc.collect()
        result = [type(one) for one in gc.get_objects()]
        seen.append((result.count(torch.optim.AdamW), result.count(SFTTrainer)))

    look()
    config = recipe(sft={"steps": 2, "batch_size": 4})
    train(config, reward=odd, progress=watch({("sft", 2): look, ("train", 2): look}))
    before, in_sft, in_rl = seen
    assert [(a - before[0], b - before[1]) for a, b in (in_sft, in_rl)] == [(1, 1), (1, 0)]


def test_the_gradients_of_sft_are_freed_at_its_end(
    recipe: Recipe, train: Train, watch: Watch, make_tiny_model: MakeModel
) -> None:
    model, tokenizer = make_tiny_model()
    seen: list[bool] = []
    config = recipe(sft={"steps": 2, "batch_size": 4})
    config["model"]["new"] = None
    look = watch({("sft", 2): lambda: seen.extend(weight.grad is None for weight in model.parameters())})
    train(config, model=model, tokenizer=tokenizer, reward=odd, progress=look)
    assert seen
    assert all(seen)


def test_a_resumed_checkpoints_tensors_are_freed_once_they_are_loaded(
    recipe: Recipe, train: Train, finished: Finished, watch: Watch
) -> None:
    finished(odd)
    held: list[int] = []

    def look() -> None:
        gc.collect()
        result = [one for one in gc.get_objects() if type(one) is CheckpointState]
        held.append(sum(tensor.nbytes for one in result for tensor in one.tensors.values()))

    look()
    train(recipe(training={"steps": 3}), reward=odd, resume=True, progress=watch({("train", 3): look}))
    assert held[0] == held[1]


def test_a_named_reference_that_was_replaced_is_freed(recipe: Recipe, train: Train, watch: Watch) -> None:
    config = recipe()
    first = train(config, reward=odd)
    gc.collect()
    before = sum(isinstance(one, Policy) for one in gc.get_objects())
    seen: list[int] = []

    def look() -> None:
        gc.collect()
        seen.append(sum(isinstance(one, Policy) for one in gc.get_objects()) - before)

    config = recipe(
        run={"name": "second"},
        model={"new": None, "path": str(first.best)},
        reference={"model": str(first.best), "reset_every": 1},
        kl={"coefficient": 0.1},
    )
    train(config, reward=odd, progress=watch({("train", 2): look}))
    assert seen == [2]
