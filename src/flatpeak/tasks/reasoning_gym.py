"""Data sets of reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760), generated and scored by its code.

The reward `reasoning_gym` scores an answer, in any process, with the example's column of that name: JSON with the name
of the data set, its arguments and the whole row, which rewards/reasoning_gym.py reads.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from flatpeak.errors import UserError, did_you_mean
from flatpeak.tasks.data_files import ExampleTask
from flatpeak.types import Example
from flatpeak.utils.schema import StrictConfig

TEST_SEED_OFFSET: Final = 1_000_000_000
"""Added to the seed for the held-out rows: in nearly all data sets, row i is made from seed + i."""
_HASH_ORDERED: Final = frozenset({"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"})
"""Data sets of version 0.1.25 that iterate over sets of strings, whose order differs between processes."""


class ReasoningGymConfig(StrictConfig):
    """Data sets of reasoning-gym (arXiv 2505.24760), generated and scored by its code; needs `flatpeak[tasks]`."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str | None = None
    """The name of one data set, whose settings are `arguments`; null: use `datasets`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Settings of `dataset`, under reasoning-gym's names."""
    datasets: dict[str, dict[str, Any]] | None = None
    """Several data sets, by name, each with its arguments; sizes are divided evenly. null: only `dataset`."""
    size: Annotated[int, Field(ge=1, lt=1_000_000_000)] = 2000
    """The number of training rows, over all data sets."""
    test_size: Annotated[int, Field(ge=1, lt=1_000_000_000)] = 200
    """The number of held-out rows, over all data sets."""
    seed: Annotated[int, Field(ge=0, lt=1_000_000_000)] = 0
    """The seed of the rows."""

    def load(self) -> ExampleTask:
        """Generate the rows. Held-out rows use other seeds; training rows with the same question are dropped."""
        datasets = _datasets(self)
        test_sizes, train_sizes = (_shares(size, len(datasets)) for size in (self.test_size, self.size))
        train: list[Example] = []
        test: list[Example] = []
        notices = []
        for index, (name, arguments) in enumerate(datasets.items()):
            test_rows = _rows(name, arguments, size=test_sizes[index], seed=self.seed + TEST_SEED_OFFSET, side="test")
            train_rows = _rows(name, arguments, size=train_sizes[index], seed=self.seed, side="train")
            test_questions = {example.question for example in test_rows}
            kept = [example for example in train_rows if example.question not in test_questions]
            if len(kept) < len(train_rows):
                notices.append(
                    f"{name}: {len(train_rows) - len(kept)} of {len(train_rows)} training rows dropped, held-out rows "
                    "ask the same"
                )
            if name in _HASH_ORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
                notices.append(
                    f"{name}: its rows depend on Python's hash seed; set PYTHONHASHSEED=0, or a resumed run has others"
                )
            train += kept
            test += test_rows
        if not train:
            raise UserError(
                f"task: {', '.join(datasets)} has no training row that no held-out row repeats; lower task.test_size, "
                "or widen the data set by its arguments"
            )
        return ExampleTask(name=self.type, train=tuple(train), test=tuple(test), notices=tuple(notices))


def _datasets(config: ReasoningGymConfig) -> dict[str, dict[str, Any]]:
    """The arguments of each data set, by its name."""
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


def _shares(size: int, count: int) -> list[int]:
    return [size // count + (index < size % count) for index in range(count)]


def _rows(name: str, arguments: Mapping[str, Any], *, size: int, seed: int, side: str) -> list[Example]:
    factory = _factory(name)
    try:
        # Some data sets print while they generate rows.
        with contextlib.redirect_stdout(io.StringIO()):
            dataset = factory.create_dataset(name, **{**arguments, "size": size, "seed": seed})
            entries = [dataset[index] for index in range(size)]
    except Exception as error:  # data sets raise any type of error about their arguments
        raise UserError(
            f"reasoning-gym data set {name} with {dict(arguments)}: {type(error).__name__}: {error}; "
            "change its arguments"
        ) from error
    return [_example(entry, name, arguments, id=f"{name}/{side}/{index}") for index, entry in enumerate(entries)]


def _factory(name: str) -> Any:
    try:
        from reasoning_gym import factory  # imported here: slow, and an optional dependency
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
        scoring = json.dumps({"dataset": name, "arguments": plain(arguments), "entry": plain(entry)})
    except TypeError as error:
        raise UserError(
            f"reasoning-gym data set {name}: its rows hold {error}, which cannot be stored; take another data set"
        ) from error
    return Example(
        id=id,
        question=str(entry["question"]),
        # Some data sets have no single answer, but a function that scores answers.
        gold="" if answer is None else str(answer),
        columns={"reasoning_gym": scoring, "dataset": name},
        subsets={"dataset": name},
    )


def plain(value: Any) -> Any:
    """A JSON-serializable form of a value, every collection as a list that begins with its type: `["tuple", 1, 2]`.

    JSON itself turns tuples into lists and numeric keys into strings, a difference that affects some scorers. TypeError
    for a value of another type.
    """
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
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
