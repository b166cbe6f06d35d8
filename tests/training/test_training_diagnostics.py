"""A run that learns nothing says so, with the figures that say why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatpeak.runs.notices import no_signal_message
from flatpeak.training.collect import Rollouts
from flatpeak.training.history import SequenceWeightMonitor, ZeroAdvantageMonitor
from flatpeak.training.objective_config import SamplerCorrectionConfig
from flatpeak.types import Scores
from support.models import EOS
from support.training import Group, completion, prompt

SENTENCE = (
    "no group of the last 3 steps had rewards that differ, so no weight changed: the mean reward is 0.25, no answer is "
    "found in 50% of completions and 75% are cut at rollout.max_new_tokens=2; see groups/informative_fraction in "
    "docs/metrics.md"
)


def rollouts(scores: list[list[float | None]]) -> Rollouts:
    """Two groups of two completions, three of the four cut at two tokens."""
    texts = ([5, 6], [5, 6]), ([5, 6], [EOS])
    groups = [
        Group(prompt=prompt(str(index), [3]), completions=tuple(completion(tokens, limit=2) for tokens in group))
        for index, group in enumerate(texts)
    ]
    return Rollouts(
        groups=groups,
        scores=Scores(total=scores, parts={}),
        cursor=0,
        drawn=2,
        pass_rate=0.0,
        rollout_seconds=0.0,
        reward_seconds=0.0,
    )


def watched(**settings: Any) -> tuple[ZeroAdvantageMonitor, list[str]]:
    notices: list[str] = []
    unanswered = {"unanswered": lambda group: [True, False]}
    return ZeroAdvantageMonitor(notices.append, **{"limit": 2, "other_terms": False, **unanswered, **settings}), notices


DEAD, NONE = rollouts([[0.0, 0.0], [0.5, 0.5]]), torch.zeros(2, 2)


def test_the_third_step_in_a_row_without_an_informative_group_is_announced_with_its_figures() -> None:
    steps, notices = watched()
    for _ in range(2):
        steps.observe(DEAD, NONE)
    assert notices == []
    steps.observe(DEAD, NONE)
    assert notices == [SENTENCE]


def test_then_the_10th_the_30th_and_the_100th() -> None:
    steps, notices = watched()
    for _ in range(120):
        steps.observe(DEAD, NONE)
    assert [text.split()[5] for text in notices] == ["3", "10", "30", "100"]


def test_an_informative_step_begins_the_count_again_and_nothing_is_said_twice() -> None:
    steps, notices = watched()
    for count in (2, 4, 9, 10):
        for _ in range(count):
            steps.observe(DEAD, NONE)
        steps.observe(DEAD, torch.tensor([[0.0, 0.0], [1.0, -1.0]]))
    assert [text.split()[5] for text in notices] == ["3", "10"]


def test_steps_without_any_score_have_a_notice_of_their_own() -> None:
    steps, notices = watched()
    for _ in range(5):
        steps.observe(rollouts([[None, None], [None, None]]), NONE)
    assert notices == []


def test_a_loss_with_other_terms_moves_weights_all_the_same() -> None:
    steps, notices = watched(other_terms=True, unanswered=None)
    for _ in range(3):
        steps.observe(DEAD, NONE)
    assert "so the rewards changed no weight: the mean reward is 0.25 and 75% are cut" in notices[0]


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({"reward": None, "unanswered": None}, "no weight changed: no completion has a score and 93% are cut at"),
        ({"reward": 1.0, "unanswered": 0.0}, "no weight changed: the mean reward is 1 and 93% are cut at"),
    ],
)
def test_the_sentence_gives_the_figures_that_there_are(figures: dict[str, Any], found: str) -> None:
    assert found in no_signal_message("4 of 4 RL steps", truncated=0.93, limit=None, **figures)


def test_a_run_that_learns_nothing_says_so_and_its_report_too(recipe: Any, watch: Any) -> None:
    import flatpeak

    seen = watch()
    rewards = {"correctness": {"type": "number", "extraction": "answer_tag"}}
    result = flatpeak.train(recipe(rewards=rewards, training={"steps": 3}), progress=seen)
    (notice,) = [text for text in seen.notices if text.startswith("no group of the last 3 steps")]
    assert "no answer is found in 100% of completions" in notice
    assert seen.values("policy/grad_norm") == [0.0] * 3
    page = result.report.read_text(encoding="utf-8")
    assert "no group of 3 of 3 RL steps had rewards that differ, so no weight changed: the mean reward is 0," in page
    assert not any("policy/loss" in text for text in seen.notices)
    assert "About 0 with one update per rollout" in page


def test_a_first_task_whose_questions_the_main_reward_refuses_is_announced_without_answers(
    recipe: Any, train: Any, watch: Any, tmp_path: Any
) -> None:
    rows = tmp_path / "rows.jsonl"
    row = '{{"question": "{}", "options": ["1", "2"], "answer": "A"}}\n'
    rows.write_text("".join(row.format(f"{n}+{n}=") for n in range(9)), encoding="utf-8")
    seen = watch()
    config = recipe(
        task={"type": "choices", "train": [{"path": str(rows), "options": "options"}]},
        rewards={"correctness": {"type": "choice", "extraction": "letter"}},
        curriculum={
            "task": {"type": "arithmetic", "max_value": 5, "train_size": 5, "test_size": 2},
            "steps": 3,
            "rewards": {"correctness": {"type": "number", "extraction": "answer_tag"}},
        },
        training={"steps": 4},
        model={"new": {"config": {"max_position_embeddings": 64}}},
    )
    train(config, progress=seen)
    (notice,) = [text for text in seen.notices if text.startswith("no group of the last 3 steps")]
    assert "the mean reward is 0 and" in notice


def test_a_run_that_learns_says_nothing_of_the_kind(recipe: Any, train: Any, watch: Any) -> None:
    seen = watch()
    parity = lambda group: [float(sum(c.token_ids) % 2) for c in group.completions]  # noqa: E731
    train(recipe(training={"steps": 4}), reward=parity, progress=seen)
    assert not any("had rewards that differ" in text for text in seen.notices)


def test_weights_of_whole_completions_far_below_1_are_told_at_the_first_and_the_tenth_step() -> None:
    said: list[str] = []
    monitor = SequenceWeightMonitor(SamplerCorrectionConfig(type="truncate", level="sequence", cap=3.0))
    for mean in (1.0, 0.8, float("nan"), *[0.434] * 11):
        monitor.observe({"rollout/correction_mean": mean}, notice=said.append)
    monitor.observe({}, notice=said.append)
    assert [text.partition(" so far")[0] for text in said] == ["in 1 step", "in 10 steps"]
    assert "below 0.8 on average (now 0.43)" in said[0]
    assert "the cap of 3 takes most from long completions" in said[0]


def test_weights_of_single_tokens_are_no_such_notice() -> None:
    said: list[str] = []
    monitor = SequenceWeightMonitor(SamplerCorrectionConfig(type="truncate", level="token"))
    monitor.observe({"rollout/correction_mean": 0.1}, notice=said.append)
    assert said == []
