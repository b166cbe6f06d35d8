"""A stop signal ends a run at once, whatever it is doing, and the resumed run ends as if there had been none."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import flatpeak.training.recorder
from flatpeak.policy.model import Policy
from flatpeak.rollout.slots import CompletionBuffer, DecodeSlots
from flatpeak.runs.metrics import read_metrics
from flatpeak.training.optimizer import BaseLearner
from support.resumes import TIMES, CountedCalls, Judge, MakeRun, Whole, assert_same
from support.runs import Recipe, Send, Train, Watch

pytestmark = pytest.mark.usefixtures("one_thread")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A function that a run calls over and over; the signal comes within one of its calls."""

    owner: Any
    name: str
    left: int
    """Calls that may follow: those of an update that has begun to change the weights."""
    engine: str = "native"


MOMENTS = {
    "sampling": Moment(owner=DecodeSlots, name="step", left=0),
    "sampling by transformers": Moment(owner=CompletionBuffer, name="draw", left=1, engine="generate"),
    "a pass over a micro-batch": Moment(owner=Policy, name="token_logprobs", left=40),
    "a reward in the trainer's process": Moment(owner=Judge, name="__call__", left=0),
    "a save": Moment(owner=flatpeak.training.recorder, name="write_checkpoint", left=1),
}


REGULARIZED = {"strength": "ratio:0.3", "check_every": 3}
COMBINED: dict[str, dict[str, Any]] = {
    **{
        f"a penalty by {difference} differences": {"gradient_regularization": {**REGULARIZED, "difference": difference}}
        for difference in ("forward", "central", "exact")
    },
    "a penalty along a random direction": {"gradient_regularization": {**REGULARIZED, "direction": "random"}},
    "a penalty of some groups, now and then": {
        "gradient_regularization": {**REGULARIZED, "every": 2, "group_fraction": 0.5, "kl_in_penalty": False}
    },
    "recomputed layers": {
        "training": {"activation_checkpointing": True},
        "model": {"new": {"config": {"num_hidden_layers": 3}}},
    },
    "bfloat16": {"model": {"dtype": "bfloat16"}, "optimizer": {"learning_rate": 1e-3}},
    "states in host memory": {"optimizer": {"offload": True}},
    "resets": {"reference": {"reset_every": 2, "reset_optimizer": True}},
}
"""Sections of runs whose updates or checkpoints hold more than weights and AdamW's states."""


@pytest.fixture
def stop_and_resume(make_run: MakeRun, whole: Whole) -> Callable[..., int]:
    """`stop_and_resume(name, share, number)`: a run that gets a signal after this share of a moment's calls.

    It is stopped by the signal, keeps its last whole step and resumes to the same bits. The number of calls that the
    moment's function still got is returned.
    """

    def check(name: str, *, share: float, number: int) -> int:
        moment = MOMENTS[name]
        sections = {"rollout": {"engine": moment.engine}}
        expected, run = whole(**sections), make_run(**sections)
        with pytest.MonkeyPatch.context() as patch:
            counted = CountedCalls(patch, (moment.owner, moment.name))
            make_run("counted", **sections).start(overwrite=True)
        at = 1 + int(share * counted.count)
        with pytest.MonkeyPatch.context() as patch:
            signalled = CountedCalls(
                patch, (moment.owner, moment.name), at=at, action=partial(os.kill, os.getpid(), number)
            )
            stopped = run.start(overwrite=True)
        assert (stopped.exit_code, stopped.summary.status) == (128 + number, "stopped")
        steps = [row for row in read_metrics(run.path / "metrics.jsonl") if row["stage"] != "eval"]
        if stopped.summary.checkpoints == ("step_000000",):  # SFT is done, and no step of RL
            assert not [row for row in steps if row["stage"] == "train"]
        else:
            assert stopped.summary.last_step == (steps[-1]["step"] if steps else 0)
        assert_same(run.go_on(), expected)
        return signalled.count - at

    return check


@pytest.mark.parametrize("name", MOMENTS)
def test_a_signal_ends_a_run_at_once_and_nothing_is_lost(stop_and_resume: Callable[..., int], name: str) -> None:
    assert stop_and_resume(name, share=0.6, number=signal.SIGTERM) <= MOMENTS[name].left


@pytest.mark.slow
@pytest.mark.parametrize("name", MOMENTS)
def test_signals_at_random_moments_lose_nothing(stop_and_resume: Callable[..., int], name: str) -> None:
    chance = random.Random(name)
    for number in SIGNALS * 3:
        assert stop_and_resume(name, share=chance.random(), number=number) <= MOMENTS[name].left


@pytest.mark.parametrize(
    "name", [name if name == "resets" else pytest.param(name, marks=pytest.mark.slow) for name in COMBINED]
)
def test_a_signal_at_a_layer_of_an_update_loses_nothing(make_run: MakeRun, whole: Whole, name: str) -> None:
    """Each run gets two signals, the second after it was resumed."""
    sections, chance = COMBINED[name], random.Random(name)
    expected = whole(**sections)
    moment = Moment(owner=BaseLearner, name="_before_layer", left=0)
    with pytest.MonkeyPatch.context() as patch:
        counted = CountedCalls(patch, (moment.owner, moment.name))
        make_run("counted", **sections).start(overwrite=True)
    run = make_run(**sections)
    for shares, resume in (((0.2, 0.5), False), ((0.1, 0.3), True)):
        at = 1 + int(chance.uniform(*shares) * counted.count)
        with pytest.MonkeyPatch.context() as patch:
            CountedCalls(
                patch, (moment.owner, moment.name), at=at, action=partial(os.kill, os.getpid(), signal.SIGTERM)
            )
            assert run.start(resume=resume).exit_code == 128 + signal.SIGTERM
    assert_same(run.go_on(), expected)


def test_a_signal_leaves_no_time_for_the_report(
    recipe: Recipe, train: Train, watch: Watch, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its charts take longer to draw than anything else between the signal and the end."""
    written: list[Path] = []
    monkeypatch.setattr("flatpeak.pipeline.lifecycle.write_report", written.append)
    stopped = train(recipe(), progress=watch({("train", 1): send(signal.SIGTERM)}))
    assert (stopped.exit_code, written) == (143, [])
    assert train(recipe(), resume=True).exit_code == 0
    assert written == [stopped.path]


SLEEPING = """
import time
from pathlib import Path

def rewards(completions):
    Path({mark!r}).touch()
    time.sleep(60)
    return [0.0 for _ in completions]

def reward(completion):
    return rewards([completion])[0]
"""


@pytest.mark.parametrize("function", ["rewards", "reward"])
def test_a_signal_does_not_wait_for_a_reward_in_this_process_or_in_a_worker(
    recipe: Recipe, train: Train, tmp_path: Path, function: str
) -> None:
    mark, file = tmp_path / "called", tmp_path / "sleeping.py"
    file.write_text(SLEEPING.format(mark=str(mark)))
    reward = {"type": "function", "function": f"{file}:{function}", "timeout": "auto" if function == "rewards" else 90}
    config = recipe(rewards={"correctness": reward})

    def send_when_called() -> None:
        while not mark.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send_when_called, daemon=True)
    thread.start()
    start = time.monotonic()
    assert train(config).exit_code == 143
    assert time.monotonic() - start < 40  # of 60 seconds for the first call alone


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("raises", [False, True], ids=["a score of 0", "an error of its own"])
def test_what_a_reward_makes_of_the_interruption_enters_no_evaluation_and_no_step(
    recipe: Recipe, train: Train, call: int, raises: bool
) -> None:
    """The first and the third call are of evaluations."""

    def run(name: str, *, at: int = 0, **options: Any) -> tuple[int, list[dict[str, Any]]]:
        calls = itertools.count(1)

        def length(completions: list[str]) -> list[float]:
            try:
                if next(calls) == at:
                    os.kill(os.getpid(), signal.SIGTERM)
            except Exception as error:
                if raises:
                    raise RuntimeError("no answer") from error
                return [0.0 for _ in completions]
            return [float(len(completion) % 3) for completion in completions]

        config = recipe(run={"name": name}, evaluation={"every": 1, "accuracy": None, "metric": "reward"})
        done = train(config, reward=length, **options)
        rows = read_metrics(Path(done.path) / "metrics.jsonl")
        return done.exit_code, [{key: row[key] for key in row if not key.startswith(TIMES)} for row in rows]

    assert run("stopped", at=call)[0] == 143
    assert run("stopped", resume=True) == run("whole")
