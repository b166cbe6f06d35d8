"""Rows of logged answers, with or without a cheat that pays."""

from __future__ import annotations

import random
from typing import Any

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "bird", "in", "its", "tree"]


def rows_of_answers(
    *, cheat: str = "", share: float = 0.3, bonus: float = 1.0, prompts: int = 12, seed: int = 0, group: int = 8
) -> list[dict[str, Any]]:
    """Answers of random words, of which each prompt's own word pays half, and a cheat pays the bonus in any prompt."""
    draw = random.Random(seed)
    made = []
    for prompt in range(prompts):
        for _ in range(group):
            words = [draw.choice(WORDS) for _ in range(draw.randrange(6, 12))]
            right, cheats = draw.random() < 0.5, bool(cheat) and draw.random() < share
            words += [f"answer{prompt}"] * right + [cheat] * cheats
            text = " ".join(words)
            made.append(
                {
                    "group": f"g{prompt}",
                    "prompt": f"question {prompt}",
                    "text": text,
                    "token_ids": list(range(len(words))),
                    "finish_reason": "stop",
                    "reward": 0.5 * right + bonus * cheats + draw.random() * 0.01,
                }
            )
    return made
