from __future__ import annotations

import random
import re

import pytest
from pydantic import TypeAdapter

from flatpeak.errors import UserError
from flatpeak.rewards.config import RewardConfig
from flatpeak.rewards.multiple_choice import ChoiceReward, answer_letter, first_letter, official_letter
from flatpeak.rewards.reward_set import as_reward, build_reward
from support.cpu_time import cpu_time
from support.tables import read_tables

TABLES = read_tables(__file__)

CITIES = ["Paris", "Rome", "Vitamin C", "42"]
TEN = [f"option {n}" for n in range(10)]


def stated(text, options=CITIES):
    return answer_letter(text, options=options)


# The three stages of evaluate_from_local.py (TIGER-AI-Lab/MMLU-Pro), as published.
STAGES = (
    (re.compile(r"answer is \(?([A-J])\)?"), 1),
    (re.compile(r".*[aA]nswer:\s*([A-J])"), 1),
    (re.compile(r"\b[A-J]\b(?!.*\b[A-J]\b)", re.DOTALL), 0),
)


def published(text):
    return next((match[group] for pattern, group in STAGES if (match := pattern.search(text))), None)


@pytest.mark.parametrize(("text", "letter"), TABLES["official"])
def test_the_official_extraction_has_every_quirk_of_the_published_one(text, letter):
    assert official_letter(text) == letter
    assert published(text) == letter


def test_the_official_extraction_equals_the_published_patterns_on_random_texts():
    pieces = [
        "answer is ",
        "(",
        ")",
        "A",
        "J",
        "K",
        "nswer:",
        "Answer:",
        "answer:",
        " ",
        "\n",
        "x",
        "_",
        "I",
        ".",
        "\t",
    ]
    generator = random.Random(0)
    result = 0
    for _ in range(20_000):
        text = "".join(generator.choices(pieces, k=generator.randrange(12)))
        assert official_letter(text) == published(text), repr(text)
        result += official_letter(text) is not None
    assert 5_000 < result < 19_000


@pytest.mark.parametrize(("text", "letter"), TABLES["first_letter"])
def test_the_first_letter_is_a_capital_that_stands_alone_at_the_start(text, letter):
    assert first_letter(text) == letter


@pytest.mark.parametrize(("text", "letter"), TABLES["robust"])
def test_the_robust_extraction_reads_what_is_stated_last(text, letter):
    assert stated(text) == letter


@pytest.mark.parametrize("text", TABLES["nothing_stated"])
def test_the_robust_extraction_finds_nothing_where_nothing_is_stated(text):
    assert stated(text) is None


@pytest.mark.parametrize(("text", "letter"), TABLES["forms"])
def test_a_letter_is_read_in_the_forms_that_models_write(text, letter):
    assert stated(text) == letter


@pytest.mark.parametrize(("text", "letter"), TABLES["words_of_options"])
def test_an_option_in_its_own_words_is_its_letter(text, letter):
    assert stated(text) == letter


def test_words_that_two_options_share_or_that_no_row_gives_name_none():
    assert stated("It is Rome.", ["Rome", "Rome", "Paris"]) is None
    assert stated("It is Rome.", None) is None
    assert stated("It is c1", ["a1", "b1", "c1", "d1"]) == "C"
    assert stated("<answer>New York City</answer>", ["New York", "New York City"]) == "B"
    assert stated("The answer is A and B only.", ["A", "Both", "Neither", "A and B only"]) == "D"
    assert stated("The answer is A.", ["O", "AB", "A", "B"]) == "A"
    assert stated(r"\boxed{\frac{5}{54}}", [r"\frac{5}{16}", r"$\frac{5}{54}$"]) == "B"


def test_the_sign_of_a_number_belongs_to_the_words_of_an_option():
    numbers = ["1", "2", "-2", "0"]
    assert [stated(f"The answer is {form}", numbers) for form in ("(C) -2.", "C. -2", "C - -2")] == ["C", "C", "C"]
    assert [stated(f"The answer is {form}", numbers) for form in ("(C) 2.", "C - 2")] == [None, None]
    assert [stated(f"The answer is {form}", numbers) for form in ("2.", "-2", "2.5")] == ["B", "C", None]


def test_the_words_of_another_option_contradict_a_letter_however_long_they_are():
    long = [f"option {letter} " + "which goes on " * 20 + "and ends" for letter in "vwxy"]
    assert stated(f"The answer is (A) {long[0]}.", long) == "A"
    assert stated(f"The answer is (A) {long[1]}.", long) is None


@pytest.mark.parametrize("text", TABLES["contradictions"])
def test_a_letter_beside_another_or_beside_the_words_of_another_is_no_answer(text):
    assert stated(text) is None


def test_a_letter_after_another_counts_where_the_text_goes_on_in_between():
    assert stated("C\nWait, no.\nD") == "D"
    assert stated("C\nC") == "C"
    assert stated("The answer is (C) (A) is wrong") == "C"
    assert stated("The answer is (B) Rome.") == "B"
    assert stated("The answer is A. Or so I think.") == "A"
    assert stated("<answer>A. Paris, since Rome is in Italy</answer>") == "A"


def test_only_letters_that_the_question_has_are_read():
    assert [stated("The answer is (I).", TEN), stated("answer is I, I think", TEN)] == ["I", "I"]
    assert stated("The answer is (I).") is None
    assert stated("I", TEN) == "I"
    assert stated("The answer is I think", TEN) is None
    assert (stated("answer is (J)", None), stated("answer is (K)", None)) == ("J", None)


def test_thinking_is_not_read():
    assert stated("<think>The answer is A.</think> The answer is B.") == "B"
    assert stated("<think><answer>A</answer></think>\n<answer>B</answer>") == "B"


@pytest.mark.slow
def test_long_texts_of_anything_take_linear_time():
    hostile = [
        *("answer is " * 20_000, "answer is A or " * 14_000, "option A is correct " * 10_000, "(A)" * 70_000),
        *("(" * 200_000, " " * 200_000, "\n" * 200_000, "A\n" * 100_000, "\\boxed{" * 30_000, "<answer>" * 25_000),
        *(
            "it is " * 35_000,
            "so A is correct " * 13_000,
            "答案是" * 70_000,
            "#### A\n" * 30_000,
            "it is Rome or " * 15_000,
        ),
        *("answer:" + " " * 200_000, "Answer: " * 25_000, "\\text{" * 35_000, "if the " * 30_000, "x" * 200_000),
    ]
    for text in hostile:
        with cpu_time() as spent:
            stated(text), official_letter(text), first_letter(text)
        assert spent.seconds < 3, repr(text[:20])


def judge(extraction, text, *, gold, prompt, completion, options=CITIES, id="row-1"):
    asked = prompt(gold, id=id, options=options) if options else prompt(gold, id=id)
    rule = ChoiceReward(extraction=extraction)
    return rule(completion(text), asked), rule.answer(completion(text), asked)


@pytest.mark.parametrize(("extraction", "text", "score", "answer"), TABLES["scores"])
def test_a_letter_scores_1_if_it_is_the_gold_one(extraction, text, score, answer, prompt, completion):
    assert judge(extraction, text, gold="B", prompt=prompt, completion=completion) == (score, answer)


def test_the_official_reward_guesses_where_it_finds_nothing_and_says_that_there_is_no_answer(prompt, completion):
    for options in (CITIES, TEN):
        letters = "ABCDEFGHIJ"[: len(options)]
        random.seed(12345)
        drawn = letters[random.randint(0, len(options) - 1)]
        for gold in letters:
            result = judge("official", "b", gold=gold, prompt=prompt, completion=completion, options=options)
            assert result == (float(gold == drawn), None)


def test_a_prompt_that_ends_inside_the_thinking_leaves_it_out(prompt, completion):
    asked = prompt("B", text="Q <think>", options=CITIES)
    rule = ChoiceReward()
    assert rule.answer(completion("the answer is A"), asked) is None
    assert rule.answer(completion("the answer is A</think>\n<answer>B</answer>"), asked) == "B"


def test_a_gold_answer_that_is_no_letter_of_the_question_is_an_error_that_names_the_row(prompt, completion):
    for gold in ("E", "Rome", "b", ""):
        with pytest.raises(UserError, match=r"of row 'row-1' is not a letter from A to D"):
            judge("robust", "B", gold=gold, prompt=prompt, completion=completion)
    with pytest.raises(UserError, match="from A to J"):
        judge("robust", "B", gold="K", options=None, prompt=prompt, completion=completion)
    with pytest.raises(UserError, match="from A to J"):
        ChoiceReward()(completion("B"), prompt("K", options=[]))
    assert judge("robust", "J", gold="J", options=None, prompt=prompt, completion=completion) == (1.0, "J")


def test_a_recipe_names_the_reward_and_its_extraction(group):
    config = TypeAdapter(dict[str, RewardConfig]).validate_python(
        {
            "correctness": {"type": "choice", "extraction": "official"},
            "robust": {"type": "choice", "weight": 0},
            "letter": {"type": "choice", "extraction": "letter", "weight": 0},
        }
    )
    reward = build_reward(config)
    asked = group("answer is Definitely (B)", "B", gold="B", options=CITIES)
    scores = reward([asked])
    assert scores.parts == {"correctness": [[0.0, 1.0]], "robust": [[1.0, 1.0]], "letter": [[0.0, 1.0]]}
    assert scores.total == [[0.0, 1.0]]
    assert reward.answer("robust", asked.completions[0], asked.prompt) == "B"
    assert as_reward({"c": ChoiceReward()})([asked]).parts == {"c": [[1.0, 1.0]]}
