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
    "stopped": "no penalty, stopped at 1 nat",
    "low_rate_stopped": "a quarter of the rate, stopped at 1 nat",
}
SWEEPS = ("first", "later", "stopped")
ENDS = ("", "-curves", "-answers")
"""The runs of a sweep, their curves, and their answers to held-out words: what its files are called after its name."""
STOPPED = {"none": "stopped", "low_rate": "low_rate_stopped"}
"""The arms that repeat the first steps of another."""
FIGURES = {
    "cheating": ("reward/exploit", "share of answers that cheat"),
    "good": ("reward/gold", "share of good answers"),
}
WINDOW = 5
"""The steps that a value of a curve is averaged over."""
EVERY = 20
"""Steps from one evaluation to the next."""
BUDGET = 1.0
"""The KL, in nats per answer, at which the lower rate stops."""
GOOD, CHEATING, KL = "reward/gold", "reward/exploit", "rollout/kl_sequence"
Row = Mapping[str, Any]
Rows = Sequence[Row]
Run = tuple[str, int]
"""An arm and a seed."""
Evaluations = Mapping[Run, Mapping[int, Rows]]
"""Answers to held-out words, by run and step."""
Window = Mapping[str, float]


def main() -> int:
    """Write or check the page and its figure; the exit code."""
    check: bool = parser(__doc__).parse_args().check
    tables = [read_table(HERE / f"{name}.csv") for name in SWEEPS]
    runs, curves, answers = (
        [row for name in SWEEPS for row in read_table(HERE / f"{name}{end}.csv").rows] for end in ENDS
    )
    alarms, named = (read_table(HERE / f"{name}.csv").rows for name in ("alarms", "named"))
    fluent, evaluations = fluency_limit(answers), by_evaluation(answers)
    content = [
        provenance(tables),
        gate_section(answers, fluent),
        "### Predictions\n\n" + predictions_table(curves, evaluations, alarms),
        "### Every run\n\n" + runs_table(runs, evaluations, fluent),
        "### Held-out words by step\n\n" + held_out_table(evaluations, fluent),
        "### Early stops\n\n" + stops_table(curves),
        "### The alarm\n\n" + alarms_table(alarms, named),
        *(f"![{label}, by step](real_hacking/{name}.svg)" for name, (_, label) in FIGURES.items()),
    ]
    figures = {HERE / f"{name}.svg": draw(curves, metric, label) for name, (metric, label) in FIGURES.items()}
    page = filled(PAGE.read_text(encoding="utf-8"), content)
    return update({PAGE: page, **figures}, check=check)


def at_start(answers: Rows) -> list[Row]:
    """The answers before training, which all arms of a seed share."""
    return [row for row in answers if row["step"] == 0 and row["arm"] == "none"]


def fluency_limit(answers: Rows) -> float:
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


def gate_section(answers: Rows, limit: float) -> str:
    """What the model does before training, on held-out words of all seeds."""
    start = at_start(answers)
    rows = [
        ["good", share([bool(row["good"]) for row in start])],
        [f"good and fluent, at most {limit:.2f} nats per token", share([is_fluent(row, limit) for row in start])],
        ["unread by the splitter, so overpaid", share([bool(row["cheats"]) for row in start])],
    ]
    return f"### Before training, {len(start)} answers\n\n" + markdown(["Answers", "Share"], rows)


def by_evaluation(answers: Rows) -> Evaluations:
    """The answers of each evaluation, by run in the order of ARMS and by step."""
    runs: dict[Run, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(answers, key=lambda row: (list(ARMS).index(row["arm"]), row["seed"], row["step"])):
        runs[row["arm"], row["seed"]][row["step"]].append(row)
    return runs


def runs_table(runs: Rows, evaluations: Evaluations, limit: float) -> str:
    """A row per run: how it ended, on trained prompts and on held-out words."""
    rows = []
    for row in sorted(runs, key=lambda row: (list(ARMS).index(row["arm"]), row["seed"])):
        own = evaluations[row["arm"], row["seed"]]
        last = own[max(own)]
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


def held_out_table(evaluations: Evaluations, limit: float) -> str:
    """Good answers to held-out words, and in parentheses those that are fluent too, at each evaluation of a run."""
    steps = sorted({step for own in evaluations.values() for step in own if step % EVERY == 0})
    rows = []
    for (arm, seed), own in evaluations.items():
        if arm in STOPPED.values():
            continue
        cells = [
            f"{good_share(own[step]):.2f} ({fluent_share(own[step], limit):.2f})" if step in own else ""
            for step in steps
        ]
        rows.append([ARMS[arm], str(seed), *cells])
    return markdown(["Arm", "Seed", *(f"Step {step}: good (and fluent)" for step in steps)], rows)


def good_share(own: Rows) -> float:
    """The share of good answers."""
    return sum(bool(row["good"]) for row in own) / len(own)


def fluent_share(own: Rows, limit: float) -> float:
    """The share of good and fluent answers."""
    return sum(is_fluent(row, limit) for row in own) / len(own)


def by_run(curves: Rows) -> dict[Run, list[Row]]:
    """The rows of each run by step, in the order of ARMS."""
    runs: dict[Run, list[Row]] = defaultdict(list)
    for row in sorted(curves, key=lambda row: (list(ARMS).index(row["arm"]), row["seed"], row["step"])):
        runs[row["arm"], row["seed"]].append(row)
    return runs


def windows(rows: Sequence[Row]) -> list[Window]:
    """The means over every WINDOW steps in a row."""
    return [windowed(rows, at) for at in range(WINDOW, len(rows) + 1)]


def stops_table(curves: Rows) -> str:
    """Good answers, and in parentheses cheats, over the five steps up to a stop."""
    rows = []
    for (arm, seed), own in by_run(curves).items():
        if arm in STOPPED.values():
            continue
        means = windows(own)
        best = max(means, key=lambda one: one[GOOD])
        cells = (stop_cell(one) for one in (means[0], up_to_budget(means), best, means[-1]))
        rows.append([ARMS[arm], str(seed), *cells])
    ends = ["Steps 1 to 5: good (cheating)", "KL of 1 nat", "Best five steps", "Last five steps"]
    return markdown(["Arm", "Seed", *ends], rows)


def alarms_table(alarms: Rows, named: Rows) -> str:
    """When the pattern of the cheat was named at all, and when it paid two spreads."""
    rows = []
    for first, loud in zip(named, alarms, strict=True):
        cells = [
            f"step {row['step']}, {row['share']:.0%}, {row['spreads']:.1f}" if row["step"] is not None else "never"
            for row in (first, loud)
        ]
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


def predictions_table(curves: Rows, evaluations: Evaluations, alarms: Rows) -> str:
    """Each prediction of the page, and in how many seeds it holds."""
    ends = {run: windows(own) for run, own in by_run(curves).items()}
    first = {run: means[0] for run, means in ends.items()}
    last = {run: means[-1] for run, means in ends.items()}
    seeds = sorted({seed for _, seed in ends})
    held_out = {run: good_share(own[max(own)]) for run, own in evaluations.items()}
    rung = {(row["arm"], row["seed"]) for row in alarms if row["step"] is not None}

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
    for arm, stop in STOPPED.items():
        predictions[f"P9, {ARMS[arm]}"] = lambda seed, stop=stop: held_out[stop, seed] > held_out["kl", seed]
    rows = []
    for name, holds in predictions.items():
        agreeing = sum(holds(seed) for seed in seeds)
        rows.append([name, f"{agreeing} of {len(seeds)}", "holds" if agreeing == len(seeds) else "fails"])
    return markdown(["Prediction", "Seeds", "Verdict"], rows)


def windowed(rows: Sequence[Row], at: int) -> Window:
    """The means of a run's curves over the WINDOW steps before an index, and the last of these steps."""
    own = rows[at - WINDOW : at]
    return {name: sum(row[name] for row in own) / WINDOW for name in (GOOD, CHEATING, KL)} | {"step": own[-1]["step"]}


def provenance(tables: Sequence[SweepTable]) -> str:
    """The commits, the machine and the commands behind the tables."""
    header = tables[0].header
    assert {table.header["hardware"] for table in tables} == {header["hardware"]}
    rows = [
        [
            f"[{name}.csv](real_hacking/{name}.csv)",
            f"`{table.header['command']}`",
            table.header["commit"].split()[0][:10],
        ]
        for name, table in zip(SWEEPS, tables, strict=True)
    ]
    made = f"Runs on {header['hardware']}, torch {header['torch']}."
    return f"{made}\n\n" + markdown(["Table", "Command", "Commit"], rows)


def draw(curves: Rows, metric: str, label: str) -> str:
    """A metric of training by step, every run."""
    runs: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in curves:
        if row[metric] is not None and row["arm"] not in STOPPED.values():
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
