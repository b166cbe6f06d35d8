"""A run whose reference is reset resumes to the same bits: the reference of that time is in its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.resumes import RL_STEPS, MakeRun, Whole, assert_same, outcome
from support.runs import Recipe, Train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
PREFIX = "reference."
EVERY_TWO = {"reset_every": 2, "reset_optimizer": True}


def architecture(name: str) -> dict[str, Any]:
    """Sections of a run with this kind of model, without SFT, whose last step moves the policy like the others."""
    return {"model": {"new": {"architecture": name}}, "sft": {"steps": 0}, "optimizer": {"schedule": "constant"}}


def train_rows(found: dict[str, Any], key: str) -> list[float]:
    return [row[key] for row in found["metrics"] if row["stage"] == "train"]


def saved_reference(checkpoint: Path) -> dict[str, torch.Tensor]:
    saved = load_file(checkpoint / "trainer" / "state.safetensors")
    return {name.removeprefix(PREFIX): tensor for name, tensor in saved.items() if name.startswith(PREFIX)}


@pytest.mark.parametrize("stop", range(1, RL_STEPS + 1))
@pytest.mark.parametrize(("kind", "tied"), [("gpt2", True), ("qwen2", False)])
def test_a_run_stopped_before_at_or_after_a_reset_ends_the_same(
    make_run: MakeRun, whole: Whole, kind: str, tied: bool, stop: int
) -> None:
    sections = architecture(kind) | {"reference": EVERY_TWO}
    expected = whole(**sections)
    assert train_rows(expected, "reference/resets") == [0, 1, 1, 2, 2]
    assert ("lm_head.weight" not in expected["weights"]) == tied
    run = make_run(**sections)
    run.stop_at("train", stop)
    checkpoint = run.path / "checkpoints" / "last"
    assert checkpoint.readlink() == Path(f"step_{stop:06d}")
    reference, policy = saved_reference(checkpoint), load_file(checkpoint / "model.safetensors")
    if stop == 1:
        assert reference == {}
    else:
        assert reference.keys() == policy.keys()
        differ = {name for name, tensor in policy.items() if not torch.equal(reference[name], tensor)}
        # Between resets the reference is neither the policy nor where it began, so that it must be stored.
        assert differ == (set() if stop % 2 == 0 else policy.keys())
        start = load_file(run.path / "checkpoints" / "step_000000" / "model.safetensors")
        assert not any(torch.equal(reference[name], tensor) for name, tensor in start.items())
    assert_same(run.go_on(), expected)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_run_that_died_after_a_checkpoint_ends_the_same(make_run: MakeRun, whole: Whole, step: int) -> None:
    sections = architecture("gpt2") | {"reference": EVERY_TWO}
    run = make_run(**sections)
    run.die_at("train", step)
    assert (run.path / "checkpoints" / "last").readlink() == Path(f"step_{step - 1:06d}")
    assert_same(run.go_on(), whole(**sections))


def test_resets_after_sft_by_a_bound_on_the_kl_resume_to_the_same_bits(make_run: MakeRun, whole: Whole) -> None:
    free = train_rows(whole(reference={"keep": True}), "policy/kl_reference")
    # Between the second step's KL and the largest one, and no figure of any other step.
    bound = (free[1] + max(free)) / 2
    sections = {"reference": {"reset_at_kl": bound}}
    expected = whole(**sections)
    first = next(step for step, kl in enumerate(free, start=1) if kl > bound)
    resets, kl = train_rows(expected, "reference/resets"), train_rows(expected, "policy/kl_reference")
    assert 1 < first < RL_STEPS
    assert kl[:first] == free[:first]
    assert resets == [sum(value > bound for value in kl[: step + 1]) for step in range(RL_STEPS)]
    assert resets[first - 1] == 1
    assert kl[first] < free[first]
    run = make_run(**sections)
    run.stop_at("train", first)
    assert_same(run.go_on(), expected)


def test_a_named_reference_is_replaced_and_stays_so_when_resumed(
    make_run: MakeRun, whole: Whole, make_tiny_model: Any, tmp_path: Path
) -> None:
    paths = {seed: tmp_path / f"model-{seed}" for seed in (0, 1)}
    for seed, path in paths.items():
        # Another number of layers: the reference is not just the policy with other weights.
        for component in make_tiny_model(seed=seed, num_hidden_layers=1 + seed, initializer_range=0.3):
            component.save_pretrained(path)
    sections = {
        "model": {"new": None, "path": str(paths[0])},
        "reference": {"model": str(paths[1]), "reset_every": 2},
        "sft": {"steps": 0},
    }
    expected = whole(**sections)
    kl = train_rows(expected, "policy/kl_reference")
    assert min(kl[:2]) > 2 * max(kl[2:]) > 0
    for stop in (1, 3):
        run = make_run(f"cut-{stop}", **sections)
        run.stop_at("train", stop)
        assert_same(run.go_on(), expected)


def test_a_reset_at_the_last_step_is_there_when_the_run_is_made_longer(make_run: MakeRun, whole: Whole) -> None:
    sections = architecture("qwen2") | {"reference": EVERY_TWO}
    expected = whole(**sections)
    run = make_run(**sections, training={"steps": 4})
    assert run.start().summary.last_step == 4
    longer = make_run(**sections)
    assert longer.start(resume=True).summary.last_step == RL_STEPS
    result = outcome(longer.path)
    assert train_rows(result, "reference/resets") == train_rows(expected, "reference/resets")
    for what in ("weights", "optimizer"):
        assert result[what].keys() == expected[what].keys()
        assert all(torch.equal(result[what][name], tensor) for name, tensor in expected[what].items())


def test_nothing_is_stored_without_a_rule(whole: Whole) -> None:
    result = whole(reference={"keep": True})
    assert max(train_rows(result, "policy/kl_reference")) > 0
    assert not any(name.startswith(PREFIX) for name in result["optimizer"])
    assert all("reference/resets" not in row for row in result["metrics"])


@pytest.mark.parametrize("rule", [{"reset_every": 1}, {"reset_at_kl": 1e-9}])
def test_a_rule_alone_keeps_a_reference(recipe: Recipe, train: Train, watch: Any, rule: dict[str, Any]) -> None:
    seen = watch()
    config = recipe(reference=rule, training={"steps": 3})
    train(config, reward=lambda completion_ids: [sum(ids) / 100 for ids in completion_ids], progress=seen)
    kl, resets = seen.values("policy/kl_reference"), seen.values("reference/resets")
    if "reset_every" in rule:
        assert resets == [1, 2, 3]
        assert kl == pytest.approx([0] * 3, abs=1e-9)
    else:
        # On-policy and at its own reference the first step's KL is 0, and so is every one after a reset.
        assert resets == [0, 1, 1]
        assert kl[1] > 1e-4
        assert (kl[0], kl[2]) == pytest.approx((0, 0), abs=1e-9)
