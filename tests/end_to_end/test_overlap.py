"""Groups are graded in worker processes while others are sampled, and nothing else about a run changes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flatpeak.pipeline import samplers as pipeline_samplers
from flatpeak.protocols import Sampler
from flatpeak.rewards.reward_set import as_reward
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.rollout.config import RolloutConfig
from flatpeak.training.collect import collect
from flatpeak.training.curriculum import Phase, Stream
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams
from support.resumes import assert_same, outcome
from support.runs import Recipe, Train
from support.worker_functions import step_by_step
from support.workers import all_end, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
REWARDS = {
    "correctness": {"type": "number"},
    "brevity": {"type": "length", "target": 1, "limit": 5, "weight": 0.2},
    "tags": {"type": "format", "weight": 0.0},
}


class Backwards(Sampler):
    """A sampler that streams: its last group is the first to finish."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.streamed = 0

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[Group]:
        return self.sampler.generate(prompts, **settings)

    def stream(self, prompts: Sequence[Prompt], **settings: Any) -> Iterator[tuple[int, Group]]:
        self.streamed += 1
        yield from reversed(list(enumerate(self.generate(prompts, **settings))))


class Waiting(Sampler):
    """A sampler whose next group does not come before the one before it has its score."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def prompts(self, count: int) -> list[Prompt]:
        rows = [
            {"mine": str(self.directory / f"{index}"), "before": str(self.directory / f"{index - 1}") if index else ""}
            for index in range(count)
        ]
        examples = [Example(id=f"{index}", question="", gold="", columns=row) for index, row in enumerate(rows)]
        return [Prompt(id=example.id, token_ids=(1,), text="", example=example) for example in examples]

    def stream(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[int, Group]]:
        for index, prompt in sorted(enumerate(prompts), key=lambda pair: int(pair[1].id)):
            before = prompt.example.columns["before"]
            wait_for(lambda before=before: not before or Path(before).exists())
            texts = [f"{prompt.id}.{place}" for place in range(group_size)]
            completions = [
                Completion(token_ids=(2,), logprobs=(0.0,), finish_reason="stop", text=text) for text in texts
            ]
            yield index, Group(prompt=prompt, completions=tuple(completions))


@pytest.mark.parametrize("size", [1, 2])
def test_a_group_is_graded_before_the_next_one_is_sampled(tmp_path: Path, size: int) -> None:
    sampler = Waiting(tmp_path)
    prompts = Stream(items=sampler.prompts(5), seed=3)
    with WorkerPool(size, timeout=30) as pool:
        reward = as_reward(step_by_step, name="correctness", workers=pool)
        rollouts = collect(
            sampler,
            Phase(task="t", prompts=prompts, reward=reward, accuracy="correctness"),
            RolloutConfig(prompts_per_step=5, group_size=2),
            cursor=0,
            seed=0,
            has_signal=lambda groups, scores: [True] * len(groups),
            max_resamples=0,
        )
    # In the order of the data, whatever the order in which groups came.
    ids = [group.prompt.id for group in rollouts.groups]
    assert ids != sorted(ids) and sorted(ids) == ["0", "1", "2", "3", "4"]
    assert rollouts.scores.total == [[float(f"{id}.0"), float(f"{id}.1")] for id in ids]


def test_a_run_with_workers_leaves_what_one_without_them_leaves(
    make_run: Callable[..., Any], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = pipeline_samplers.build_sampler
    samplers: list[Backwards] = []

    def build_backwards(*arguments: Any) -> Backwards:
        samplers.append(Backwards(build(*arguments)))
        return samplers[-1]

    result = []
    for name, workers, builder in (("here", 0, build_backwards), ("own", 2, build), ("backwards", 1, build_backwards)):
        monkeypatch.setattr(pipeline_samplers, "build_sampler", builder)
        run = make_run(
            name,
            run={"grading_workers": workers},
            rewards=REWARDS,
            training={"steps": 3},
            curriculum={"rewards": {"correctness": {"type": "number", "weight": 2.0}}},
            evaluation={"metric": "reward", "samples": 2, "k": [1, 2]},
        )
        assert train(run.config).exit_code == 0
        result.append(outcome(run.path))
        result[-1]["state"]["stage"].pop("sampler")  # what the engine itself remembers; these wrappers do not
    assert_same(result[1], result[0])
    assert_same(result[2], result[0])
    assert [sampler.streamed > 3 for sampler in samplers] == [True, True]
    rows = [row for row in result[0]["metrics"] if row["stage"] == "train"]
    assert max(row["groups/drawn"] for row in rows) > 4
    assert [row["reward/missing_fraction"] for row in rows] == [0.0] * 3
    assert {name for row in rows for name in row if name.startswith("reward/")} >= {"reward/brevity", "reward/tags"}


def pids(directory: Path) -> list[int]:
    return [int(path.name) for path in directory.iterdir()]


def watched(recipe: Recipe, directory: Path) -> dict[str, Any]:
    """A recipe of two steps whose one worker leaves its process id in the directory."""
    directory.mkdir()
    mine = {"type": "function", "function": "support.worker_functions:note", "arguments": {"directory": str(directory)}}
    config: dict[str, Any] = recipe(run={"grading_workers": 1}, rewards={"correctness": mine})
    return config


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_of_a_job_is_for_the_run_to_answer(
    recipe: Recipe, train: Train, watch: Any, tmp_path: Path, number: signal.Signals
) -> None:
    seen = tmp_path / "seen"
    actions = {
        ("eval", 0): lambda: os.kill(*pids(seen), number),
        ("train", 1): lambda: os.kill(os.getpid(), number),
    }
    progress = watch(actions)
    assert train(watched(recipe, seen), progress=progress).exit_code == 128 + number
    assert progress.steps("train") == [1]
    assert progress.values("reward/missing_fraction") == [0.0]
    assert len(pids(seen)) == 1  # it went on after the signal
    assert all_end(pids(seen), within=0)


def test_workers_end_with_a_run_that_fails(recipe: Recipe, train: Train, watch: Any, tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    def fail() -> None:
        assert not all_end(pids(seen), within=0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(watched(recipe, seen), progress=watch({("train", 1): fail}))
    assert len(pids(seen)) == 1
    assert all_end(pids(seen), within=0)


def test_training_goes_on_without_the_scores_of_a_worker_that_died(
    recipe: Recipe, train: Train, watch: Any, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    mine = {"type": "function", "function": "support.worker_functions:dies_once", "arguments": {"mark": str(mark)}}
    progress = watch({("eval", 0): mark.unlink})
    result = train(
        recipe(run={"grading_workers": 1}, rewards={"correctness": {"type": "number"}, "mine": mine}), progress=progress
    )
    assert result.exit_code == 0
    # One of the 16 completions of the first step.
    assert progress.values("reward/missing_fraction") == [1 / 16, 0.0]
    assert [row.get("reward/mine/failed") for stage, _, row in progress.rows if stage == "train"] == [1.0, None]
    assert progress.notices[-1] == (
        "reward 'mine': 1 completion has had no score so far because of an error; now a worker process died: killed by "
        "SIGKILL"
    )
    rows = [json.loads(line) for line in (result.path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    missing = [row for row in rows if row["rewards"]["mine"] is None]
    assert [(row["reward"], row["advantage"]) for row in missing] == [(None, 0.0)]
    assert None not in [row["rewards"]["correctness"] for row in rows]
