"""Early stopping from the committed curves: what runs would have kept, had they been stopped. Not registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from estimates import interval, mean, paired_difference, spearman_with_interval
from hypotheses import HORIZON, runs_of
from matched_sharpness import FALL
from pages import markdown

from flatpeak.experiments.table import SweepTable

Row = Mapping[str, Any]
Curve = Sequence[Row]
"""The rows of one run by step, each the mean over the last 10 steps."""
Curves = Mapping[str, Mapping[int, Curve]]
"""The curves of a bed by arm and seed."""
Rule = Callable[[Curve, float], Row]

BEDS = ("sharp", "flat", "learned", "large", "addition")
"""The beds that have KL."""
KL = "rollout/kl_sequence"
STEPS = tuple(range(10, HORIZON + 1, 10))
BUDGETS = tuple(2 ** (k / 2) for k in range(-8, 13))
"""KL from 1/16 to 64 nat per answer."""
SOON = 20
"""The step of an early look at a run."""
INTRODUCTION = f"""\
### Early stopping from the committed curves

Post hoc: nothing here was registered. A run is stopped at a fixed step, or at the first 10 steps whose mean KL reaches
a budget (from {BUDGETS[0]:.2g} to {BUDGETS[-1]:.0f} nat in factors of the root of 2), and counts with these 10 steps.
Gold decides: each seed has the step or budget that is best for all other seeds. A first step or budget means to stop at
once. KL to the end is the registered arm.
"""
EVALUATED = """\
The sharp bed evaluated on all prompts, seeds 100 to 109 ([curves](reward_hacking/matched-curves.csv)):
"""
ALARM = f"""\
What step {SOON} tells about the step of hacking without a penalty, on the beds where no seed was hacked by then:
"""


def curves_of(table: SweepTable) -> dict[str, dict[int, list[Row]]]:
    """The curves of a bed."""
    curves: dict[str, dict[int, list[Row]]] = {}
    for row in sorted(table.rows, key=lambda row: row["step"]):
        curves.setdefault(row["arm"], {}).setdefault(row["seed"], []).append(row)
    return curves


def at_step(curve: Curve, step: float) -> Row:
    """The row at a step; the last one of a run that ended before."""
    return [row for row in curve if row["step"] <= step][-1]


def at_budget(curve: Curve, nats: float) -> Row:
    """The first row whose KL reaches a budget; the last one where none does."""
    return next((row for row in curve if row[KL] >= nats), curve[-1])


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The runs of an arm, each stopped at the threshold with the most gold in the other seeds."""

    thresholds: Mapping[int, float]
    rows: Mapping[int, Row]

    def values(self, metric: str) -> list[float]:
        """A metric at the stop, in the order of the seeds."""
        return [self.rows[seed][metric] for seed in sorted(self.rows)]


def stopped(curves: Mapping[int, Curve], rule: Rule, candidates: Sequence[float]) -> Stopped:
    """Stop each run at the first of the candidates that are best by the mean gold of all other seeds."""
    stops = {one: {seed: rule(curve, one) for seed, curve in curves.items()} for one in candidates}

    def gold_of_others(threshold: float, left_out: int) -> float:
        return mean([row["reward/gold"] for seed, row in stops[threshold].items() if seed != left_out])

    thresholds = {seed: max(candidates, key=lambda one: gold_of_others(one, seed)) for seed in curves}
    return Stopped(thresholds=thresholds, rows={seed: stops[one][seed] for seed, one in thresholds.items()})


def best_gold(curves: Mapping[int, Curve]) -> list[float]:
    """Gold in the best 10 steps of each run."""
    return [max(row["reward/gold"] for row in curve) for curve in curves.values()]


def first_gold(curves: Mapping[int, Curve]) -> list[float]:
    """Gold over steps 1 to 10 of each run."""
    return [curve[0]["reward/gold"] for curve in curves.values()]


def section(tables: Mapping[str, SweepTable], curves: Mapping[str, Curves]) -> str:
    """The section of early stopping, in Markdown."""
    header = [
        "Bed",
        "Arm",
        "Stopped at",
        "Gold",
        "Less KL at the end",
        "Cheating, mean (most)",
        "Gold of the worst seed",
    ]
    rows = [row for bed in BEDS if bed in tables and bed in curves for row in bed_rows(bed, tables[bed], curves[bed])]
    content = [INTRODUCTION, markdown(header, rows)]
    if "matched" in curves:
        content += [EVALUATED, evaluated_table(curves["matched"])]
    return "\n\n".join(text.strip() for text in [*content, ALARM, alarm_table(tables, curves)])


def bed_rows(bed: str, table: SweepTable, curves: Curves) -> list[list[str]]:
    """KL to the end, and every arm and rule beside it."""
    kl = runs_of(table, "kl")
    assert kl is not None
    gold, cheating = kl.gold(), kl.cheating()
    rows = [stop_row(bed, "kl", "the end", list(gold.values()), "", list(cheating.values()))]
    rules = {"none": (at_step, at_budget), "learning_rate": (at_step, at_budget), "kl": (at_step,)}
    for arm, rule in ((arm, rule) for arm, own in rules.items() if arm in curves for rule in own):
        stop = stopped(curves[arm], rule, STEPS if rule is at_step else BUDGETS)
        ends = min(stop.thresholds.values()), max(stop.thresholds.values())
        where = " to ".join(dict.fromkeys(f"{end:.0f}" if rule is at_step else f"{end:.2g}" for end in ends))
        own_gold = stop.values("reward/gold")
        difference = paired_difference(own_gold, [gold[seed] for seed in sorted(stop.rows)])
        where = f"step {where}" if rule is at_step else f"{where} nat"
        rows.append(stop_row(bed, arm, where, own_gold, difference, stop.values("reward/exploit")))
    return rows


def stop_row(bed: str, arm: str, where: str, gold: list[float], difference: str, cheating: list[float]) -> list[str]:
    """A row of the table of stops."""
    cheats = f"{mean(cheating):.3f} ({max(cheating):.3f})"
    return [bed, arm, where, interval(gold), difference, cheats, f"{min(gold):.3f}"]


def evaluated_table(matched: Curves) -> str:
    """Gold on trained, held-out and perturbed prompts at a stop and at the end."""
    moments = (("before RL", "none", 0), ("none", "none", SOON), ("kl", "kl", SOON), ("kl", "kl", HORIZON))
    metrics = ("sharpness/clean/gold", "sampled/gold_held_out", "sampled/gold_perturbed", "sampled/exploit")
    rows = []
    for name, arm, step in moments:
        ends = [at_step(curve, step) for curve in matched[arm].values()]
        values = ([row[f"eval/signatures/{metric}"] for row in ends] for metric in metrics)
        rows.append([name, str(step), *(interval(own) for own in values)])
    return markdown(["Arm", "Step", "Gold, trained prompts", "Held-out", "Perturbed", "Cheating"], rows)


def alarm_table(tables: Mapping[str, SweepTable], curves: Mapping[str, Curves]) -> str:
    """Rank correlations of cheats and of sharpness at step SOON with the step of hacking without a penalty."""
    cases = [(bed, "reward/exploit", f"cheating in steps {SOON - 9} to {SOON}") for bed in curves if bed != "matched"]
    cases.append(("matched", f"eval/signatures/{FALL}", "proxy lost under noise"))
    rows = []
    for bed, metric, title in cases:
        runs = runs_of(tables.get(bed), "none")
        if runs is None or bed not in curves or min(runs.step_of_hacking().values()) <= SOON:
            continue
        steps = runs.step_of_hacking()
        known = [at_step(curves[bed]["none"][seed], SOON)[metric] for seed in steps]
        name = "sharp, seeds 100 to 109" if bed == "matched" else bed
        rows.append([name, title, str(len(steps)), spearman_with_interval(known, list(steps.values()))])
    return markdown(["Bed", f"Known at step {SOON}", "Seeds", "Spearman over seeds"], rows)
