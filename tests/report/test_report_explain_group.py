"""`flatpeak explain`: the figures are those the algorithm used."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from flatpeak.cli.main import app
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.report.explain_group import ExplainedCompletion, Explanation, explain, render, visible_token
from support.reward_functions import low_first_digit
from support.runs import quick_train, tiny_recipe


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("runs")
    made = {}
    for name, rate in (("still", 0.0), ("moved", 3e-2)):
        recipe = tiny_recipe(directory, run={"name": name}, optimizer={"learning_rate": rate}, training={"steps": 3})
        made[name] = quick_train(recipe, reward=low_first_digit)
    return made


@pytest.mark.slow
def test_a_policy_that_never_moved_has_ratio_1_and_no_kl(runs: dict[str, Path]) -> None:
    explanation = explain(runs["still"], step=2)
    assert len(explanation.completions) == 4
    for messages in explanation.completions:
        assert messages.ratios == pytest.approx([1.0] * len(messages.tokens), abs=1e-5)
        assert messages.kls == pytest.approx([0.0] * len(messages.tokens), abs=1e-9)


def test_rewards_advantages_and_weights_follow_the_rule(runs: dict[str, Path]) -> None:
    explanation = explain(runs["moved"], step=1)
    rewards = [messages.row["reward"] for messages in explanation.completions]
    assert max(rewards) > min(rewards)  # the group chosen is one that differs
    mean = sum(rewards) / 4
    std = (sum((reward - mean) ** 2 for reward in rewards) / 3) ** 0.5
    for messages in explanation.completions:
        assert messages.row["advantage"] == pytest.approx((messages.row["reward"] - mean) / (std + 1e-6), rel=1e-5)
        assert messages.weight == pytest.approx(1 / (16 * len(messages.tokens)))  # sequence_mean, N = 4 prompts of 4
        assert len(messages.tokens) == len(messages.row["token_ids"]) == len(messages.ratios)


def test_a_completion_that_was_cut_off_and_masked_has_no_weight(runs: dict[str, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs["moved"], tmp_path / "masked")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["objective"]["truncated"] = "mask"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [json.loads(line) for line in (run / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    kept = sum(row["finish_reason"] != "length" for row in rows)
    weights = [(one.row["finish_reason"], one.weight, len(one.tokens)) for one in explain(run, step=1).completions]
    assert weights
    for reason, weight, length in weights:
        assert weight == (0.0 if reason == "length" else pytest.approx(1 / (kept * length)))


def test_tokens_that_were_rewarded_have_gained(runs: dict[str, Path]) -> None:
    messages = explain(runs["moved"], step=1).completions
    gained = [t.ratios[0] for t in messages if t.row["advantage"] > 0]
    lost = [t.ratios[0] for t in messages if t.row["advantage"] < 0]
    assert sum(gained) / len(gained) > 1 > sum(lost) / len(lost)
    assert max(max(t.kls) for t in messages) > 1e-4


def test_it_is_told_in_words_and_figures(runs: dict[str, Path]) -> None:
    console = Console(width=140, record=True, file=None, force_terminal=False)
    explanation = explain(runs["moved"], step=1)
    with console.capture() as capture:
        console.print(render(explanation))
    text = capture.get()
    assert f"group {explanation.completions[0].row['group']}" in text
    assert "baseline mean, scale std" in text
    assert f"x{explanation.completions[0].ratios[0]:.2f}" in text


def test_whitening_and_a_loss_of_another_weight_are_told(runs: dict[str, Path]) -> None:
    explanation = explain(runs["moved"], step=1)
    advantage = explanation.config.advantage.model_copy(
        update={"function": "gdpo", "whiten": "completions", "limit": 0.3}
    )
    objective = explanation.config.objective.model_copy(update={"loss": "vespo"})
    config = explanation.config.model_copy(update={"advantage": advantage, "objective": objective})
    console = Console(width=140, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(render(replace(explanation, config=config)))
    assert "advantages by gdpo, whitened over completions, within ±0.3" in capture.get()
    assert "A token's loss is its weight times vespo." in capture.get()


def test_a_step_or_group_that_is_not_there_is_one_clear_error(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no rollouts of step 9: choose one of 1, 2, 3"):
        explain(runs["still"], step=9)
    with pytest.raises(UserError, match="no group 'nobody'"):
        explain(runs["still"], step=1, group="nobody")
    with pytest.raises(UserError, match="is not a run's directory"):
        explain(tmp_path, step=1)


def test_the_newest_logged_step_is_explained_unless_another_is_named(runs: dict[str, Path]) -> None:
    assert explain(runs["still"]).step == 3
    assert explain(runs["still"], step=2).step == 2


def test_a_run_that_logged_no_rollouts_says_why(runs: dict[str, Path], tmp_path: Path) -> None:
    empty = tmp_path / "x"
    empty.mkdir()
    for name in ("manifest.json", "config.yaml"):
        shutil.copy(runs["still"] / name, empty)
    with pytest.raises(UserError, match=r"x has no rollouts: no step of RL has been logged yet$"):
        explain(empty)
    recipe = (empty / "config.yaml").read_text()
    (empty / "config.yaml").write_text(recipe.replace("log_rollouts_every: 1", "log_rollouts_every: 0"))
    with pytest.raises(UserError, match=r"x has no rollouts: run\.log_rollouts_every=0 logs none; raise it$"):
        explain(empty, step=1)


def test_the_name_of_a_run_in_runs_is_suggested(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    shutil.copy(runs["still"] / "manifest.json", tmp_path / "runs" / "x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^x is not a run's directory: did you mean runs/x\?$"):
        explain(Path("x"))


def told(rewards: dict[str, float]) -> ExplainedCompletion:
    row = {
        "group": "g", "gold": "[7]", "prompt": "[/bold] 3+4=", "reward": 0.0012345, "advantage": -1.2345678,
        "finish_reason": "length", "rewards": rewards,
    }  # fmt: skip
    return ExplainedCompletion(row=row, weight=0.000123456, tokens=("7",), ratios=(1.0,), kls=(0.0,))


PARTS = {"correctness": 0.123456, "format": 0.25, "conciseness_of_the_answer": 1.0, "language": -2.5}


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_figure_is_cut_on_a_terminal_of_any_width(width: int) -> None:
    explanation = Explanation(step=1, config=RunConfig(), completions=(told(PARTS), told(PARTS)))
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(render(explanation, width=width))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    names = ("reward", "advantage", "weight per token", "tokens", "ended by", *PARTS)
    values = ("0.001234", "-1.235", "0.0001235", "length", "0.1235", "0.25", "-2.5")
    assert [one for one in (*names, *values) if one not in text] == []
    assert "gold [7]" in text
    assert "[/bold] 3+4=" in text


def test_equal_completions_are_one_line_with_their_count() -> None:
    completions = (told({"format": 0.0}), told({"format": 1.0}), told({"format": 0.0}))
    console = Console(width=120, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(render(Explanation(step=1, config=RunConfig(), completions=completions)))
    rows = [line.replace("│", " ").split() for line in capture.get().splitlines() if line.startswith("│")]
    assert [(row[:2], row[-1]) for row in rows] == [(["0", "2"], "0"), (["1", "1"], "1")]
    assert [line.split()[0] for line in capture.get().splitlines() if "x1.00" in line] == ["0", "1"]


def test_the_name_of_a_reward_that_is_wider_than_the_terminal_goes_on_in_the_next_line() -> None:
    name = "n" * 50
    explanation = Explanation(step=1, config=RunConfig(), completions=(told({name: 0.5}),))
    console = Console(width=40, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(render(explanation, width=40))
    assert capture.get().count("n" * 20) >= 1
    assert "…" not in capture.get()
    assert "0.5" in capture.get()


def test_output_that_is_piped_has_every_figure_in_one_table(runs: dict[str, Path]) -> None:
    done = CliRunner().invoke(app, ["explain", str(runs["moved"])])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("step 3, group ")
    assert "…" not in done.stdout
    (head,) = (line for line in lines if "advantage " in line and "reward" in line)
    assert all(name in head for name in ("weight per token", "tokens", "ended by", "correctness"))


class Decoder:
    """A tokenizer of a few tokens, one of which has no text of its own."""

    texts = ("a", "\n", " ", "  ", " b", "\\frac", "\u200b", "", "\t", "é", "")

    def decode(self, ids: list[int]) -> str:
        return self.texts[ids[0]]

    def convert_ids_to_tokens(self, token: int) -> str:
        return "▁" if token == 7 else ""


def test_no_token_is_invisible() -> None:
    displayed = [visible_token(Decoder(), token) for token in range(len(Decoder.texts))]
    assert displayed == ["a", "\\n", "␣", "␣␣", " b", "\\frac", "\\u200b", "▁", "\\t", "é", "<10>"]
