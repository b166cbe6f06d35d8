"""Asking workers about pairs that the rules leave open: at once, or within the time that a step may lose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Final

from flatpeak.rewards.base import GradingBudget, stopwatch
from flatpeak.rewards.workers.pool import WorkerError
from flatpeak.rewards.workers.process import LIMITS

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
