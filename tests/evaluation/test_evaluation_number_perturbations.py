"""Questions with other numbers: the answer is computed, or there is no such question."""

from __future__ import annotations

import os
import re
from fractions import Fraction
from pathlib import Path

import pytest

from flatpeak.evaluation.number_perturbations import question_numbers
from flatpeak.evaluation.robustness import perturb
from flatpeak.evaluation.solution_steps import find_origins, read_steps, recompute
from flatpeak.tasks.arithmetic import ArithmeticConfig
from flatpeak.tasks.math import GSM8KConfig
from flatpeak.types import Example
from support.tables import read_tables

TABLES = read_tables(__file__)

CRATES = (
    "A grower fills 8 crates with 55 pears each. He sells half of the pears and 20% of what is left spoils. He then "
    "picks 9 pears. How many pears does he have?"
)
WORKED = (
    "There are 8*55=<<8*55=440>>440 pears.\nHe sells 440/2=<<440/2=220>>220.\nOf them 20% spoil: 220*20/100="
    "<<220*20/100=44>>44.\nHe has 220-44+9=<<220-44+9=185>>185 pears left.\n#### 185"
)


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def row(question: str, gold: str, rationale: str | None = None, id: str = "q") -> Example:
    return Example(id=id, question=question, gold=gold, rationale=rationale)


def test_marks_are_computed_again_with_the_new_numbers() -> None:
    seen = set()
    for seed in range(30):
        result = perturb(row(CRATES, "185", WORKED), "numbers", seed=seed)
        if result is None:
            continue
        crates, each, percent, more = numbers(result.question)
        left = Fraction(crates * each, 2)
        gold = left - left * percent / 100 + more
        assert gold.denominator == 1
        assert result.gold == str(gold)
        assert result.rationale is None
        assert re.sub(r"\d+", "N", result.question) == re.sub(r"\d+", "N", CRATES)
        assert percent <= 100
        seen.add(result.gold)
    assert len(seen) > 5


@pytest.mark.parametrize(("question", "gold", "rationale"), TABLES["unsure"])
def test_where_the_working_is_not_sure_there_is_no_new_question(question: str, gold: str, rationale: str) -> None:
    for seed in range(5):
        assert perturb(row(question, gold, rationale), "numbers", seed=seed) is None


def test_no_result_becomes_negative_or_fractional() -> None:
    question = "Of 24 eggs 9 break. 3 fit a box. How many boxes?"
    rationale = "After some break, <<24-9=15>>15 eggs.\nBoxes: <<15/3=5>>5\n#### 5"
    seen = [result for seed in range(40) if (result := perturb(row(question, "5", rationale), "numbers", seed=seed))]
    assert len(seen) > 20
    for result in seen:
        eggs, broken, fit = numbers(result.question)
        assert eggs >= broken
        assert (eggs - broken) % fit == 0
        assert result.gold == str((eggs - broken) // fit)
        assert result.gold != "5"  # which a model may know by heart


def test_decimals_commas_and_years_are_written_as_they_were() -> None:
    question = "In 1998 a house cost $12,500 and 2.50 more a day. How much?"
    seen = [
        perturb(row(question, "13", "<<1998+12500*2.50=33248>>\n#### 33248"), "numbers", seed=seed) for seed in range(5)
    ]
    assert seen == [None] * 5  # the gold answer is not the last result
    for seed in range(20):
        result = perturb(row(question, "33248", "<<1998+12,500*2.50=33248>>\n#### 33248"), "numbers", seed=seed)
        if result is not None:
            year, price, component = re.findall(r"[\d,.]*\d", result.question)
            assert 1978 <= int(year) <= 2018
            assert re.fullmatch(r"\d{1,2},\d{3}", price)
            assert re.fullmatch(r"\d\.\d\d", component)
            assert result.gold == str(int(year) + Fraction(price.replace(",", "")) * Fraction(component))


def test_word_problems_without_working_need_equations_that_agree() -> None:
    result = perturb(row("Vera had 31 plums and ate 12. How many plums are left?", "19"), "numbers", seed=1)
    assert result is not None
    had, ate = numbers(result.question)
    assert (had, ate) != (31, 12)
    assert result.gold == str(had - ate)
    # 2 + 2 and 2 * 2 fit alike, and agree on no other numbers.
    for seed in range(20):
        assert perturb(row("Vera had 2 plums and got 2. How many plums are there?", "4"), "numbers", seed=seed) is None


@pytest.mark.parametrize("question", TABLES["others"])
def test_other_questions_keep_their_numbers(question: str) -> None:
    assert perturb(row(question, "19"), "numbers", seed=0) is None
    assert perturb(row("Vera had 31 plums and ate 12. How many are left?", "B"), "numbers", seed=0) is None


@pytest.mark.parametrize("operators", [("+",), ("-",), ("*",)])
def test_arithmetic_is_done_again(operators: tuple[str, ...]) -> None:
    config = ArithmeticConfig(min_value=-20, max_value=120, operators=operators, train_size=1, test_size=40)
    for one in config.load().test:
        result = perturb(one, "numbers", seed=3)
        assert result is not None
        a, b = result.columns["a"], result.columns["b"]
        assert result.question == f"{a}{operators[0]}{b}="
        assert result.question != one.question
        assert int(result.gold) == {"+": a + b, "-": a - b, "*": a * b}[operators[0]]
        assert [len(str(abs(new))) for new in (a, b)] == [len(str(abs(one.columns[key]))) for key in ("a", "b")]


def test_columns_that_repeat_question_and_answer_follow() -> None:
    columns = {"question": CRATES, "answer": WORKED, "grade": 5}
    example = Example(id="q", question=CRATES, gold="185", rationale=WORKED, columns=columns)
    result = next(one for seed in range(20) if (one := perturb(example, "numbers", seed=seed)))
    assert result.columns == {"question": result.question, "answer": f"#### {result.gold}", "grade": 5}


def test_a_few_shot_question_gets_the_numbers_of_the_plain_one_between_its_cues() -> None:
    seen = 0
    for seed in range(20):
        plain = perturb(row(CRATES, "185", WORKED), "numbers", seed=seed)
        cued = perturb(row(f"Question: {CRATES}\nAnswer:", "185", f" {WORKED}"), "numbers", seed=seed)
        assert (plain is None) == (cued is None)
        if plain is not None and cued is not None:
            assert (cued.question, cued.gold) == (f"Question: {plain.question}\nAnswer:", plain.gold)
            seen += 1
    assert seen > 5


def test_replaying_the_same_numbers_gives_the_same_results() -> None:
    steps, result = read_steps(WORKED), question_numbers(CRATES)
    assert result is not None
    origins = find_origins(steps, result, question=CRATES, rationale=WORKED)
    assert origins is not None
    assert recompute(steps, origins, [number.value for number in result]) == [440, 220, 44, 185]


def by_value(before: str, after: str, rationale: str) -> Fraction:
    """The new answer by replacing values in the text of the marks: another way than by the origin of operands."""
    pattern = r"\d[\d,]*(?:\.\d+)?|\d+"
    pairs = zip(re.findall(pattern, before), re.findall(pattern, after), strict=True)
    new = {Fraction(old.rstrip(",").replace(",", "")): Fraction(now.rstrip(",").replace(",", "")) for old, now in pairs}
    new |= {old / 100: now / 100 for old, now in new.items() if f"{old}%" in before}
    value = Fraction(0)
    for expression, result in re.findall(r"<<([^=]*)=([^>]*)>>", rationale):
        text = re.sub(
            r"\d+\.?\d*|\.\d+",
            lambda m: f"Fraction('{new.get(Fraction(m[0]), Fraction(m[0]))}')",
            expression.replace(",", "").replace("$", ""),
        )
        value = eval(text, {"Fraction": Fraction})
        new[Fraction(result.replace(",", "").replace("$", ""))] = value
    return value


@pytest.mark.skipif("FLATPEAK_DATA" not in os.environ, reason="FLATPEAK_DATA names no folder of data sets")
def test_gsm8k_with_other_numbers_has_the_answers_of_its_working() -> None:
    task = GSM8KConfig(path=str(Path(os.environ["FLATPEAK_DATA"]) / "gsm8k")).load()
    result = [
        (example, other) for example in (*task.train, *task.test) if (other := perturb(example, "numbers", seed=0))
    ]
    assert len(result) > 300
    for example, other in result:
        assert other.gold == str(by_value(example.question, other.question, example.rationale or "")), example.id
