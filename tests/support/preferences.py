"""Preference pairs of letters, and the recipe of a reward model small enough for tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
}


def write_pairs(path: Path, *, count: int = 120, seed: int = 0) -> Path:
    """Pairs of which the answer with more of the letter that is asked for is the chosen one, whatever its length."""
    generator = random.Random(seed)
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        letter = generator.choice("ab")
        answers = ["".join(generator.choices("abcd", k=generator.randint(2, 6))) for _ in range(2)]
        answers.sort(key=lambda text: text.count(letter), reverse=True)
        if answers[0].count(letter) > answers[1].count(letter):
            rows.append({"prompt": f"{letter}{len(rows)}:", "chosen": answers[0], "rejected": answers[1]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def reward_model_recipe(directory: Path, pairs: Path, **sections: Any) -> dict[str, Any]:
    """A few steps of a tiny new model; `sections` are merged over it."""
    from flatpeak.config.load import merge

    base = {
        "run": {"name": "judge", "directory": str(directory), "checkpoint_every": 0},
        "model": {"new": {"architecture": "llama", "config": SIZES}, "device": "cpu"},
        "task": {"type": "preferences", "path": str(pairs), "test_fraction": 0.25},
        "reward_model": {
            "steps": 4,
            "batch_size": 8,
            "evaluate_every": 2,
            "optimizer": {"learning_rate": 5e-3, "schedule": "cosine", "warmup_steps": 1},
        },
    }
    return merge(base, sections)
