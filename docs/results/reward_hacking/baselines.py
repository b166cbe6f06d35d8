"""The registered tests of baselines.md: the cheap baselines, their stops, and the verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from early_stopping import KL, Curve, Curves, Row, Rule, at_budget, at_step
from estimates import count, interval, mean, paired_difference
from hypotheses import HORIZON, Registered, Runs, differ, final_gold, hacked_seeds, runs_of
from pages import markdown

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


FIXED_STEP, KL_BUDGET, LOWER_RATE, KL_AND_STEP, ALARM = (
    "no penalty, at a step",
    "no penalty, at a KL",
    "the lower rate, at a KL",
    "KL, at a step (not registered)",
    "no penalty, at the alarm",
)
READ = ("reward/gold", "reward/exploit")


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Where the runs of an arm were stopped, and what they were like there."""

    where: str
    runs: Runs


@dataclass(frozen=True, kw_only=True)
class Bed:
    """The runs of a bed by arm and seed: rows of the sweep's table, and curves of five steps a row."""

    rows: Mapping[str, Mapping[int, Row]]
    curves: Curves

    def at(self, arm: str, step: int) -> Runs:
        """Every run at a step: the mean over the ten steps up to there, or over its last ten where it ended before."""
        ends = {seed: row for seed, row in self.rows[arm].items() if row["steps"] <= step}
        later = self.curves[arm].keys() - ends.keys()
        read = as_runs({seed: [row for row in self.curves[arm][seed] if row["step"] <= step][-2:] for seed in later})
        return Runs(rows=dict(sorted({**ends, **read.rows}.items())))


def bed_of(table: SweepTable, curves: Curves) -> Bed:
    """The finished runs of a sweep."""
    rows: dict[str, dict[int, Row]] = {}
    for row in table.rows:
        if row["status"] == "done":
            rows.setdefault(row["arm"], {})[row["seed"]] = row
    return Bed(rows=rows, curves=curves)


def as_runs(rows: Mapping[int, Sequence[Row]]) -> Runs:
    """Runs that end with the mean of some rows of their curves."""
    return Runs(
        rows={seed: {f"{name}.final": mean([row[name] for row in own]) for name in READ} for seed, own in rows.items()}
    )


def stopped(curves: Mapping[int, Curve], rule: Rule, threshold: float) -> Runs:
    """Every run of an arm, stopped by a rule: the five steps at which it stops count."""
    return as_runs({seed: [rule(curve, threshold)] for seed, curve in curves.items()})


def stopped_at_alarms(curves: Mapping[int, Curve], steps: Mapping[int, float | None]) -> Runs:
    """Every run of an arm, stopped at its alarm: the last five whole steps up to there; without an alarm its last."""
    before = {
        seed: [row for row in curve if steps[seed] is None or row["step"] <= steps[seed]]
        for seed, curve in curves.items()
    }
    return as_runs({seed: rows[-1:] or curves[seed][:1] for seed, rows in before.items()})


def stops_of(tuning: SweepTable, tuning_curves: SweepTable, curves: Curves, alarms: SweepTable) -> dict[str, Stop]:
    """The stops by name; the step and the KL are those with the best mean gold on the tuning seeds."""
    stops = {}
    for name, arm, rule, candidates, words in (
        (FIXED_STEP, "none", at_step, STEPS, "step {:.0f}"),
        (KL_BUDGET, "none", at_budget, BUDGETS, "{:.2g} nat"),
        (LOWER_RATE, "learning_rate", at_budget, BUDGETS, "{:.2g} nat"),
        (KL_AND_STEP, "kl", at_step, STEPS, "step {:.0f}"),
    ):
        tuned = curves_at_best(tuning, tuning_curves, arm)
        golds = {value: mean(list(stopped(tuned, rule, value).gold().values())) for value in candidates}
        best = max(golds, key=lambda value: golds[value])
        where = words.format(best)
        if rule is at_budget:
            reached = sum(any(row[KL] >= best for row in curve) for curve in curves[arm].values())
            where += f", reached by {reached} of {len(curves[arm])}"
        stops[name] = Stop(where=where, runs=stopped(curves[arm], rule, best))
    steps = {row["seed"]: row["step"] for row in alarms.rows if row["arm"] == "none"}
    rung = [step for step in steps.values() if step is not None]
    where = f"steps {min(rung):.0f} to {max(rung):.0f}, {len(rung)} of {len(steps)} seeds" if rung else "no alarm"
    return stops | {ALARM: Stop(where=where, runs=stopped_at_alarms(curves["none"], steps))}


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


def registered(bed: Bed, stops: Mapping[str, Stop]) -> list[Registered]:
    """The hypotheses in the order of baselines.md; all are read at step 300 but for parts of B10 and B11."""
    ends = {arm: bed.at(arm, HORIZON) for arm in bed.rows}
    later = {arm: bed.at(arm, LONG) for arm in ("kl", "advantage_limit")}
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


def registered_again(name: str, bed: Bed | None, stops: Mapping[str, Stop]) -> list[Registered]:
    """The four hypotheses of another bed; None where it has not run."""
    none, limit, kl = (bed.at(arm, HORIZON) if bed else None for arm in ("none", "advantage_limit", "kl"))
    lower_rate, alarm = (stops[rule].runs if stops else None for rule in (LOWER_RATE, ALARM))
    return [
        final_gold(f"B1, {name}", "the lower rate stopped at a KL has more gold than KL", lower_rate, kl, 1),
        final_gold(f"B3, {name}", "no penalty stopped at the alarm has more gold than KL", alarm, kl, 1),
        hacked_seeds(f"B4, {name}", "the limit is hacked in fewer seeds than none", limit, none),
        final_gold(f"B12, {name}", "the limit has more gold than KL", limit, kl, 1),
    ]


def tuning_section(table: SweepTable) -> str:
    """Mean final gold and hacked seeds of every strength that was tried, and gold on prompts that RL does not see."""
    rows: list[list[str]] = []
    other: list[list[str]] = []
    at_edge: list[str] = []
    for arm in TUNED:
        tried = by_strength(table, arm)
        best = best_strength(table, arm)
        marks = [(value, "**" if value == best else "") for value in tried]
        golds = {value: mean(list(runs.gold().values())) for value, runs in tried.items()}
        hacked = {value: sum(runs.hacked().values()) for value, runs in tried.items()}
        unseen = {value: mean(at_end(runs.rows, "held_out")) for value, runs in tried.items()}
        rows.append([arm, *(f"{mark}{value:g}: {golds[value]:.3f} ({hacked[value]}){mark}" for value, mark in marks)])
        other.append([arm, *(f"{mark}{value:g}: {unseen[value]:.3f}{mark}" for value, mark in marks)])
        if best in (min(tried), max(tried)):
            at_edge.append(f"{arm} {best:g}")
    seeds = sorted({row["seed"] for row in table.rows})
    none = runs_of(table, "none")
    assert none is not None
    header = ["Arm", *(f"Strength {i}" for i in range(1, max(map(len, rows))))]
    return "\n\n".join(
        [
            f"Mean final gold over tuning seeds {seeds[0]} to {seeds[-1]}, and in parentheses how many of the "
            f"{len(seeds)} were hacked; the chosen strength in bold.",
            markdown(header, padded(rows)),
            f"No penalty: {mean(list(none.gold().values())):.3f} ({sum(none.hacked().values())}). "
            f"At an edge of its grid: {', '.join(at_edge) or 'none'}.",
            "Gold at step 300 on the eight prompts that SFT taught and RL does not see, which chose nothing:",
            markdown(header, padded(other)),
            f"No penalty: {mean(at_end(none.rows, 'held_out')):.3f}; before RL: {mean(before(none.rows)):.3f}.",
        ]
    )


def before(rows: Mapping[int, Row]) -> list[float]:
    """Gold on held-out prompts before RL; runs evaluate twice, so that `.auc` is the mean of both."""
    name = "eval/signatures/sampled/gold_held_out"
    return [2 * row[f"{name}.auc"] - row[f"{name}.last"] for row in rows.values()]


def padded(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows of equal length."""
    most = max(map(len, rows))
    return [[*row, *[""] * (most - len(row))] for row in rows]


def arm_section(bed: Bed) -> str:
    """Every arm at step 300, and those that ran on at step 1,000, with what only a run's end has: other prompts."""
    rows = []
    for arm, own in bed.rows.items():
        last = max(row["steps"] for row in own.values())
        for step in sorted({HORIZON, max(HORIZON, last)}):
            others = [interval(at_end(own, split)) if last <= step else "" for split in SPLITS]
            rows.append([arm, str(step), str(len(own)), *outcome(bed.at(arm, step)), *others])
    return markdown(["Arm", "Step", "Seeds", *OUTCOME, "Held-out prompts", "Perturbed prompts"], rows)


def at_end(rows: Mapping[int, Row], split: str) -> list[float]:
    """Gold on the prompts of a split at the end of runs; a task without this split has none."""
    values = [value for row in rows.values() for name, value in row.items() if name.endswith(f"gold_{split}.last")]
    return [value for value in values if value is not None]


def stop_section(stops: Mapping[str, Stop], kl: Runs) -> str:
    """Every stop beside KL at step 300."""
    rows = [
        [name, stop.where, *outcome(stop.runs), paired_difference(*zip_seeds(stop.runs.gold(), kl.gold()))]
        for name, stop in stops.items()
    ]
    return markdown(["Stopped", "Where", *OUTCOME, "Gold less KL's at step 300"], rows)


SPLITS = ("held_out", "perturbed")
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
