"""Two of the ablations on a real model."""

from __future__ import annotations

from textwrap import fill

from differences import Values, interval, mean, paired
from pages import markdown

from flatpeak.experiments.table import SweepTable

ARMS = {
    "base": "base",
    "no_std": "without the standard deviation",
    "minibatches4": "4 updates a step",
}
"""The arms, the first of which is the base of the others."""
MEASURES = {
    "eval/numbers/exact.final": "Right lists",
    "eval/numbers/overlap.final": "Right numbers",
}
"""Columns of the table: shares of 200 held-out texts, and of their numbers."""


def section(table: SweepTable) -> list[str]:
    """Each measure by seed with the arms' paired differences from the base, and where the runs were made."""
    base, *others = ({column: values_of(table, arm, column) for column in MEASURES} for arm in ARMS)
    rows = [row(label, values, base) for label, values in zip(ARMS.values(), [base, *others], strict=True)]
    header = [cell for name in MEASURES.values() for cell in (f"{name}, by seed", "Mean", "Less the base")]
    minutes = sum(one["seconds"] for one in table.rows) / 60
    source = table.header
    return [
        markdown(["Arm", *header], rows),
        fill(
            f"{len(table.rows)} runs of {minutes:.0f} minutes in all, two at a time beside other work, at commit "
            f"{source['commit'].split()[0][:10]}, on {source['hardware']}, torch {source['torch']}.",
            120,
            break_long_words=False,
            break_on_hyphens=False,
        ),
    ]


def row(label: str, values: dict[str, Values], base: dict[str, Values]) -> list[str]:
    """The line of an arm."""
    cells = [label]
    for column, own in values.items():
        cells += [", ".join(f"{own[seed]:.2f}" for seed in sorted(own)), f"{mean(own.values()):.2f}"]
        cells.append("" if own is base[column] else interval(paired(own, base[column])))
    return cells


def values_of(table: SweepTable, arm: str, column: str) -> Values:
    """A column of an arm's finished runs by seed."""
    return {row["seed"]: row[column] for row in table.rows if row["arm"] == arm and row["status"] == "done"}
