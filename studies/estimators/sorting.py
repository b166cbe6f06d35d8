"""The study's second task: rows of digits to be sorted, so that answers have 2 to 8 tokens and are unequally hard."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_rows(directory: Path, seed: int) -> None:
    """Write train.jsonl (6,800 rows) and test.jsonl (600), all different, of 2 to 8 digits: those of 2 are few."""
    generator = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < 7400:
        digits = "".join(generator.choices("0123456789", k=generator.randint(2, 8)))
        rows.setdefault(digits, "".join(sorted(digits)))
    items = list(rows.items())
    generator.shuffle(items)
    for name, part in (("test", items[:600]), ("train", items[600:])):
        lines = [json.dumps({"question": f"{question}=", "answer": answer}) for question, answer in part]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
