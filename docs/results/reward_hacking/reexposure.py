"""The registered tests of reexposure.md, from the table of runs that met the cheat again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from estimates import count, interval, markdown
from hypotheses import FEWEST_PAIRS, Estimate, Registered, Runs, hacked_seeds, same

from flatpeak.experiments.table import SweepTable

ARMS = {"R1": "none", "R2": "advantage_limit", "R3": "gr_reuse"}


def held_runs(table: SweepTable, arm: str, metric: str) -> Runs | None:
    """The held runs of an arm, with `cheating` after the cheats or `cheating_alone`; None where they are too few."""
    rows = {row["seed"]: _as_final(row, metric) for row in table.rows if row["arm"] == arm and row["held"]}
    return Runs(rows=rows) if len(rows) >= FEWEST_PAIRS else None


def _as_final(row: Mapping[str, Any], metric: str) -> dict[str, float]:
    return {"reward/exploit.final": float(row[metric])}


def registered(table: SweepTable) -> list[Registered]:
    """The hypotheses in the order of reexposure.md."""
    pairs = {arm: tuple(held_runs(table, arm, name) for name in ("cheating", "cheating_alone")) for arm in _arms(table)}

    def kl() -> Estimate | None:
        return same(*pairs["kl"], Runs.cheating, bound=0.1)

    tests = [
        hacked_seeds(name, f"{arm}: hacked in more seeds after the cheats than alone", *pairs[arm], 1)
        for name, arm in ARMS.items()
    ]
    return [
        *tests,
        Registered(
            name="R4",
            claim="kl: cheating after the cheats within 0.1 of that alone",
            test=kl,
            unit="share of answers",
            expected=0,
            smallest=0.1,
            equivalence=True,
        ),
    ]


def _arms(table: SweepTable) -> list[str]:
    return list(dict.fromkeys(row["arm"] for row in table.rows))


def arm_section(table: SweepTable) -> str:
    """What became of the held runs of every arm."""
    rows = []
    for arm in _arms(table):
        own = [row for row in table.rows if row["arm"] == arm]
        held = [row for row in own if row["held"]]
        hacked = [[row[name] >= 0.5 for row in held] for name in ("cheating_alone", "cheating")]
        means = [interval([float(row[name]) for row in held]) for name in ("cheating_before", "cheating_after", "gold")]
        forced = f"{min(row['forced'] for row in held)} to {max(row['forced'] for row in held)}" if held else ""
        rows.append(
            [arm, f"{len(held)} of {len(own)}", forced, *(count(hits) if hits else "" for hits in hacked), *means]
        )
    header = [
        "Arm",
        "Held at step 150",
        "Cheats forced",
        "Hacked alone",
        "Hacked after the cheats",
        "Cheating, steps 141 to 150",
        "Cheating, steps 171 to 180",
        "Gold at the end",
    ]
    return markdown(header, rows)
