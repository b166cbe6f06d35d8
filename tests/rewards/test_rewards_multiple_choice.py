from __future__ import annotations

import random
import re
import time

import pytest
from pydantic import TypeAdapter

from flatpeak.errors import UserError
from flatpeak.rewards.config import RewardConfig
from flatpeak.rewards.multiple_choice import ChoiceReward, answer_letter, first_letter, official_letter
from flatpeak.rewards.reward_set import as_reward, build_reward

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


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("so the answer is (C).", "C"),
        ("so the answer is C", "C"),
        ("the answer is (A). Wait, the answer is (B).", "A"),  # the first statement, not the last
        ("If answer is (A), x. So answer is (C).", "A"),  # a hypothesis is a statement
        ("answer is Definitely (C)", "D"),  # the first letter of a word
        ("The answer is (B\nnot closed", "B"),
        ("Answer: B", "B"),
        ("answer:\n\nB", "B"),
        ("Answer: A, then Answer: B", "B"),  # the last of a line
        ("Answer: A\nAnswer: B", "A"),  # of the first line that has one
        ("Answer: Answer: B", "B"),
        ("Answer: (B). I am sure", "I"),  # no parenthesis after the colon, so the pronoun wins
        ("I think it is so", "I"),
        ("A cat, B, and last of all Euler", "B"),
        ("It is E.\nA good one", "A"),  # the article
        ("the answer is **C**", "C"),  # found only as a lone letter
        ("the answer is (c)", None),  # small letters fail
        ("answer: c", None),
        ("the answer is (K)", None),
        ("ANSWER IS NOT KNOWN", None),
        ("", None),
    ],
)
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


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (" B", "B"),
        ("\n(C) because", "C"),
        ("D.", "D"),
        ("B\n\nThe next question", "B"),
        ("Because", None),
        ("b", None),
        ("The answer is B", None),
        ("B2", None),
        ("", None),
    ],
)
def test_the_first_letter_is_a_capital_that_stands_alone_at_the_start(text, letter):
    assert first_letter(text) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B).", "B"),
        ("the answer is (b)", "B"),
        ("THE ANSWER IS B", "B"),
        ("the answer is c.", "C"),
        ("answer is Definitely (C)", "C"),
        ("The answer is definitely C.", "C"),
        ("If answer is (A), so what. The answer is (C).", "C"),
        ("If the correct answer is A, pigs fly.", None),
        ("The answer is A. Wait, the answer is (B).", "B"),
        ("The answer is not (A), the answer is (B) here", "B"),
        ("The wrong answer is (B). The right answer is (D)", "D"),
        ("Is the answer A? No. The answer is B", "B"),
        ("The answer is: **C) Vitamin C**", "C"),
        ("**Answer:** B", "B"),
        ("Answer:\n\n(D)", "D"),
        ("My answer: (b) Rome", "B"),
        ("The correct choice would be option d.", "D"),
        ("The answer is A because the rest is wrong", "A"),
        ("The answer is B, because A is wrong.", "B"),
        ("The answer is “B”", "B"),
        ("The answer is Rome (B).", "B"),
        ("The best answer is therefore (A), not (B).", "A"),
        ("Therefore option C is correct.", "C"),
        ("(B) is the correct answer.\nDone.", "B"),
        ("So we get (D).", "D"),
        ("The answer to the question is (B) Rome.", "B"),
        ("The right option here is C.", "C"),
        ("The answer is (C), (A) is wrong", "C"),
        ("the answer is (C), since (A) and (B) fail.", "C"),
        ("The answer is not A but (D).", "D"),
        ("the answer is, I believe, (D).", "D"),
        ("Options: A. Paris B. Rome. Answer: B", "B"),
        ("### Final Answer\n\n**C**", "C"),
        ("\\boxed{B}", "B"),
        ("$\\boxed{\\text{(C)}}$", "C"),
        ("The final answer is $\\boxed{\\mathbf{D}}$.", "D"),
        ("The value is \\boxed{42}, so the answer is D", "D"),
        ("the answer is (C), that is \\boxed{42}", "C"),
        ("<answer>B</answer>", "B"),
        ("<answer> b. Rome </answer>", "B"),
        ("<answer>C. Vitamin C</answer>", "C"),
        ("<answer>\\boxed{C}</answer>", "C"),
        ("<answer>The answer is (A)</answer>", "A"),
        ("<answer>A</answer> no: <answer>B</answer>", "B"),
        ("The answer is (A). <answer>B</answer> Or is the answer C?", "B"),
        ("C", "C"),
        ("(c)", "C"),
        ("**C**", "C"),
        (" C.\n", "C"),
        ("B\n\nExplanation: A is wrong", "B"),
        ("Rome it is.\nB. Rome", "B"),
        ("B. Rome", "B"),
        ("（B）", "B"),
    ],
)
def test_the_robust_extraction_reads_what_is_stated_last(text, letter):
    assert stated(text) == letter


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I think A is nice",
        "A dog barked. I ran.",
        "The answer is a matter of taste",
        "The answer is A good thing",
        "The answer is Berlin",
        "The answer is f(a)",
        "The answer is not (A).",
        "the answer isn't B",
        "The answer is E",
        "Is the answer B?",
        "Both (A) and (B).",
        "The answer is none of these.",
        "The answer is vitamin C, or so.",
        "\\boxed{A \\text{ or } B}",
        "<answer>E</answer>",
        "\\boxed{43}",
        "The answer is A or B.",
        "The answer is A, B, or C",
        "The answer is (A) or (B)",
        "answer is D/ C",
        "The answer is (B). Rather, the answer is A or B.",
        "<answer>A or B</answer>",
        "The answer is 'A or C'.",
        'The answer is "A and C"',
        "<answer>(A) or (B)</answer>",
        "<answer>A. B. C. D.</answer>",
        "the answer is (A) <answer>unsure</answer>",
        "A. Paris\nB. Rome\nC. Vitamin C\nD. 42",
        "<think>the answer is A",
        "<think>The answer is A.</think> Hm.",
    ],
)
def test_the_robust_extraction_finds_nothing_where_nothing_is_stated(text):
    assert stated(text) is None


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is 'C'.", "C"),
        ("The answer is ‘C’", "C"),
        ("The answer is I'm sure", None),
        ("The answer is most likely C.", "C"),
        ("The answer is actually (C).", "C"),
        ("The answer is C rather than A.", "C"),
        ("The answer is A rather odd one.", None),
        ("Ｃ", "C"),
        ("答案是（Ｃ）", "C"),
        ("<answer>Option C</answer>", "C"),
        ("<answer>option (c)</answer>", "C"),
        ("\\boxed{\\text{Option C}}", "C"),
        ("<answer>Option C or D</answer>", None),
        ("<answer>Option C, Option D</answer>", None),
        ("<answer>Option B: Vitamin C</answer>", None),
        ("Option A\nParis is one.\nOption B\nRome is one.", None),
        ("<answer>B - Rome</answer>", "B"),
        ("B – Rome", "B"),
        ("A - Rome", None),
        ("Therefore, C is correct.", "C"),
        ("Therefore C is the correct answer.", "C"),
        ("A is wrong, so B is correct.", "B"),
        ("Since A is not right, C is correct.", "C"),
        ("C is correct because the others are not.", "C"),
        ("I conclude that D is right.\nDone", "D"),
        ("Vitamin C is correct.", None),
        ("It is not true that C is correct.", None),
        ("We ask whether C is correct.", None),
        ("We ask if option C is correct.", None),
        ("I do not think (C) is correct.", None),
        ("A or B is correct.", None),
        ("#### C", "C"),
        ("So it is.\n#### (c)\n", "C"),
        ("#### B. Rome", "B"),
        ("#### A\nParis is one.\n#### B\nRome is one.", None),
        ("#### A\nParis is one.\nThe answer is B.", "B"),
        ("答案：C", "C"),
        ("答案是C", "C"),
        ("答案是C。", "C"),
        ("正确答案为（B），因为", "B"),
        ("所以答案选 D。", "D"),
        ("答案是选项C", "C"),
        ("答案是C选项", "C"),
        ("故选B", "B"),
        ("答案不是C", None),
        ("不应选C", None),
        ("答案是A类", None),
        ("答案是A或B", None),
        ("答案是A、B", None),
    ],
)
def test_a_letter_is_read_in_the_forms_that_models_write(text, letter):
    assert stated(text) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("It is Rome.", "B"),
        ("It's Rome", "B"),
        ("<answer>Rome</answer>", "B"),
        ("<answer> vitamin  c. </answer>", "C"),
        ("The answer is Rome", "B"),
        ("The answer is “Rome”. It is old.", "B"),
        ("**Answer:** Vitamin C", "C"),
        ("\\boxed{42}", "D"),
        ("$\\boxed{\\text{Rome}}$", "B"),
        ("So I say:\nRome", "B"),
        ("答案是Rome。", "B"),
        ("It is Paris. No, it is Rome.", "B"),
        ("It is Paris. But the answer is (B).", "B"),
        ("It is not Rome.", None),
        ("It is Rome or Paris.", None),
        ("It is Rome that I like", None),
        ("If it is Rome.", None),
        ("Rome is old.", None),
        ("Rome. Then again, no.", None),
        ("It is 42.5", None),
        ("Let us see whether it is 42.", None),
    ],
)
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


@pytest.mark.parametrize(
    "text",
    [
        "The answer is (C)(D)",
        "The answer is (C) (D).",
        "(C)(D)",
        "<answer>(C)(D)</answer>",
        "\\boxed{(C)(D)}",
        "C\nD",
        "C\n\nD",
        "A\nB\nB",
        "<answer>C\nD</answer>",
        "<answer>A. Rome</answer>",
        "\\boxed{A. Rome}",
        "The answer is (A) Rome.",
        "The answer is A. Rome",
        "Answer: A) Rome",
        "The answer is A. Or B.",
        "<answer>A. Rome or Paris</answer>",
        "<answer>A: any of Paris, Rome, Vitamin C, 42</answer>",
        "\\boxed{A. Paris and Rome}",
    ],
)
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
        start = time.process_time()
        stated(text), official_letter(text), first_letter(text)
        assert time.process_time() - start < 3, repr(text[:20])


def judge(extraction, text, *, gold, prompt, completion, options=CITIES, id="row-1"):
    asked = prompt(gold, id=id, options=options) if options else prompt(gold, id=id)
    rule = ChoiceReward(extraction=extraction)
    return rule(completion(text), asked), rule.answer(completion(text), asked)


@pytest.mark.parametrize(
    ("extraction", "text", "score", "answer"),
    [
        ("robust", "The answer is (b)", 1.0, "B"),
        ("robust", "The answer is (C)", 0.0, "C"),
        ("robust", "Who knows", 0.0, None),
        ("letter", " B", 1.0, "B"),
        ("letter", "The answer is B", 0.0, None),
        ("letter", " E", 0.0, None),
        ("official", "the answer is (B)", 1.0, "B"),
        ("official", "answer is Definitely (B)", 0.0, "D"),
    ],
)
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
