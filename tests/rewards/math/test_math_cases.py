"""The table of verdicts, class by class."""

from __future__ import annotations

from collections import Counter

import pytest

from support.graded_cases import BARE, CASES, RULES, Case, grade

KINDS = sorted({case.kind for case in (*CASES, *RULES)})


def disagreements(cases: tuple[Case, ...]) -> list[tuple[Case, bool | None]]:
    verdicts = grade((case.answer, case.gold) for case in cases)
    return [(case, verdict) for case, verdict in zip(cases, verdicts, strict=True) if verdict is not case.correct]


def test_the_table_is_large_and_asks_nothing_twice() -> None:
    asked = Counter((case.answer, case.gold) for case in (*CASES, *RULES))
    assert len(CASES) >= 220
    assert [pair for pair, times in asked.items() if times > 1] == []
    assert 0.35 < sum(case.correct for case in CASES) / len(CASES) < 0.65


@pytest.mark.parametrize("kind", KINDS)
def test_the_verdicts_are_what_mathematicians_agree_on(kind: str) -> None:
    assert disagreements(tuple(case for case in CASES if case.kind == kind)) == []


@pytest.mark.parametrize("kind", sorted({case.kind for case in RULES}))
def test_conventions_are_as_documented(kind: str) -> None:
    assert disagreements(tuple(case for case in RULES if case.kind == kind)) == []


def test_every_gold_answer_of_the_table_is_equal_to_itself() -> None:
    golds = sorted({case.gold for case in CASES if "boxed" not in case.gold})
    assert disagreements(tuple(Case(rf"$\boxed{{{gold}}}$", gold, True, "self") for gold in golds)) == []


@pytest.mark.slow
def test_a_bare_answer_is_graded_like_a_boxed_one() -> None:
    verdicts = grade(((case.answer, case.gold) for case in BARE), extraction="any")
    pairs = zip(BARE, verdicts, strict=True)
    assert [(case, verdict) for case, verdict in pairs if verdict is not case.correct] == []


def test_a_transcript_has_64_boxes_at_most() -> None:
    assert grade([(r"\boxed{4}" * number, "4") for number in (64, 65)]) == [True, False]


def test_a_bold_announcement_is_one() -> None:
    texts = (
        "**Answer:** 24",
        "**Final Answer**\n24",
        "**The final answer is:** $24$",
        "**Answer:** 24 or 25",
        "**Note:** 24",
    )
    assert grade([(text, "24") for text in texts], extraction="any") == [True, True, True, False, False]
