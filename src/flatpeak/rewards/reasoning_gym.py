"""The reward of reasoning-gym (arXiv 2505.24760): the data set that made a question scores its completions.

Some of its scorers run the answer as Python, with `eval` or sympy's `parse_expr`. They get an answer only if it can do
nothing except build a value. Two others (in version 0.1.25) give full marks to texts that are not answers; they get
only answers of the right kind. Anything else scores 0 without being passed on.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from flatpeak.errors import UserError
from flatpeak.rewards.base import ComponentScores, Isolation, Rule
from flatpeak.rewards.countdown import evaluate
from flatpeak.utils.answers import after_thinking, judged_text, last_answer

if TYPE_CHECKING:
    from flatpeak.types import Completion, Example, Group, Prompt, Score

MAX_CHARACTERS: Final = 20_000
"""Longer answers score 0 without being graded; the longest right answers are grids of numbers, far below it."""
MAX_PROGRAM: Final = 2_000
"""The most characters of an answer that a scorer runs as Python."""

# As of version 0.1.25; a test checks for others.
EVALUATED: Final = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
PARSED: Final = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})
ARITHMETIC: Final = frozenset({"countdown", "puzzle24"})
# For the first, everything but "True" is a correct "False"; for the second, nan is as near as possible.
KINDS: Final[Mapping[str, re.Pattern[str]]] = {
    "game_of_life_halting": re.compile(r"true|false", re.IGNORECASE),
    "complex_arithmetic": re.compile(r"[0-9.eEij+\-*() \t]+"),
}

_FUNCTIONS: Final = frozenset(
    (
        "sin",
        "cos",
        "tan",
        "sec",
        "csc",
        "cot",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "exp",
        "log",
        "ln",
        "sqrt",
    )
)
MAX_DEPTH: Final = 3
"""The deepest nesting of powers and functions in a formula."""
MAX_EXPONENT: Final = 100
MAX_SUM_EXPONENT: Final = 12
"""Largest exponent, except for names and numbers as the base, because sympy multiplies powers out."""
_LARGEST_NUMBER: Final = 10**12


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningGymReward(Rule):
    """The data set's score of the answer, in [0, 1]; 0 without an answer.

    The row's column `reasoning_gym` has the name of the data set, its arguments, and its row.
    """

    extraction: Literal["answer_tag", "whole"] = "answer_tag"
    """The last answer block after the thinking, or everything after the thinking."""
    timeout: float = 5.0
    """Seconds that a worker process may take for one answer; if it takes longer, the score is 0."""
    parallel: ClassVar[bool] = False

    def __reduce__(self) -> tuple[Callable[..., ReasoningGymReward], tuple[str, float]]:
        return _load, (self.extraction, self.timeout)

    @property
    def isolation(self) -> Isolation:
        """The limits of a worker's calls, because scorers are third-party code."""
        return Isolation(timeout=self.timeout, on_timeout=0.0)

    def __call__(self, completion: Completion, prompt: Prompt) -> float:
        """The score; 0 also if the scorer raises on this answer but not on the row's own answer.

        Other errors are passed on. UserError with the row's name if the column is missing.
        """
        name, arguments, entry = _read(prompt.example)
        scorer = _scorer(name, arguments)
        answer = self.answer(completion, prompt)
        if answer is None or len(answer) > MAX_CHARACTERS or not admissible(name, answer, entry):
            return 0.0
        try:
            score = _quietly(scorer, answer, entry)
        except (MemoryError, OSError, ImportError):  # caused by the machine instead of the text
            raise
        except Exception:  # some scorers raise for any text that is not in the expected form
            _quietly(scorer, entry["answer"] or "", entry)
            return 0.0
        return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0

    def score(self, groups: Sequence[Group]) -> ComponentScores:
        """The score of every completion, missing if the data set's scorer raised."""
        failed, first_error = 0, None
        scores: list[list[Score]] = []
        for group in groups:
            row: list[Score] = []
            for completion in group.completions:
                try:
                    row.append(self(completion, group.prompt))
                except UserError:
                    raise
                except Exception as error:  # scorers may raise anything about a text
                    failed, first_error = failed + 1, first_error or error
                    row.append(None)
            scores.append(row)
        return ComponentScores(scores=scores, failed=failed, first_error=first_error)

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """The answer's text, stripped, or None, for majority votes."""
        text = judged_text(completion, prompt)
        content = last_answer(text) if self.extraction == "answer_tag" else after_thinking(text)
        return (content or "").strip() or None


def _load(extraction: Literal["answer_tag", "whole"], timeout: float) -> ReasoningGymReward:
    """The reward in a worker process; loads its package before the clock of the first call starts."""
    with contextlib.suppress(ImportError):
        import reasoning_gym.factory  # noqa: F401
    return ReasoningGymReward(extraction=extraction, timeout=timeout)


def admissible(name: str, answer: str, entry: Mapping[str, Any]) -> bool:
    """Whether the scorer of data set `name` can get this answer without running anything but arithmetic."""
    if name in ARITHMETIC:
        return evaluate(answer) is not None
    if name in KINDS:
        return KINDS[name].fullmatch(answer) is not None
    return name not in EVALUATED | PARSED or answer == entry["answer"] or _is_harmless(name, answer)


def _is_harmless(name: str, program: str) -> bool:
    try:
        tree = _parsed(program)
        if name in PARSED:
            return _is_formula(tree)
        ast.literal_eval(tree)
    except SyntaxError:  # it cannot run at all
        return name in EVALUATED
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _parsed(program: str) -> ast.expr:
    if len(program) > MAX_PROGRAM:
        raise ValueError(f"{len(program)} characters")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(program, mode="eval").body


def _is_formula(node: ast.expr, *, depth: int = 0) -> bool:
    """Whether it has only numbers, names, four operations, powers and known functions, nested in `depth` of these."""
    match node:
        case ast.Constant(value=int() | float() as number):
            allowed = not isinstance(number, bool) and abs(number) <= _LARGEST_NUMBER
        case ast.Name():
            allowed = True
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            allowed = _is_formula(operand, depth=depth)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            most = MAX_EXPONENT if isinstance(left, ast.Name | ast.Constant) else MAX_SUM_EXPONENT
            allowed = depth < MAX_DEPTH and _is_formula(left, depth=depth + 1) and _is_exponent(right, most=most)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            allowed = _is_formula(left, depth=depth) and _is_formula(right, depth=depth)
        case ast.Call(func=ast.Name(id=function), args=[argument], keywords=[]):
            allowed = function in _FUNCTIONS and depth < MAX_DEPTH and _is_formula(argument, depth=depth + 1)
        case _:
            allowed = False
    return allowed


def _is_exponent(node: ast.expr, *, most: int) -> bool:
    """Whether it is a small number, a name, a product of both, or a fraction, so that the power stays small."""
    match node:
        case ast.Constant(value=int() | float() as number):
            allowed = not isinstance(number, bool) and abs(number) <= most
        case ast.Name():
            allowed = True
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            allowed = _is_exponent(operand, most=most)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            allowed = _is_exponent(left, most=most) and _is_exponent(right, most=most)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Name()):
            allowed = _is_exponent(left, most=most)
        case _:
            allowed = False
    return allowed


def _read(example: Example) -> tuple[str, str, dict[str, Any]]:
    """The data set's name, its arguments as JSON, and the row."""
    stored = example.columns.get("reasoning_gym")
    if not isinstance(stored, str):
        raise UserError(
            f"row {example.id!r}: the reward reasoning_gym needs the column `reasoning_gym`, which rows of "
            "task.type=reasoning_gym have; use that task, or another reward"
        )
    content = json.loads(stored)
    return content["dataset"], json.dumps(content["arguments"]), restore(content["entry"])


def restore(value: Any) -> Any:
    """A value from the tagged form in which a row is stored (tasks/reasoning_gym.py)."""
    if not isinstance(value, list):
        return value
    kind, *items = value
    return _MAKERS[kind](map(restore, items))


_MAKERS: Final[Mapping[str, Callable[[Iterable[Any]], Any]]] = {
    "dict": dict,
    "fraction": lambda items: Fraction(*items),
    "frozenset": frozenset,
    "list": list,
    "set": set,
    "tuple": tuple,
}


def _quietly(scorer: Callable[[str, Mapping[str, Any]], float], answer: str, entry: Mapping[str, Any]) -> float:
    """Call a scorer and suppress its output and warnings."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(scorer(answer, entry))


@lru_cache(maxsize=256)
def _scorer(name: str, arguments: str) -> Callable[[str, Mapping[str, Any]], float]:
    """A data set's scorer; created once per process."""
    try:
        from reasoning_gym.factory import create_dataset  # slow to import, and an extra
    except ImportError as error:
        raise UserError(
            f'the reward reasoning_gym needs the package reasoning-gym ({error}): pip install "flatpeak[tasks]"'
        ) from error
    with contextlib.redirect_stdout(io.StringIO()):
        dataset = create_dataset(name, **{**restore(json.loads(arguments)), "size": 1, "seed": 0})
    return lambda answer, entry: dataset.score_answer(answer=answer, entry=entry)
