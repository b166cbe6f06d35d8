"""The task and tools of the recipe `word_problems_with_tools`: sums, differences and products in short texts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from flatpeak.recipes.calculator import multiply
from flatpeak.tasks.data_files import ExampleTask
from flatpeak.types import Example


def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract b from a."""
    return a - b


TOOLS: Final = {"add": add, "subtract": subtract, "multiply": multiply}
PROBLEMS: Final = {
    "add": (
        "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
        "The harbor sold {a} {things} in May and {b} in June. How many did it sell in both months?",
        "{name} drove {a} miles on Friday and {b} miles on Sunday. How far did {name} drive?",
        "On day {d} there are {a} {things} in the red truck and {b} in the blue truck. How many are in both?",
        "{name} had ${a} and earned ${b} in {d} days. How much money does {name} have?",
        "A school has {a} girls and {b} boys. How many pupils does it have?",
        "After {name} took {a} {things} from a pile, {b} remained. How many {things} were in the pile at first?",
        "{name} counted {a} {things} upstairs and {b} downstairs. What is the total?",
    ),
    "subtract": (
        "{name} had {a} {things} and gave {b} of them to a friend. How many {things} are left?",
        "A hall has {a} seats, and {b} of them are taken. How many seats are free?",
        "{name} has read {b} of the {a} pages of a book in {d} days. How many pages are left?",
        "{name} wants {a} {things} and has {b}. How many more does {name} need?",
        "The bakery made {a} {things}. At {d} o'clock it had sold {b}. How many were not sold?",
        "{name} weighs {b} pounds, and a horse weighs {a} pounds. How much heavier is the horse?",
        "With the {b} {things} that came today {name} has {a}. How many were there yesterday?",
        "A train had {a} passengers. At the next stop {b} left. How many passengers remain?",
    ),
    "multiply": (
        "Each of {a} boxes holds {b} {things}. How many {things} are there?",
        "A ticket costs ${a}. How much do {b} tickets cost?",
        "{name} fills {a} crates with {b} {things} each. How many {things} does {name} have?",
        "A machine makes {a} {things} an hour. How many does it make in {b} hours?",
        "The library has {d} floors and {a} shelves. Every shelf has {b} books. How many books are there?",
        "{name} runs {a} meters every day. How many meters is that in {b} days?",
        "There are {a} rows of {b} {things}. How many {things} are there altogether?",
        "{b} friends of {name} pay ${a} each. How much do they pay?",
    ),
}
"""The kinds of problems by tool. Of these, and of the lists below, every fourth is in held-out problems alone."""
NAMES: Final = ("Amara", "Ben", "Chen", "Dora", "Emil", "Farah", "Goran", "Hana", "Ines", "Jonas", "Keiko", "Luis")
THINGS: Final = ("apples", "bricks", "chairs", "cups", "lamps", "nails", "pens", "plates", "shirts", "tiles")
NUMBERS: Final = random.Random(0).sample(range(100, 1000), 900)
_HELD_OUT: Final = 4


def problems(
    *, train_size: int = 1500, test_size: int = 300, demonstrations: int = 64, calls: bool = True, seed: int = 0
) -> ExampleTask:
    """Problems of two numbers, and sometimes a third that does not matter.

    The first training problems are demonstrations, of one kind for each tool; unless `calls` they answer at once.
    """
    generator = random.Random(seed)
    call = "<call>{tool}(a={a}, b={b})</call><result>{gold}</result>" if calls else ""
    demonstrated = [
        replace(example, rationale=call.format(gold=example.gold, **example.columns) + example.gold)
        for example in _draw(demonstrations, generator, test=False, kinds=1)
    ]
    train = _draw(train_size, generator, test=False)
    return ExampleTask(name="problems", train=(*demonstrated, *train), test=_draw(test_size, generator, test=True))


def _draw(size: int, generator: random.Random, *, test: bool, kinds: int | None = None) -> list[Example]:
    """Distinct problems of the first so many kinds of each tool."""
    numbers, names, things = (_side(values, test=test) for values in (NUMBERS, NAMES, THINGS))
    drawn: dict[str, Example] = {}
    while len(drawn) < size:
        tool = generator.choice(list(TOOLS))
        b, a = sorted(generator.sample(numbers, 2))
        question = generator.choice(_side(PROBLEMS[tool], test=test)[:kinds]).format(
            a=a, b=b, d=generator.randint(2, 9), name=generator.choice(names), things=generator.choice(things)
        )
        gold = str(TOOLS[tool](a, b))
        drawn[question] = Example(id=question, question=question, gold=gold, columns={"tool": tool, "a": a, "b": b})
    return list(drawn.values())


def _side(values: Sequence[Any], *, test: bool) -> Sequence[Any]:
    """The held-out values, or those to train on."""
    return values[::_HELD_OUT] if test else [value for at, value in enumerate(values) if at % _HELD_OUT]
