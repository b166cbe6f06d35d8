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


def mix(tasks: Sequence[tuple[str | None, float, Task]]) -> Mixture:
    """The mixture of tasks, each with a weight and a name, or None for its own. UserError where names repeat."""
    by_name = [(name or task.name, weight, task) for name, weight, task in tasks]
    check_names([MIXTURE, *(name for name, _, _ in by_name)])
    train, test = (
        tuple(_alternating([named(name, getattr(task, side)) for name, _, task in by_name]))
        for side in ("train", "test")
    )
    notices = (f"{name}: {notice}" for name, _, task in by_name for notice in getattr(task, "notices", ()))
    tests = {name: task.test for name, _, task in by_name}
    total = sum(weight for _, weight, _ in by_name)
    return Mixture(
        shares={name: weight / total for name, weight, _ in by_name},
        train=train,
        test=test,
        notices=(*notices, *leaks(train, tests)),
    )


def check_names(names: Sequence[str]) -> None:
    """UserError unless the names of tasks and evaluation sets can stand in metrics, `eval/<name>/accuracy`."""
    for name, count in Counter(names).items():
        if count > 1:
            problem = "names the whole in metrics" if name == MIXTURE else "names two tasks or evaluation sets"
        elif not name or "/" in name:
            problem = "has a slash" if name else "is empty"
        else:
            continue
        raise UserError(
            f"{name!r} {problem}: set task.name, or tasks.0.name and so on, or rename it in evaluation.sets"
        )


def named(name: str, examples: Sequence[Example]) -> list[Example]:
    """The examples of the task of that name; reward functions get the name as the column `task`."""
    return [replace(one, id=f"{name}/{one.id}", task=name, columns={"task": name, **one.columns}) for one in examples]


def _alternating(parts: Sequence[Sequence[Example]]) -> Iterator[Example]:
    """One example of each part in turn, so that the first examples are of all parts."""
    return (example for turn in zip_longest(*parts) for example in turn if example is not None)


def leaks(train: Sequence[Example], tests: Mapping[str, Sequence[Example]]) -> Iterator[str]:
    """Notices of training questions that another task or an evaluation set holds out, by its name."""
    keys = [(example.task, question_key(example.question)) for example in train]
    for name, examples in tests.items():
        asked = {question_key(example.question) for example in examples}
        if count := sum(task != name and key in asked for task, key in keys):
            yield (
                f"{count} of {len(train)} training rows ask questions that {name} holds out, so that its accuracy may "
                "come from memory; leave them out of the training data (for task.type=rows: task.overlap)"
            )
