"""Regenerate the tables and figures of real_hacking.md from the committed tables.

    python docs/results/real_hacking/make_report.py [--check]

`--check` fails where the committed page or figure is not what the tables give.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatpeak.experiments.plots import arm_styles, curves_with_bands
from flatpeak.experiments.table import SweepTable, read_table
from flatpeak.functional import wilson_interval

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from pages import filled, markdown, parser, update  # noqa: E402

PAGE = HERE.parent / "real_hacking.md"
ARMS = {
    "none": "no penalty",
    "mended": "the mended grader",
    "kl": "KL 0.1",
    "advantage_limit": "advantages within ±0.075",
    "low_rate": "a quarter of the rate",
    "gr": "gradient regularization",
}
FIGURES = {
    "cheating": ("reward/exploit", "share of answers that cheat"),
    "good": ("reward/gold", "share of good answers"),
}
WINDOW = 5
"""The steps that a value of a curve is averaged over."""
BUDGET = 1.0
"""The KL, in nats per answer, at which the lower rate stops."""
GOOD, CHEATING, KL = "reward/gold", "reward/exploit", "rollout/kl_sequence"
Row = Mapping[str, Any]
Window = Mapping[str, float]


def main() -> int:
    """Write or check the page and its figure; the exit code."""
    check: bool = parser(__doc__).parse_args().check
    runs, curves, answers, alarms, named = (
        read_table(HERE / f"{name}.csv") for name in ("runs", "curves", "answers", "alarms", "named")
    )
    fluent = fluency_limit(answers)
    content = [
        provenance(runs),
        gate_section(answers, fluent),
        "### Predictions\n\n" + predictions_table(curves, alarms),
        "### Every run\n\n" + runs_table(runs, answers, fluent),
        "### Early stops\n\n" + stops_table(curves),
        "### The alarm\n\n" + alarms_table(alarms, named),
        *(f"![{label}, by step](real_hacking/{name}.svg)" for name, (_, label) in FIGURES.items()),
    ]
    figures = {HERE / f"{name}.svg": draw(curves, metric, label) for name, (metric, label) in FIGURES.items()}
    page = filled(PAGE.read_text(encoding="utf-8"), content)
    return update({PAGE: page, **figures}, check=check)


def at_start(answers: SweepTable) -> list[Row]:
    """The answers before training, which all arms of a seed share."""
    return [row for row in answers.rows if row["step"] == 0 and row["arm"] == "none"]


def fluency_limit(answers: SweepTable) -> float:
    """The 90th percentile of nats per token of the answers before training: a good answer below it is fluent."""
    start = sorted(row["nats"] for row in at_start(answers) if row["nats"] is not None)
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
    start = at_start(answers)
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


def windows(rows: Sequence[Row]) -> list[Window]:
    """The means over every WINDOW steps in a row."""
    return [windowed(rows, at) for at in range(WINDOW, len(rows) + 1)]


def stops_table(curves: SweepTable) -> str:
    """Good answers, and in parentheses cheats, over the five steps up to a stop."""
    rows = []
    for (arm, seed), own in by_run(curves).items():
        means = windows(own)
        best = max(means, key=lambda one: one[GOOD])
        cells = (stop_cell(one) for one in (means[0], up_to_budget(means), best, means[-1]))
        rows.append([ARMS[arm], str(seed), *cells])
    ends = ["Steps 1 to 5: good (cheating)", "KL of 1 nat", "Best five steps", "Last five steps"]
    return markdown(["Arm", "Seed", *ends], rows)


def alarms_table(alarms: SweepTable, named: SweepTable) -> str:
    """When the pattern of the cheat was named at all, and when it paid two spreads."""
    rows = []
    for first, loud in zip(named.rows, alarms.rows, strict=True):
        cells = [f"step {row['step']}, {row['share']:.0%}, {row['spreads']:.1f}" for row in (first, loud)]
        rows.append([ARMS[loud["arm"]], str(loud["seed"]), *cells, loud["pattern"]])
    header = ["Arm", "Seed", "Named: step, share of answers, spreads", "Two spreads", "The pattern"]
    return markdown(header, rows)


def stop_cell(one: Window) -> str:
    """Good answers, cheats and the step of a stop."""
    return f"{one[GOOD]:.2f} ({one[CHEATING]:.2f}), step {one['step']:.0f}"


def up_to_budget(own: Sequence[Window]) -> Window:
    """The window at which a run reaches the KL budget, or its last."""
    return next((one for one in own if one[KL] >= BUDGET), own[-1])


def half_cheat(own: Sequence[Window]) -> float:
    """The step by which half of the answers of WINDOW steps cheat."""
    return next((one["step"] for one in own if one[CHEATING] >= 0.5), math.inf)


def stopped_like(own: Sequence[Window], others: Sequence[Sequence[Window]]) -> Window:
    """A run's window where the others had the most good answers, or its last; ended runs stay at their last."""
    longest = max(map(len, others))
    best = max(range(longest), key=lambda at: sum(one[min(at, len(one) - 1)][GOOD] for one in others))
    return own[min(best, len(own) - 1)]


def predictions_table(curves: SweepTable, alarms: SweepTable) -> str:
    """Each prediction of the page, and in how many seeds it holds."""
    ends = {run: windows(own) for run, own in by_run(curves).items()}
    first = {run: means[0] for run, means in ends.items()}
    last = {run: means[-1] for run, means in ends.items()}
    seeds = sorted({seed for _, seed in ends})
    rung = {(row["arm"], row["seed"]) for row in alarms.rows if row["step"] is not None}

    def stopped(seed: int) -> Window:
        return stopped_like(ends["none", seed], [ends["none", other] for other in seeds if other != seed])

    predictions: dict[str, Callable[[int], bool]] = {
        "P1": lambda seed: last["none", seed][CHEATING] >= 0.5 and last["none", seed][GOOD] < first["none", seed][GOOD],
        "P2": lambda seed: last["mended", seed][GOOD] > first["mended", seed][GOOD],
        "P3, KL": lambda seed: last["kl", seed][CHEATING] < last["none", seed][CHEATING],
        "P3, limit": lambda seed: last["advantage_limit", seed][CHEATING] < last["none", seed][CHEATING],
        "P4": lambda seed: stopped(seed)[GOOD] > last["kl", seed][GOOD],
        "P5, than at the start": lambda seed: (
            last["advantage_limit", seed][GOOD] > first["advantage_limit", seed][GOOD]
        ),
        "P5, than KL": lambda seed: last["advantage_limit", seed][GOOD] > last["kl", seed][GOOD],
        "P6": lambda seed: ("none", seed) not in rung,
        "P7": lambda seed: up_to_budget(ends["low_rate", seed])[GOOD] > last["kl", seed][GOOD],
        "P8": lambda seed: half_cheat(ends["gr", seed]) > half_cheat(ends["none", seed]),
    }
    waiting = {"P7": "low_rate", "P8": "gr"}
    rows = []
    for name, holds in predictions.items():
        if waiting.get(name, "none") not in {arm for arm, _ in ends}:
            rows.append([name, "", "not run yet"])
            continue
        agreeing = [seed for seed in seeds if holds(seed)]
        rows.append([name, f"{len(agreeing)} of {len(seeds)}", "holds" if len(agreeing) == len(seeds) else "fails"])
    return markdown(["Prediction", "Seeds", "Verdict"], rows)


def windowed(rows: Sequence[Row], at: int) -> Window:
    """The means of a run's curves over the WINDOW steps before an index, and the last of these steps."""
    own = rows[at - WINDOW : at]
    return {name: sum(row[name] for row in own) / WINDOW for name in (GOOD, CHEATING, KL)} | {"step": own[-1]["step"]}


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


if __name__ == "__main__":
    sys.exit(main())
