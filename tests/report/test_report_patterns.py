"""`flatpeak patterns`: the last logged steps of a run, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from typer.testing import CliRunner

from flatpeak.cli.main import app
from flatpeak.report.patterns import patterns_of, render_patterns
from support.rows_of_answers import rows_of_answers


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
    missing = [row | {"reward": None} for row in rows_of_answers(cheat="never graded", seed=9)]
    tricks = {step: rows_of_answers(cheat="trick", share=0.05, seed=step) for step in range(2, 8)}
    run = write_run(tmp_path, {1: rows_of_answers(seed=1), **tricks})
    with (run / "rollouts" / "step_000007.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in missing)
    steps, found = patterns_of(run)
    assert steps == [3, 4, 5, 6, 7]
    assert [one.name for one in found] == ["'trick'"]
    assert patterns_of(run, step=1)[1] == []


def test_the_command_prints_the_table_and_says_where_nothing_pays(tmp_path: Path) -> None:
    run = write_run(tmp_path, {1: rows_of_answers(seed=1), 2: rows_of_answers(cheat="as an expert", seed=2)})
    result = CliRunner().invoke(app, ["patterns", str(run)])
    assert result.exit_code == 0, result.output
    assert "steps 1, 2" in result.output
    assert "as an expert" in result.output
    nothing = CliRunner().invoke(app, ["patterns", str(run), "--step", "1"])
    assert "no pattern of completions pays in 5 prompts or more" in nothing.output
    console = Console(width=200, record=True)
    console.print(render_patterns(patterns_of(run)[1]))
    assert "±" in console.export_text()


def test_steps_whose_rewards_are_all_alike_are_no_all_clear(tmp_path: Path) -> None:
    run = write_run(tmp_path, {1: [row | {"reward": 1.5} for row in rows_of_answers(cheat="trick", seed=1)]})
    nothing = CliRunner().invoke(app, ["patterns", str(run)])
    assert "rewards differ within fewer than 5 groups of these steps, so that nothing can be compared" in nothing.output


def test_the_steps_before_a_fork_are_read_alone(tmp_path: Path) -> None:
    """Another reward may have paid for them."""
    steps = {step: rows_of_answers(cheat="trick" if step < 3 else "", seed=step) for step in range(1, 5)}
    run = write_run(tmp_path, steps)
    (run / "manifest.json").write_text('{"versions": {"flatpeak": "0"}, "forked": {"step": 2}}')
    assert patterns_of(run) == ([3, 4], [])
    before, (found,) = patterns_of(run, step=2)
    assert (before, found.name) == ([1, 2], "'trick'")


def test_what_a_terminal_would_obey_is_printed_escaped(tmp_path: Path) -> None:
    made = rows_of_answers(cheat="\x1b[31m red")
    result = CliRunner().invoke(app, ["patterns", str(write_run(tmp_path, {1: made}))])
    assert "\x1b" not in result.output
    assert "\\x1b" in result.output
