"""Whole runs by a policy loss and an advantage of the user's own, from files and from Python."""

from __future__ import annotations

import json
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

import flatpeak
from flatpeak.config.algorithm_name import algorithm_name
from flatpeak.config.load import load_recipe, merge, parse_config
from flatpeak.errors import RunError, UserError
from flatpeak.functional import PolicyLoss
from flatpeak.report.explain_group import explain, render
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.notices import read_notices
from support.pushed_runs import card_of
from support.resumes import Run, assert_same
from support.reward_functions import varied
from support.runs import Recipe, Train

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_loss.py"
COPIES = """
from flatpeak.functional import clipped_surrogate, group_advantages

def loss(logprobs_T, ratio_T, advantages_T, config):
    return clipped_surrogate(ratio_T, advantages_T, clip_low=config.clip_low, clip_high=config.clip_high)

def advantage(rewards_PG, valid_PG, *, scale="std"):
    return group_advantages(rewards_PG, scale=scale, valid_PG=valid_PG)
"""
BUSY: dict[str, Any] = {
    "rollout": {"prompts_per_step": 4, "group_size": 5},
    "training": {"steps": 3, "epochs_per_rollout": 2, "minibatches": 2, "micro_batch_tokens": 40},
}


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """A file with copies of GRPO's loss and advantage."""
    path = tmp_path / "copies.py"
    path.write_text(COPIES, encoding="utf-8")
    return path


def trained_weights(path: Path) -> dict[str, Tensor]:
    return load_file(path / "checkpoints" / "last" / "model.safetensors")


def mentions(path: Path) -> list[str]:
    return [row["text"] for row in read_notices(path / "notices.jsonl") if "code of" in row["text"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"gradient_regularization": {"strength": 0.1, "ratio_mode": "reuse"}},
        {"gradient_regularization": {"strength": "ratio:0.5", "group_fraction": 0.5}, "kl": {"coefficient": 0.1}},
        {"objective": {"ratio": "sequence", "clip_low": 3e-4, "entropy_coefficient": 0.01}},
        {"model": {"dtype": "bfloat16"}, "objective": {"sampler_correction": {"type": "truncate"}}},
        {"kl": {"coefficient": 0.1, "placement": "reward"}, "training": {"dynamic_sampling": {"max_resamples": 1}}},
    ],
    ids=str,
)
def test_copies_of_loss_and_advantage_train_the_same_weights(
    recipe: Recipe, train: Train, copies: Path, sections: dict[str, Any]
) -> None:
    def some_missing(completion_ids: list[list[int]]) -> list[float | None]:
        return [
            None if sum(ids) % 7 == 0 else score
            for ids, score in zip(completion_ids, varied(completion_ids), strict=True)
        ]

    config = merge(BUSY, sections)
    own = {"objective": {"loss": f"{copies}:loss"}, "advantage": {"function": f"{copies}:advantage"}}
    runs = [
        train(
            recipe(**merge(config, change), run={"name": name}),
            reward=some_missing,
            progress=False,
        )
        for name, change in (("built_in", {}), ("own", own))
    ]
    expected, given = (trained_weights(run.path) for run in runs)
    assert all(torch.equal(expected[name], given[name]) for name in expected)
    start = load_file(runs[0].path / "checkpoints" / "step_000000" / "model.safetensors")
    assert not all(torch.equal(expected[name], start[name]) for name in start)


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_ends_the_same(
    make_run: Callable[..., Run], uninterrupted: dict[str, Any], copies: Path
) -> None:
    def make(name: str) -> Run:
        run = make_run(name, objective={"loss": f"{copies}:loss"})
        run.config["advantage"] = {"function": f"{copies}:advantage", "arguments": {"scale": "none"}}
        return run

    expected, stopped = make("whole").finish(), make("stopped")
    stopped.stop_at("train", 3)
    assert_same(stopped.go_on(), expected)
    assert mentions(stopped.path) == []
    for part in ("weights", "optimizer"):  # of the built-in loss and advantage
        assert all(torch.equal(uninterrupted[part][name], tensor) for name, tensor in expected[part].items())


def test_a_resumed_run_says_that_the_code_has_changed(
    recipe: Recipe, train: Train, watch: Any, send: Any, copies: Path
) -> None:
    config = recipe(**BUSY, objective={"loss": f"{copies}:loss"}, advantage={"function": f"{copies}:advantage"})
    stopped = train(config, reward=varied, progress=watch({("train", 1): send(signal.SIGTERM)}))
    assert stopped.exit_code == 143
    changed = COPIES.replace("return clipped_surrogate", "return 0.5 * clipped_surrogate")
    copies.write_text(changed, encoding="utf-8")
    train(config, reward=varied, progress=watch(), resume=True)
    keys = ("advantage.function", "objective.loss")
    assert [text.partition(" has changed")[0] for text in mentions(stopped.path)] == [
        f"the code of {key}={copies}:{key.rpartition('.')[2].replace('function', 'advantage')}" for key in keys
    ]
    manifest = json.loads((stopped.path / "manifest.json").read_text())
    assert manifest["code"].keys() == manifest["resumed"][0]["code"].keys() == {*keys, "rewards"}
    assert manifest["code"]["objective.loss"] != manifest["resumed"][0]["code"]["objective.loss"]
    # The changed code is what ran: an uninterrupted run by the old one ends elsewhere.
    copies.write_text(COPIES, encoding="utf-8")
    whole = train({**config, "run": {**config["run"], "name": "whole"}}, reward=varied, progress=False)
    old, new = trained_weights(whole.path), trained_weights(stopped.path)
    assert not all(torch.equal(old[name], new[name]) for name in old)


def halved(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any) -> Tensor:
    return -0.5 * ratio_T.clamp(max=config.cap) * advantages_T


def raw(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    return rewards_PG


def test_functions_given_in_python_are_named_in_the_recipe_and_asked_for_again(recipe: Recipe, train: Train) -> None:
    config = recipe(**BUSY, objective={"cap": 3.0})
    result = train(config, reward=varied, loss=halved, advantage=raw, progress=False, settings=["training.steps=2"])
    written = yaml.safe_load((result.path / "config.yaml").read_text())
    assert (written["objective"]["loss"], written["advantage"]["function"]) == ("python:halved", "python:raw")
    assert json.loads((result.path / "manifest.json").read_text())["code"].keys() == {
        "objective.loss",
        "advantage.function",
        "rewards",
    }
    resolved = parse_config(load_recipe(result.path / "config.yaml"))
    assert algorithm_name(resolved) == "policy gradient"
    card = card_of(resolved, result.path)
    assert "- RL: Advantage: a function of the user's own, `raw`.\n" in card
    loss = "- RL: Loss: a function of the user's own, `halved`, with the token-level importance ratio; the mean over a "
    assert f"{loss}completion's tokens, then over completions (`sequence_mean`).\n" in card
    with pytest.raises(UserError, match=r"^objective\.loss=python:halved was given in Python.* give it again"):
        train(resolved, reward=varied, resume=True, progress=False)
    again = train(config, reward=varied, loss=halved, advantage=raw, progress=False, resume=True)
    assert again.summary.last_step == 3
    assert mentions(again.path) == []


def test_a_fork_may_have_another_loss_from_python(
    recipe: Recipe, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = train(recipe(**BUSY, run={"checkpoint_every": 1}), reward=varied, loss=halved, progress=False)
    monkeypatch.setattr("flatpeak.apps.fork.fork_run.train", train)

    def doubled(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any) -> Tensor:
        return 4 * halved(logprobs_T, ratio_T, advantages_T, config)

    same = flatpeak.fork(result.path, 1, name="same", reward=varied, loss=halved, progress=False)
    other = flatpeak.fork(result.path, 1, name="other", reward=varied, loss=doubled, progress=False)
    weights = [trained_weights(run.path) for run in (result, same, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    assert json.loads((other.path / "manifest.json").read_text())["forked"]["changed"]["objective.loss"] == (
        "python:halved -> python:doubled"
    )
    assert mentions(same.path) == mentions(other.path) == []


def test_a_loss_object_counts_its_clipped_tokens(recipe: Recipe, train: Train) -> None:
    always = PolicyLoss(value=halved, clipped=lambda logprobs_T, ratio_T, advantages_T, config: ratio_T > 0)
    fractions = {}
    for name, loss in (("plain", halved), ("object", always)):
        result = train(recipe(**BUSY, run={"name": name}), reward=varied, loss=loss, progress=False)
        rows = read_metrics(result.path / "metrics.jsonl")
        fractions[name] = {row["policy/clip_fraction"] for row in rows if row["stage"] == "train"}
    assert fractions == {"plain": {0.0}, "object": {1.0}}


def test_one_completion_per_prompt_is_enough_for_a_function_that_compares_none(recipe: Recipe, train: Train) -> None:
    config = recipe(rollout={"prompts_per_step": 8, "group_size": 1}, advantage={"function": f"{__file__}:raw"})
    result = train(config, reward=varied, progress=False)
    rows = [row for row in read_metrics(result.path / "metrics.jsonl") if row["stage"] == "train"]
    assert all(row["policy/grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"objective": {"loss": "copies.py:gone"}}, r"objective\.loss=copies\.py:gone: .*no 'gone'"),
        ({"objective": {"loss": "nowhere.py:loss"}}, r"objective\.loss=nowhere\.py:loss: there is no file"),
        ({"advantage": {"function": "copies.py:loss"}}, r"let it take \(rewards_PG, valid_PG\)"),
        ({"objective": {"loss": "copies.py:advantage"}}, r"let it take \(logprobs_T, ratio_T"),
        ({"objective": {"arguments": {"tau": 1}}}, r"has no effect with objective\.loss=clipped_surrogate"),
        (
            {"advantage": {"function": "copies.py:advantage", "scale": "batch_std"}},
            r"advantage\.scale=batch_std has no effect with advantage\.function=copies\.py:advantage: remove it",
        ),
        (
            {"advantage": {"function": "standard"}},
            r"advantage\.function=standard: .* or a function of yours",
        ),
        (
            {
                "advantage": {"function": "copies.py:advantage"},
                "rollout": {"group_size": 1},
                "training": {"dynamic_sampling": {"max_resamples": 1}},
            },
            r"rollout\.group_size=1 with training\.dynamic_sampling",
        ),
    ],
    ids=str,
)
def test_bad_input_is_one_error_and_leaves_no_run(
    recipe: Recipe, train: Train, copies: Path, monkeypatch: pytest.MonkeyPatch, section: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(copies.parent)
    with pytest.raises(UserError, match=message) as error:
        train(recipe(**section), progress=False)
    assert "\n" not in str(error.value)
    assert not (copies.parent / "runs" / "tiny").exists()


def test_a_function_that_fails_in_a_step_leaves_the_steps_before_it(recipe: Recipe, train: Train) -> None:
    steps, broken = [0], [True]

    def fragile(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
        steps[0] += bool((rewards_PG > 5).any())  # no reward of the trial is as large
        return rewards_PG / 0 if broken[0] and steps[0] == 3 else rewards_PG

    def large(completion_ids: list[list[int]]) -> list[float]:
        return [6 + score for score in varied(completion_ids)]

    config = recipe(**BUSY)
    with pytest.raises(RunError, match=r"^advantage\.function=python:fragile returned inf .* rewards \[6"):
        train(config, reward=large, advantage=fragile, progress=False)
    broken[0] = False
    resumed = train(config, reward=large, advantage=fragile, progress=False, resume=True)
    assert (steps[0], resumed.summary.status, resumed.summary.last_step) == (4, "done", 3)


def test_the_example_trains_and_is_explained(recipe: Recipe, train: Train) -> None:
    own = {
        "objective": {"loss": f"{EXAMPLE}:spo_with_statistics", "arguments": {"epsilon": 1e-3}},
        "advantage": {"function": f"{EXAMPLE}:max_rl"},
    }

    def zero_or_one(completion_ids: list[list[int]]) -> list[float]:
        return [float(sum(ids) % 2) for ids in completion_ids]

    result = train(recipe(**BUSY, **own, run={"log_rollouts_every": 1}), reward=zero_or_one, progress=False)
    rows = [row for row in read_metrics(result.path / "metrics.jsonl") if row["stage"] == "train"]
    assert 0 < max(row["policy/clip_fraction"] for row in rows) < 1
    explanation = explain(result.path, step=2)
    mean = sum(explanation.rewards) / len(explanation.rewards)
    for completion in explanation.completions:
        assert completion.row["advantage"] == pytest.approx((completion.row["reward"] - mean) / mean, rel=1e-5)
    texts = [str(line) for line in render(explanation).renderables]
    assert any(f"advantages by {EXAMPLE}:max_rl" in text for text in texts)
    assert any(f"A token's loss is its weight times {EXAMPLE}:spo_with_statistics." in text for text in texts)


def test_the_example_prints_the_gradients_of_both_losses(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [
        "PPO: r=0.6 -1.00, r=0.8 -1.00, r=1.0 -1.00, r=1.1 -1.00, r=1.2 -1.00, r=1.4 +0.00",
        "SPO: r=0.6 -3.00, r=0.8 -2.00, r=1.0 -1.00, r=1.1 -0.50, r=1.2 +0.00, r=1.4 +1.00",
    ]
