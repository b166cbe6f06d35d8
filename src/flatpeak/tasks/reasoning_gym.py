"""Data sets of reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760): generated, and scored by their own code.

An example's columns are what the reward `reasoning_gym` needs to ask the data set for a score in any process:
`reasoning_gym`, a text that holds the data set's name, its arguments and the whole row, which
rewards/reasoning_gym.py reads.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

from flatpeak.errors import UserError, did_you_mean
from flatpeak.tasks.config import ReasoningGymConfig
from flatpeak.types import Example

TEST_SEEDS: Final = 1_000_000_000
"""What is added to the seed for the held-out rows: row i of a data set comes from seed + i, in nearly all of them."""
_ORDER_OF_SETS: Final = frozenset({"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"})
"""Data sets of version 0.1.25 that iterate over sets of strings, whose order is another one in each process."""


def reasoning_gym_examples(
    config: ReasoningGymConfig,
) -> tuple[tuple[Example, ...], tuple[Example, ...], tuple[str, ...]]:
    """Train, test and notices. Held-out rows have seeds of their own; training rows that ask the same are dropped."""
    wanted = _wanted(config)
    shares = {side: _shares(size, len(wanted)) for side, size in (("train", config.size), ("test", config.test_size))}
    sides: dict[str, list[Example]] = {"train": [], "test": []}
    notices = []
    for place, (name, arguments) in enumerate(wanted.items()):
        test = _rows(name, arguments, size=shares["test"][place], seed=config.seed + TEST_SEEDS, side="test")
        train = _rows(name, arguments, size=shares["train"][place], seed=config.seed, side="train")
        asked = {example.question for example in test}
        kept = [example for example in train if example.question not in asked]
        if len(kept) < len(train):
            notices.append(
                f"{name}: {len(train) - len(kept)} of {len(train)} training rows dropped, held-out rows ask the same"
            )
        if name in _ORDER_OF_SETS and os.environ.get("PYTHONHASHSEED", "random") == "random":
            notices.append(
                f"{name}: its rows depend on Python's hash seed; set PYTHONHASHSEED=0, or a resumed run has others"
            )
        sides["train"] += kept
        sides["test"] += test
    if not sides["train"]:
        raise UserError(
            f"task: {', '.join(wanted)} has no training row that no held-out row repeats; lower task.test_size, or "
            "widen the data set by its arguments"
        )
    return tuple(sides["train"]), tuple(sides["test"]), tuple(notices)


def _wanted(config: ReasoningGymConfig) -> dict[str, dict[str, Any]]:
    """Arguments by data set name."""
    if config.dataset is not None and not config.datasets:
        return {config.dataset: config.arguments}
    if config.dataset is not None:
        raise UserError("task.dataset and task.datasets are both given: set one of them to null")
    if not config.datasets:
        raise UserError("task: name one data set as task.dataset, or several with their arguments as task.datasets")
    if config.arguments:
        raise UserError("task.arguments goes with task.dataset; in task.datasets each name has its own")
    if len(config.datasets) > min(config.size, config.test_size):
        raise UserError(
            f"task.size={config.size} and task.test_size={config.test_size} leave nothing for some of the "
            f"{len(config.datasets)} data sets; raise them"
        )
    return config.datasets


def _shares(size: int, parts: int) -> list[int]:
    return [size // parts + (part < size % parts) for part in range(parts)]


def _rows(name: str, arguments: Mapping[str, Any], *, size: int, seed: int, side: str) -> list[Example]:
    factory = _factory(name)
    try:
        # Some of them print while they work.
        with contextlib.redirect_stdout(io.StringIO()):
            dataset = factory.create_dataset(name, **{**arguments, "size": size, "seed": seed})
            entries = [dataset[index] for index in range(size)]
    except Exception as error:  # a data set raises what it likes about its arguments
        raise UserError(
            f"reasoning-gym data set {name} with {dict(arguments)}: {type(error).__name__}: {error}; "
            "change its arguments"
        ) from error
    return [_example(entry, name, arguments, id=f"{name}/{side}/{index}") for index, entry in enumerate(entries)]


def _factory(name: str) -> Any:
    try:
        from reasoning_gym import factory  # slow to import, and an extra
    except ImportError as error:
        raise UserError(
            f'task.type=reasoning_gym needs the package reasoning-gym ({error}): pip install "flatpeak[tasks]"'
        ) from error
    if name == "composite":
        raise UserError("task: reasoning-gym's composite is what task.datasets does; name the data sets there")
    if name not in factory.DATASETS:
        raise UserError(
            f"task: reasoning-gym has no data set {name!r}{did_you_mean(name, factory.DATASETS)}; it has "
            f"{len(factory.DATASETS)}, listed at https://github.com/open-thought/reasoning-gym"
        )
    return factory


def _example(entry: Mapping[str, Any], name: str, arguments: Mapping[str, Any], *, id: str) -> Example:
    answer = entry["answer"]
    try:
        scored_by = json.dumps({"dataset": name, "arguments": plain(arguments), "entry": plain(entry)})
    except TypeError as error:
        raise UserError(
            f"reasoning-gym data set {name}: its rows hold {error}, which cannot be stored; take another data set"
        ) from error
    return Example(
        id=id,
        question=str(entry["question"]),
        # Some data sets know no single answer, only how to score one.
        gold="" if answer is None else str(answer),
        columns={"reasoning_gym": scored_by, "dataset": name},
        subsets={"dataset": name},
    )


def plain(value: Any) -> Any:
    """A value as JSON can hold it, every collection as a list that begins with its kind: `["tuple", 1, 2]`.

    JSON itself makes lists of tuples and texts of numbers that are keys, and some scorers tell them apart. TypeError
    where there is something else in it.
    """
    if hasattr(value, "tolist"):  # NumPy, its numbers and texts too
        value = value.tolist()
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Fraction():
            return ["fraction", str(value)]
        case Mapping():
            return ["dict", *(plain(item) for item in value.items())]
        case list() | tuple() | set() | frozenset():
            return [type(value).__name__, *(plain(item) for item in value)]
    raise TypeError(type(value).__name__)
