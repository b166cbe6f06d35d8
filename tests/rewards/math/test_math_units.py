"""Words after a number: units, which an answer may add, and words that make another number of it."""

from __future__ import annotations

from fractions import Fraction

import pytest

from flatpeak.rewards.math import read_number
from flatpeak.rewards.math.units import read_unit
from support.graded_cases import grade
from support.tables import read_tables

TABLES = read_tables(__file__)


@pytest.mark.parametrize("words", TABLES["no_units"])
def test_words_that_change_or_deny_a_number_are_no_unit_of_it(words: str) -> None:
    assert grade([(rf"\boxed{{5 {words}}}", "5"), (rf"\boxed{{5\text{{ {words}}}}}", "5")]) == [False, False]
    assert read_number(f"5 {words}") is None


@pytest.mark.parametrize(("words", "factor"), TABLES["magnitudes"])
def test_short_magnitudes_count(words: str, factor: int) -> None:
    assert read_number(rf"5\text{{ {words}}}") == Fraction(5 * factor)
    assert grade([(rf"\boxed{{5\text{{ {words} dollars}}}}", gold) for gold in ("5", str(5 * factor))]) == [False, True]


@pytest.mark.parametrize("words", TABLES["units"])
def test_the_same_words_before_a_noun_are_a_unit(words: str) -> None:
    assert read_unit(words) is not None
    assert grade([(rf"\boxed{{5 {words}}}", "5"), (rf"\boxed{{5\text{{ {words}}}}}", "5")]) == [True, True]
