"""The registered tests of reexposure.md, from the table of runs that met the cheat again."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from estimates import count, interval
from hypotheses import FEWEST_PAIRS, Estimate, Registered, Runs, hacked_seeds, same
from pages import markdown

from flatpeak.experiments.table import SweepTable

ARMS = {"R1": "none", "R2": "advantage_limit", "R3": "gr_reuse"}


def held_runs(table: SweepTable, arm: str, metric: str) -> Runs:
    """The held runs of an arm, with `cheating` after the cheats or `cheating_alone`."""
    held = {row["seed"]: row for row in table.rows if row["arm"] == arm and row["held"]}
    return Runs(rows={seed: {"reward/exploit.final": float(row[metric])} for seed, row in held.items()})


def registered(table: SweepTable) -> list[Registered]:
    """The hypotheses in the order of reexposure.md."""
    tests = []
    for name, arm in (*ARMS.items(), ("R4", "kl")):
        exposed, alone = (held_runs(table, arm, metric) for metric in ("cheating", "cheating_alone"))
        if name == "R4":
            hypothesis = Registered(
                name=name,
                claim="kl: cheating after the cheats within 0.1 of that alone",
                test=partial(same, exposed, alone, Runs.cheating, bound=0.1),
                unit="share of answers",
                expected=0,
                smallest=0.1,
                equivalence=True,
            )
        else:
            hypothesis = hacked_seeds(
                name, f"{arm}: hacked in more seeds after the cheats than alone", exposed, alone, 1
            )
        if len(exposed.rows) < FEWEST_PAIRS:
            unknown = Estimate(n=len(exposed.rows), value=math.nan, low=math.nan, high=math.nan, p=math.nan)
            hypothesis = replace(hypothesis, test=partial(replace, unknown))
        tests.append(hypothesis)
    return tests


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
