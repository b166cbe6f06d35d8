"""Whole runs on ranks that a test has started: the job of each, faults that it may have, and what a run left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from flatpeak.errors import DivergedError, RunError
from flatpeak.pipeline.build import Components
from flatpeak.runs.callbacks import Callback, RunControl
from flatpeak.runs.checkpoints import CheckpointError
from support.runs import tiny_recipe

Fault = Literal["signal", "engine", "alike", "diverged"]
ODD = "def odd(completion_ids):\n    return [float(sum(ids) % 2) for ids in completion_ids]\n"
"""A reward that differs within most groups, whatever the model says."""

OWN = '''
def spo(logprobs_T, ratio_T, advantages_T, config, *, epsilon):
    return advantages_T.abs() * (ratio_T - 1).square() / (2 * epsilon) - ratio_T * advantages_T


def of_the_step(rewards_PG, valid_PG):
    """Depends on every reward of the step."""
    return ((rewards_PG - rewards_PG[valid_PG].mean()) / rewards_PG.shape[0]).masked_fill(~valid_PG, 0)
'''
"""A loss and an advantage of the user's."""


def recipe(directory: Path, name: str, *, processes: int = 1, strategy: str = "ddp", **sections: Any) -> dict[str, Any]:
    """Four steps after three of SFT, with five groups for the ranks to share."""
    reward = directory / "odd.py"
    reward.write_text(ODD)
    base = tiny_recipe(
        directory,
        run={"name": name, "checkpoint_every": 2},
        rollout={"prompts_per_step": 5},
        rewards={
            "odd": {"type": "function", "function": f"{reward}:odd"},
            "correctness": {"type": "number", "weight": 0.0},
        },
        sft={"steps": 3, "batch_size": 6},
        training={"steps": 4},
        evaluation={"every": 2},
        distributed={"processes": processes, "strategy": strategy},
    )
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return base


def train(
    recipe: Mapping[str, Any], *, resume: bool = False, fault: Fault | None = None, **objects: Any
) -> dict[str, Any]:
    """The run of one process or rank: its exit code, or the class of its error."""
    import flatpeak

    if recipe["distributed"]["processes"] > 1:
        os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with ExitStack() as patches:
        patches.enter_context(quick())
        if fault is not None and (fault == "alike" or dist.get_rank() == 1):
            patches.enter_context(faulty(fault))
        try:
            result = flatpeak.train(recipe, progress=False, resume=resume, **objects)
        except Exception as error:
            return {"error": type(error).__name__, "text": str(error)}
    return {"code": result.exit_code, "signal": result.summary.signal, "rank": result.stopped_rank}


class StopsAtStep3(Callback):
    """Stops the run, or fails, in one of its methods at step 3, in the first process alone."""

    def __init__(self, hook: Literal["step", "evaluation"], *, fails: bool = False) -> None:
        self.hook, self.fails = hook, fails

    def on_step(self, run: RunControl, step: int, metrics: Mapping[str, float]) -> None:
        self.act(run, "step", step)

    def on_evaluation(
        self, run: RunControl, step: int, metrics: Mapping[str, float], *, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        self.act(run, "evaluation", step)

    def act(self, run: RunControl, hook: str, step: int) -> None:
        assert dist.get_rank() == 0
        if (hook, step, run.stage) == (self.hook, 3, "train"):
            if self.fails:
                raise ZeroDivisionError("a fault of a callback")
            run.stop()


def train_without_space(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A run of which the checkpoint of step 2 of RL cannot be written."""
    import flatpeak.training.recorder

    write = flatpeak.training.recorder.write_checkpoint

    def full(parent: Path, step: int, **content: Any) -> Path:
        if step == 2 and parent.name == "checkpoints":
            raise CheckpointError("no space left")
        return write(parent, step, **content)

    with patch.object(flatpeak.training.recorder, "write_checkpoint", full):
        return train(recipe)


def train_unlike(recipe: Mapping[str, Any], what: Literal["weights", "training prompts"]) -> dict[str, Any]:
    """A run whose second rank has other weights, or the same prompts in another order."""
    import flatpeak.pipeline.run_components

    build = flatpeak.pipeline.run_components.build_components

    def unlike(*args: Any, **settings: Any) -> Components:
        components = build(*args, **settings)
        if dist.get_rank() == 1 and what == "weights":
            next(components.policy.model.parameters()).data += 1e-3
        elif dist.get_rank() == 1:
            (phase,) = components.phases
            prompts = replace(phase.prompts, items=phase.prompts.items[::-1])
            components.phases = (replace(phase, prompts=prompts),)
        return components

    with patch.object(flatpeak.pipeline.run_components, "build_components", unlike):
        return train(recipe)


def train_unlike_judged(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A run whose second rank finds one accuracy and pass rate after another, and the first always the same."""
    from flatpeak.evaluation.result import Evaluation

    mean, found = Evaluation.mean, [0.0]

    def rising(self: Evaluation, name: str) -> float:
        found.append(found[-1] + 1.0)
        return found[-1] if dist.get_rank() else mean(self, "missing")

    with patch.object(Evaluation, "mean", rising), patch.object(Evaluation, "pass_rate", property(rising_rate)):
        return train(recipe)


def rising_rate(evaluation: Any) -> float:
    """A pass rate that the second rank alone finds perfect."""
    return float(dist.get_rank())


def train_with_own_sampler(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A run by a caller's sampler that needs a prompt."""
    from flatpeak.rollout.engine import NativeEngine

    class Own:
        def __init__(self, policy: Any) -> None:
            self.engine = NativeEngine(policy)

        def generate(self, prompts: Any, **request: Any) -> Any:
            if not prompts:
                raise IndexError("no prompt")
            return self.engine.generate(prompts, **request)

    return train(recipe, sampler=Own)


def effects(recipe: Mapping[str, Any]) -> dict[str, int]:
    """How often a rank's run takes a directory, opens trackers, and writes rollouts, answers, metrics and summaries."""
    import flatpeak.pipeline.run_start
    import flatpeak.training.recorder

    counts = dict.fromkeys(("directories", "trackers", "rollouts", "answers", "rows", "summaries"), 0)

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **settings: Any) -> Any:
            counts[name] += 1
            return function(*args, **settings)

        return call

    with ExitStack() as patches:
        for owner, function, name in (
            (flatpeak.pipeline.run_start.RunDirectory, "create", "directories"),
            (flatpeak.pipeline.run_start, "open_trackers", "trackers"),
            (flatpeak.training.recorder.RolloutLog, "write", "rollouts"),
            (flatpeak.training.recorder, "write_answers", "answers"),
            (flatpeak.training.recorder.MetricsWriter, "write", "rows"),
            (flatpeak.training.recorder, "write_summary", "summaries"),
        ):
            patches.enter_context(patch.object(owner, function, counted(name, getattr(owner, function))))
        train(recipe)
    return counts


@contextmanager
def quick() -> Iterator[None]:
    """A context without the report's charts and the engine's self-test."""
    import flatpeak.pipeline.lifecycle
    import flatpeak.pipeline.run_components

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with (
        patch.object(flatpeak.pipeline.lifecycle, "write_report", lambda path: path / "report.html"),
        patch.object(flatpeak.pipeline.run_components, "announce_decoding", lambda *args, **settings: None),
    ):
        yield
    torch.set_num_threads(threads)


@contextmanager
def faulty(fault: Fault) -> Iterator[None]:
    """A context in which this rank gets a signal, or an error, in the third step; every rank the same in the fourth."""
    from flatpeak.rollout.engine import NativeEngine
    from flatpeak.training.recorder import Recorder

    begin, steps = Recorder.begin_step, list[int]()

    def begin_step(self: Recorder, stage: Any, step: int) -> None:
        if stage.name == "train":
            steps.append(step)
            if step == 3 and fault == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            if step == 4 and fault == "alike":
                raise RunError("a fault of all")
        begin(self, stage, step)

    stream = NativeEngine.stream

    def fail_late(self: NativeEngine, *args: Any, **settings: Any) -> Any:
        if fault == "engine" and 3 in steps:
            raise ZeroDivisionError("a fault of this rank")
        if fault == "diverged" and 4 in steps:
            raise DivergedError("logits that are NaN")
        return stream(self, *args, **settings)

    with patch.object(Recorder, "begin_step", begin_step), patch.object(NativeEngine, "stream", fail_late):
        yield


def weights(run: Path, checkpoint: str = "last") -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / checkpoint / "model.safetensors")


def trainer_tensors(run: Path, checkpoint: str = "last") -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / checkpoint / "trainer" / "state.safetensors")


def largest_gap(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name].float() - right[name].float()).abs().max()) for name in left)


def completions(run: Path) -> list[list[int]]:
    """The tokens of every completion of the run, in the order of its log."""
    files = sorted((run / "rollouts").glob("*.jsonl"))
    return [json.loads(line)["token_ids"] for file in files for line in file.read_text().splitlines()]


def rows(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without times and memory."""
    dropped = ("time", "throughput", "memory")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: v for name, v in json.loads(line).items() if not name.startswith(dropped)} for line in lines]


def files(run: Path) -> set[str]:
    """Every file of a run, by its path in it."""
    return {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
