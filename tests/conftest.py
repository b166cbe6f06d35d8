"""Fixtures for whole runs: tiny recipes, a tiny model, a progress display, and runs to be interrupted and resumed."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flatpeak  # noqa: F401  before torch, which reads the environment that this sets
from support.models import run_model, save_run_model
from support.pushed_runs import make_finished_run, make_run_with_keys
from support.runs import Finished, FinishedRuns, Train, Watcher, speed_up_runs, tiny_recipe

# A suite under nohup ignores SIGHUP, and one that a script starts in the background SIGINT; what tests start would
# inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Garbage collection while eleven thousand tests are collected would take a third of that time, and find nothing.
gc.disable()


def pytest_collection_finish() -> None:
    """Turn garbage collection on, with all that there is by now in its oldest generation, which it seldom looks at."""
    gc.freeze()
    gc.unfreeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Leave all there is to the end of the process: pytest would look through it five times for garbage."""
    gc.freeze()


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`recipe(**sections)`: a tiny recipe whose runs go to `tmp_path / "runs"`."""
    return lambda **sections: tiny_recipe(tmp_path / "runs", **sections)


@pytest.fixture
def make_tiny_model() -> Callable[..., tuple[Any, Any]]:
    """`make_tiny_model(seed=0, **config)`: (model, tokenizer)."""
    return run_model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A saved model with its tokenizer."""
    return save_run_model(tmp_path / "base")


@pytest.fixture
def watch() -> type[Watcher]:
    """The class of the recording progress display."""
    return Watcher


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """flatpeak.train without what takes most of a tiny run's time (`speed_up_runs`).

    Beside a model of the caller's, the tiny recipe's own is left out: naming both is refused.
    """
    import flatpeak.pipeline.train

    speed_up_runs(monkeypatch)

    def run(config: Any, *, model: Any = None, **options: Any) -> Any:
        if model is not None and isinstance(config, dict):
            rest = {key: value for key, value in config.get("model", {}).items() if key not in ("new", "device")}
            config = {**config, "model": rest}
        return flatpeak.pipeline.train.train(config, model=model, **options)

    return run


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory: pytest.TempPathFactory) -> FinishedRuns:
    """The session-wide store of the `finished` fixture."""
    return FinishedRuns(tmp_path_factory.mktemp("finished_runs"))


@pytest.fixture
def finished(finished_runs: FinishedRuns, train: Train, tmp_path: Path) -> Finished:
    """`finished(reward, **sections)`: a tiny run that is done, in `tmp_path / "runs"`; each is trained once."""
    return lambda reward=None, **sections: finished_runs.copy(
        tmp_path / "runs", train, reward=reward, sections=sections
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for torch, for the length of the test."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def send() -> Callable[[int], Callable[[], None]]:
    """`send(signal)` makes a function that sends the signal to this very process."""
    return lambda number: lambda: os.kill(os.getpid(), number)


@pytest.fixture
def make_run(recipe: Callable[..., Any], train: Callable[..., Any]) -> Callable[..., Any]:
    """`make_run(name, **sections)`: a run that uses all that a resumed one could get wrong."""

    def make(name: str = "tiny", **sections: Any) -> Any:
        from flatpeak.config.load import merge
        from support.resumes import EVERYTHING, Run

        return Run(train, Watcher, recipe(**merge(merge(EVERYTHING, sections), {"run": {"name": name}})))

    return make


@pytest.fixture(scope="session")
def outcomes() -> dict[str, dict[str, Any]]:
    """The session-wide store of the `whole` fixture."""
    return {}


@pytest.fixture
def whole(outcomes: dict[str, dict[str, Any]], make_run: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """`whole(**sections)`: the outcome of `make_run`'s run with these, uninterrupted; each is trained once."""

    def get(**sections: Any) -> dict[str, Any]:
        key = json.dumps(sections, sort_keys=True)
        if key not in outcomes:
            outcomes[key] = make_run(f"whole-{len(outcomes)}", **sections).finish()
        return outcomes[key]

    return get


@pytest.fixture
def uninterrupted(whole: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The outcome of such a run without other sections."""
    return whole()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of rules alone; to be read, and changed only in copies."""
    return make_finished_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="session")
def run_with_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose recipe was given keys."""
    return make_run_with_keys(tmp_path_factory.mktemp("keys") / "home")
