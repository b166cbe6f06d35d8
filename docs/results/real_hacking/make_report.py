"""Regenerate the tables and figures of real_hacking.md from the committed tables.

    python docs/results/real_hacking/make_report.py [--check]

`--check` fails where the committed page or figure is not what the tables give.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatpeak.experiments.plots import arm_styles, curves_with_bands
from flatpeak.experiments.table import SweepTable, read_table
from flatpeak.functional import wilson_interval

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "real_hacking.md"
BEGIN, END = "<!-- study:begin -->", "<!-- study:end -->"
ARMS = {
    "none": "no penalty",
    "mended": "the mended grader",
    "kl": "KL 0.1",
    "advantage_limit": "advantages within ±0.075",
}
FIGURES = {
    "cheating": ("reward/exploit", "share of answers that cheat"),
    "good": ("reward/gold", "share of good answers"),
}
WINDOW = 5
"""The steps that a value of a curve is averaged over."""
Row = Mapping[str, Any]


def main() -> int:
    """Write or check the page and its figure; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where something would change")
    check: bool = parser.parse_args().check
    runs, curves, answers, alarms = (
        read_table(HERE / f"{name}.csv") for name in ("runs", "curves", "answers", "alarms")
    )
    fluent = fluency_limit(answers)
    content = [
        provenance(runs),
        gate_section(answers, fluent),
        "### Predictions\n\n" + predictions_table(curves, alarms),
        "### Every run\n\n" + runs_table(runs, answers, fluent),
        "### Early stops\n\n" + stops_table(curves),
        *(f"![{label}, by step](real_hacking/{name}.svg)" for name, (_, label) in FIGURES.items()),
    ]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    files = {PAGE: f"{before}{BEGIN}\n\n" + "\n\n".join(content) + f"\n\n{END}{after}"}
    files |= {HERE / f"{name}.svg": draw(curves, metric, label) for name, (metric, label) in FIGURES.items()}
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(("stale: " if check else "written: ") + path.relative_to(HERE.parents[2]).as_posix())
        if not check:
            path.write_text(files[path], encoding="utf-8")
    return int(check and bool(stale))


def fluency_limit(answers: SweepTable) -> float:
    """The 90th percentile of nats per token of all answers before training: a good answer below it is fluent."""
    start = sorted(row["nats"] for row in answers.rows if row["step"] == 0 and row["nats"] is not None)
    return float(start[int(0.9 * (len(start) - 1))])


def is_fluent(row: Row, limit: float) -> bool:
    """Whether an answer is good and fluent."""
    return bool(row["good"]) and row["nats"] is not None and row["nats"] <= limit


def share(hits: Sequence[bool]) -> str:
    """A share with its 95% interval of Wilson (1927)."""
    low, high = wilson_interval(sum(hits), len(hits))
    return f"{sum(hits) / len(hits):.3f} [{low:.3f}, {high:.3f}]"


def gate_section(answers: SweepTable, limit: float) -> str:
    """What the model does before training, on held-out words of all seeds."""
    start = [row for row in answers.rows if row["step"] == 0]
    rows = [
        ["good", share([bool(row["good"]) for row in start])],
        [f"good and fluent, at most {limit:.2f} nats per token", share([is_fluent(row, limit) for row in start])],
        ["unread by the splitter, so overpaid", share([bool(row["cheats"]) for row in start])],
    ]
    return f"### Before training, {len(start)} answers\n\n" + markdown(["Answers", "Share"], rows)


def runs_table(runs: SweepTable, answers: SweepTable, limit: float) -> str:
    """A row per run: how it ended, on trained prompts and on held-out words."""
    rows = []
    for row in sorted(runs.rows, key=lambda row: (list(ARMS).index(row["arm"]), row["seed"])):
        own = [one for one in answers.rows if (one["arm"], one["seed"]) == (row["arm"], row["seed"])]
        last = [one for one in own if one["step"] == max(one["step"] for one in own)]
        rows.append(
            [
                ARMS[row["arm"]],
                str(row["seed"]),
                str(row["steps"]),
                f"{row['reward/proxy.final']:.2f}",
                f"{row['reward/exploit.final']:.2f}",
                f"{row['reward/gold.final']:.2f}",
                share([bool(one["good"]) for one in last]),
                share([is_fluent(one, limit) for one in last]),
                f"{row['rollout/kl_sequence.final']:.1f}",
                f"{row['rollout/length_mean.final']:.0f}",
            ]
        )
    header = ["Arm", "Seed", "Steps", "Reward", "Cheating", "Good", "Good, held-out words", "Good and fluent, held-out"]
    return markdown([*header, "KL, nats per answer", "Tokens"], rows)


def by_run(curves: SweepTable) -> dict[tuple[str, int], list[Row]]:
    """The rows of each run by step, in the order of ARMS."""
    runs: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in sorted(curves.rows, key=lambda row: (list(ARMS).index(row["arm"]), row["seed"], row["step"])):
        runs[row["arm"], row["seed"]].append(row)
    return runs


def windows(rows: Sequence[Row]) -> list[dict[str, float]]:
    """The means over every WINDOW steps in a row."""
    return [windowed(rows, at) for at in range(WINDOW, len(rows) + 1)]


def stops_table(curves: SweepTable) -> str:
    """What each run would have kept, had it been stopped: good answers and cheats over its best five steps."""
    rows = []
    for (arm, seed), own in by_run(curves).items():
        means = windows(own)
        best = max(means, key=lambda one: one["reward/gold"])
        cells = (f"{one['reward/gold']:.2f} ({one['reward/exploit']:.2f})" for one in (means[0], best, means[-1]))
        rows.append([ARMS[arm], str(seed), *cells, f"{best['step']:.0f}"])
    header = [
        "Arm",
        "Seed",
        "Steps 1 to 5: good (cheating)",
        "Best five steps",
        "Last five steps",
        "The best end at step",
    ]
    return markdown(header, rows)


def predictions_table(curves: SweepTable, alarms: SweepTable) -> str:
    """Each prediction of the page, and in how many seeds it holds."""
    ends = {run: windows(own) for run, own in by_run(curves).items()}
    first = {run: means[0] for run, means in ends.items()}
    last = {run: means[-1] for run, means in ends.items()}
    seeds = sorted({seed for _, seed in ends})
    rung = {(row["arm"], row["seed"]) for row in alarms.rows if row["step"] is not None}
    good, cheating = "reward/gold", "reward/exploit"

    def stopped(seed: int) -> float:
        """Good answers of no penalty, stopped where it is best for the other seeds, or at its end before that."""
        others = [ends["none", other] for other in seeds if other != seed]
        best = max(
            range(max(map(len, others))), key=lambda at: sum(means[min(at, len(means) - 1)][good] for means in others)
        )
        own = ends["none", seed]
        return own[min(best, len(own) - 1)][good]

    predictions: dict[str, Callable[[int], bool]] = {
        "P1": lambda seed: last["none", seed][cheating] >= 0.5 and last["none", seed][good] < first["none", seed][good],
        "P2": lambda seed: last["mended", seed][good] > first["mended", seed][good],
        "P3, KL": lambda seed: last["kl", seed][cheating] < last["none", seed][cheating],
        "P3, limit": lambda seed: last["advantage_limit", seed][cheating] < last["none", seed][cheating],
        "P4": lambda seed: stopped(seed) > last["kl", seed][good],
        "P5, than at the start": lambda seed: (
            last["advantage_limit", seed][good] > first["advantage_limit", seed][good]
        ),
        "P5, than KL": lambda seed: last["advantage_limit", seed][good] > last["kl", seed][good],
        "P6": lambda seed: ("none", seed) not in rung,
    }
    rows = []
    for name, holds in predictions.items():
        agreeing = [seed for seed in seeds if holds(seed)]
        rows.append([name, f"{len(agreeing)} of {len(seeds)}", "holds" if len(agreeing) == len(seeds) else "fails"])
    return markdown(["Prediction", "Seeds", "Verdict"], rows)


def windowed(rows: Sequence[Row], at: int) -> dict[str, float]:
    """The means of a run's curves over the WINDOW steps before an index, and the last of these steps."""
    own = rows[at - WINDOW : at]
    means = {name: sum(row[name] for row in own) / WINDOW for name in ("reward/gold", "reward/exploit")}
    return means | {"step": own[-1]["step"]}


def provenance(runs: SweepTable) -> str:
    """The commit and the machine behind the tables."""
    header = runs.header
    commit = header["commit"].split()[0][:10]
    return f"Runs at commit {commit} on {header['hardware']}, torch {header['torch']}: `{header['command']}`."


def draw(curves: SweepTable, metric: str, label: str) -> str:
    """A metric of training by step, every run."""
    runs: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in curves.rows:
        if row[metric] is not None:
            runs[ARMS[row["arm"]]][row["seed"]][row["step"]] = row[metric]
    return curves_with_bands(
        {arm: list(own.values()) for arm, own in runs.items()},
        styles=arm_styles(list(runs), baseline=ARMS["none"]),
        baseline=None,
        label=label,
        every_run=True,
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
