"""Estimators of evaluations: pass@k and maj@k of n samples, and confidence intervals of means."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_RESAMPLED_AT_ONCE = 1 << 22
"""Numbers that the bootstrap draws at a time: 32 MiB."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that k of the samples, drawn without replacement, include a correct one.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. 2021. Exact integers until the last division.
    Raises ValueError for k > n, k < 1, or c outside 0..n.
    """
    _check_draws(num_samples, k)
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct={num_correct} of num_samples={num_samples}: give a count from 0 to num_samples")
    draws = comb(num_samples, k)
    return (draws - comb(num_samples - num_correct, k)) / draws


def maj_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """The probability that the majority answer of k of the n samples, drawn without replacement, is right.

    Equal answers vote together and ties are broken uniformly at random. None (no answer) does not vote, and a draw
    without votes is wrong. If samples with the same answer got different verdicts, the answer counts as their share of
    correct verdicts.
    The result is exact for every k: counts of a draw without replacement are independent binomials, given that they sum
    to k. Raises ValueError for k > n, k < 1, or lists of different lengths.
    """
    num_samples = len(answers)
    _check_draws(num_samples, k)
    if len(correct) != num_samples:
        raise ValueError(f"{num_samples} answers but {len(correct)} verdicts: give one verdict per answer")
    verdicts: dict[Hashable, list[bool]] = defaultdict(list)
    for answer, verdict in zip(answers, correct, strict=True):
        if answer is not None:
            verdicts[answer].append(bool(verdict))
    counts = {answer: len(judged) for answer, judged in verdicts.items()}
    num_silent = num_samples - sum(counts.values())

    right = 0.0
    for answer, judged in verdicts.items():
        if any(judged):
            others = [count for other, count in counts.items() if other != answer]
            right += _win_probability(len(judged), others, num_silent, k) * sum(judged) / len(judged)
    return min(right, 1.0)  # rounding


def bootstrap_interval(
    values: Sequence[float] | NDArray[np.floating],
    *,
    weights: Sequence[float] | None = None,
    confidence: float = 0.95,
    num_resamples: int = 10000,
    seed: int = 0,
) -> tuple[float, float]:
    """The percentile bootstrap interval (low, high) of the mean (Efron 1979); the same seed gives the same interval.

    With `weights`, the interval of the weighted mean: a value is resampled together with its weight. Raises ValueError
    for an empty list, values that are not finite, or a confidence outside (0, 1).
    """
    values_N = np.asarray(values, dtype=np.float64)
    if values_N.ndim != 1 or values_N.size == 0 or not np.isfinite(values_N).all():
        raise ValueError("the bootstrap needs a flat list of at least one value, all finite")
    if not 0 < confidence < 1 or num_resamples < 1:
        raise ValueError(
            f"confidence={confidence}, num_resamples={num_resamples}: give a confidence between 0 and 1 "
            "and at least 1 resample"
        )
    generator = np.random.default_rng(seed)
    rows = max(1, _RESAMPLED_AT_ONCE // values_N.size)
    weights_N = None if weights is None else np.asarray(weights, dtype=np.float64)
    drawn = (
        generator.integers(values_N.size, size=(min(rows, num_resamples - start), values_N.size))
        for start in range(0, num_resamples, rows)
    )
    means = np.concatenate(
        [
            values_N[indices].mean(1)
            if weights_N is None
            else (values_N * weights_N)[indices].sum(1) / weights_N[indices].sum(1)
            for indices in drawn
        ]
    )
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def wilson_interval(successes: float, total: float, confidence: float = 0.95) -> tuple[float, float]:
    """The score interval (low, high) of a proportion (Wilson 1927).

    Unlike the bootstrap interval, it has a width even if all or none succeed: 0 of n gives up to z^2 / (n + z^2).
    Raises ValueError for total < 1, successes outside 0..total, or a confidence outside (0, 1).
    """
    if total < 1 or not 0 <= successes <= total:
        raise ValueError(f"successes={successes} of total={total}: give a total of at least 1 and a count from 0 to it")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: give a confidence between 0 and 1")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / total
    center = share + z * z / (2 * total)
    half = z * sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    scale = 1 + z * z / total
    # Exact at the edges: rounding could give slightly less than 0 or more than 1.
    low = 0.0 if successes == 0 else (center - half) / scale
    high = 1.0 if successes == total else (center + half) / scale
    return low, high


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """The mean difference b - a of paired items, with its confidence interval."""

    difference: float
    """mean(b) - mean(a)."""
    low: float
    """Lower bound of the bootstrap interval of the difference."""
    high: float
    """Upper bound."""


def paired_bootstrap(
    a: Sequence[float] | NDArray[np.floating],
    b: Sequence[float] | NDArray[np.floating],
    *,
    confidence: float = 0.95,
    num_resamples: int = 10000,
    seed: int = 0,
) -> PairedDifference:
    """The mean of b - a over items scored under both, with the interval of `bootstrap_interval` over items.

    Raises ValueError for lists of different lengths, and otherwise as `bootstrap_interval` does.
    """
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} values and b {len(b)}: pairs are by index, so give both for the same items")
    differences_N = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
    low, high = bootstrap_interval(differences_N, confidence=confidence, num_resamples=num_resamples, seed=seed)
    return PairedDifference(difference=float(differences_N.mean()), low=low, high=high)


def _check_draws(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k} of {num_samples} samples: give a k from 1 to {num_samples}, or draw more samples")


def _win_probability(count: int, others: Sequence[int], num_silent: int, k: int) -> float:
    """The probability that the answer with `count` samples wins a draw of k against answers with counts `others`."""
    num_samples = count + sum(others) + num_silent
    taken = {c: _binomial(c, k, num_samples) for c in {count, num_silent, *others}}
    total = 0.0
    for votes in range(1, len(taken[count])):
        ties_and_draws = _rivals([taken[c] for c in others], votes, k - votes)
        # Samples without an answer fill the rest of the draw.
        silent = np.zeros(k - votes + 1)
        silent[: len(taken[num_silent])] = taken[num_silent][: k - votes + 1]
        chance_of_ties = ties_and_draws @ silent[::-1]
        shares = 1 / np.arange(1, len(chance_of_ties) + 1)
        total += float(taken[count][votes] * (chance_of_ties @ shares))
    return total / float(_binomial(num_samples, k, num_samples)[k])


def _binomial(count: int, k: int, num_samples: int) -> NDArray[np.float64]:
    """P(u successes) for u <= k in `count` trials with probability k / num_samples each; computed from integers."""
    whole = num_samples**count
    ways = (comb(count, u) * k**u * (num_samples - k) ** (count - u) for u in range(min(count, k) + 1))
    return np.array([w / whole for w in ways])


def _rivals(taken: Sequence[NDArray[np.float64]], votes: int, draws: int) -> NDArray[np.float64]:
    """[j, d]: the probability that the others draw d samples in total, none above `votes` and exactly j equal to it."""
    table = np.zeros((draws // votes + 1, draws + 1))
    table[0, 0] = 1.0
    for chances in taken:
        grown = np.zeros_like(table)
        for drawn, chance in enumerate(chances[: min(votes, draws) + 1]):
            moved = table[:, : draws + 1 - drawn] * chance
            if drawn < votes:
                grown[:, drawn:] += moved
            else:
                grown[1:, drawn:] += moved[:-1]
        table = grown
    return table
