from __future__ import annotations

import time

import pytest

from flatpeak.rewards.judge_score import parse_judge_score


@pytest.mark.parametrize(
    ("verdict", "score"),
    [
        ("0.5", 0.5),
        ("Score: 1", 1.0),
        ("I give it .75.", 0.75),
        ("First 0.2, on reflection 0.9", 0.9),
        ("0.5/1.0", 0.5),
        ("0.0 out of 1.0", 0.0),
        ("<score>0.3</score>", 0.3),
        ("<score> 0.3 </score> of at most 1.0", 0.3),
        ("<score>0.9</score> no: <SCORE>0.1</SCORE>", 0.1),
        ("<score>0.3/1</score>", 0.3),
        ("<think>0.9 or <score>0.9</score></think>0.2", 0.2),
    ],
)
def test_the_last_tag_or_else_the_last_number_is_the_score(verdict, score):
    assert parse_judge_score(verdict) == score


@pytest.mark.parametrize(
    "verdict",
    [
        *("good", "-0.5", "\u22120.5", "1.01", "1e9", "1.5e9", "0.1.2", "0,5", "8/10", "0.5/0.0", "80%", "v0.5", "inf"),
        *(
            "<score>high</score> 0.5",
            "<score>0.5</score><score>10</score>",
            "<score></score>",
            "<score>0.5 or 1</score>",
        ),
        *("<think>0.5", "<think>0.5</think>", "9" * 5000, "0.5" * 2000),
    ],
)
def test_a_verdict_without_a_valid_score_has_none(verdict):
    assert parse_judge_score(verdict) is None


@pytest.mark.parametrize(
    ("verdict", "score"), [("8/10", 8.0), ("10.0", 10.0), ("-3", -3.0), ("8/5", None), ("11", None), ("-6", None)]
)
def test_the_range_is_the_callers(verdict, score):
    assert parse_judge_score(verdict, low=-5, high=10) == score


def test_the_ends_of_the_range_belong_to_it():
    assert parse_judge_score("0.1", low=0.1, high=0.3) == 0.1
    assert parse_judge_score("0.3 out of 0.3", low=0.1, high=0.3) == 0.3


@pytest.mark.parametrize("piece", ["<score>", "9", "0.", "-", " out of ", "1 out of ", " "])
def test_no_verdict_is_slow_to_read(piece):
    start = time.process_time()
    parse_judge_score(piece * (200_000 // len(piece)))
    assert time.process_time() - start < 1.0
