"""A mixture: several tasks as one, in which each example knows its task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Final

from flatpeak.errors import UserError
from flatpeak.protocols import Task
from flatpeak.tasks.decontamination import question_key
from flatpeak.types import Example

MIXTURE: Final = "mixture"
"""The name of the whole in metrics."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Several tasks as one. Their examples alternate, and ids begin with the name of the task."""

    shares: Mapping[str, float]
    """By task, its share of the prompts; they add up to 1."""
    train: tuple[Example, ...]
    test: tuple[Example, ...]
    notices: tuple[str, ...]
    name: str = MIXTURE


def mix(tasks: Sequence[tuple[str, float, Task]]) -> Mixture:
    """The mixture of tasks, each with a name and a weight; UserError where names repeat."""
    counts = Counter([MIXTURE, *(name for name, _, _ in tasks)])
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise UserError(f"tasks: {name!r} names two results of evaluations; set tasks.0.name and so on to other names")
    total = sum(weight for _, weight, _ in tasks)
    train, test = (
        tuple(_alternating([_named(name, getattr(task, side)) for name, _, task in tasks]))
        for side in ("train", "test")
    )
    notices = (f"{name}: {notice}" for name, _, task in tasks for notice in getattr(task, "notices", ()))
    return Mixture(
        shares={name: weight / total for name, weight, _ in tasks},
        train=train,
        test=test,
        notices=tuple(notices),
    )


def _named(name: str, examples: Sequence[Example]) -> list[Example]:
    return [replace(example, id=f"{name}/{example.id}", task=name) for example in examples]


def _alternating(parts: Sequence[Sequence[Example]]) -> Iterator[Example]:
    """One example of each part in turn, so that the first examples are of all parts."""
    return (example for turn in zip_longest(*parts) for example in turn if example is not None)


def leaks(train: Sequence[Example], held_out: Mapping[str, Sequence[Example]]) -> Iterator[str]:
    """Notices of training questions that another task or an evaluation set holds out, by its name."""
    keys = [(example.task, question_key(example.question)) for example in train]
    for name, examples in held_out.items():
        asked = {question_key(example.question) for example in examples}
        if count := sum(task != name and key in asked for task, key in keys):
            yield (
                f"{count} of {len(train)} training rows ask questions that {name} holds out, so that its accuracy may "
                "come from memory; leave them out of the training data (for task.type=rows: task.overlap)"
            )
