"""Tiny recipes for whole runs, a progress display that records and acts, and runs without slow extras."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from support.models import RUN_SIZES

Recipe = Callable[..., dict[str, Any]]
"""The fixture `recipe`, and below those of the same names."""
Train = Callable[..., Any]
Finished = Callable[..., Path]
MakeModel = Callable[..., tuple[Any, Any]]
Send = Callable[[int], Callable[[], None]]


def tiny_recipe(directory: Path, **sections: Any) -> dict[str, Any]:
    """Single-digit sums, a model of a few thousand parameters, two steps; `sections` are merged over it."""
    from flatpeak.config.load import merge

    base = {
        "run": {"name": "tiny", "directory": str(directory), "checkpoint_every": 0},
        "model": {"new": {"architecture": "qwen2", "config": RUN_SIZES}, "device": "cpu"},
        "task": {"type": "arithmetic", "max_value": 9, "train_size": 30, "test_size": 6},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 4},
        "optimizer": {"learning_rate": 1e-2},
        "training": {"steps": 2},
        "evaluation": {"every": 0},
    }
    return merge(base, sections)


class FinishedRuns:
    """Tiny runs that are done: each recipe is trained once, and copied for every test that asks for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: dict[str, Path] = {}

    def copy(self, directory: Path, train: Train, *, reward: Callable[..., Any] | None, sections: Any) -> Path:
        """A copy in `directory` of the run of these sections, by a reward that is a function of a module's."""
        key = json.dumps([reward and f"{reward.__module__}.{reward.__qualname__}", sections], sort_keys=True)
        if key not in self.made:
            recipe = tiny_recipe(self.root / str(len(self.made)), **sections)
            self.made[key] = Path(train(recipe, reward=reward, progress=False).path)
        made = self.made[key]
        copy = directory / made.name
        shutil.copytree(made, copy, symlinks=True)
        for path in (copy / "config.yaml", copy / "manifest.json"):
            path.write_text(path.read_text().replace(str(made.parent), str(directory)))
        return copy


def replace_in_importers(patch: pytest.MonkeyPatch, function: Callable[..., Any], replacement: Any) -> None:
    """Replace a function in every loaded module of flatpeak.pipeline that imports it, but not in its own."""
    for name, module in list(sys.modules.items()):
        imported = name.startswith("flatpeak.pipeline.") and name != function.__module__
        if imported and vars(module).get(function.__name__) is function:
            patch.setattr(module, function.__name__, replacement)


def speed_up_runs(patch: pytest.MonkeyPatch) -> None:
    """Leave out most of a tiny run's time: the report's charts, the engine's self-test, and waiting for disks."""
    import flatpeak.pipeline.train  # noqa: F401  (loads what is replaced below)
    from flatpeak.pipeline.rollout_engines import announce_decoding
    from flatpeak.report.page import write_report

    patch.setattr(os, "fsync", lambda descriptor: None)
    replace_in_importers(patch, write_report, lambda path: path / "report.html")
    replace_in_importers(patch, announce_decoding, lambda *args, **settings: None)


def quick_train(*args: Any, **settings: Any) -> Path:
    """`flatpeak.train` in silence, without what takes most of a tiny run's time; the run's directory."""
    with pytest.MonkeyPatch.context() as patch:
        speed_up_runs(patch)
        import flatpeak.pipeline.train

        return Path(flatpeak.pipeline.train.train(*args, progress=False, **settings).path)


class Watcher:
    """A Progress that records metrics and notices, and calls `at[stage, step]` when that step is recorded."""

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


Watch = Callable[..., Watcher]
