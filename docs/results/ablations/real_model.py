"""Two of the ablations on a real model."""

from __future__ import annotations

from collections.abc import Mapping

from differences import Values, interval, mean, paired
from pages import markdown

from flatpeak.experiments.statistics import Difference, holm
from flatpeak.experiments.table import SweepTable

ARMS = {"no_std": "without the standard deviation", "minibatches4": "4 updates a step"}
"""The arms that are compared with the base."""
MEASURES = {"eval/numbers/exact.final": "right", "eval/numbers/overlap.final": "share of right numbers"}


def section(table: SweepTable) -> list[str]:
    """The arms' means on held-out texts, their paired differences from the base, and where the runs were made."""
    values = {(arm, column): values_of(table, arm, column) for arm in ("base", *ARMS) for column in MEASURES}
    found = {key: paired(own, values["base", key[1]]) for key, own in values.items() if key[0] in ARMS}
    adjusted = dict(zip(found, holm([one.p for one in found.values()]), strict=True))
    header = ["Arm", "Seeds", *(name.capitalize() for name in MEASURES.values())]
    header += [f"Difference, {name}" for name in MEASURES.values()]
    rows = [row(arm, values, found, adjusted) for arm in ("base", *ARMS)]
    source = table.header
    return [
        markdown(header, rows),
        f"Runs of [real_model.csv](ablations/real_model.csv) at commit {source['commit'].split()[0][:10]} on "
        f"{source['hardware']}, torch {source['torch']}.",
    ]


def row(
    arm: str,
    values: Mapping[tuple[str, str], Values],
    found: Mapping[tuple[str, str], Difference],
    adjusted: Mapping[tuple[str, str], float],
) -> list[str]:
    """The line of an arm; p is that of Holm over all comparisons of the table."""
    own = [values[arm, column] for column in MEASURES]
    cells = [ARMS.get(arm, arm), str(len(own[0])), *(f"{mean(value.values()):.3f}" for value in own)]
    if arm not in ARMS:
        return [*cells, *("" for _ in MEASURES)]
    return [*cells, *(f"{interval(found[key])}, p {adjusted[key]:.2f}" for key in ((arm, one) for one in MEASURES))]


def values_of(table: SweepTable, arm: str, column: str) -> Values:
    """A column of an arm's finished runs by seed."""
    return {row["seed"]: row[column] for row in table.rows if row["arm"] == arm and row["status"] == "done"}
