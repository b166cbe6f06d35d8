"""The study's task: sort 2 to 5 digits, after as many dots as the policy likes, so that an answer's length is free."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

MOST_DOTS: Final = 7
"""The most dots in an SFT text; each number of them from 0 on is as frequent."""


def write_rows(directory: Path, seed: int) -> None:
    """Write train.jsonl (6,000 rows) and test.jsonl (300), all different, with an SFT text for each."""
    generator = random.Random(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < 6300:
        digits = "".join(generator.choices("0123456789", k=generator.randint(2, 5)))
        answer = "".join(sorted(digits))
        dots = "." * generator.randint(0, MOST_DOTS)
        rows.setdefault(digits, {"question": f"{digits}=", "answer": answer, "text": dots + answer})
    items = list(rows.values())
    generator.shuffle(items)
    for name, chosen in (("test", items[:300]), ("train", items[300:])):
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, chosen)) + "\n", encoding="utf-8")


def sorted_digits(completion: str, gold: str, log_metric: Callable[[str, float], None]) -> float:
    """1 for the sorted digits, whatever the dots before them; logs the characters of right and of wrong answers."""
    right = completion.strip().lstrip(".") == gold
    log_metric("right_length" if right else "wrong_length", len(completion))
    return float(right)
