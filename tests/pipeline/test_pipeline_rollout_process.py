"""Runs whose rollouts a second process draws: the same as by hand, resumed exactly, and ended with one clear error."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flatpeak.errors import RunError, UserError
from flatpeak.pipeline import samplers
from flatpeak.pipeline.rollout_engines import RolloutProcess
from flatpeak.policy.reference import snapshot
from flatpeak.rollout.ahead import Background, answer_request
from flatpeak.rollout.engine import NativeEngine
from flatpeak.runs.metrics import read_metrics
from flatpeak.types import Group, Prompt, SamplingParams
from flatpeak.utils import child_process
from flatpeak.utils.scratch import ScratchDirectory
from support.reward_functions import first_token
from support.runs import Recipe, Watcher


class Inline(Background):
    """The second process without a process: a copy of the policy."""

    def __init__(self, policy: Any, config: Any) -> None:
        self.policy = policy

    def begin(self, request: dict[str, Any]) -> None:
        copy = snapshot(self.policy)
        self.answer = json.loads(json.dumps(answer_request(NativeEngine(copy), request)))
        copy.release()

    def result(self) -> Any:
        return self.answer

    def close(self) -> None:
        pass


class Lagging:
    """Rollouts by the weights of one step before, as staleness 1 is defined; greedy ones by those of now."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.copy = policy, snapshot(policy)
        self.now, self.before = NativeEngine(policy), NativeEngine(self.copy)

    def generate(self, prompts: list[Prompt], *, group_size: int, sampling: SamplingParams, seed: int) -> list[Group]:
        if sampling.temperature == 0:
            return self.now.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
        groups = self.before.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
        self.copy.follow(self.policy)
        return groups


def weights_of(result: Any, checkpoint: str = "last") -> dict[str, torch.Tensor]:
    return load_file(result.path / "checkpoints" / checkpoint / "model.safetensors")


def same(left: Any, right: Any) -> bool:
    ours, theirs = weights_of(left), weights_of(right)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def stale(recipe: Recipe) -> Callable[..., Any]:
    """A recipe of six steps with rollouts ahead."""
    return lambda name="tiny", **sections: recipe(
        rollout={"staleness": 1},
        training={"steps": 6},
        run={"name": name, "checkpoint_every": 1, "threads": 1},
        **sections,
    )


@pytest.mark.slow
def test_a_second_process_draws_as_a_copy_of_the_policy_and_one_step_behind(
    stale: Any, recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = []
    start = RolloutProcess._start

    def recorded(process: RolloutProcess) -> ScratchDirectory:
        scratch = start(process)
        directories.append(scratch.path)
        return scratch

    monkeypatch.setattr(RolloutProcess, "_start", recorded)
    files = list[str]()
    look = Watcher({("train", 2): lambda: files.extend(file.name for file in directories[0].glob("*.safetensors"))})
    ours = train(stale("process"), reward=first_token, progress=look)
    assert files == ["weights.safetensors"]  # the model's own, which lie in memory, are read and deleted
    monkeypatch.setattr(samplers, "RolloutProcess", Inline)
    inline = train(stale("inline"), reward=first_token)
    lagging = train(
        recipe(run={"name": "lagging", "threads": 1}, training={"steps": 6}), reward=first_token, sampler=Lagging
    )
    now = train(recipe(run={"name": "now", "threads": 1}, training={"steps": 6}), reward=first_token)
    assert same(ours, inline)
    assert same(ours, lagging)
    assert not same(ours, now)
    rows = [row for row in read_metrics(ours.path / "metrics.jsonl") if row["stage"] == "train"]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert max(row.get("rollout/logprob_gap_mean", 0.0) for row in rows) > 1e-4
    assert len(directories) == 1
    assert not directories[0].exists()
    drawn_by = [json.loads((run.path / "manifest.json").read_text())["decoder"] for run in (ours, now)]
    assert drawn_by[0] == drawn_by[1] != "vllm"


@pytest.mark.slow
def test_a_callers_model_with_frozen_weights_is_drawn_from_ahead(
    stale: Any, train: Any, make_tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str) -> Any:
        model, tokenizer = make_tiny_model()
        model.model.embed_tokens.weight.requires_grad_(False)
        return train(stale(name), model=model, tokenizer=tokenizer, reward=first_token)

    process = run("process")
    monkeypatch.setattr(samplers, "RolloutProcess", Inline)
    assert same(process, run("inline"))
    rows = [row for row in read_metrics(process.path / "metrics.jsonl") if row["stage"] == "train"]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_a_run_that_is_stopped_goes_on_to_the_same_weights(
    stop: int, stale: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samplers, "RolloutProcess", Inline)
    whole = train(stale("whole"), reward=first_token)
    watcher = Watcher({("train", stop): lambda: os.kill(os.getpid(), signal.SIGINT)})
    config = stale("stopped")
    stopped = train(config, reward=first_token, progress=watcher)
    assert stopped.exit_code == 130
    assert not same(stopped, whole)
    resumed = train(config, reward=first_token, resume=True)
    assert same(resumed, whole)


def test_a_curriculum_that_moves_on_uses_nothing_of_what_was_drawn_for_the_first_task(
    stale: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samplers, "RolloutProcess", Inline)
    first = {"task": {"type": "arithmetic", "max_value": 5, "train_size": 5, "test_size": 2}, "steps": 3}
    result = train(stale(curriculum=first), reward=first_token)
    rows = [row for row in read_metrics(result.path / "metrics.jsonl") if row["stage"] == "train"]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 0, 1, 1]


ENDS = {
    "dies": (
        "import os; print('no memory', flush=True); os.abort()",
        r"killed by SIGABRT \(.*no memory\); go on with resume=True",
    ),
    "ends": ("import sys; sys.exit('cannot load')", r"died: exit code 1 \(cannot load\); go on with resume=True"),
    "fails": (
        "import json, sys; from multiprocessing.connection import Connection; "
        "pipe = Connection(json.loads(sys.argv[1])[2]); "
        'pipe.recv_bytes(); pipe.recv_bytes(); pipe.send_bytes(b\'{"error": "no such file"}\')',
        r"draws rollouts ahead failed: no such file; go on with resume=True",
    ),
    "hangs up": (
        "import json, socket, sys, time; socket.socket(fileno=json.loads(sys.argv[1])[2]).close(); time.sleep(60)",
        r"died: killed by SIGKILL; go on with resume=True",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_is_lost_ends_the_run_with_one_error(
    end: str, stale: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot, message = ENDS[end]
    monkeypatch.setattr(child_process, "_BOOT", boot)
    made: list[RolloutProcess] = []
    plain = RolloutProcess.__init__
    monkeypatch.setattr(RolloutProcess, "__init__", lambda self, *given: (made.append(self), plain(self, *given))[1])
    config = stale()
    with pytest.raises(RunError, match=message):
        train(config, reward=first_token)
    assert made[0]._scratch is None  # its files are deleted
    assert made[0]._child is None
    monkeypatch.setattr(samplers, "RolloutProcess", Inline)
    assert train(config, reward=first_token, overwrite=True).exit_code == 0


def test_without_staleness_there_is_no_process(recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "RolloutProcess", None)
    result = train(recipe(rollout={"staleness": 0}))
    rows = read_metrics(result.path / "metrics.jsonl")
    assert not [row for row in rows if "rollout/staleness" in row]


def test_samplers_that_no_second_process_has_are_refused(stale: Any, train: Any) -> None:
    with pytest.raises(UserError, match=r"rollout.staleness=1 beside a sampler of the caller's"):
        train(stale(), sampler=Lagging)
    with pytest.raises(UserError, match=r"rollout.staleness"):
        train(stale(), settings={"rollout.staleness": 2})
