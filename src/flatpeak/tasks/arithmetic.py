"""Integer arithmetic: the smallest task on which everything can be seen to work."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, overload

import numpy as np
from numpy.typing import NDArray

from flatpeak.errors import UserError
from flatpeak.tasks.config import ArithmeticConfig, CountdownTaskConfig
from flatpeak.tasks.data_files import Row, read_file, read_hub
from flatpeak.tasks.prompts import check_fields, fill
from flatpeak.types import Example

Problem = tuple[int, str, int]
_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_COMMUTES = frozenset("+*")


def arithmetic_examples(config: ArithmeticConfig) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Train and test problems drawn without replacement from all a, op, b of the range.

    A problem whose twin `b op a` is held out is not trained on: knowing one is knowing the other.
    UserError where the range cannot supply both sizes, or a format string has a wrong field.
    """
    operators = tuple(dict.fromkeys(config.operators))
    values = config.max_value - config.min_value + 1
    if values < 1:
        raise UserError(
            f"task.min_value={config.min_value} exceeds task.max_value={config.max_value}: swap or widen them"
        )
    if not operators:
        raise UserError("task.operators is empty: name at least one of +, -, *")
    told_apart = ("a", "b", "op") if len(operators) > 1 else ("a", "b")
    check_fields(config.question, allowed=("a", "op", "b"), required=told_apart, option="task.question")
    check_fields(config.rationale, allowed=("a", "op", "b", "answer"), option="task.rationale")

    total = values * values * len(operators)
    problems = (_problem(index, values, operators, config.min_value) for index in _shuffled(total, seed=config.seed))
    test = list(islice(problems, config.test_size))
    held_out = {twin for problem in test for twin in _twins(problem)}
    train = list(islice((problem for problem in problems if problem not in held_out), config.train_size))
    _check_sizes(config, total=total, train=len(train), test=len(test))
    return tuple(_example(p, config) for p in train), tuple(_example(p, config) for p in test)


def _shuffled(total: int, *, seed: int) -> Iterator[int]:
    """0..total-1 in random order. A Fisher-Yates shuffle that stores only what it moved: total may be 10^30."""
    generator = random.Random(seed)
    moved: dict[int, int] = {}
    for position in range(total):
        other = generator.randrange(position, total)
        yield moved.get(other, other)
        moved[other] = moved.pop(position, position)


def _problem(index: int, values: int, operators: tuple[str, ...], min_value: int) -> Problem:
    pair, op = divmod(index, len(operators))
    a, b = divmod(pair, values)
    return min_value + a, operators[op], min_value + b


def _twins(problem: Problem) -> tuple[Problem, ...]:
    a, op, b = problem
    return (problem, (b, op, a)) if op in _COMMUTES else (problem,)


def _check_sizes(config: ArithmeticConfig, *, total: int, train: int, test: int) -> None:
    if test == config.test_size and train == config.train_size:
        return
    wanted = f"task.train_size={config.train_size} and task.test_size={config.test_size}"
    if train == 0:
        raise UserError(f"{wanted}: the range has only {total} problems; widen task.max_value or lower the sizes")
    raise UserError(
        f"{wanted}: of {total} problems, {train} remain for training once the held-out ones and their commuted "
        f"twins are set aside; lower task.train_size to {train} or widen task.max_value"
    )


def _example(problem: Problem, config: ArithmeticConfig) -> Example:
    a, op, b = problem
    answer = _APPLY[op](a, b)
    fields: dict[str, object] = {"a": a, "op": op, "b": b}
    return Example(
        id=f"{a}{op}{b}",
        question=fill(config.question, fields, option="task.question"),
        gold=str(answer),
        rationale=fill(config.rationale, {**fields, "answer": answer}, option="task.rationale"),
        columns=fields,
    )


HUB_NAME: Final = "Jiayi-Pan/Countdown-Tasks-3to4"

_Integers = NDArray[np.int64]
_SIGNS: Final = "+-*/"
_DRAWS: Final = 1 << 18
_LARGEST: Final = 10**9
"""What a partial result may reach; beyond it a draw is given up."""
_FRUITLESS: Final = 8
"""So many blocks of draws in a row without a new problem end the search."""


def countdown_examples(config: CountdownTaskConfig) -> tuple[Sequence[Example], Sequence[Example], tuple[str, ...]]:
    """Train, test and notices. Columns are `nums` and `target`, and `solution` of generated problems."""
    check_fields(config.question, allowed=("nums", "target"), required=("nums", "target"), option="task.question")
    if config.source == "published":
        return _published(config)
    if config.path is not None:
        raise UserError(f"task.path={config.path} is not read with task.source=generated: set task.source=published")
    problems = _generate(config)
    test_size = config.test_size
    return (
        Problems(problems, slice(test_size, None), prefix="train", question=config.question),
        Problems(problems, slice(0, test_size), prefix="test", question=config.question),
        (),
    )


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """N problems of up to K numbers; operations fold them from left to right."""

    nums_NK: _Integers
    """Zero beyond a problem's count."""
    signs_NK: _Integers
    """Index into `_SIGNS` of what comes before each number but the first."""
    targets_N: _Integers


class Problems(Sequence[Example]):
    """Generated problems, made into examples when they are asked for: 327,680 of them take 24 MB."""

    def __init__(self, drawn: _Drawn, part: slice, *, prefix: str, question: str) -> None:
        self._nums_NK = drawn.nums_NK[part]
        self._signs_NK = drawn.signs_NK[part]
        self._targets_N = drawn.targets_N[part]
        self._prefix = prefix
        self._question = question

    def __len__(self) -> int:
        return len(self._targets_N)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        """One example, or some."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        nums = [number for number in self._nums_NK[place].tolist() if number]
        solution = _solution(nums, self._signs_NK[place].tolist())
        return _countdown_example(
            f"{self._prefix}/{place}",
            sorted(nums),
            int(self._targets_N[place]),
            question=self._question,
            solution=solution,
        )


def _solution(nums: Sequence[int], signs: Sequence[int]) -> str:
    text, last = str(nums[0]), "*"
    for number, sign in zip(nums[1:], signs[1:], strict=False):
        # Only a sum before a product needs parentheses, as all is folded from left to right.
        text = f"({text})" if last in "+-" and _SIGNS[sign] in "*/" else text
        text, last = f"{text} {_SIGNS[sign]} {number}", _SIGNS[sign]
    return text


def _countdown_example(id: str, nums: list[int], target: int, *, question: str, solution: str | None) -> Example:
    fields: dict[str, object] = {"nums": ", ".join(map(str, nums)), "target": target}
    columns: dict[str, Any] = {"nums": nums, "target": target}
    return Example(
        id=id,
        question=fill(question, fields, option="task.question"),
        gold=str(target),
        rationale=None if solution is None else f"<answer>{solution}</answer>",
        columns=columns if solution is None else {**columns, "solution": solution},
    )


def _generate(config: CountdownTaskConfig) -> _Drawn:
    """Distinct problems, test first, as many as both sizes ask for."""
    for low, high in (("min_number", "max_number"), ("min_target", "max_target")):
        if getattr(config, low) > getattr(config, high):
            raise UserError(
                f"task.{low}={getattr(config, low)} exceeds task.{high}={getattr(config, high)}: swap or widen them"
            )
    wanted = config.train_size + config.test_size
    # A bit generator's own stream is the same in every version of NumPy; that of Generator's methods may change.
    bits = np.random.PCG64(config.seed)
    found: list[_Drawn] = []
    keys_N = np.empty(0, dtype=np.int64)
    fruitless = 0
    while len(keys_N) < wanted and fruitless < _FRUITLESS:
        drawn = _draw(bits, config)
        new_keys_N, first_N = np.unique(_keys(drawn, config), return_index=True)
        fresh_N = np.sort(first_N[~np.isin(new_keys_N, keys_N, assume_unique=True)])
        fruitless = 0 if len(fresh_N) else fruitless + 1
        found.append(_take(drawn, fresh_N))
        keys_N = np.concatenate([keys_N, _keys(found[-1], config)])
    if len(keys_N) < wanted:
        raise UserError(
            f"task.train_size={config.train_size} and task.test_size={config.test_size}: only {len(keys_N)} distinct "
            "problems were found; lower the sizes, or widen task.max_number, task.max_target or task.counts"
        )
    parts = (np.concatenate([getattr(one, name) for one in found])[:wanted] for name in _Drawn.__dataclass_fields__)
    return _Drawn(**dict(zip(_Drawn.__dataclass_fields__, parts, strict=True)))


def _draw(bits: np.random.PCG64, config: CountdownTaskConfig) -> _Drawn:
    """What is usable of a block of random numbers and operations: whole partial results, the target in its range."""

    def integers(*shape: int, below: int) -> _Integers:
        # The remainder favours small numbers by less than one part in 2 ** 50.
        return (bits.random_raw(int(np.prod(shape))) % np.uint64(below)).astype(np.int64).reshape(shape)

    longest = max(config.counts)
    counts_N = np.array(config.counts)[integers(_DRAWS, below=len(config.counts))]
    nums_NK = config.min_number + integers(_DRAWS, longest, below=config.max_number - config.min_number + 1)
    nums_NK *= np.arange(longest) < counts_N[:, None]
    signs_NK = integers(_DRAWS, longest, below=len(_SIGNS))
    values_N = nums_NK[:, 0].copy()
    usable_N = np.ones(_DRAWS, dtype=bool)
    for place in range(1, longest):
        number_N, sign_N, there_N = nums_NK[:, place], signs_NK[:, place], place < counts_N
        divisor_N = np.maximum(number_N, 1)
        results = (values_N + number_N, values_N - number_N, values_N * number_N, values_N // divisor_N)
        next_N = np.choose(sign_N, results)
        usable_N &= ~there_N | (sign_N != 3) | (values_N % divisor_N == 0)
        usable_N &= np.abs(next_N) <= _LARGEST
        values_N = np.where(there_N & usable_N, next_N, values_N)
    usable_N &= (values_N >= config.min_target) & (values_N <= config.max_target)
    return _take(_Drawn(nums_NK=nums_NK, signs_NK=signs_NK, targets_N=values_N), np.flatnonzero(usable_N))


def _take(drawn: _Drawn, places: NDArray[np.intp]) -> _Drawn:
    return _Drawn(nums_NK=drawn.nums_NK[places], signs_NK=drawn.signs_NK[places], targets_N=drawn.targets_N[places])


def _keys(drawn: _Drawn, config: CountdownTaskConfig) -> _Integers:
    """One integer per problem, that of its sorted numbers and its target."""
    keys_N = drawn.targets_N.copy()
    for column_N in np.sort(drawn.nums_NK, axis=1).T:
        keys_N = keys_N * (config.max_number + 1) + column_N
    return keys_N


def _published(config: CountdownTaskConfig) -> tuple[Sequence[Example], Sequence[Example], tuple[str, ...]]:
    """Rows in their order: train, then test. Training rows that ask what a test row asks are dropped."""
    sizes = f"task.train_size={config.train_size} and task.test_size={config.test_size}"
    wanted = config.train_size + config.test_size
    problems = [_countdown_problem(row) for row in islice(_rows(config), wanted)]
    if len(problems) < wanted:
        raise UserError(f"{sizes}: there are only {len(problems)} rows; lower the sizes")
    held_out = {(tuple(sorted(nums)), target) for nums, target in problems[config.train_size :]}
    examples = [
        _countdown_example(str(index), nums, target, question=config.question, solution=None)
        for index, (nums, target) in enumerate(problems)
        if index >= config.train_size or (tuple(sorted(nums)), target) not in held_out
    ]
    train, test = examples[: -config.test_size], examples[-config.test_size :]
    if not train:
        raise UserError(f"{sizes}: every training row asks what a test row asks; give more rows")
    dropped = config.train_size - len(train)
    return train, test, (f"{dropped} training rows dropped: test rows ask the same",) if dropped else ()


def _rows(config: CountdownTaskConfig) -> Iterable[Row]:
    if config.path is not None:
        return read_file(config.path, option="task.path")
    return read_hub(HUB_NAME, config=None, split="train", path_option="task.path, a file")


def _countdown_problem(row: Row) -> tuple[list[int], int]:
    nums, target = row.values.get("nums"), row.values.get("target")
    whole = [value for value in _flat(nums, target) if isinstance(value, int) and not isinstance(value, bool)]
    if not isinstance(nums, list) or len(nums) < 2 or len(whole) != len(nums) + 1:
        raise UserError(
            f"{row.where}: nums={nums!r} and target={target!r}; countdown rows have a list of integers and an integer"
        )
    return list(nums), whole[-1]


def _flat(nums: Any, target: Any) -> Iterator[Any]:
    yield from nums if isinstance(nums, list) else ()
    yield target
