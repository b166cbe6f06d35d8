"""The task and the rewards of flatpeak:laptop."""

import json
import re

import pytest

from flatpeak.config.load import load_recipe, parse_config
from flatpeak.recipes.laptop import SENTENCES, exact, numbers, overlap, shape
from flatpeak.tasks.config import build_task
from flatpeak.tasks.decontamination import near_any

TASK = numbers(train_size=300, test_size=100)


def kinds(text: str) -> set[str]:
    """The kinds of sentences in a text."""
    slots = {"n": r"\d+", "k": r"[\d,]+", "d": r"[\d.]+", "name": r"\w+", "things": r"\w+", "place": r"the \w+"}
    patterns = {kind: re.sub(r"\\{(\w+)\\}", lambda slot: slots[slot[1]], re.escape(kind)) for kind in SENTENCES}
    return {kind for kind, pattern in patterns.items() if re.search(pattern, text)}


def test_a_gold_answer_has_the_numbers_of_its_text_in_their_order() -> None:
    for example in (*TASK.train, *TASK.test):
        written = [float(one.replace(",", "")) for one in re.findall(r"\d[\d,]*(?:\.\d+)?", example.question)]
        assert json.loads(example.gold) == written
    assert {len(json.loads(example.gold)) for example in TASK.train} == {1, 2, 3, 4, 5, 6}


def test_no_held_out_text_has_a_sentence_of_a_kind_that_is_trained_on() -> None:
    trained = set().union(*(kinds(example.question) for example in TASK.train))
    held_out = set().union(*(kinds(example.question) for example in TASK.test))
    assert (len(trained), len(held_out)) == (30, 10)
    assert not trained & held_out
    questions = [[example.question for example in side] for side in (TASK.test, TASK.train)]
    assert not any(near_any(*questions, threshold=0.8))


def test_texts_are_distinct_and_the_same_for_the_same_seed() -> None:
    assert len({example.question for example in (*TASK.train, *TASK.test)}) == 400
    assert numbers(train_size=300, test_size=100) == TASK
    assert numbers(train_size=300, test_size=100, seed=1) != TASK


@pytest.mark.parametrize(
    ("completion", "rewards"),
    [
        ("[3, 14.5]", (1, 1, 1)),
        (" [3,14.5]\n", (1, 1, 1)),
        ("[3, 14]", (0, 1 / 2, 1)),
        ("[14.5, 3]", (0, 1, 1)),
        ("[3, 14.5, 7]", (0, 2 / 3, 1)),
        ("The numbers are [3, 14.5].", (0, 1, 0)),
        ("3 cups and 14.5 pens", (0, 1 / 2, 0)),
        ("no numbers", (0, 0, 0)),
        ("[]", (0, 0, 1)),
        ("[3, 14.5", (0, 1 / 2, 0)),
        ("{}", (0, 0, 0)),
        ("[" * 100_000, (0, 0, 0)),
    ],
)
def test_the_rewards_pay_for_the_list_its_numbers_and_its_form(completion: str, rewards: tuple[float, ...]) -> None:
    gold = "[3, 14.5]"
    assert (exact(completion, gold), overlap(completion, gold), shape(completion)) == pytest.approx(rewards)


def test_worked_texts_stand_before_held_out_ones_alone() -> None:
    task = numbers(train_size=10, test_size=5, shots=2)
    worked = [f"{one.question}\nNumbers: {one.gold}\n\n" for one in task.train[:2]]
    assert [list(one.shots) for one in task.test] == [worked] * 5
    assert {one.shots for one in task.train} == {()}


def test_the_recipe_names_the_task_and_rewards() -> None:
    config = parse_config(load_recipe("flatpeak:laptop"))
    assert len(build_task(config.task).train) == 2000
    assert {name: reward.weight for name, reward in config.rewards.items()} == {
        "exact": 1.0,
        "overlap": 1.0,
        "shape": 0.25,
    }
    assert config.evaluation.accuracy_part == "exact"
