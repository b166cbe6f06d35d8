"""The Hub data sets of a task, by its configuration."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from flatpeak.tasks.config import TaskConfig, hub_datasets, is_generated

ROWS = [{"hub": "me/a"}, {"path": "x.jsonl", "hub": None}, {"hub": "me/b"}, {"hub": "me/a"}]


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ({"type": "arithmetic"}, ()),
        ({"type": "gsm8k"}, ("openai/gsm8k",)),
        ({"type": "gsm8k", "path": "data"}, ()),
        ({"type": "math"}, ("EleutherAI/hendrycks_math",)),
        ({"type": "math", "split": "math500"}, ("EleutherAI/hendrycks_math", "HuggingFaceH4/MATH-500")),
        ({"type": "math", "split": "math500", "math500_path": "m.jsonl"}, ("EleutherAI/hendrycks_math",)),
        ({"type": "math", "split": "math500", "path": "data"}, ()),
        ({"type": "mmlu"}, ("cais/mmlu",)),
        ({"type": "mmlu_pro"}, ("TIGER-Lab/MMLU-Pro",)),
        ({"type": "rows", "train": ROWS[:2], "test": ROWS[2:]}, ("me/a", "me/b")),
        ({"type": "choices", "train": ROWS[1:3]}, ("me/b",)),
        ({"type": "rows", "train": [{"hub": "/data/of-mine"}, {"hub": "src"}, {"hub": "me/a"}]}, ("me/a",)),
        ({"type": "camel_ai", "subjects": ["physics", "biology"]}, ("camel-ai/physics", "camel-ai/biology")),
        ({"type": "dr_sci"}, ("MiniByte-666/Dr.SCI",)),
        ({"type": "countdown"}, ()),
        ({"type": "countdown", "source": "published"}, ("Jiayi-Pan/Countdown-Tasks-3to4",)),
        ({"type": "countdown", "source": "published", "path": "c.jsonl"}, ()),
        ({"type": "preferences"}, ("tatsu-lab/alpaca_farm",)),
        ({"type": "preferences", "path": "p.jsonl"}, ()),
        ({"type": "custom", "factory": "mine.py:task"}, ()),
    ],
    ids=str,
)
def test_a_task_names_the_hub_data_sets_that_it_reads_and_no_others(section: dict[str, Any], names: Any) -> None:
    config: Any = TypeAdapter(TaskConfig).validate_python(section)
    assert hub_datasets(config) == names
    generated = section["type"] == "arithmetic" or (section["type"] == "countdown" and "source" not in section)
    assert is_generated(config) == generated
