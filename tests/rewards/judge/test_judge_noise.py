from __future__ import annotations

import json
from collections import Counter

import pytest

from flatpeak.errors import UserError
from flatpeak.rewards.judge.build import judge_noise, judge_reward
from support.judge_server import texts
from support.judges import FunctionJudge, group


def wavering(marks):
    """A judge that gives each answer its marks in turn; None is no verdict."""
    asked = Counter()

    def reply(content):
        answer = texts({"messages": [{"role": "user", "content": content}]})["answer"]
        mark = marks[answer][asked[answer] % len(marks[answer])]
        asked[answer] += 1
        return "no" if mark is None else json.dumps({"rationale": "", "correct": mark})

    return FunctionJudge(reply)


def test_the_noise_is_the_spread_of_repeated_marks_beside_that_of_different_answers(tmp_path):
    judge = judge_reward(
        wavering({"a": [0, 1, 0, 1], "b": [1], "c": [1, None]}), cache=tmp_path / "cache.sqlite", repair=False
    )
    result = judge_noise(judge, [group("a", "b", ""), group("c", id="row-2")], repeats=4)
    judge.close()
    # Variances 1/3, 0 and 0; means 1/2, 1 and 1.
    assert result.within == pytest.approx((1 / 9) ** 0.5)
    assert result.between == pytest.approx(12**-0.5)
    assert (result.answers, result.missing) == (3, 2)


@pytest.mark.parametrize(("answers", "repeats", "named"), [(["a"], 1, "repeats=1"), (["", "."], 3, "marked twice")])
def test_a_spread_of_nothing_is_refused(answers, repeats, named):
    judge = judge_reward(wavering({"a": [1]}))
    with pytest.raises(UserError, match=named):
        judge_noise(judge, [group(*answers)], repeats=repeats)
    judge.close()
