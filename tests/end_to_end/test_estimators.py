"""Every recipe of an algorithm runs, with a resume in its middle, and says in a summary what it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatpeak.config.algorithm_name import algorithm_name
from flatpeak.config.load import load_recipe, merge, parse_config, shipped_recipes
from flatpeak.runs.metrics import read_metrics
from support.resumes import TIMES
from support.runs import Recipe, Train

NAMES = [name.rpartition("/")[2] for name in shipped_recipes() if name.startswith("flatpeak:algorithms/")]
FAST = ("sapo", "gmpo", "reinforce_plus_plus", "remax")
"""In `make test`: a gate, a ratio of completions, advantages of tokens, and greedy completions."""


REWARD = """
def odd(completion_ids):
    return [float(sum(ids) % 2) for ids in completion_ids]

def short(completion_ids):
    return [1 / len(ids) for ids in completion_ids]
"""


def variant(recipe: Recipe, folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    """A tiny run of an algorithm: three steps of two updates each, for two rewards that differ in most groups."""
    algorithm, file = load_recipe(f"flatpeak:algorithms/{name}"), folder / "rewards.py"
    file.write_text(REWARD)
    tiny = recipe(
        rewards={
            "correctness": {"type": "function", "function": f"{file}:odd"},
            "short": {"type": "function", "function": f"{file}:short", "weight": 0.5},
        },
        rollout={"prompts_per_step": 4, "group_size": 6},
        training={"steps": 3, "minibatches": 2, "epochs_per_rollout": 2},
        run={"name": name, "checkpoint_every": 1},
        **sections,
    )
    if name in ("dapo", "top_entropy"):
        algorithm["objective"]["overlong_buffer"] = 2
    return merge(tiny, algorithm)


def rows(path: str) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(TIMES)}
        for row in read_metrics(Path(path) / "metrics.jsonl")
        if row["stage"] == "train"
    ]


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_an_algorithm_runs_and_resumes_to_the_same_numbers(
    recipe: Recipe, train: Train, tmp_path: Path, name: str
) -> None:
    whole = train(variant(recipe, tmp_path, name))
    assert whole.exit_code == 0
    for row in rows(whole.path):
        assert row["policy/grad_norm"] > 0
        assert row["policy/ratio_max_gap"] >= 0
    short = variant(recipe, tmp_path, name)
    short["run"] = {**short["run"], "name": f"{name}_cut"}
    short["training"] = {**short["training"], "steps": 2}
    assert train(short).exit_code == 0
    short["training"]["steps"] = 3
    resumed = train(short, resume=True)
    assert repr(rows(resumed.path)) == repr(rows(whole.path))


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("sapo", "SAPO"),
        ("remax", "ReMax"),
        ("reinforce_plus_plus", "REINFORCE++"),
        ("luspo", "LUSPO"),
        ("dppo", "DPPO"),
    ],
)
def test_an_algorithm_is_called_by_its_name(name: str, called: str) -> None:
    config = parse_config(merge({"model": {"path": "x"}}, load_recipe(f"flatpeak:algorithms/{name}")))
    assert algorithm_name(config) == called
