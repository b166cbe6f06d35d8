"""The choice of a setting on tuning seeds, which are never the seeds that results are reported on."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatpeak.errors import UserError
from flatpeak.experiments.statistics import MeanEstimate, mean_over_seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The candidate with the best mean over the tuning seeds, beside the others."""

    setting: str
    metric: str
    seeds: tuple[int, ...]
    chosen: Any
    candidates: Mapping[Any, MeanEstimate]
    """Every candidate with a value on all tuning seeds, the best first; of equal ones, the first in the rows."""
    incomplete: Mapping[Any, tuple[int, ...]]
    """Candidates that were not eligible, with the seeds whose value is missing: a run that failed is no draw."""


def select_best(
    rows: Sequence[Mapping[str, Any]],
    *,
    setting: str,
    metric: str,
    seeds: Collection[int],
    reporting_seeds: Collection[int],
    largest: bool = True,
) -> Selection:
    """Choose the value of `setting` whose metric has the best mean over the tuning `seeds`.

    Rows of other seeds are never read. UserError where tuning and reporting share a seed, where one candidate has two
    rows of a seed, and where no candidate has a value on every seed.
    """
    check_disjoint(seeds, reporting_seeds)
    tuning = tuple(sorted(set(seeds)))
    if not tuning:
        raise UserError("no tuning seeds: name at least one seed to choose on")
    values: dict[Any, dict[int, float | None]] = {}
    for row in rows:
        if row["seed"] not in tuning:
            continue
        of_candidate = values.setdefault(row[setting], {})
        if row["seed"] in of_candidate:
            raise UserError(
                f"{setting}={row[setting]} has two rows of seed {row['seed']}: give the rows of one arm, one per seed"
            )
        of_candidate[row["seed"]] = row.get(metric)
    estimates, incomplete = {}, {}
    for candidate, by_seed in values.items():
        missing = tuple(seed for seed in tuning if _is_missing(by_seed.get(seed)))
        if missing:
            incomplete[candidate] = missing
        else:
            estimates[candidate] = mean_over_seeds([by_seed[seed] for seed in tuning])
    if not estimates:
        raise UserError(
            f"no {setting} has {metric} on all tuning seeds {list(tuning)}: rerun what is missing, or name fewer seeds"
        )
    sign = -1 if largest else 1
    ranked = dict(sorted(estimates.items(), key=lambda item: sign * item[1].estimate))
    return Selection(
        setting=setting,
        metric=metric,
        seeds=tuning,
        chosen=next(iter(ranked)),
        candidates=ranked,
        incomplete=incomplete,
    )


def check_disjoint(selection_seeds: Collection[int], reporting_seeds: Collection[int]) -> None:
    """UserError where a seed that settings were chosen on would be reported on."""
    shared = sorted(set(selection_seeds) & set(reporting_seeds))
    if shared:
        raise UserError(
            f"seeds {', '.join(map(str, shared))} are both tuned and reported on, which favours the tuned arm: report "
            "on seeds that chose nothing"
        )


def _is_missing(value: float | None) -> bool:
    return value is None or math.isnan(value)
