"""Tiny twins of the shipped profiles: the same recipe with a tiny model of the same architecture, run to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flatpeak
from flatpeak.config.load import shipped_recipes
from flatpeak.runs.metrics import read_metrics
from support.models import letter_tokenizer, tiny_model

pytestmark = pytest.mark.slow

PROFILES = [name for name in shipped_recipes() if name.endswith("gb")]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """A directory with a few problems in the layout of MATH."""
    directory = tmp_path / "problems"
    directory.mkdir()
    for split, count in (("train", 8), ("test", 4)):
        rows = [
            {
                "problem": f"What is {n} + {n}?",
                "solution": f"It is $\\boxed{{{2 * n}}}$.",
                "level": "Level 1",
                "type": "Algebra",
            }
            for n in range(1, count + 1)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return directory


@pytest.mark.parametrize("name", PROFILES)
def test_a_tiny_twin_runs_to_its_end(name: str, problems: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_model("qwen2", hidden_size=64, intermediate_size=128, max_position_embeddings=2048).save_pretrained(model)
    letter_tokenizer().save_pretrained(model)
    settings = {
        "run": {"name": "twin", "directory": str(tmp_path / "runs")},
        "model.path": str(model),
        "model.device": "cpu",
        "task.path": str(problems),
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6},
        "training": {"steps": 2},
        "evaluation": {"size": 2, "final_size": 4},
    }
    result = flatpeak.train(name, settings=settings, progress=False)
    assert (result.summary.status, result.summary.last_step) == ("done", 2)
    steps = [row for row in read_metrics(result.path / "metrics.jsonl") if row["stage"] == "train"]
    assert [row["step"] for row in steps] == [1, 2]
