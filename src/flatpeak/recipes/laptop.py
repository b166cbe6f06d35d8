"""Task and rewards of the recipe `laptop`: read the numbers of a short text as a JSON list, and write nothing else.

Copy this file and laptop.yaml to train a small model on a job of your own: a task is a function that returns questions
with their answers, a reward is a function that scores completions.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from flatpeak.tasks.data_files import ExampleTask
from flatpeak.types import Example

WORDS: Final = {
    "name": [
        "Amara",
        "Ben",
        "Chen",
        "Dora",
        "Emil",
        "Farah",
        "Goran",
        "Hana",
        "Ines",
        "Jonas",
        "Keiko",
        "Luis",
        "Mina",
    ],
    "things": ["apples", "bricks", "chairs", "cups", "books", "lamps", "nails", "pens", "plates", "shirts", "tiles"],
    "place": ("the airport", "the bakery", "the harbor", "the library", "the market", "the museum", "the school"),
}
DRAWS: Final[dict[str, Callable[[random.Random], str]]] = {
    "n": lambda generator: str(generator.randint(2, 99)),
    "k": lambda generator: f"{generator.randint(1000, 9999):,}",
    "d": lambda generator: f"{generator.randint(11, 199) / 10}",
}
"""A small number, one of four digits with a comma, and one with a decimal place."""
SENTENCES: Final = (
    "{name} ordered {n} {things} for {place}.",
    "The parcel weighs {d} kilograms.",
    "Our train leaves platform {n} in {n} minutes.",
    "{name} ran {d} kilometers before breakfast.",
    "The invoice for the {things} comes to ${k}.",
    "There are {n} guests, and {name} will bring {n} more.",
    "The concert near {place} sold {k} tickets.",
    "It was {d} degrees warmer than last week.",
    "{name} moved to apartment {n} on the hill.",
    "Mix {n} grams of butter with {n} grams of sugar.",
    "The old bridge by {place} is {k} meters long.",
    "{name} and the team scored {n} points to {n}.",
    "A box of {things} costs ${d}.",
    "Please print {n} copies of the report.",
    "The tank at {place} holds {k} liters.",
    "{name} slept only {d} hours.",
    "We drove {n} miles and stopped at {place}.",
    "The shop has {n} {things} left, down from {k}.",
    "{name} turned {n} on Sunday.",
    "Bus {n} goes to {place} every {n} minutes.",
    "The rent rose by ${n} this year.",
    "Only {n} of the {n} {things} were broken.",
    "{name} borrowed ${k} from the bank.",
    "The meeting in room {n} lasts {d} hours.",
    "Paint {n} walls before {name} comes back.",
    "The farm behind {place} sold {k} eggs.",
    "My code for the door is {k}, said {name}.",
    "The battery is at {n} percent.",
    "{name} planted {n} trees in {n} rows.",
    "The flight to the coast takes {d} hours.",
    "They collected ${k} for {place}.",
    "Each shelf carries {n} {things}.",
    "{name} lives {d} miles from {place}.",
    "The museum shows {n} paintings on {n} floors.",
    "The report has {n} pages and {n} tables.",
    "{name} paid ${d} for lunch.",
    "A crew of {n} repaired the road.",
    "The lake is {d} meters deep.",
    "{name} counted {k} steps on the way to {place}.",
    "Take {n} drops twice a day for {n} days.",
)
"""Kinds of sentences; {n}, {k} and {d} are numbers. Every fourth kind is in held-out texts alone."""
_HELD_OUT: Final = 4


def numbers(*, train_size: int = 2000, test_size: int = 400, shots: int = 0, seed: int = 0) -> ExampleTask:
    """Texts of one to three sentences. No sentence of a held-out text is of a kind that a training text has.

    `shots` puts so many training texts with their answers before each held-out one, for a template without a chat.
    """
    generator = random.Random(seed)
    kinds = {
        "test": SENTENCES[::_HELD_OUT],
        "train": [sentence for at, sentence in enumerate(SENTENCES) if at % _HELD_OUT],
    }
    made = {side: _texts(kinds[side], size, generator) for side, size in (("test", test_size), ("train", train_size))}
    worked = tuple(f"{example.question}\nNumbers: {example.gold}\n\n" for example in made["train"][:shots])
    return ExampleTask(
        name="numbers", train=made["train"], test=tuple(replace(example, shots=worked) for example in made["test"])
    )


def _texts(sentences: Sequence[str], size: int, generator: random.Random) -> tuple[Example, ...]:
    texts: dict[str, list[str]] = {}
    while len(texts) < size:
        written = [_write(sentence, generator) for sentence in generator.sample(sentences, generator.randint(1, 3))]
        texts[" ".join(text for text, _ in written)] = [value for _, values in written for value in values]
    return tuple(
        Example(id=text, question=text, gold=f"[{', '.join(values)}]", rationale=f"[{', '.join(values)}]")
        for text, values in texts.items()
    )


def _write(sentence: str, generator: random.Random) -> tuple[str, list[str]]:
    """A sentence with its slots filled, and its numbers in order as JSON writes them."""
    values: list[str] = []

    def fill(slot: re.Match[str]) -> str:
        if slot[1] in WORDS:
            return generator.choice(WORDS[slot[1]])
        text = DRAWS[slot[1]](generator)
        values.append(text.replace(",", ""))
        return text

    return re.sub(r"{(\w+)}", fill, sentence), values


def exact(completion: str, gold: str) -> float:
    """1 where the whole completion is the right list."""
    return float(_read(completion) == json.loads(gold))


def overlap(completion: str, gold: str) -> float:
    """The share of right numbers in the first list, in any order, or half of it in a text without a list."""
    first = re.search(r"\[[^\[\]]*\]", completion)
    given = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", first[0] if first else completion)]
    wanted: list[float] = json.loads(gold)
    right = (Counter(given) & Counter(wanted)).total() / max(len(given), len(wanted))
    return right if first else right / 2


def shape(completion: str) -> float:
    """1 where the whole completion is a list."""
    return float(_read(completion) is not None)


def _read(completion: str) -> list[Any] | None:
    try:
        value = json.loads(completion)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None
