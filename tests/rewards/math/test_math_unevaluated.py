"""`evaluated: true`: answers that leave operations, or copy the question, beside those that only spell a result."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from test_math_grade_command import rows, run

from flatpeak.config.load import load_recipe
from flatpeak.rewards.config import RewardConfig
from flatpeak.rewards.math.extract import extract_answer, gold_answer
from flatpeak.rewards.math.unevaluated import is_evaluated, only_evaluated
from flatpeak.rewards.math_reward import question_only_reward, r1_zero_reward
from flatpeak.rewards.reward_set import build_reward
from flatpeak.types import Completion, Group, Prompt
from support.cpu_time import cpu_time
from support.graded_cases import CASES, grade
from support.tables import read_tables

TABLES = read_tables(__file__)

RESTATED = TABLES["restated"]
"""What a question asks for, taken from its statement."""

LEFT = [*RESTATED, *TABLES["left"]]

WRITTEN = TABLES["written"]
"""Results as models write them: nothing is left to do, or no more than in the gold."""


def config(**fields: Any) -> Any:
    return TypeAdapter(RewardConfig).validate_python(fields)


@pytest.mark.slow
def test_the_restatements_are_many_and_are_equal_to_their_golds_where_the_grader_reads_them() -> None:
    assert len(RESTATED) == len({answer for answer, _ in RESTATED}) == 23
    verdicts = grade([(rf"\boxed{{{answer}}}", gold) for answer, gold in LEFT])
    unequal = [answer for (answer, _), verdict in zip(LEFT, verdicts, strict=True) if not verdict]
    assert set(unequal) <= {r"17 \bmod 5", r"\lim_{x\to0}\frac{\sin x}{x}", r"[1,3]\cap[2,4]"}


@pytest.mark.parametrize(("answer", "gold"), LEFT)
def test_an_answer_that_leaves_operations_is_refused(answer: str, gold: str) -> None:
    assert not is_evaluated(answer, gold)
    assert is_evaluated(answer, answer)


@pytest.mark.parametrize(("answer", "gold"), WRITTEN)
def test_a_result_is_not_refused_however_it_is_written(answer: str, gold: str) -> None:
    assert is_evaluated(answer, gold)
    assert is_evaluated(answer, gold, f"What is it? ${gold}$, or another number, 12 or 7?")


def test_the_results_are_right() -> None:
    verdicts = grade([(rf"\boxed{{{answer}}}", gold) for answer, gold in WRITTEN])
    assert [pair for pair, verdict in zip(WRITTEN, verdicts, strict=True) if not verdict] == []


def test_of_the_right_answers_of_the_table_only_those_with_operations_are_refused() -> None:
    refused = set()
    for case in CASES:
        answer = extract_answer(case.answer)
        if case.correct and answer is not None and not is_evaluated(answer, gold_answer(case.gold)):
            refused.add((case.kind, answer))
    kinds = {"evaluated", "unicode", "complex", "polynomial", "function", "operators", "identity", "notation"}
    assert {kind for kind, _ in refused} <= kinds | {"spellings", "root", "interval"}
    assert 40 <= len(refused) <= 60


@pytest.mark.parametrize(("question", "answer", "gold"), TABLES["in_question"])
def test_an_answer_that_stands_in_the_question_in_another_form_is_refused(
    question: str, answer: str, gold: str
) -> None:
    assert is_evaluated(answer, gold)
    assert not is_evaluated(answer, gold, question)


HALFWAY = TABLES["halfway"]
"""Formulas of a question that are rewritten, but not into the form that it asks for."""


@pytest.mark.parametrize(("question", "answer", "gold"), HALFWAY)
def test_a_formula_of_the_question_that_is_rewritten_halfway_is_refused(question: str, answer: str, gold: str) -> None:
    assert grade([(rf"\boxed{{{answer}}}", gold)]) == [True]
    assert not is_evaluated(answer, gold, question)
    assert is_evaluated(gold.replace(" ", "  "), gold, question)


@pytest.mark.parametrize(("question", "answer", "gold"), TABLES["not_in_question"])
def test_a_result_in_another_form_is_right_where_the_question_does_not_hold_it(
    question: str, answer: str, gold: str
) -> None:
    assert is_evaluated(answer, gold, question)


@pytest.mark.parametrize(("question", "answer", "gold"), TABLES["by_chance"])
def test_what_stands_in_the_question_by_chance_or_in_the_form_of_the_gold_is_not_refused(
    question: str, answer: str, gold: str
) -> None:
    assert is_evaluated(answer, gold, question)


def test_pairs_without_an_answer_stay_as_they_are() -> None:
    pairs = [(None, "5"), ("5", "5"), ("2+3", "5"), ("2+3", r"so \boxed{5}"), ("8", "#### 8")]
    assert only_evaluated(pairs, [""] * 5) == [(None, "5"), ("5", "5"), (None, "5"), (None, r"so \boxed{5}"), pairs[4]]


def test_texts_of_any_kind_cost_little_and_raise_nothing() -> None:
    generator = random.Random(0)
    pieces = [
        r"\frac",
        "{",
        "}",
        "(",
        ")",
        "1",
        "2",
        "x",
        "+",
        "-",
        "^",
        "!",
        r"\sqrt",
        r"\sin",
        "|",
        "=",
        ",",
        " ",
        r"\cdot",
    ]
    texts = ["".join(generator.choices(pieces, k=generator.randrange(1, 40))) for _ in range(1500)]
    texts += [
        "1+" * 120 + "1",
        "x" * 250,
        "-" * 250 + "1",
        "2^" * 15 + "2",
        "9^{9^{9.5}}",
        "1e9000",
        "(" * 19 + "x" + ")" * 19,
    ]
    texts += [r"\frac1{" * 15 + "2" + "}" * 15, "x!" * 60, "|x" * 60, "5" * 3000, "(x+1)" * 50, "(1+i)^9999", "2" * 255]
    with cpu_time() as spent:
        for text in texts:
            is_evaluated(text, r"\frac12", r"Simplify $\sqrt{50}+2x$ " * 20)
            is_evaluated("5", text)
    assert spent.seconds < 10


def test_a_long_question_is_searched_in_little_time() -> None:
    with cpu_time() as spent:
        assert not is_evaluated(r"\sqrt{50}", r"5\sqrt2", "word " * 5000 + r"\n Simplify $\sqrt{50}$" + "1 + " * 5000)
    assert spent.seconds < 3


@pytest.mark.parametrize(
    ("extraction", "frame"),
    [
        ("auto", r"a</think> \boxed{{{}}}"),
        ("r1_zero", "a</think> <answer>{}</answer>"),
        ("boxed", r"a</think> \boxed{{{}}}"),
    ],
)
def test_the_mathematical_rewards_refuse_where_a_recipe_asks_for_it(
    group: Callable[..., Group], extraction: str, frame: str
) -> None:
    texts = [frame.format(answer) for answer in ("18", r"2\cdot9", r"\sum_{k=1}^{10^9} 1", "19")]
    asked = group(*texts, text="How many? <think>")
    strict = build_reward({"right": config(type="math", extraction=extraction, evaluated=True)})
    assert strict([asked]).total == [[1.0, 0.0, 0.0, 0.0]]
    assert strict.failures == {}
    loose = build_reward({"right": config(type="math", extraction=extraction)})
    assert loose([group(*texts[:2], text="How many? <think>")]).total == [[1.0, 1.0]]
    for reward in (strict, loose):
        reward.close()


@pytest.mark.slow
def test_the_published_functions_refuse_if_they_are_asked_to() -> None:
    answer, question = r"\sqrt{50}", r"Simplify $\sqrt{50}$."
    for reward, response in (
        (r1_zero_reward, f"a</think> <answer>{answer}</answer>"),
        (question_only_reward, rf"\boxed{{{answer}}}"),
    ):
        assert reward(response, r"5\sqrt2")["reward"] == 1.0
        assert reward(response, r"5\sqrt2", evaluated=True)["reward"] == 1.0
        refused = reward(response, r"5\sqrt2", evaluated=True, question=question)
        assert refused == {"format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0}


@pytest.mark.slow
def test_the_command_refuses_with_its_option_only(tmp_path: Path) -> None:
    file = rows(tmp_path, (r"\boxed{2^3}", "8"), (r"\boxed{8}", "8"), (r"\boxed{\sqrt{50}}", r"5\sqrt2"))
    assert json.loads(run(file, "--json"))["verdicts"] == [True, True, True]
    assert json.loads(run(file, "--json", "--evaluated"))["verdicts"] == [False, True, True]
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    lines[2]["question"] = r"Simplify $\sqrt{50}$."
    Path(file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert json.loads(run(file, "--json", "--evaluated"))["verdicts"] == [False, True, False]
    file = rows(tmp_path, (r"\boxed{144/12}", "12"), (r"\boxed{12}", "12"), ("#### 12", "5 + 7\n#### 12"))
    lines = [json.loads(line) | {"question": "What is 144/12?"} for line in Path(file).read_text().splitlines()]
    Path(file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert json.loads(run(file, "--json", "--task", "gsm8k", "--evaluated"))["verdicts"] == [False, True, True]
    assert json.loads(run(file, "--json", "--task", "gsm8k"))["verdicts"] == [True, True, True]


@pytest.mark.parametrize(
    ("extraction", "frame"), [("answer_tag", "<answer>{}</answer>"), ("boxed", r"\boxed{{{}}}"), ("whole", "{}")]
)
def test_the_reward_for_numbers_refuses_too(group: Callable[..., Group], extraction: str, frame: str) -> None:
    asked = group(*map(frame.format, ("12", "12.0", "24/2", "144/12", "13")), gold="12")
    example = replace(asked.prompt.example, question="What is 144/12?")
    asked = replace(asked, prompt=replace(asked.prompt, example=example))
    loose = build_reward({"right": config(type="number", extraction=extraction)})
    strict = build_reward({"right": config(type="number", extraction=extraction, evaluated=True)})
    assert loose([asked]).total == [[1.0, 1.0, 1.0, 1.0, 0.0]]
    assert strict([asked]).total == [[1.0, 1.0, 0.0, 0.0, 0.0]]
    sums = group(*map(frame.format, (r"11+\frac{2}{2}", "12")), gold="12")
    assert strict([sums]).total == [[0.0, 1.0]]


def test_an_answer_that_is_refused_has_a_vote_of_its_own(
    completion: Callable[..., Completion], prompt: Callable[..., Prompt]
) -> None:
    texts = [completion(rf"\boxed{{{answer}}}") for answer in ("12", "12.0", "144/12")]
    asked = prompt("12")
    asked = replace(asked, example=replace(asked.example, question="What is 144/12?"))
    for type, rest in (("math", {}), ("number", {"extraction": "boxed"})):
        reward = build_reward({"right": config(type=type, evaluated=True, **rest)})
        first, second, refused = (reward.answer("right", text, asked) for text in texts)
        assert first == second == "12" != refused
        assert refused is not None
        loose = build_reward({"right": config(type=type, **rest)})
        assert {loose.answer("right", text, asked) for text in texts} == {"12"}


def test_patterns_take_digits_and_nothing_is_left_of_them(group: Callable[..., Group]) -> None:
    for extraction, text in (
        ("gsm8k_strict", "2*9 = 18\n#### 18"),
        ("last_number", "2*9 is 18"),
        ("gsm8k_flexible", "18"),
    ):
        reward = build_reward({"right": config(type="number", extraction=extraction, evaluated=True)})
        assert reward([group(text)]).total == [[1.0]]


def test_training_recipes_ask_for_results_and_a_published_protocol_for_values() -> None:
    asked = {}
    for name in ("tasks/math", "tasks/math500", "tasks/gsm8k", "math_qwen_24gb", "math_qwen_80gb"):
        asked[name] = load_recipe(f"flatpeak:{name}")["rewards"]["correctness"]["evaluated"]
    assert asked.pop("math_qwen_24gb") is asked.pop("math_qwen_80gb") is False
    assert set(asked.values()) == {True}
    assert [config(type=type).evaluated for type in ("math", "number")] == [False] * 2


def test_the_examples_of_the_page_are_refused_as_it_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "grading.md").read_text(encoding="utf-8")
    table = page.partition("## What is worked out")[2].partition("\n## ")[0]
    examples = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert len(examples) >= 12
    for *cells, verdict in examples:
        question, answer, gold = (cell.strip("`").replace(r"\|", "|") for cell in cells)
        assert is_evaluated(answer, gold, question) == (verdict.strip() == "right"), (question, answer, gold)
