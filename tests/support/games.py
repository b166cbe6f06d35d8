"""Recipes of games and the files that their runs leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flatpeak.config.load import merge
from flatpeak.runs.metrics import read_metrics

WORDS = "<call>add(a={a},b={b})</call><result>{answer}</result>{answer}"
CHARACTERS: dict[str, Any] = {"tokenizer": {"type": "characters"}, "config": {"max_position_embeddings": 128}}
"""Of the rationales, and so also of calls and answers."""
WON: Any = {"rewards": {"won": {"type": "environment"}}, "evaluation": {"accuracy": None, "metric": "reward"}}
"""A reward of the environment's alone."""


def game(code: str, name: str = "Even", **sections: Any) -> dict[str, Any]:
    """The sections of a game of this file, in turns of up to four tokens."""
    base = {
        "model": {"new": CHARACTERS},
        "task": {"rationale": WORDS},
        "environment": f"{code}:{name}",
        "episodes": {"max_tokens": 4},
        "rollout": {"max_new_tokens": 60},
        **WON,
    }
    return merge(base, sections)


def rows_of(run: Path, step: int = 1) -> list[dict[str, Any]]:
    """The rollouts of a step."""
    return [json.loads(line) for line in (run / "rollouts" / f"step_{step:06}.jsonl").read_text().splitlines()]


def metrics_of(run: Path, stage: str = "train") -> list[dict[str, Any]]:
    """The metrics of a stage's steps."""
    return [row for row in read_metrics(run / "metrics.jsonl") if row["stage"] == stage]
