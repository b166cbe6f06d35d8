"""Sweep files over tiny runs, as text on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from support.models import RUN_SIZES

RECIPE: dict[str, Any] = {
    "run": {"checkpoint_every": 1, "log_rollouts_every": 0},
    "model": {
        "new": {"architecture": "qwen2", "config": {**RUN_SIZES, "num_hidden_layers": 1}},
        "device": "cpu",
    },
    "task": {"type": "arithmetic", "max_value": 9, "train_size": 30, "test_size": 6},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 4},
    "optimizer": {"learning_rate": 1e-2},
    "training": {"steps": 3},
    "evaluation": {"every": 0},
}
FUNCTIONS = '''
"""Functions of a user: rows of a prefix, and rewards."""

import json


def write_rows(directory, seed, count=4):
    print("rows of seed", seed)
    (directory / "rows.json").write_text(json.dumps([seed] * count))


def fail(directory, seed):
    raise ValueError(f"no rows for seed {seed}")


def first_letters(completions, **columns):
    return [sum(ord(letter) for letter in text) % 7 / 7 for text in completions]


def broken(completions, **columns):
    raise ValueError("no score today")
'''


def write_sweep(directory: Path, **sections: Any) -> Path:
    """Write sweep.yaml with recipe.yaml and functions.py beside it; its runs go to `directory / "sweeps"`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "functions.py").write_text(FUNCTIONS)
    (directory / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    content = {
        "name": "tiny",
        "directory": str(directory / "sweeps"),
        "recipe": "recipe.yaml",
        "seeds": "1-2",
        "settings": {
            "rewards": {"letters": {"type": "function", "function": f"{directory / 'functions.py'}:first_letters"}},
            "evaluation.accuracy": None,
            "evaluation.metric": "reward",
        },
        **sections,
    }
    path = directory / "sweep.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path
