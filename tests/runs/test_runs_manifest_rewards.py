"""What of a reward may change when a run goes on."""

from __future__ import annotations

from typing import Any

import pytest

from flatpeak.errors import UserError
from flatpeak.runs.manifest import check_resumable

JUDGE = {"type": "judge", "rubric": "correctness", "timeout": 60.0, "budget": {"max_calls": 10}}


def recipe(**changes: Any) -> dict[str, Any]:
    return {"rewards": {"judge": JUDGE | changes}}


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"budget": {"max_calls": 20}}, "rewards.judge.budget.max_calls"), ({"timeout": 5.0}, "rewards.judge.timeout")],
)
def test_how_a_judge_is_asked_and_what_may_be_spent_can_change(changes: dict[str, Any], key: str) -> None:
    assert list(check_resumable(recipe(), recipe(**changes))) == [key]


def test_what_a_step_may_lose_to_hopeless_answers_can_change() -> None:
    changed = check_resumable({"run": {"grading_budget": 30.0}}, {"run": {"grading_budget": None}})
    assert changed == {"run.grading_budget": "30.0 -> None"}


@pytest.mark.parametrize("changes", [{"rubric": "weighted"}, {"weight": 2.0}, {"type": "math"}])
def test_what_its_scores_mean_cannot(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="cannot resume with a changed recipe"):
        check_resumable(recipe(), recipe(**changes))
