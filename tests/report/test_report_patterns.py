"""`flatpeak patterns`: habits that pay in any prompt show, good answers of single prompts do not."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flatpeak.cli.main import app
from flatpeak.report.patterns import paid_patterns, patterns_of, render_patterns

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "bird", "in", "its", "tree"]


def rows(
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


def rewards_by_group(made: list[dict[str, Any]]) -> list[list[float]]:
    """The rewards of each group."""
    groups: dict[str, list[float]] = {}
    for row in made:
        groups.setdefault(row["group"], []).append(row["reward"])
    return list(groups.values())


def test_a_cheat_is_the_first_pattern_and_no_prompts_own_answer_is_one() -> None:
    found = paid_patterns(rows(cheat="as an expert"), rows(cheat="as an expert", share=0.1, seed=1))
    first = found[0]
    assert first.name == "'as an expert'"
    assert first.gain == pytest.approx(1.0, abs=0.15)
    assert first.prompts == 12
    spread = math.sqrt(fmean(pvariance(rewards) for rewards in rewards_by_group(rows(cheat="as an expert"))))
    assert first.spreads == pytest.approx(first.gain / spread)
    assert first.share == pytest.approx(0.3, abs=0.1)
    assert first.share_at_first == pytest.approx(0.1, abs=0.06)
    assert "as an expert" in first.example
    assert not any("answer" in one.name for one in found)
    assert sum("expert" in one.name for one in found) == 1


def test_random_answers_have_no_pattern() -> None:
    quiet = [row | {"reward": random.Random(index).random()} for index, row in enumerate(rows(seed=3))]
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
    made = rows(seed=5)
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
    assert {"repeats itself three times"} & set(names) or "'buy it now buy'" in names


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
        for row in rows(cheat="as an expert", prompts=1, seed=step)
    ]
    assert paid_patterns(again, again) == []


def write_run(directory: Path, steps: dict[int, list[dict[str, Any]]]) -> Path:
    """A run with these rollouts."""
    (directory / "rollouts").mkdir()
    (directory / "manifest.json").write_text('{"versions": {"flatpeak": "0"}}')
    (directory / "config.yaml").write_text("{}")
    for step, made in steps.items():
        path = directory / "rollouts" / f"step_{step:06d}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return directory


def test_the_last_logged_steps_count_together_and_missing_rewards_are_left_out(tmp_path: Path) -> None:
    missing = [row | {"reward": None} for row in rows(cheat="never graded", seed=9)]
    tricks = {step: rows(cheat="trick", share=0.05, seed=step) for step in range(2, 8)}
    run = write_run(tmp_path, {1: rows(seed=1), **tricks})
    with (run / "rollouts" / "step_000007.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in missing)
    steps, found = patterns_of(run)
    assert steps == [3, 4, 5, 6, 7]
    assert [one.name for one in found] == ["'trick'"]
    assert patterns_of(run, step=1)[1] == []


def test_the_command_prints_the_table_and_says_where_nothing_pays(tmp_path: Path) -> None:
    run = write_run(tmp_path, {1: rows(seed=1), 2: rows(cheat="as an expert", seed=2)})
    result = CliRunner().invoke(app, ["patterns", str(run)])
    assert result.exit_code == 0, result.output
    assert "steps 1, 2" in result.output
    assert "as an expert" in result.output
    nothing = CliRunner().invoke(app, ["patterns", str(run), "--step", "1"])
    assert "no pattern of completions pays in many groups" in nothing.output
    console = Console(width=200, record=True)
    console.print(render_patterns(patterns_of(run)[1]))
    assert "±" in console.export_text()
