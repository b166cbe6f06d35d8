"""A table of accuracy by steps, from files that `time_to_accuracy` wrote for rows like "seed 0, 100 steps".

    python -m benchmarks.cpu.steps_to_accuracy FILE... [--against groups]

For each contender over the seeds: accuracy averaged over steps 10, 20, ... and both held-out sets (mean and standard
deviation), the difference to another contender by seed with a 95% interval (Student's t), the first step at 0.9 on the
held-out set, and the accuracy at the last step. `noise` is the standard deviation of the difference between the two
sets of 500 questions, divided by the square root of 2.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.harness.statistics import Measurement, first_reaching

GOAL = 0.9
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 0.975 quantiles of Student's t for 1 to 9 degrees of freedom."""
HEAD = ("Contender", "Seeds", "Mean accuracy", "Difference", "First step at 0.9", "Accuracy at the end")


def averages(measurements: Sequence[Measurement]) -> float:
    """Accuracy after the start, over steps and both sets."""
    return mean((one["accuracy"] + one["second"]) / 2 for one in measurements if one["step"] > 0)


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the bounds of its 95% interval."""
    middle, error = mean(differences), stdev(differences) / math.sqrt(len(differences))
    reach = STUDENT[len(differences) - 2] * error
    return middle, middle - reach, middle + reach


def noise(rows: Sequence[Mapping[str, Any]]) -> float:
    """The standard deviation of one accuracy on 500 questions, from the differences between the two sets."""
    gaps = [f["accuracy"] - f["second"] for row in rows for raced in row["contenders"].values() for f in raced]
    return stdev(gaps) / math.sqrt(2)


def table(rows: Sequence[Mapping[str, Any]], *, against: str) -> str:
    """A table with a line for each contender."""
    lines = [HEAD, ["---"] * len(HEAD)]
    for name in rows[0]["contenders"]:
        raced = [row["contenders"] for row in rows if name in row["contenders"]]
        means = [averages(contenders[name]) for contenders in raced]
        beside = [(mine, averages(c[against])) for mine, c in zip(means, raced, strict=True) if against in c]
        firsts = [first_reaching(contenders[name], GOAL) for contenders in raced]
        ends = [(c[name][-1]["accuracy"] + c[name][-1]["second"]) / 2 for c in raced]
        lines.append(
            (
                name,
                str(len(raced)),
                f"{mean(means):.3f} ± {stdev(means):.3f}" if len(means) > 1 else f"{means[0]:.3f}",
                _difference([a - b for a, b in beside]) if name != against else "",
                ", ".join(f"{first['step']:.0f}" if first else "none" for first in firsts),
                f"{mean(ends):.3f}",
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _difference(differences: Sequence[float]) -> str:
    if len(differences) < 2:
        return ""
    middle, low, high = interval(differences)
    return f"{middle:+.3f} [{low:+.3f}, {high:+.3f}]"


def main() -> None:
    """Print the table of all rows of the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--against", default="groups")
    given = parser.parse_args()
    rows = [row for file in given.files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    stepped = [row for row in rows if "steps" in row]
    print(table(stepped, against=given.against))
    print(f"\nnoise of 500 questions: {noise(stepped):.3f}")


if __name__ == "__main__":
    main()
