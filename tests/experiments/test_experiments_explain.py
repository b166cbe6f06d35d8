"""`flatpeak explain`: the figures are those the algorithm used."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from flatpeak.api import train
from flatpeak.errors import UserError
from flatpeak.experiments.explain import explain, render
from run_parts import tiny_recipe


def first_token(completion: str) -> float:
    """Some completions of a group differ in their first character."""
    return float(completion[:1] in "01234")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("runs")
    made = {}
    for name, rate in (("still", 0.0), ("moved", 3e-2)):
        recipe = tiny_recipe(directory, run={"name": name}, optimizer={"learning_rate": rate}, training={"steps": 3})
        made[name] = train(recipe, reward=first_token).path
    return made


def test_a_policy_that_never_moved_has_ratio_1_and_no_kl(runs: dict[str, Path]) -> None:
    explanation = explain(runs["still"], step=2)
    assert len(explanation.completions) == 4
    for told in explanation.completions:
        assert told.ratios == pytest.approx([1.0] * len(told.tokens), abs=1e-5)
        assert told.kls == pytest.approx([0.0] * len(told.tokens), abs=1e-9)


def test_rewards_advantages_and_weights_follow_the_rule(runs: dict[str, Path]) -> None:
    explanation = explain(runs["moved"], step=1)
    rewards = [told.row["reward"] for told in explanation.completions]
    assert max(rewards) > min(rewards)  # the group chosen is one that differs
    mean = sum(rewards) / 4
    std = (sum((reward - mean) ** 2 for reward in rewards) / 3) ** 0.5
    for told in explanation.completions:
        assert told.row["advantage"] == pytest.approx((told.row["reward"] - mean) / (std + 1e-6), rel=1e-5)
        assert told.weight == pytest.approx(1 / (16 * len(told.tokens)))  # sequence_mean, N = 4 prompts of 4
        assert len(told.tokens) == len(told.row["token_ids"]) == len(told.ratios)


def test_tokens_that_were_rewarded_have_gained(runs: dict[str, Path]) -> None:
    told = explain(runs["moved"], step=1).completions
    gained = [t.ratios[0] for t in told if t.row["advantage"] > 0]
    lost = [t.ratios[0] for t in told if t.row["advantage"] < 0]
    assert sum(gained) / len(gained) > 1 > sum(lost) / len(lost)
    assert max(max(t.kls) for t in told) > 1e-4


def test_it_is_told_in_words_and_figures(runs: dict[str, Path]) -> None:
    console = Console(width=140, record=True, file=None, force_terminal=False)
    explanation = explain(runs["moved"], step=1)
    with console.capture() as capture:
        console.print(render(explanation))
    text = capture.get()
    assert f"group {explanation.completions[0].row['group']}" in text
    assert "baseline mean, scale std" in text
    assert f"x{explanation.completions[0].ratios[0]:.2f}" in text


def test_a_step_or_group_that_is_not_there_is_one_clear_error(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no rollouts of step 9: choose one of 1, 2, 3"):
        explain(runs["still"], step=9)
    with pytest.raises(UserError, match="no group 'nobody'"):
        explain(runs["still"], step=1, group="nobody")
    with pytest.raises(UserError, match="is not a run's directory"):
        explain(tmp_path, step=1)
