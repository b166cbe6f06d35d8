"""Grading mathematical answers: rules first, in this process; what they leave open, in processes that can be killed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from threading import Lock
from typing import TYPE_CHECKING, Final

from flatpeak.rewards.base import GradingBudget, stopwatch
from flatpeak.rewards.math.extract import extract_answer, gold_answer
from flatpeak.rewards.math.nodes import MAX_CHARACTERS, OverLimitError
from flatpeak.rewards.math.rule_grader import read_answer, rule_verdict, worth_asking
from flatpeak.rewards.workers.pool import NOT_CALLED, WorkerError, WorkerPool
from flatpeak.rewards.workers.process import LIMITS
from flatpeak.utils.user_code import one_line

if TYPE_CHECKING:
    from flatpeak.rewards.base import GradingBudget, MathExtraction
    from flatpeak.types import Score

Pair = tuple[str, str]
"""Answer and gold answer, as they were extracted."""
Outcome = bool | WorkerError
"""A verdict, or why there is none."""
SHORTEST: Final = 0.1
"""Seconds that every pair has, however many there are; most pairs need less than half of it."""


def ask_within(
    budget: GradingBudget,
    pairs: Sequence[Pair],
    submit: Callable[[Pair, float], Future[Outcome]],
    *,
    limit: float,
    workers: int,
) -> dict[Pair, Outcome]:
    """Outcomes of as many pairs as the budget allows; `submit` takes a pair and its limit in seconds.

    Where it would not last for the whole limit of every pair, half of it goes to equal shares, in the order of the
    pairs: those that are quick have their verdicts, however many slow ones there are. The rest follows with the whole
    limit, as far as the other half lasts.
    """
    found: dict[Pair, Outcome] = {}
    if budget.left * workers < limit * len(pairs):
        half = GradingBudget(budget.left / 2)
        share = half.left * workers / len(pairs)
        first = _ask(half, pairs, submit, limit=min(limit, max(share, SHORTEST)))
        budget.spend(half.seconds - half.left)
        found = {pair: outcome for pair, outcome in first.items() if not ran_out(outcome)}
        pairs = [pair for pair in pairs if pair not in found]
    return found | _ask(budget, pairs, submit, limit=limit)


def ran_out(outcome: Outcome | None) -> bool:
    """Whether a pair ran out of time or memory."""
    return isinstance(outcome, WorkerError) and outcome.reason in LIMITS


def result(future: Future[Outcome]) -> Outcome:
    """The outcome of a call."""
    try:
        return future.result()
    except WorkerError as error:
        # It is cached, and its traceback would keep the variables of all who called alive: a step's tensors too.
        return error.with_traceback(None)


def _ask(
    budget: GradingBudget, pairs: Sequence[Pair], submit: Callable[[Pair, float], Future[Outcome]], *, limit: float
) -> dict[Pair, Outcome]:
    """What is at work when the budget is spent ends by its own limit, and nobody waits for it."""
    found: dict[Pair, Outcome] = {}
    waiting = {} if budget.spent else {submit(pair, limit): pair for pair in pairs}
    while waiting and not budget.spent:
        with stopwatch() as seconds:
            done, _ = wait(waiting, timeout=budget.left, return_when=FIRST_COMPLETED)
        outcomes = {waiting.pop(future): result(future) for future in done}
        found |= outcomes
        if not done or any(map(ran_out, outcomes.values())):
            budget.spend(seconds[0])
    for future in waiting:
        future.cancel()
    return found


RECURSION_LIMIT: Final = 1000
DIGITS: Final = 40
"""To which values have to agree where math-verify compares them as decimals; its own 6 let approximations pass."""

# The parser builds its tables, and SymPy its caches, as they are used: after these a worker's first verdict takes 5 to
# 45 ms instead of 60 to 210 ms.
_FIRST: Final = (
    (r"\sum_{k=1}^{2} \frac{k}{2}+\sqrt{2}\cdot\sin(x)", r"\int_0^1 x^2 dx"),
    (r"\lim_{x\to0} x", "0"),
    (r"\max(1,2)", "2"),
)


class Symbolic:
    """(answer, gold) -> whether they are equal, by the rules with all their digits, else by math-verify.

    Unpickling it loads math-verify: a worker does that once, before the clock of its first call runs.
    """

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _load, ()

    def __call__(self, answer: str, gold: str) -> bool:
        """The two as they were extracted. What a text wants of the stack counts as memory."""
        try:
            verdict = rule_verdict(answer, gold)
            if verdict is None:
                return worth_asking(answer, gold) and verify(read_answer(answer)[0], read_answer(gold)[0])
            return verdict
        except RecursionError:
            raise MemoryError from None


def verify(answer: str, gold: str) -> bool:
    """math-verify's verdict on two cleaned texts. Only values count: text that it merely copies does not.

    What it cannot read or compare is not equal. MemoryError and RecursionError, which it would call unequal too, are
    passed on: they are failures.
    """
    try:
        return _verified(answer, gold)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # of the parser and of SymPy, about any text
        return False


def _verified(answer: str, gold: str) -> bool:
    from math_verify import LatexExtractionConfig, parse
    from math_verify import verify as equal

    config = (LatexExtractionConfig(boxed_match_priority=0),)
    values = []
    for text in (gold, answer):
        # Its own time limits would take the worker's alarm signal away.
        parsed = parse(rf"\boxed{{{text}}}", extraction_config=config, parsing_timeout=None, raise_on_error=True)
        found = [value for value in parsed if not isinstance(value, str)]
        if not found:
            return False
        values.append(found)
    digits = {"float_rounding": DIGITS, "numeric_precision": 2 * DIGITS}
    return bool(equal(*values, **digits, timeout_seconds=None, raise_on_error=True))


def _load() -> Symbolic:
    import math_verify

    logging.getLogger(math_verify.__name__).setLevel(logging.CRITICAL)
    sys.setrecursionlimit(RECURSION_LIMIT)
    for answer, gold in _FIRST:
        verify(answer, gold)
    return Symbolic()


MEMORY_BYTES: Final = 2**30
MAX_CACHED: Final = 100_000
MAX_CACHED_CHARACTERS: Final = 2 * MAX_CHARACTERS
"""Of answer and gold together, where the rules decide: what is longer is read again, in less than a millisecond."""
TRIVIAL: Final = "7"
"""An answer that costs nothing: a gold answer that gives it no verdict cannot be graded against at all. (Not 0, from
which a sum of positive terms is told apart without adding them.)"""


class UnscorableError(WorkerError):
    """An answer that ran out of time, memory or the step's budget, against a gold answer that can be graded against."""


def extracted(text: str, extraction: MathExtraction) -> str | None:
    """`extract_answer`, where a text with too many boxes has no answer."""
    try:
        return extract_answer(text, extraction)
    except OverLimitError:
        return None


class MathGrader:
    """Grades (text, gold) pairs; a context manager, because it may own worker processes.

    A verdict is True, False, or None where it failed: the worker ran out of its time or memory, or died. Verdicts are
    cached by (answer, gold), failed ones too, so that a text costs its time limit once.
    """

    def __init__(self, *, extraction: MathExtraction = "auto", timeout: float = 2.0, workers: int = 2) -> None:
        """`timeout` is in seconds, for one pair that the rules leave open; `workers` start at the first such pair."""
        self._extraction = extraction
        self._timeout = timeout
        self._size = workers
        self._pool: WorkerPool | None = None
        self._cache: dict[tuple[str, str], Outcome] = {}
        self._lock = Lock()

    def __enter__(self) -> MathGrader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def grade(self, pairs: Iterable[tuple[str, str]]) -> list[bool | None]:
        """A verdict for each (text, gold), in order. An empty gold is equal to an empty answer only."""
        return [
            None if isinstance(outcome, WorkerError) else outcome
            for outcome in self.compare((extracted(text, self._extraction), gold) for text, gold in pairs)
        ]

    def compare(self, pairs: Iterable[tuple[str | None, str]], *, budget: GradingBudget | None = None) -> list[Outcome]:
        """Of (extracted answer or None, gold); a failed verdict is the reason why it failed.

        It is an UnscorableError where the answer is to blame. What a budget leaves ungraded has run out of time.
        """
        asked: dict[Pair, Future[Outcome] | None] = {}
        decided: list[tuple[Pair, Outcome | None]] = []
        for answer, reference in pairs:
            pair = (answer or "", gold_answer(reference))
            with stopwatch() as seconds:
                outcome = False if answer is None else self._decide(*pair)
            decided.append((pair, outcome))
            if outcome is None and pair not in asked:
                asked[pair] = None if budget is not None else self._submit(pair, self._timeout)
                if budget is not None:
                    budget.spend(seconds[0])
        found = self._ask(asked, budget)
        return [self._blamed(found[pair] if outcome is None else outcome, pair[1], budget) for pair, outcome in decided]

    def _ask(self, asked: Mapping[Pair, Future[Outcome] | None], budget: GradingBudget | None) -> dict[Pair, Outcome]:
        """Outcomes of pairs that are left to the workers, and were submitted already where there is no budget.

        All but those that the budget left open are remembered.
        """
        if budget is None:
            found = {pair: result(future) for pair, future in asked.items() if future is not None}
        else:
            if asked:
                with stopwatch() as seconds:
                    self._workers().ready()
                budget.spend(seconds[0])
            # What the rules can read takes a moment. What they cannot may take any time, a short text rarely much.
            pairs = sorted(asked, key=lambda pair: (_unread(*pair), len(pair[0])))
            found = ask_within(budget, pairs, self._submit, limit=self._timeout, workers=self._size)
        for pair, outcome in found.items():
            self._remember(pair, outcome)
        return {pair: found.get(pair, NOT_CALLED) for pair in asked}

    def _blamed(self, outcome: Outcome, gold: str, budget: GradingBudget | None) -> Outcome:
        """UnscorableError for a limit that the answer ran into, and not the gold answer; else the outcome."""
        if not isinstance(outcome, WorkerError) or not ran_out(outcome) or not self._gradable(gold, budget):
            return outcome
        return UnscorableError(outcome.reason, str(outcome))

    def _gradable(self, gold: str, budget: GradingBudget | None) -> bool:
        """Whether a trivial answer has a verdict against this gold answer."""
        pair = (TRIVIAL, gold)
        outcome = self._decide(*pair)
        if outcome is None:
            outcome = self._ask({pair: None if budget is not None else self._submit(pair, self._timeout)}, budget)[pair]
        return not isinstance(outcome, WorkerError)

    def _decide(self, answer: str, gold: str) -> Outcome | None:
        """What the cache or the rules say; None for a pair that is left to the workers."""
        cached = self._cache.get((answer, gold))
        if cached is not None:
            return cached
        outcome = _fast_outcome(answer, gold)
        # Of texts too long to be right, a run has as many as it has completions.
        if outcome is not None and len(answer) + len(gold) <= MAX_CACHED_CHARACTERS:
            self._remember((answer, gold), outcome)
        return outcome

    def _submit(self, pair: Pair, limit: float) -> Future[Outcome]:
        return self._workers().submit(Symbolic(), *pair, timeout=limit)

    def _workers(self) -> WorkerPool:
        with self._lock:
            if self._pool is None:
                self._pool = WorkerPool(self._size, timeout=self._timeout, memory_bytes=MEMORY_BYTES, forked=Symbolic())
            return self._pool

    def _remember(self, key: tuple[str, str], outcome: Outcome) -> None:
        with self._lock:
            if len(self._cache) >= MAX_CACHED:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = outcome


def grade_answer(text: str, gold: str, *, extraction: MathExtraction = "auto", timeout: float = 2.0) -> bool | None:
    """One verdict. For many, keep a MathGrader: here, workers start and end with every pair that needs one."""
    with MathGrader(extraction=extraction, timeout=timeout, workers=1) as grader:
        return grader.grade([(text, gold)])[0]


def _unread(*texts: str) -> bool:
    return any(read_answer(text)[1].kind == "unread" for text in texts)


def score_of(outcome: Outcome) -> Score:
    """What a reward pays: 0 for an answer that ran out of its limits, nothing where the answer is not to blame."""
    if isinstance(outcome, UnscorableError):
        return 0.0
    return None if isinstance(outcome, WorkerError) else float(outcome)


def _fast_outcome(answer: str, gold: str) -> Outcome | None:
    try:
        verdict = rule_verdict(answer, gold, precise=False)
        if verdict is None and "unread" in (read_answer(answer)[1].kind, read_answer(gold)[1].kind):
            # More digits would not help: spare a worker the question.
            return None if worth_asking(answer, gold) else False
        return verdict
    except OverLimitError as error:
        return WorkerError("raised", f"the gold answer {gold[:60]!r} is too long or too deep to read: {error}")
    except Exception as error:  # whatever a text makes the rules do, it is no reason to stop a run
        return WorkerError("raised", one_line(error))
