"""A custom task: a function that returns an object with `name`, `train` and `test`.

Run it to print a few of its questions:

    python examples/custom_task.py

Train on it with the demo's small model and two arguments of the function:

    flatpeak train flatpeak:demo run.name=largest task.type=custom \\
        task.factory=examples/custom_task.py:largest_number task.arguments.numbers=4 task.arguments.test_size=300

In Python, create the object and pass it: `flatpeak.train(config, task=largest_number(numbers=4))`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from flatpeak.errors import UserError
from flatpeak.types import Example

LARGEST = 99


@dataclass(frozen=True)
class ExampleTask:
    name: str
    """The task's name in metrics: eval/<name>/accuracy."""
    train: list[Example]
    test: list[Example]
    """Held-out questions: none is in both sets."""


def largest_number(*, numbers: int = 3, train_size: int = 4000, test_size: int = 200, seed: int = 0) -> ExampleTask:
    """A task in which `7 42 13=` asks for 42. Bad arguments raise UserError, a single line on the command line."""
    if numbers < 2:
        raise UserError(f"task.arguments.numbers={numbers}: comparing needs at least 2")
    if train_size + test_size > (LARGEST + 1) ** numbers // 2:
        raise UserError(f"task.arguments.numbers={numbers} has too few questions for these sizes: lower train_size")
    generator = random.Random(seed)
    questions: dict[str, Example] = {}  # by id, so that a repeated question is kept once
    while len(questions) < train_size + test_size:
        drawn = [generator.randint(0, LARGEST) for _ in range(numbers)]
        example = as_example(drawn)
        questions[example.id] = example
    examples = list(questions.values())
    return ExampleTask(name=f"largest_of_{numbers}", train=examples[test_size:], test=examples[:test_size])


def as_example(drawn: list[int]) -> Example:
    text = " ".join(map(str, drawn))
    return Example(
        id=text,
        question=f"{text}=",
        gold=str(max(drawn)),
        rationale=str(max(drawn)),  # the text that SFT imitates; omit it if there is none
        columns={"drawn": drawn},  # reward functions get it through a parameter with this name
    )


if __name__ == "__main__":
    for example in largest_number().test[:3]:
        print(example.question, example.gold)
