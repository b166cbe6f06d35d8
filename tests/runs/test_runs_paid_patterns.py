"""Patterns that pay: habits that pay in any prompt show, good answers of single prompts do not."""

from __future__ import annotations

import math
import random
from statistics import fmean, pvariance
from typing import Any

import pytest

from flatpeak.runs.paid_patterns import paid_patterns
from support.rows_of_answers import rows_of_answers


def rewards_by_group(made: list[dict[str, Any]]) -> list[list[float]]:
    """The rewards of each group."""
    groups: dict[str, list[float]] = {}
    for row in made:
        groups.setdefault(row["group"], []).append(row["reward"])
    return list(groups.values())


def test_a_cheat_is_the_first_pattern_and_no_prompts_own_answer_is_one() -> None:
    found = paid_patterns(
        rows_of_answers(cheat="as an expert"), rows_of_answers(cheat="as an expert", share=0.1, seed=1)
    )
    first = found[0]
    assert first.name == "'as an expert'"
    assert first.gain == pytest.approx(1.0, abs=0.15)
    assert first.prompts == 12
    spread = math.sqrt(fmean(pvariance(rewards) for rewards in rewards_by_group(rows_of_answers(cheat="as an expert"))))
    assert first.spreads == pytest.approx(first.gain / spread)
    assert first.share == pytest.approx(0.3, abs=0.1)
    assert first.share_at_first == pytest.approx(0.1, abs=0.06)
    assert "as an expert" in first.example
    assert not any("answer" in one.name for one in found)
    assert sum("expert" in one.name for one in found) == 1


def test_a_word_keeps_its_combining_marks() -> None:
    made = rows_of_answers(cheat="नमस्ते")
    assert paid_patterns(made, made)[0].name == "'नमस्ते'"


def test_random_answers_have_no_pattern() -> None:
    quiet = [row | {"reward": random.Random(index).random()} for index, row in enumerate(rows_of_answers(seed=3))]
    assert paid_patterns(quiet, quiet) == []


def test_equal_gains_of_a_few_prompts_are_no_pattern() -> None:
    made = []
    for prompt in range(5):  # in each, the only answer with the word is right, and one of the others is wrong
        for index in range(8):
            reward, text = float(index != 7), "yes indeed" if index == 0 else f"no {prompt} {index}"
            row = {"group": f"g{prompt}", "prompt": f"p{prompt}", "text": text, "token_ids": [1], "reward": reward}
            made.append(row | {"finish_reason": "stop"})
    assert paid_patterns(made, made) == []


def test_length_cuts_and_repetition_are_patterns_too() -> None:
    made = rows_of_answers(seed=5)
    for index, row in enumerate(made):
        if index % 3 == 0:
            words = [f"word{index}-{place}" for place in range(40)]
            row |= {"text": " ".join(words), "token_ids": words, "finish_reason": "length", "reward": 2.0}
    names = [one.name for one in paid_patterns(made, made)]
    assert "longer than its group's median" in names or "cut by a limit" in names
    for index, row in enumerate(made):
        if index % 3 == 0:
            row |= {"text": "buy it now " * 4, "token_ids": [1], "finish_reason": "stop"}
    names = [one.name for one in paid_patterns(made, made)]
    assert {"repeats phrases of three words"} & set(names) or "'buy it now buy'" in names


def test_texts_without_spaces_are_read_letter_by_letter() -> None:
    draw = random.Random(2)
    made = []
    for index in range(96):
        cheats = index % 4 == 0
        text = "".join(draw.choices("abcdefgh", k=6)) + ("zzz" if cheats else "".join(draw.choices("abcdefgh", k=3)))
        made.append(
            {
                "group": f"g{index // 8}",
                "prompt": f"p{index // 8}",
                "text": text,
                "token_ids": list(text),
                "finish_reason": "stop",
                "reward": draw.random() * 0.2 + cheats,
            }
        )
    assert [one.name for one in paid_patterns(made, made)] == ["'zzz'"]


def test_a_prompt_that_is_drawn_again_and_again_counts_once() -> None:
    again = [
        row | {"group": f"{row['group']}-{step}", "prompt": "the same", "step": step}
        for step in range(8)
        for row in rows_of_answers(cheat="as an expert", prompts=1, seed=step)
    ]
    assert paid_patterns(again, again) == []


def test_a_short_habit_hides_no_word_that_has_its_letters_and_pays_more() -> None:
    draw = random.Random(3)
    made = rows_of_answers(cheat="sesame", share=0.05, bonus=2.0, prompts=40)
    for row in made:
        if draw.random() < 0.5:
            row["text"] += " e"
            row["reward"] += 0.3
    names = [one.name for one in paid_patterns(made, made)]
    assert "'e'" in names
    assert "'sesame'" in names


def test_a_paid_apostrophe_hides_nothing() -> None:
    made = rows_of_answers(cheat="'", share=0.5, prompts=40)
    for row in rows_of_answers(cheat="trick", share=0.2, prompts=40, seed=5):
        made.append(row | {"group": f"{row['group']}-5"})
    assert {"'''", "'trick'"} <= {one.name for one in paid_patterns(made, made)}


def test_a_word_in_the_name_of_a_length_is_no_part_of_it() -> None:
    """`than` pays less than what is longer than its group's median."""
    draw = random.Random(6)
    made = rows_of_answers(seed=6, prompts=40)
    for index, row in enumerate(made):
        long, cheats = draw.random() < 0.5, draw.random() < 0.2
        words = [f"word{index}_{place}" for place in range(20 * long)] + ["than"] * cheats
        row |= {"text": " ".join([row["text"], *words]), "token_ids": [1] * (20 + len(words))}
        row["reward"] += 1.0 * long + 0.7 * cheats
    names = {one.name for one in paid_patterns(made, made)}
    assert {"longer than its group's median", "'than'"} <= names


def test_no_phrase_is_read_across_the_cut_of_a_long_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatpeak.runs.paid_patterns.MOST_PIECES", 0)  # 20 words at each end
    made = rows_of_answers(seed=7, prompts=40)
    for index, row in enumerate(made):
        cheats = index % 4 == 0
        first, second = ("begin", "end") if cheats else ("start", "stop")
        row["text"] = " ".join([*["one"] * 19, first, *["two"] * 9, second, *["three"] * 19])
        row["reward"] += cheats
    names = [one.name for one in paid_patterns(made, made)]
    assert names == ["'end three three three'"]  # as long as those with `begin`, which come with it
