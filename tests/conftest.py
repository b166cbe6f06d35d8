"""What the tests of whole runs share: tiny recipes, a tiny model, and somebody who watches a run and may stop it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

# Read when torch loads. Threads that spin while they wait make two of them far slower than one on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

CHARACTERS = "0123456789+-*=#"
"""The vocabulary of the tiny model, beside <pad>, <eos> and <unk>."""
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def tiny_recipe(directory: Path, **sections: Any) -> dict[str, Any]:
    """Single-digit sums, a model of a few thousand parameters, two steps; `sections` are merged over it."""
    from flatpeak.recipe import merge

    base = {
        "run": {"name": "tiny", "directory": str(directory), "checkpoint_every": 0},
        "model": {"new": {"architecture": "qwen2", "config": SIZES}, "device": "cpu"},
        "task": {"type": "arithmetic", "max_value": 9, "train_size": 30, "test_size": 6},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 4},
        "optimizer": {"learning_rate": 1e-2},
        "training": {"steps": 2},
        "evaluation": {"every": 0},
    }
    return merge(base, sections)


def tiny_model(*, seed: int = 0, **settings: Any) -> tuple[Any, Any]:
    """A random model and a tokenizer of single characters."""
    from flatpeak.policy.config import NewModelConfig
    from flatpeak.policy.loading import make_model

    return make_model(NewModelConfig(config={**SIZES, **settings}), texts=[CHARACTERS], seed=seed)


class Watcher:
    """A Progress that remembers what it saw, and calls `at[stage, step]` when that step is recorded."""

    def __init__(self, at: Mapping[tuple[str, int], Callable[[], None]] | None = None) -> None:
        self.at = dict(at or {})
        self.rows: list[tuple[str, int, Mapping[str, float]]] = []
        self.notices: list[str] = []

    def update(self, stage: str, *, step: int, total: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((stage, step, metrics))
        if (stage, step) in self.at:
            self.at[stage, step]()

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def steps(self, stage: str) -> list[int]:
        return [step for seen, step, _ in self.rows if seen == stage]

    def values(self, name: str, *, stage: str = "train") -> list[float]:
        return [metrics[name] for seen, _, metrics in self.rows if seen == stage]


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`recipe(**sections)`: a tiny recipe whose runs go to `tmp_path / "runs"`."""
    return lambda **sections: tiny_recipe(tmp_path / "runs", **sections)


@pytest.fixture
def make_tiny_model() -> Callable[..., tuple[Any, Any]]:
    """`make_tiny_model(seed=0, **config)`: (model, tokenizer)."""
    return tiny_model


@pytest.fixture
def watch() -> type[Watcher]:
    """The Watcher class."""
    return Watcher


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """flatpeak.train without what takes most of a tiny run's time: plots, the start-up self-test, waiting for disks."""
    import flatpeak.api

    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr("flatpeak.api.write_report", lambda path: path / "report.html")
    monkeypatch.setattr("flatpeak.api.announce_invariance", lambda *args, **settings: None)
    return flatpeak.api.train


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch with one thread, and as it was afterwards."""
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
        from flatpeak.recipe import merge
        from resume_parts import EVERYTHING, Run

        return Run(train, Watcher, recipe(**merge(merge(EVERYTHING, sections), {"run": {"name": name}})))

    return make


@pytest.fixture(scope="session")
def outcomes() -> dict[str, Any]:
    """What `uninterrupted` keeps."""
    return {}


@pytest.fixture
def uninterrupted(outcomes: dict[str, Any], make_run: Callable[..., Any]) -> dict[str, Any]:
    """The outcome of such a run, uninterrupted; made by the first test that asks for it."""
    from resume_parts import outcome

    if not outcomes:
        run = make_run("uninterrupted")
        assert run.start().exit_code == 0
        outcomes.update(outcome(run.path))
    return outcomes
