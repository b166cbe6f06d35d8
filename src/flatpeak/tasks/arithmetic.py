"""Generated arithmetic: integer sums, and Countdown (reach a target with given numbers), which is also published.

Arithmetic is the smallest task for a complete run. Countdown is the task of TinyZero.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, overload

from pydantic import Field

from flatpeak.errors import UserError
from flatpeak.tasks.data_files import ExampleTask, Row, SeededConfig, read_file, read_hub
from flatpeak.tasks.prompts import check_fields, fill
from flatpeak.types import Example
from flatpeak.utils.schema import StrictConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    _Integers = NDArray[np.int64]

COUNTDOWN_HUB_NAME: Final = "Jiayi-Pan/Countdown-Tasks-3to4"
_APPLY: Final = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_COMMUTATIVE: Final = frozenset("+*")
_OPERATIONS: Final = "+-*/"
_BLOCK_SIZE: Final = 1 << 18
"""Candidate problems per block of random numbers."""
_MAX_MAGNITUDE: Final = 10**9
"""The largest absolute value of a partial result; candidates beyond it are rejected."""
_MAX_FRUITLESS_BLOCKS: Final = 8
"""The search ends after this many consecutive blocks without a new problem."""

Problem = tuple[int, str, int]
"""Operand, operator, operand."""


class ArithmeticConfig(SeededConfig):
    """Generated integer arithmetic: seeded, with disjoint train and held-out problems."""

    type: Literal["arithmetic"] = "arithmetic"
    min_value: int = 0
    """The smallest operand."""
    max_value: int = 99
    """The largest operand."""
    operators: tuple[Literal["+", "-", "*"], ...] = ("+",)
    """The possible operations; each problem has one of them."""
    train_size: Annotated[int, Field(ge=1)] = 8000
    """The number of training problems."""
    test_size: Annotated[int, Field(ge=1)] = 500
    """The number of held-out problems."""
    question: str = "{a}{op}{b}="
    """Python format string with fields a, op, b."""
    rationale: str = "{answer}"
    """The SFT target, with fields a, op, b, answer; "{a}{op}{b}={answer}\\n#### {answer}" has GSM8K's layout."""

    def load(self) -> ExampleTask:
        """Draw train and test problems without replacement from all a, op, b of the range.

        If `b op a` is held out, `a op b` is not used for training: they have the same answer. UserError if the range
        cannot supply both sizes, or if a format string has a wrong field.
        """
        operators = tuple(dict.fromkeys(self.operators))
        values = self.max_value - self.min_value + 1
        if values < 1:
            raise UserError(
                f"task.min_value={self.min_value} exceeds task.max_value={self.max_value}: swap or widen them"
            )
        if not operators:
            raise UserError("task.operators is empty: name at least one of +, -, *")
        required = ("a", "b", "op") if len(operators) > 1 else ("a", "b")
        check_fields(self.question, allowed=("a", "op", "b"), required=required, option="task.question")
        check_fields(self.rationale, allowed=("a", "op", "b", "answer"), option="task.rationale")

        total = values * values * len(operators)
        problems = (_problem(index, values, operators, self.min_value) for index in _shuffled(total, seed=self.seed))
        test = list(islice(problems, self.test_size))
        excluded = {twin for problem in test for twin in _twins(problem)}
        train = list(islice((problem for problem in problems if problem not in excluded), self.train_size))
        _check_sizes(self, total=total, train=len(train), test=len(test))
        return ExampleTask(
            name=self.type,
            train=tuple(_arithmetic_example(problem, self) for problem in train),
            test=tuple(_arithmetic_example(problem, self) for problem in test),
        )


def _shuffled(total: int, *, seed: int) -> Iterator[int]:
    """The integers below `total` in random order.

    A Fisher-Yates shuffle that stores only moved entries, so that `total` may be 10^30.
    """
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
    return (problem, (b, op, a)) if op in _COMMUTATIVE else (problem,)


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


def _arithmetic_example(problem: Problem, config: ArithmeticConfig) -> Example:
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


class CountdownTaskConfig(StrictConfig):
    """Countdown: make `target` from `nums`, using each once. Generated, or `Jiayi-Pan/Countdown-Tasks-3to4`."""

    type: Literal["countdown"] = "countdown"
    source: Literal["generated", "published"] = "generated"
    """generated: flatpeak makes the problems. published: read them from `Jiayi-Pan/Countdown-Tasks-3to4`, or `path`."""
    path: str | None = None
    """Published rows in a file with columns `target` and `nums`; null loads them from the Hub."""
    train_size: Annotated[int, Field(ge=1)] = 327_680
    """The number of training problems; the default is TinyZero's."""
    test_size: Annotated[int, Field(ge=1)] = 1024
    """The number of test problems; the default is TinyZero's. Published test rows follow the training rows in the
    file."""
    counts: tuple[Annotated[int, Field(ge=2, le=4)], ...] = Field(default=(3, 4), min_length=1)
    """Generated: how many numbers a problem can have."""
    min_number: Annotated[int, Field(ge=1)] = 1
    """Generated: the smallest of the numbers."""
    max_number: Annotated[int, Field(le=999)] = 99
    """Generated: the largest of the numbers."""
    min_target: Annotated[int, Field(ge=1)] = 10
    """Generated: the smallest target."""
    max_target: Annotated[int, Field(le=9999)] = 99
    """Generated: the largest target."""
    question: str = (
        "Using each of the numbers {nums} exactly once, and only +, -, *, / and parentheses, write an expression that "
        "equals {target}. The answer is the expression alone, without an equals sign."
    )
    """Python format string with fields nums, target."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Generated: the seed of the problems."""

    def load(self) -> ExampleTask:
        """Generate or read the problems. Columns are `nums`, `target` and, for generated problems, `solution`."""
        check_fields(self.question, allowed=("nums", "target"), required=("nums", "target"), option="task.question")
        if self.source == "published":
            return _published(self)
        if self.path is not None:
            raise UserError(f"task.path={self.path} is not read with task.source=generated: set task.source=published")
        problems = _generate(self)
        return ExampleTask(
            name=self.type,
            train=Problems(problems, slice(self.test_size, None), prefix="train", question=self.question),
            test=Problems(problems, slice(0, self.test_size), prefix="test", question=self.question),
        )


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """N problems of up to K numbers, combined by their operations from left to right."""

    nums_NK: _Integers
    """Zero beyond a problem's count."""
    operations_NK: _Integers
    """Indices into `_OPERATIONS` of the operation before each number but the first."""
    targets_N: _Integers


class Problems(Sequence[Example]):
    """Generated problems, converted to examples on access: 327,680 of them take 24 MB."""

    def __init__(self, drawn: _Drawn, rows: slice, *, prefix: str, question: str) -> None:
        self._nums_NK = drawn.nums_NK[rows]
        self._operations_NK = drawn.operations_NK[rows]
        self._targets_N = drawn.targets_N[rows]
        self._prefix = prefix
        self._question = question

    def __len__(self) -> int:
        return len(self._targets_N)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        """The example at an index, or a list of those in a slice."""
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        nums = [number for number in self._nums_NK[position].tolist() if number]
        solution = _solution(nums, self._operations_NK[position].tolist())
        return _countdown_example(
            f"{self._prefix}/{position}",
            sorted(nums),
            int(self._targets_N[position]),
            question=self._question,
            solution=solution,
        )


def _solution(nums: Sequence[int], operations: Sequence[int]) -> str:
    text, last = str(nums[0]), "*"
    for number, index in zip(nums[1:], operations[1:], strict=False):
        operation = _OPERATIONS[index]
        # Evaluation is from left to right, so only a sum before a product needs parentheses.
        text = f"({text})" if last in "+-" and operation in "*/" else text
        text, last = f"{text} {operation} {number}", operation
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
    """Distinct problems for both sizes, the test problems first."""
    import numpy as np

    for low, high in (("min_number", "max_number"), ("min_target", "max_target")):
        if getattr(config, low) > getattr(config, high):
            raise UserError(
                f"task.{low}={getattr(config, low)} exceeds task.{high}={getattr(config, high)}: swap or widen them"
            )
    wanted = config.train_size + config.test_size
    # A bit generator's raw stream is the same in every version of NumPy; Generator's methods may change.
    bits = np.random.PCG64(config.seed)
    blocks: list[_Drawn] = []
    keys_N = np.empty(0, dtype=np.int64)
    fruitless = 0
    while len(keys_N) < wanted and fruitless < _MAX_FRUITLESS_BLOCKS:
        block = _draw_block(bits, config)
        block_keys_N, first_N = np.unique(_keys(block, config), return_index=True)
        new_N = np.sort(first_N[~np.isin(block_keys_N, keys_N, assume_unique=True)])
        fruitless = 0 if len(new_N) else fruitless + 1
        blocks.append(_take(block, new_N))
        keys_N = np.concatenate([keys_N, _keys(blocks[-1], config)])
    if len(keys_N) < wanted:
        raise UserError(
            f"task.train_size={config.train_size} and task.test_size={config.test_size}: only {len(keys_N)} distinct "
            "problems were found; lower the sizes, or widen task.max_number, task.max_target or task.counts"
        )
    return _Drawn(
        nums_NK=np.concatenate([block.nums_NK for block in blocks])[:wanted],
        operations_NK=np.concatenate([block.operations_NK for block in blocks])[:wanted],
        targets_N=np.concatenate([block.targets_N for block in blocks])[:wanted],
    )


def _draw_block(bits: np.random.PCG64, config: CountdownTaskConfig) -> _Drawn:
    """The valid problems in a block of random candidates: integer partial results, and a target within the range."""
    import numpy as np

    def integers(*shape: int, below: int) -> _Integers:
        # The remainder favours small numbers by less than one part in 2 ** 50.
        return (bits.random_raw(int(np.prod(shape))) % np.uint64(below)).astype(np.int64).reshape(shape)

    longest = max(config.counts)
    counts_N = np.array(config.counts)[integers(_BLOCK_SIZE, below=len(config.counts))]
    nums_NK = config.min_number + integers(_BLOCK_SIZE, longest, below=config.max_number - config.min_number + 1)
    nums_NK *= np.arange(longest) < counts_N[:, None]
    operations_NK = integers(_BLOCK_SIZE, longest, below=len(_OPERATIONS))
    values_N = nums_NK[:, 0].copy()
    valid_N = np.ones(_BLOCK_SIZE, dtype=bool)
    for position in range(1, longest):
        number_N, operation_N, present_N = nums_NK[:, position], operations_NK[:, position], position < counts_N
        divisor_N = np.maximum(number_N, 1)
        results = (values_N + number_N, values_N - number_N, values_N * number_N, values_N // divisor_N)
        next_N = np.choose(operation_N, results)
        valid_N &= ~present_N | (operation_N != _OPERATIONS.index("/")) | (values_N % divisor_N == 0)
        valid_N &= np.abs(next_N) <= _MAX_MAGNITUDE
        values_N = np.where(present_N & valid_N, next_N, values_N)
    valid_N &= (values_N >= config.min_target) & (values_N <= config.max_target)
    return _take(_Drawn(nums_NK=nums_NK, operations_NK=operations_NK, targets_N=values_N), np.flatnonzero(valid_N))


def _take(drawn: _Drawn, rows: NDArray[np.intp]) -> _Drawn:
    return _Drawn(nums_NK=drawn.nums_NK[rows], operations_NK=drawn.operations_NK[rows], targets_N=drawn.targets_N[rows])


def _keys(drawn: _Drawn, config: CountdownTaskConfig) -> _Integers:
    """One integer per problem, unique for its sorted numbers and its target."""
    import numpy as np

    keys_N = drawn.targets_N.copy()
    for column_N in np.sort(drawn.nums_NK, axis=1).T:
        keys_N = keys_N * (config.max_number + 1) + column_N
    return keys_N


def _published(config: CountdownTaskConfig) -> ExampleTask:
    """The published rows in order: train, then test. Drops training rows with the same question as a test row."""
    sizes = f"task.train_size={config.train_size} and task.test_size={config.test_size}"
    wanted = config.train_size + config.test_size
    problems = [_countdown_problem(row) for row in islice(_countdown_rows(config), wanted)]
    if len(problems) < wanted:
        raise UserError(f"{sizes}: there are only {len(problems)} rows; lower the sizes")
    test_problems = {(tuple(sorted(nums)), target) for nums, target in problems[config.train_size :]}
    examples = [
        _countdown_example(str(index), nums, target, question=config.question, solution=None)
        for index, (nums, target) in enumerate(problems)
        if index >= config.train_size or (tuple(sorted(nums)), target) not in test_problems
    ]
    train, test = examples[: -config.test_size], examples[-config.test_size :]
    if not train:
        raise UserError(f"{sizes}: every training row asks what a test row asks; give more rows")
    dropped = config.train_size - len(train)
    notices = (f"{dropped} training rows dropped: test rows ask the same",) if dropped else ()
    return ExampleTask(name=config.type, train=train, test=test, notices=notices)


def _countdown_rows(config: CountdownTaskConfig) -> Iterable[Row]:
    if config.path is not None:
        return read_file(config.path, option="task.path")
    return read_hub(COUNTDOWN_HUB_NAME, config=None, split="train", path_option="task.path, a file")


def _countdown_problem(row: Row) -> tuple[list[int], int]:
    nums, target = row.values.get("nums"), row.values.get("target")
    values = (*nums, target) if isinstance(nums, list) else ()
    integers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if not isinstance(nums, list) or len(nums) < 2 or len(integers) != len(nums) + 1:
        raise UserError(
            f"{row.where}: nums={nums!r} and target={target!r}; countdown rows have a list of integers and an integer"
        )
    return list(nums), integers[-1]
