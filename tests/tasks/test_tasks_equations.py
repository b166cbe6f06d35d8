"""Equations found behind word problems, and problems made from them, by hand."""

from __future__ import annotations

import json

import pytest
from studies.word_problems.equations import (
    find_equation,
    numbers_in,
    rationale,
    results,
    variants,
    word_problems,
    worked,
)

from flatpeak.types import Example


def example(question: str, gold: str, *, id: str = "x") -> Example:
    return Example(id=id, question=question, gold=gold)


@pytest.mark.parametrize(
    ("question", "gold", "working"),
    [
        ("3 boxes of 4 eggs: how many eggs?", "12", "3*4=12\n#### 12"),
        ("Of 20 birds 12 left. How many stay?", "8", "20-12=8\n#### 8"),
        ("12 left of the 20 birds.", "8", "20-12=8\n#### 8"),
        ("50 apples in 5 bags", "10", "50/5=10\n#### 10"),
        ("He had 20, lost 12, then each of the 5 friends brought as many", "40", "20-12=8 8*5=40\n#### 40"),
        ("From 50 take 3 bags of 4", "38", "3*4=12 50-12=38\n#### 38"),
    ],
)
def test_the_simplest_equation_that_fits_is_written_out(question: str, gold: str, working: str) -> None:
    equation = find_equation(question, gold)
    assert equation is not None
    assert rationale(equation, numbers_in(question)) == working


@pytest.mark.parametrize(
    ("question", "gold"),
    [
        ("3 and 4", "99"),
        ("one number: 5", "5"),
        ("3 and 4", "-1"),
        ("3 and 4", "0.75"),
        ("1 2 3 4 5 6 7", "3"),
    ],
)
def test_no_equation_is_made_up_where_none_fits(question: str, gold: str) -> None:
    assert find_equation(question, gold) is None
    assert worked(example(question, gold)).rationale is None
    assert list(variants(example(question, gold), 3, seed=0)) == []


def test_only_whole_numbers_that_stand_alone_count() -> None:
    assert numbers_in("3.5 kg, the 3rd of 1,300 at 3:30, 3/4 of 12 and $7 by 2024.") == [12, 7, 2024]


def test_steps_that_are_negative_or_not_whole_end_an_equation() -> None:
    divide = find_equation("12 by 4", "3")
    subtract = find_equation("9 less 5", "4")
    assert divide is not None
    assert subtract is not None
    assert results(divide, [12, 5]) is None
    assert results(divide, [12, 0]) is None
    assert results(subtract, [5, 9]) is None
    assert results(subtract, [9, 5]) == [4]


def test_variants_keep_the_wording_and_recompute_the_answer() -> None:
    original = example("In 2 weeks Ann reads 14 pages of 90. How many a week?", "7", id="a")
    made = list(variants(original, 20, seed=1))
    assert 10 <= len(made) <= 20
    assert len({variant.id for variant in made}) == len(made)
    for variant in made:
        weeks, pages, total = numbers_in(variant.question)
        assert variant.question == f"In {weeks} weeks Ann reads {pages} pages of {total}. How many a week?"
        assert total == 90  # no part of the equation
        assert int(variant.gold) * weeks == pages
        assert variant.rationale == f"{pages}/{weeks}={variant.gold}\n#### {variant.gold}"
    assert len({variant.question for variant in made}) > 5


def test_variants_depend_on_the_seed_and_the_id_alone() -> None:
    first = example("3 boxes of 4", "12", id="a")
    assert list(variants(first, 4, seed=1)) == list(variants(first, 4, seed=1))
    assert list(variants(first, 4, seed=1)) != list(variants(first, 4, seed=2))


def test_the_training_side_gains_equations_and_variants_and_the_held_out_side_stays(tmp_path) -> None:
    mawps, asdiv = tmp_path / "mawps.jsonl", tmp_path / "asdiv.jsonl"
    words = [chr(97 + n) * 3 for n in range(22)]  # questions that differ by more than their numbers
    rows = [{"input": f"{n} {words[n]} of {n + 1} {words[n]}s", "target": n * (n + 1)} for n in range(2, 22)]
    mawps.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asdiv.write_text(json.dumps({"body": "Ann has 3 hats.", "question": "Bob takes 2.", "answer": "1 (hat)"}) + "\n")
    plain = word_problems(str(mawps), str(asdiv), copies=0)
    grown = word_problems(str(mawps), str(asdiv), copies=2)
    assert grown.test == plain.test
    assert [e.question for e in grown.train[: len(plain.train)]] == [e.question for e in plain.train]
    assert len(grown.train) == 3 * len(plain.train)
    assert all("=" in (e.rationale or "") for e in grown.train)
