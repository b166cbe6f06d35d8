"""A number whose role the text leaves open is never replaced: an answer computed from it may be wrong."""

from __future__ import annotations

import re

import pytest

from flatpeak.evaluation.robustness import perturb
from flatpeak.evaluation.solution_steps import ambiguous_word, keeps_order
from flatpeak.types import Example
from support.tables import read_tables

TABLES = read_tables(__file__)

SEEDS = range(12)
MARBLES = "A jar holds 37 marbles. Vera adds 26 marbles and takes out 17 marbles. How many marbles are in the jar?"
MARBLES_WORKED = "With hers there are <<37+26=63>>63 marbles.\nThen <<63-17=46>>46 marbles are left.\n#### 46"


def golds(question: str, rationale: str) -> list[tuple[str, str]]:
    """(question, gold) of every seed that gives one."""
    gold = rationale.rpartition("#### ")[2]
    example = Example(id="q", question=question, gold=gold, rationale=rationale)
    result = [perturb(example, "numbers", seed=seed) for seed in SEEDS]
    return [(one.question, one.gold) for one in result if one is not None]


def test_where_every_role_is_said_the_question_gets_other_numbers_and_the_answer_they_give() -> None:
    result = golds(MARBLES, MARBLES_WORKED)
    assert len(result) == len(SEEDS)
    for question, gold in result:
        held, added, taken = map(int, re.findall(r"\d+", question))
        assert gold == str(held + added - taken) != "46"


@pytest.mark.parametrize("case", TABLES["uncertain"], ids=lambda case: case["why"])
def test_a_question_with_an_uncertain_role_is_left_out(case: dict[str, str]) -> None:
    assert golds(case["question"], case["rationale"].strip()) == []


def test_a_question_that_asks_for_whole_things_of_each_keeps_its_divisions_whole() -> None:
    question = "Pens cost $3 each. Sam has $36 and Kim has $24. How many pens can they buy?"
    result = golds(question, "With $36 and $24 they have <<36+24=60>>60.\nAt that cost <<60/3=20>>20 pens.\n#### 20")
    assert result
    for changed, gold in result:
        price, one, other = map(int, re.findall(r"\d+", changed))
        assert (one % price, other % price) == (0, 0)
        assert gold == str(one // price + other // price)


def test_what_was_more_remains_more() -> None:
    question = "Mia has 40 beads, Ben has 25 beads. Mia gives away 12 beads. How many beads do they have?"
    rationale = "Mia keeps <<40-12=28>>28 beads.\nIn all <<28+25=53>>53 beads.\n#### 53"
    result = golds(question, rationale)
    assert result
    for changed, gold in result:
        mia, ben, given = map(int, re.findall(r"\d+", changed))
        assert given < ben < mia - given < mia
        assert gold == str(mia - given + ben)
    assert keeps_order([3, 1, 2, 2], [30, 0, 5, 5])
    assert not keeps_order([3, 1, 2, 2], [30, 0, 5, 6])
    assert not keeps_order([3, 1], [1, 1])


def test_hours_a_day_and_days_a_week_stay_within_their_bounds() -> None:
    question = "Uma paints 5 hours a day on 4 days a week. She has 30 weeks. How many hours does she paint?"
    rationale = (
        "A week has <<5*4=20>>20 hours, as she paints 5 hours on 4 days.\nIn 30 weeks <<20*30=600>>600 hours.\n#### 600"
    )
    result = golds(question, rationale)
    assert result
    for changed, _ in result:
        hours, days, _ = map(int, re.findall(r"\d+", changed))
        assert days < 7
        assert hours < 24


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("It costs at most $5.", "at most"),
        ("Two of 7 pens.", "two"),
        ("He walks the fence.", "fence"),
        ("She is 4 years older than Tim.", "than"),
        ("He found 7 pens. How many pens has he?", None),
        ("The contest has 5 guests.", None),
    ],
)
def test_words_that_leave_a_role_open_are_named(text: str, word: str | None) -> None:
    assert ambiguous_word(text) == word
