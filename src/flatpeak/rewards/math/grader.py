"""Grading of mathematical answers: by rules in this process, then by math-verify in processes that can be killed."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from threading import Lock
from typing import TYPE_CHECKING, Final

from flatpeak.rewards.base import GradingBudget
from flatpeak.rewards.math.extract import extract_answer, gold_answer
from flatpeak.rewards.math.rule_grader import read_answer, rule_verdict, suits_math_verify
from flatpeak.rewards.math.syntax_tree import MAX_CHARACTERS, OverLimitError
from flatpeak.rewards.math.unevaluated import only_evaluated
from flatpeak.rewards.workers.pool import NOT_CALLED, WorkerError, WorkerPool
from flatpeak.rewards.workers.worker import LIMITS
from flatpeak.utils.user_code import one_line

if TYPE_CHECKING:
    from flatpeak.rewards.base import MathExtraction
    from flatpeak.types import Score

Pair = tuple[str, str]
"""An answer and a gold answer, both extracted."""
Outcome = bool | WorkerError
"""A verdict, or the error that prevented it."""
SHORTEST: Final = 0.1
"""Smallest time limit of a pair in seconds; most pairs need less than half of this."""
MEMORY_BYTES: Final = 2**30
MAX_CACHED: Final = 100_000
MAX_CACHED_CHARACTERS: Final = 2 * MAX_CHARACTERS
"""The most characters of answer and gold together whose verdict by the rules is cached; longer texts are read again."""
TRIVIAL_ANSWER: Final = "7"
"""An answer without cost: if it gets no verdict against a gold answer, no answer can be graded against that. (Not 0,
which differs from a sum of positive terms without adding them.)"""
RECURSION_LIMIT: Final = 1000
DIGITS: Final = 40
"""Digits to which math-verify compares decimals; its default of 6 accepts approximations."""

# The parser builds its tables, and SymPy its caches, on first use: after these pairs, a worker's first verdict takes 5
# to 45 ms instead of 60 to 210 ms.
_WARM_UP: Final = (
    (r"\sum_{k=1}^{2} \frac{k}{2}+\sqrt{2}\cdot\sin(x)", r"\int_0^1 x^2 dx"),
    (r"\lim_{x\to0} x", "0"),
    (r"\max(1,2)", "2"),
)


class UnscorableError(WorkerError):
    """An answer ran out of time, memory or the step's budget, although its gold answer can be graded against."""


class MathGrader:
    """A grader of (text, gold) pairs; a context manager, because it may own worker processes.

    A verdict is True, False, or None if the worker ran out of time or memory, or died. Verdicts are cached by (answer,
    gold), including failed ones, so that a text costs its time limit only once.
    """

    def __init__(self, *, extraction: MathExtraction = "auto", timeout: float = 2.0, workers: int = 2) -> None:
        """`timeout` is in seconds, for a pair without a verdict by rules; `workers` start at the first such pair."""
        self._extraction = extraction
        self._timeout = timeout
        self._num_workers = workers
        self._pool: WorkerPool | None = None
        self._cache: dict[tuple[str, str], Outcome] = {}
        self._lock = Lock()

    def __enter__(self) -> MathGrader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers; a later call starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def grade(self, pairs: Iterable[tuple[str, str]], *, questions: Iterable[str] | None = None) -> list[bool | None]:
        """A verdict for each (text, gold), in order. An empty gold answer equals only an empty answer.

        With the `questions` of the pairs, answers that `is_evaluated` refuses are wrong.
        """
        answers = [(extract_answer(text, self._extraction), gold) for text, gold in pairs]
        if questions is not None:
            answers = only_evaluated(answers, questions)
        return [None if isinstance(outcome, WorkerError) else outcome for outcome in self.compare(answers)]

    def compare(self, pairs: Iterable[tuple[str | None, str]], *, budget: GradingBudget | None = None) -> list[Outcome]:
        """Outcomes of (extracted answer or None, gold) pairs, in order; the outcome of a failed pair is its error.

        It is an UnscorableError if the answer is to blame. Pairs beyond the budget have run out of time.
        """
        pending: dict[Pair, Future[Outcome] | None] = {}
        decided: list[tuple[Pair, Outcome | None]] = []
        for answer, reference in pairs:
            pair = (answer or "", gold_answer(reference))
            started = time.monotonic()
            outcome = False if answer is None else self._fast_outcome(*pair)
            decided.append((pair, outcome))
            if outcome is None and pair not in pending:
                if budget is None:
                    pending[pair] = self._submit(pair, self._timeout)
                else:
                    pending[pair] = None
                    budget.spend(time.monotonic() - started)
        outcomes = self._worker_outcomes(pending, budget)
        return [
            self._with_blame(outcomes[pair] if outcome is None else outcome, pair[1], budget)
            for pair, outcome in decided
        ]

    def _worker_outcomes(
        self, pending: Mapping[Pair, Future[Outcome] | None], budget: GradingBudget | None
    ) -> dict[Pair, Outcome]:
        """Outcomes of pairs for the workers; without a budget, the pairs are already submitted.

        All outcomes are cached, except those beyond the budget.
        """
        if budget is None:
            outcomes = {pair: outcome_of(future) for pair, future in pending.items() if future is not None}
        else:
            if pending:
                with budget.charged():
                    self._workers().ready()
            # Texts that the rules can read are quick. Others may take any time; short ones rarely take much.
            pairs = sorted(pending, key=lambda pair: (_is_unread(*pair), len(pair[0])))
            outcomes = grade_within(budget, pairs, self._submit, limit=self._timeout, workers=self._num_workers)
        for pair, outcome in outcomes.items():
            self._remember(pair, outcome)
        return {pair: outcomes.get(pair, NOT_CALLED) for pair in pending}

    def _with_blame(self, outcome: Outcome, gold: str, budget: GradingBudget | None) -> Outcome:
        """The outcome, or UnscorableError if the answer, and not the gold answer, exceeded a limit."""
        if not isinstance(outcome, WorkerError) or not hit_limit(outcome) or not self._gradable(gold, budget):
            return outcome
        return UnscorableError(outcome.reason, str(outcome))

    def _gradable(self, gold: str, budget: GradingBudget | None) -> bool:
        """Whether a trivial answer has a verdict against this gold answer."""
        pair = (TRIVIAL_ANSWER, gold)
        outcome = self._fast_outcome(*pair)
        if outcome is None:
            future = self._submit(pair, self._timeout) if budget is None else None
            outcome = self._worker_outcomes({pair: future}, budget)[pair]
        return not isinstance(outcome, WorkerError)

    def _fast_outcome(self, answer: str, gold: str) -> Outcome | None:
        """The outcome from the cache or the rules; None for a pair that needs a worker."""
        cached = self._cache.get((answer, gold))
        if cached is not None:
            return cached
        outcome = _rule_outcome(answer, gold)
        # Long texts, which are never right, would fill the cache.
        if outcome is not None and len(answer) + len(gold) <= MAX_CACHED_CHARACTERS:
            self._remember((answer, gold), outcome)
        return outcome

    def _submit(self, pair: Pair, limit: float) -> Future[Outcome]:
        return self._workers().submit(Symbolic(), *pair, timeout=limit)

    def _workers(self) -> WorkerPool:
        with self._lock:
            if self._pool is None:
                self._pool = WorkerPool(
                    self._num_workers, timeout=self._timeout, memory_bytes=MEMORY_BYTES, forked=Symbolic()
                )
            return self._pool

    def _remember(self, key: tuple[str, str], outcome: Outcome) -> None:
        with self._lock:
            if len(self._cache) >= MAX_CACHED:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = outcome


def score_of(outcome: Outcome) -> Score:
    """The score of an outcome: 0 for an answer that exceeded a limit; missing if the answer is not to blame."""
    if isinstance(outcome, UnscorableError):
        return 0.0
    return None if isinstance(outcome, WorkerError) else float(outcome)


def _is_unread(*texts: str) -> bool:
    return any(read_answer(text)[1].kind == "unread" for text in texts)


def _rule_outcome(answer: str, gold: str) -> Outcome | None:
    try:
        verdict = rule_verdict(answer, gold, precise=False)
        if verdict is None and _is_unread(answer, gold):
            # More digits would not help, so a worker is not needed.
            return None if suits_math_verify(answer, gold) else False
        return verdict
    except OverLimitError as error:
        return WorkerError("raised", f"the gold answer {gold[:60]!r} is too long or too deep to read: {error}")
    except Exception as error:  # no text may stop a run
        return WorkerError("raised", one_line(error))


def grade_within(
    budget: GradingBudget,
    pairs: Sequence[Pair],
    submit: Callable[[Pair, float], Future[Outcome]],
    *,
    limit: float,
    workers: int,
) -> dict[Pair, Outcome]:
    """Outcomes of as many pairs as the budget allows; `submit` takes a pair and its limit in seconds.

    A budget below the whole limit of every pair is halved. The first half is divided equally among all pairs, in order,
    so that quick pairs get verdicts for any number of slow ones. The second half gives the remaining pairs their whole
    limit, as long as it lasts.
    """
    outcomes: dict[Pair, Outcome] = {}
    if budget.left * workers < limit * len(pairs):
        half = GradingBudget(budget.left / 2)
        share = half.left * workers / len(pairs)
        first = _wait_within(half, pairs, submit, limit=min(limit, max(share, SHORTEST)))
        budget.spend(half.seconds - half.left)
        outcomes = {pair: outcome for pair, outcome in first.items() if not hit_limit(outcome)}
        pairs = [pair for pair in pairs if pair not in outcomes]
    return outcomes | _wait_within(budget, pairs, submit, limit=limit)


def hit_limit(outcome: Outcome | None) -> bool:
    """Whether a pair ran out of time or memory."""
    return isinstance(outcome, WorkerError) and outcome.reason in LIMITS


def outcome_of(future: Future[Outcome]) -> Outcome:
    """The outcome of a finished call."""
    try:
        return future.result()
    except WorkerError as error:
        # It is cached, and its traceback would keep the callers' variables alive, including a step's tensors.
        return error.with_traceback(None)


def _wait_within(
    budget: GradingBudget, pairs: Sequence[Pair], submit: Callable[[Pair, float], Future[Outcome]], *, limit: float
) -> dict[Pair, Outcome]:
    """Outcomes until the budget is spent; calls still running then end by their own limit, without waiting for them."""
    outcomes: dict[Pair, Outcome] = {}
    waiting = {} if budget.spent else {submit(pair, limit): pair for pair in pairs}
    while waiting and not budget.spent:
        started = time.monotonic()
        done, _ = wait(waiting, timeout=budget.left, return_when=FIRST_COMPLETED)
        seconds = time.monotonic() - started
        finished = {waiting.pop(future): outcome_of(future) for future in done}
        outcomes |= finished
        if not done or any(map(hit_limit, finished.values())):
            budget.spend(seconds)
    for future in waiting:
        future.cancel()
    return outcomes


class Symbolic:
    """A function of (answer, gold): equality by the rules with all their digits, else by math-verify.

    Unpickling it loads math-verify: a worker does that once, before the clock of its first call starts.
    """

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _load, ()

    def __call__(self, answer: str, gold: str) -> bool:
        """Whether two extracted answers are equal; a stack overflow counts as MemoryError."""
        try:
            verdict = rule_verdict(answer, gold)
            if verdict is None:
                return suits_math_verify(answer, gold) and verify(read_answer(answer)[0], read_answer(gold)[0])
            return verdict
        except RecursionError:
            raise MemoryError from None


def verify(answer: str, gold: str) -> bool:
    """math-verify's verdict on two cleaned texts, by their values only, ignoring text that it merely copies.

    Texts that it cannot read or compare are unequal. MemoryError and RecursionError, which it would also call unequal,
    are raised as failures.
    """
    from math_verify import LatexExtractionConfig, parse
    from math_verify import verify as equal

    config = (LatexExtractionConfig(boxed_match_priority=0),)
    values = []
    try:
        for text in (gold, answer):
            # Its own time limits would replace the worker's alarm signal.
            parsed = parse(rf"\boxed{{{text}}}", extraction_config=config, parsing_timeout=None, raise_on_error=True)
            values.append([value for value in parsed if not isinstance(value, str)])
            if not values[-1]:
                return False
        digits = {"float_rounding": DIGITS, "numeric_precision": 2 * DIGITS}
        return bool(equal(*values, **digits, timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the parser and SymPy may raise anything, about any text
        return False


def _load() -> Symbolic:
    import math_verify

    logging.getLogger(math_verify.__name__).setLevel(logging.CRITICAL)
    sys.setrecursionlimit(RECURSION_LIMIT)
    for answer, gold in _WARM_UP:
        verify(answer, gold)
    return Symbolic()
