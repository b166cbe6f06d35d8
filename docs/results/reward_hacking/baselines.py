"""The registered tests of baselines.md: the cheap baselines, their stops, and the verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from early_stopping import Curve, Curves, Row, Rule, at_budget, at_step
from estimates import count, interval, markdown, mean, paired_difference
from hypotheses import HORIZON, Registered, Runs, differ, final_gold, hacked_seeds, runs_of

from flatpeak.experiments.table import SweepTable

LONG = 1000
"""The steps of the arms that run on."""
STEPS = tuple(range(5, HORIZON + 1, 5))
BUDGETS = tuple(2 ** (k / 2) for k in range(-8, 13))
TUNED = {
    "learning_rate": "optimizer.learning_rate",
    "advantage_limit": "advantage.limit",
    "advantage_limit_spreads": "advantage.limit_spreads",
    "kl": "kl.coefficient",
    "kl_k2": "kl.coefficient",
    "kl_reward": "kl.coefficient",
    "gr_reuse": "gradient_regularization.strength",
}
"""The setting that each arm was tuned over."""


FIXED_STEP, KL_BUDGET, LOWER_RATE, ALARM = (
    "no penalty, at a step",
    "no penalty, at a KL",
    "the lower rate, at a KL",
    "no penalty, at the alarm",
)
READ = ("reward/gold", "reward/exploit")


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Where the runs of an arm were stopped, and what they were like there."""

    where: str
    runs: Runs


def as_runs(rows: Mapping[int, Sequence[Row]]) -> Runs:
    """Runs that end with the mean of some rows of their curves."""
    return Runs(
        rows={seed: {f"{name}.final": mean([row[name] for row in own]) for name in READ} for seed, own in rows.items()}
    )


def read_at(curves: Mapping[int, Curve], step: int) -> Runs:
    """Every run of an arm at a step: the mean over the ten steps up to there, as in a sweep's table."""
    return as_runs({seed: [row for row in curve if row["step"] <= step][-2:] for seed, curve in curves.items()})


def stopped(curves: Mapping[int, Curve], rule: Rule, threshold: float) -> Runs:
    """Every run of an arm, stopped by a rule: the five steps at which it stops count."""
    return as_runs({seed: [rule(curve, threshold)] for seed, curve in curves.items()})


def stopped_at_alarms(curves: Mapping[int, Curve], alarms: SweepTable) -> Runs:
    """Every run of an arm, stopped in the five steps of its alarm; without an alarm at its end."""
    steps = {row["seed"]: row["step"] or math.inf for row in alarms.rows}
    stops = {seed: [row for row in curve if row["step"] >= steps[seed]] for seed, curve in curves.items()}
    return as_runs({seed: rows[:1] or curves[seed][-1:] for seed, rows in stops.items()})


def stops_of(tuning: SweepTable, tuning_curves: SweepTable, curves: Curves, alarms: SweepTable) -> dict[str, Stop]:
    """The stops by name; the step and the KL are those with the best mean gold on the tuning seeds."""
    stops = {}
    for name, arm, rule, candidates, words in (
        (FIXED_STEP, "none", at_step, STEPS, "step {:.0f}"),
        (KL_BUDGET, "none", at_budget, BUDGETS, "{:.2g} nat"),
        (LOWER_RATE, "learning_rate", at_budget, BUDGETS, "{:.2g} nat"),
    ):
        tuned = curves_at_best(tuning, tuning_curves, arm)
        golds = {one: mean(list(stopped(tuned, rule, one).gold().values())) for one in candidates}
        best = max(golds, key=lambda one: golds[one])
        stops[name] = Stop(where=words.format(best), runs=stopped(curves[arm], rule, best))
    heard = [float(row["step"]) for row in alarms.rows if row["step"] is not None]
    where = f"steps {min(heard):.0f} to {max(heard):.0f}, {len(heard)} of {len(alarms.rows)} seeds"
    return stops | {ALARM: Stop(where=where, runs=stopped_at_alarms(curves["none"], alarms))}


def by_strength(table: SweepTable, arm: str) -> dict[Any, Runs]:
    """The finished tuning runs of an arm by the value that was tried."""
    rows: dict[Any, dict[int, Row]] = {}
    for row in table.rows:
        if row["arm"] == arm and row["status"] == "done":
            rows.setdefault(row[TUNED[arm]], {})[row["seed"]] = row
    return {value: Runs(rows=own) for value, own in rows.items()}


def best_strength(table: SweepTable, arm: str) -> Any:
    """The value with the best mean final gold over the tuning seeds, which is the one that the sweep ran."""
    golds = {value: mean(list(runs.gold().values())) for value, runs in by_strength(table, arm).items()}
    return max(golds, key=lambda value: golds[value])


def curves_at_best(table: SweepTable, curves: SweepTable, arm: str) -> dict[int, list[Row]]:
    """The tuning curves of an arm at its tuned value, by seed."""
    best = best_strength(table, arm) if arm in TUNED else None
    rows = [row for row in curves.rows if row["arm"] == arm and (best is None or row[TUNED[arm]] == best)]
    by_seed: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        by_seed.setdefault(row["seed"], []).append(row)
    return by_seed


def registered(curves: Curves, stops: Mapping[str, Stop]) -> list[Registered]:
    """The hypotheses in the order of baselines.md; all are read at step 300 but for parts of B10 and B11."""
    ends = {arm: read_at(own, HORIZON) for arm, own in curves.items()}
    later = {arm: read_at(curves[arm], LONG) for arm in ("kl", "advantage_limit")}
    none, kl, limit, gr = (ends[arm] for arm in ("none", "kl", "advantage_limit", "gr_reuse"))
    return [
        final_gold("B1", "the lower rate stopped at a KL has more gold than KL", stops[LOWER_RATE].runs, kl, 1),
        final_gold("B2", "no penalty stopped at a step has more gold than KL", stops[FIXED_STEP].runs, kl, 1),
        final_gold("B3", "no penalty stopped at the alarm has more gold than KL", stops[ALARM].runs, kl, 1),
        hacked_seeds("B4", "the limit is hacked in fewer seeds than none", limit, none),
        final_gold("B5", "the limit has more gold than GR", limit, gr, 1),
        hacked_seeds(
            "B6", "the limit in spreads is hacked in fewer seeds than none", ends["advantage_limit_spreads"], none
        ),
        hacked_seeds("B7", "KL 0.1 with GR is hacked in more seeds than GR", ends["kl_and_gr"], gr, 1),
        final_gold("B8", "k2 and k3 in the loss differ in gold", ends["kl_k2"], kl, 0),
        final_gold("B9", "KL in the reward and in the loss differ in gold", ends["kl_reward"], kl, 0),
        Registered(
            name="B10",
            claim="under KL more answers cheat at step 1,000 than at step 300",
            test=lambda: differ(later["kl"], kl, Runs.cheating),
            unit="share of answers",
            expected=1,
            smallest=0.1,
        ),
        hacked_seeds(
            "B11", "the limit is hacked in more seeds at step 1,000 than at 300", later["advantage_limit"], limit, 1
        ),
        final_gold("B12", "the limit has more gold than KL", limit, kl, 1),
    ]


def registered_again(bed: str, curves: Curves, stops: Mapping[str, Stop]) -> list[Registered]:
    """The four hypotheses of another bed; without curves it has not run."""
    none, limit, kl = (read_at(curves[arm], HORIZON) if curves else None for arm in ("none", "advantage_limit", "kl"))
    lower_rate, alarm = (stops[name].runs if stops else None for name in (LOWER_RATE, ALARM))
    return [
        final_gold(f"B1, {bed}", "the lower rate stopped at a KL has more gold than KL", lower_rate, kl, 1),
        final_gold(f"B3, {bed}", "no penalty stopped at the alarm has more gold than KL", alarm, kl, 1),
        hacked_seeds(f"B4, {bed}", "the limit is hacked in fewer seeds than none", limit, none),
        final_gold(f"B12, {bed}", "the limit has more gold than KL", limit, kl, 1),
    ]


def tuning_section(table: SweepTable) -> str:
    """Mean final gold and hacked seeds of every strength that was tried, the chosen one in bold."""
    rows: list[list[str]] = []
    at_edge: list[str] = []
    for arm in TUNED:
        tried = by_strength(table, arm)
        best = best_strength(table, arm)
        cells = []
        for value, runs in tried.items():
            mark = "**" if value == best else ""
            cells.append(
                f"{mark}{value:g}: {mean(list(runs.gold().values())):.3f} ({sum(runs.hacked().values())}){mark}"
            )
        rows.append([arm, *cells])
        if best in (min(tried), max(tried)):
            at_edge.append(f"{arm} {best:g}")
    seeds = sorted({row["seed"] for row in table.rows})
    title = (
        f"Mean final gold over tuning seeds {seeds[0]} to {seeds[-1]}, and in parentheses how many of the {len(seeds)} "
        "were hacked; the chosen strength in bold."
    )
    none = runs_of(table, "none")
    assert none is not None
    alone = f"No penalty: {mean(list(none.gold().values())):.3f} ({sum(none.hacked().values())})."
    edges = f"{alone} At an edge of its grid: {', '.join(at_edge) or 'none'}."
    most = max(map(len, rows))
    filled = [[*row, *[""] * (most - len(row))] for row in rows]
    return f"{title}\n\n{markdown(['Arm', *(f'Strength {i}' for i in range(1, most))], filled)}\n\n{edges}"


def arm_section(curves: Curves) -> str:
    """Every arm at step 300, and those that ran on at step 1,000."""
    rows = []
    for arm, own in curves.items():
        for step in (HORIZON, LONG):
            if step == LONG and all(curve[-1]["step"] <= HORIZON for curve in own.values()):
                continue
            runs = read_at(own, step)
            rows.append([arm, str(step), str(len(own)), *outcome(runs)])
    return markdown(["Arm", "Step", "Seeds", *OUTCOME], rows)


def stop_section(stops: Mapping[str, Stop], kl: Runs) -> str:
    """Every stop beside KL at step 300."""
    rows = [
        [name, stop.where, *outcome(stop.runs), paired_difference(*zip_seeds(stop.runs.gold(), kl.gold()))]
        for name, stop in stops.items()
    ]
    return markdown(["Stopped", "Where", *OUTCOME, "Gold less KL's at step 300"], rows)


OUTCOME = ("Hacked (half or more)", "Cheating", "Gold", "Gold of the worst seed")


def outcome(runs: Runs) -> list[str]:
    """The columns of OUTCOME."""
    gold = list(runs.gold().values())
    return [
        count(list(runs.hacked().values())),
        interval(list(runs.cheating().values())),
        interval(gold),
        f"{min(gold):.3f}",
    ]


def zip_seeds(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """The values of the seeds that both have."""
    seeds = sorted(a.keys() & b.keys())
    return [a[seed] for seed in seeds], [b[seed] for seed in seeds]
