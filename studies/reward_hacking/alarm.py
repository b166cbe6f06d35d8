"""The first step at which `flatpeak patterns` names a pattern of two spreads or more, for every run of an arm.

python studies/reward_hacking/alarm.py runs/reward_hacking/baselines/runs/none --csv alarms.csv

With `--pattern NAME` it is the first step at which this one is named, whatever it pays.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from flatpeak.report.patterns import patterns_of
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.rollout_log import logged_steps

SPREADS = 2.0
"""From seeds 20 to 24 of the first study: docs/hacking.md."""
COLUMNS = ("arm", "seed", "step", "pattern", "share", "spreads", "others")


def alarm(run: Path, pattern: str | None = None) -> dict[str, Any]:
    """The step of the alarm and the pattern that pays most in spreads; without an alarm only the run's name."""
    row: dict[str, Any] = {"arm": run.parent.name, "seed": run.name.removeprefix("seed-")}
    for step in sorted(logged_steps(RunPaths(run).rollouts)):
        found = patterns_of(run, step=step)[1]
        chosen = [one for one in found if (one.spreads >= SPREADS if pattern is None else one.name == pattern)]
        named = sorted(chosen, key=lambda one: -one.spreads)
        if named:
            first, others = named[0], " ".join(one.name for one in named[1:])
            measured = {"share": round(first.share, 5), "spreads": round(first.spreads, 3)}
            return row | {"step": step, "pattern": first.name, "others": others} | measured
    return row


def main() -> None:
    """Write a row per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", type=Path, nargs="+", help="directories with a run per seed")
    parser.add_argument("--pattern")
    parser.add_argument("--csv", type=Path, required=True)
    given = parser.parse_args()
    runs = sorted(run for arm in given.arms for run in arm.glob("seed-*"))
    with given.csv.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(alarm(run, given.pattern) for run in runs)


if __name__ == "__main__":
    main()
