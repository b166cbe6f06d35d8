"""Perturbed questions: what changes, what must not, and where nothing can be changed safely."""

from __future__ import annotations

import re

import pytest

from flatpeak.evaluation.config import Perturbation
from flatpeak.evaluation.robustness import perturb
from flatpeak.evaluation.text_perturbations import (
    DISTRACTORS,
    FIRST_NAMES,
    FRAMES,
    INTERCHANGEABLE,
    last_sentence,
    split_question,
)
from flatpeak.types import Example

STORY = (
    "Nadia and her brother Hugo keep rabbits near Mr. Brown's farm. Nadia's hutch holds 14 rabbits, and Hugo has 3 "
    "fewer than Nadia. How many rabbits do they keep together?"
)
CHOICE = (
    "Question: Which planet did Galileo observe through his telescope in the winter of 1610?\n"
    "A. Jupiter, whose moons surprised everybody\nB. Neptune\nC. Mercury\nD. None of these planets\nAnswer:"
)
FORMULA = (
    "Suppose that $x_{first} + \\frac{1}{2} = 7$ and `print(value)` shows \\text{nothing}. Determine whether it holds."
)
LATEX = re.compile(r"\$[^$]*\$|`[^`]*`|\\text\{\w+\}")


def example(question: str, *, id: str = "q", gold: str = "25", preamble: str = "") -> Example:
    return Example(id=id, question=question, gold=gold, preamble=preamble)


def changed(question: str, kind: Perturbation, *, seed: int = 0, id: str = "q", gold: str = "25") -> str:
    result = perturb(example(question, id=id, gold=gold), kind, seed=seed)
    assert result is not None
    assert (result.id, result.gold) == (id, gold)
    return result.question


@pytest.mark.parametrize("kind", ["distractor", "framing", "rename", "typos"])
def test_a_perturbation_depends_on_seed_and_id_alone(kind: Perturbation) -> None:
    assert changed(STORY, kind) == changed(STORY, kind)
    assert len({changed(STORY, kind, seed=seed) for seed in range(12)}) > 1
    assert len({changed(STORY, kind, id=f"q{index}") for index in range(12)}) > 1


@pytest.mark.parametrize("kind", ["distractor", "framing", "rename", "typos"])
@pytest.mark.parametrize("seed", range(8))
def test_numbers_formulas_and_options_stay(kind: Perturbation, seed: int) -> None:
    for question in (STORY, CHOICE, FORMULA):
        result = perturb(example(question), kind, seed=seed)
        if result is None:
            continue
        added = next((text for text in DISTRACTORS if text in result.question), "")
        left = result.question.replace(added, "")
        assert re.findall(r"\d+", left) == re.findall(r"\d+", question)
        assert LATEX.findall(left) == LATEX.findall(question)
        assert result.question.endswith(split_question(question)[2])
        assert result.question.startswith(split_question(question)[0])
        assert result.question != question


def test_the_distractor_stands_before_what_is_asked() -> None:
    result = changed(STORY, "distractor")
    head, asked = STORY[: STORY.index("How many")], STORY[STORY.index("How many") :]
    sentence = result.removeprefix(head).removesuffix(asked).strip()
    assert sentence in DISTRACTORS
    assert result == f"{head}{sentence} {asked}"
    # A question of one sentence, and one after which something is still said.
    assert changed("How many are there?", "distractor").endswith(". How many are there?")
    two = "Is it 5? Answer in words."
    assert changed(two, "distractor").endswith(f". {two}")
    assert changed(CHOICE, "distractor").endswith(CHOICE.removeprefix("Question: "))


def test_sentences_end_at_points_that_end_sentences() -> None:
    text = "Dr. Wu came at 8 a.m. today with 2.5 kg of rice, e.g. for lunch. She left. How much is left?"
    assert text[last_sentence(text) :] == "How much is left?"
    assert "Dr. Wu works. He eats"[last_sentence("Dr. Wu works. He eats") :] == "He eats"
    assert last_sentence("Dr. Wu has three.") == 0


def test_options_of_several_lines_belong_to_the_tail() -> None:
    question = "Which program sorts?\nA. first take\nthen leave\nB. nothing of this\nAnswer:"
    assert split_question(question) == ("", "Which program sorts?", question.removeprefix("Which program sorts?"))
    assert split_question("A. Smith met C. Jones.\nWhere was that?")[2] == ""
    assert split_question("Say it.\nOptions:\n(A) yes\n(B) no")[1] == "Say it."


def test_nothing_in_words_has_nothing_to_distract_from() -> None:
    assert perturb(example("3+4="), "distractor", seed=0) is None
    assert perturb(example("3+4="), "typos", seed=0) is None
    assert perturb(example("3+4="), "rename", seed=0) is None
    assert changed("3+4=", "framing").endswith("3+4=")


def test_a_frame_comes_before_the_question_and_rewords_a_known_preamble() -> None:
    assert changed(STORY, "framing") in {frame.replace("{question}", STORY) for frame in FRAMES}
    preamble = (
        "The following are multiple choice questions (with answers) about marine biology. Think step by step.\n\n"
    )
    result = perturb(example(CHOICE, preamble=preamble), "framing", seed=0)
    assert result is not None
    assert "marine biology" in result.preamble
    assert result.preamble.endswith(" Think step by step.\n\n")
    assert not result.preamble.startswith("The following")
    official = preamble.replace("about marine", "about  marine")  # MMLU's own has two spaces
    assert perturb(example(CHOICE, preamble=official), "framing", seed=0) == result
    assert changed("Is {a} in \\frac{1}{2}?", "framing").endswith("Is {a} in \\frac{1}{2}?")


def test_a_person_keeps_one_new_name_of_the_same_list() -> None:
    result = changed(STORY, "rename")
    new = re.match(r"(\w+) and her brother (\w+) keep", result)
    assert new is not None
    assert "Nadia" not in result
    assert "Hugo" not in result
    assert new[1] in INTERCHANGEABLE["Nadia"]
    assert new[2] in INTERCHANGEABLE["Hugo"]
    assert result == STORY.replace("Nadia", new[1]).replace("Hugo", new[2])


def test_no_name_is_on_both_lists_or_twice_on_one() -> None:
    assert len(INTERCHANGEABLE) == sum(map(len, FIRST_NAMES))


@pytest.mark.parametrize(
    "question",
    [
        "What did James Madison write about?",
        "In which year was King John crowned?",
        "Why did Henry VIII leave the church?",
        "The law of Dr. Paul says what?",
        "Will May be warm in Victoria?",
        "Which group follows Hassan?\nA. One\nB. Another",
    ],
)
def test_who_may_be_somebody_known_keeps_the_name(question: str) -> None:
    assert perturb(example(question), "rename", seed=0) is None


def test_a_name_in_the_options_or_in_the_answer_stays() -> None:
    question = "Who is taller, if Nora is smaller than Carl?\nA. Nora\nB. Carl"
    assert perturb(example(question, gold="B"), "rename", seed=0) is None
    assert perturb(example("Who is older, if Carl was born later than Eva?", gold="Eva Carl"), "rename", seed=0) is None


def test_typos_are_few_and_keep_the_ends_of_words() -> None:
    for seed in range(20):
        before, after = STORY.split(), changed(STORY, "typos", seed=seed).split()
        different = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
        assert 1 <= len(different) <= 2
        for old, new in different:
            old, new = old.strip(".,?"), new.strip(".,?")
            assert len(old) >= 4
            assert (old[0], old[-1]) == (new[0], new[-1])
            swapped = sorted(old) == sorted(new)
            assert swapped or len(new) == len(old) - 1


def test_names_numbers_in_words_and_abbreviations_get_no_typos() -> None:
    assert perturb(example("Nadia has seven and Hugo fourteen, NASA half of 1000 km: 3rd?"), "typos", seed=0) is None
