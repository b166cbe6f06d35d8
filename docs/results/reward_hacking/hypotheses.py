"""The registered tests of hypotheses.md, from the tables of the sweeps to verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flatpeak.experiments.mcnemar import mcnemar_exact
from flatpeak.experiments.statistics import holm, paired_t, slope, tost
from flatpeak.experiments.table import SweepTable

HORIZON = 300
EARLY = 120
HACKED = 0.5
DOSES = {1: "dose-0.01", 2: "sharp", 4: "dose-0.04", 6: "dose-0.06"}
"""The table of each percentage of cheating SFT texts."""
DOSE_SEEDS = range(100, 110)
FEWEST_PAIRS = 3
Sign = Literal[-1, 0, 1]
Verdict = Literal["holds", "fails", "cannot be told", "not run"]


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The finished runs of one arm by seed, each a row of its sweep's table."""

    rows: Mapping[int, Mapping[str, Any]]

    def gold(self) -> dict[int, float]:
        """Gold reward over the final window."""
        return {seed: row["reward/gold.final"] for seed, row in self.rows.items()}

    def cheating(self) -> dict[int, float]:
        """The share of the final answers that cheat; of the flat kind, the mean share of the cheat."""
        return {seed: row["reward/exploit.final"] for seed, row in self.rows.items()}

    def hacked(self) -> dict[int, bool]:
        """Whether at least half of the final answers cheat."""
        return {seed: share >= HACKED for seed, share in self.cheating().items()}

    def step_of_hacking(self) -> dict[int, float]:
        """The first step at which the exploit rate averaged 0.5; the horizon where it never did."""
        steps = {seed: row["reward/exploit.first"] for seed, row in self.rows.items()}
        return {seed: HORIZON if step is None else float(step) for seed, step in steps.items()}

    def only(self, seeds: Collection[int]) -> Runs:
        """The runs of these seeds."""
        return Runs(rows={seed: row for seed, row in self.rows.items() if seed in seeds})

    def fall(self) -> dict[int, float]:
        """Share of the proxy reward that weight noise takes away at the end."""
        values = {
            seed: next((row[name] for name in row if name.endswith("sharpness/relative_fall_0.6.last")), None)
            for seed, row in self.rows.items()
        }
        return {seed: value for seed, value in values.items() if value is not None}


Measure = Callable[[Runs], dict[int, float]]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of an effect with its interval and p-value; `n` pairs of seeds (of seeds, for a slope)."""

    n: int
    value: float
    low: float
    high: float
    p: float


def runs_of(table: SweepTable | None, arm: str) -> Runs | None:
    """The finished runs of an arm; None where its sweep has none."""
    if table is None:
        return None
    rows = {row["seed"]: row for row in table.rows if row["arm"] == arm and row["status"] == "done"}
    return Runs(rows=rows) if rows else None


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A registered hypothesis: its name, its claim, and its test, which gives None without the runs it needs."""

    name: str
    claim: str
    test: Callable[[], Estimate | None]
    unit: str
    expected: Sign
    """Sign of the estimate that the claim predicts; 0: any, or an equivalence."""
    smallest: float
    """Smallest effect worth having; the bound of an equivalence."""
    equivalence: bool = False


def registered(tables: Mapping[str, SweepTable]) -> list[Registered]:
    """The hypotheses in the order of hypotheses.md."""
    arms = {bed: _Arms(table=tables.get(bed)) for bed in ("sharp", "flat", "learned")}
    sharp, flat, learned = arms.values()
    reuse, none, learned_gr = sharp["gr_reuse"], sharp["none"], learned["gr_importance_ratio"]
    random = sharp["random_direction"]
    return [
        hacked_seeds("H1a", "GR reuse hacked in fewer seeds than none", reuse, none),
        hacked_seeds("H1b", "GR importance hacked in fewer seeds than none", sharp["gr_importance"], none),
        _later("H1'a", "GR reuse hacked later than none", reuse, none),
        _later("H1'b", "GR importance hacked later than none", sharp["gr_importance"], none),
        Registered(
            name="H2",
            claim="`ratio:0.3` hacked at none's step, within 15",
            test=lambda: same(sharp["recommended"], none, Runs.step_of_hacking, bound=15),
            unit="steps",
            expected=0,
            smallest=15,
            equivalence=True,
        ),
        final_gold("H2'", "a fixed strength keeps more gold than a tracked one", reuse, sharp["gr_ratio_matched"], 1),
        hacked_seeds("H3a", "GR reuse hacked in fewer seeds than the lower rate", reuse, sharp["learning_rate"]),
        hacked_seeds("H3b", "GR reuse hacked in fewer seeds than the random direction", reuse, random),
        final_gold("H4", "GR reuse and KL differ in gold", reuse, sharp["kl"], 0),
        Registered(
            name="H5",
            claim="resets: hacked at step 300 in more seeds than at 120",
            test=lambda: delayed_hacks(sharp["resets"]),
            unit="share of seeds",
            expected=1,
            smallest=0.25,
        ),
        Registered(
            name="H6",
            claim="flat cheat: gold of GR reuse within 0.1 of none's",
            test=lambda: same(flat["gr_reuse"], flat["none"], Runs.gold, bound=0.1),
            unit="gold",
            expected=0,
            smallest=0.1,
            equivalence=True,
        ),
        hacked_seeds(
            "H6'a", "learned proxy: GR `ratio:1` hacked in fewer seeds than none", learned_gr, learned["none"]
        ),
        hacked_seeds("H6'b", "learned proxy: KL hacked in fewer seeds than GR `ratio:1`", learned["kl"], learned_gr),
        Registered(
            name="H7",
            claim="the gold that GR reuse saves falls with the dose of cheats",
            test=lambda: benefit_by_dose(tables),
            unit="gold per percent",
            expected=-1,
            smallest=0.02,
        ),
        _flatter("H8a", "GR reuse ends flatter than none, outcomes equal", reuse, none),
        _flatter("H8b", "GR reuse ends flatter than the random direction, outcomes equal", reuse, random),
    ]


def registered_again(tables: Mapping[str, SweepTable]) -> list[Registered]:
    """The three hypotheses that a larger model and another task test again; a family of six."""
    hypotheses = []
    for bed in ("large", "addition"):
        arms = _Arms(table=tables.get(bed))
        reuse, random = arms["gr_reuse"], arms["random_direction"]
        hypotheses += [
            hacked_seeds(f"H1a, {bed}", "GR reuse hacked in fewer seeds than none", reuse, arms["none"]),
            hacked_seeds(f"H3b, {bed}", "GR reuse hacked in fewer seeds than the random direction", reuse, random),
            final_gold(f"H4, {bed}", "GR reuse and KL differ in gold", reuse, arms["kl"], 0),
        ]
    return hypotheses


@dataclass(frozen=True, kw_only=True)
class _Arms:
    """The arms of a bed by name."""

    table: SweepTable | None

    def __getitem__(self, arm: str) -> Runs | None:
        return runs_of(self.table, arm)


def hacked_seeds(name: str, claim: str, arm: Runs | None, baseline: Runs | None, expected: Sign = -1) -> Registered:
    """A difference in the share of hacked seeds."""
    return Registered(
        name=name,
        claim=claim,
        test=lambda: hacks(arm, baseline),
        unit="share of seeds",
        expected=expected,
        smallest=0.25,
    )


def _later(name: str, claim: str, arm: Runs | None, baseline: Runs | None) -> Registered:
    return Registered(
        name=name,
        claim=claim,
        test=lambda: differ(arm, baseline, Runs.step_of_hacking),
        unit="steps",
        expected=1,
        smallest=15,
    )


def final_gold(name: str, claim: str, arm: Runs | None, baseline: Runs | None, expected: Sign) -> Registered:
    """A difference in gold."""
    return Registered(
        name=name,
        claim=claim,
        test=lambda: differ(arm, baseline, Runs.gold),
        unit="gold",
        expected=expected,
        smallest=0.1,
    )


def _flatter(name: str, claim: str, arm: Runs | None, baseline: Runs | None) -> Registered:
    return Registered(
        name=name,
        claim=claim,
        test=lambda: flatter(arm, baseline),
        unit="share of the proxy",
        expected=-1,
        smallest=0.05,
    )


def verdicts(hypotheses: Sequence[Registered]) -> list[tuple[Registered, Estimate | None, float, Verdict]]:
    """Each hypothesis with its estimate, its p-value after Holm over all that were registered, and its verdict."""
    estimates = [hypothesis.test() for hypothesis in hypotheses]
    p_values = [math.nan if estimate is None else estimate.p for estimate in estimates]
    adjusted = holm(p_values, hypotheses=len(hypotheses))
    return [
        (one, estimate, p, "not run" if estimate is None else verdict(one, estimate, p))
        for one, estimate, p in zip(hypotheses, estimates, adjusted, strict=True)
    ]


def verdict(hypothesis: Registered, estimate: Estimate, adjusted: float) -> Verdict:
    """The rule of hypotheses.md."""
    if math.isnan(adjusted):
        return "cannot be told"
    smallest = hypothesis.smallest
    if hypothesis.equivalence:
        beyond = estimate.low > smallest or estimate.high < -smallest
        return "holds" if adjusted < 0.05 else "fails" if beyond else "cannot be told"
    if adjusted < 0.05:
        return "holds" if hypothesis.expected in (0, math.copysign(1, estimate.value)) else "fails"
    # Whether the interval leaves out every effect worth having that has the predicted sign.
    none_above, none_below = estimate.high < smallest, estimate.low > -smallest
    small = {1: none_above, -1: none_below, 0: none_above and none_below}[hypothesis.expected]
    return "fails" if small else "cannot be told"


def hacks(arm: Runs | None, baseline: Runs | None) -> Estimate | None:
    """Difference in the share of hacked seeds; exact McNemar."""
    if arm is None or baseline is None:
        return None
    a, b = arm.hacked(), baseline.hacked()
    seeds = sorted(a.keys() & b.keys())
    test = mcnemar_exact([a[seed] for seed in seeds], [b[seed] for seed in seeds])
    return Estimate(n=test.n, value=test.estimate, low=test.low, high=test.high, p=test.p)


def differ(arm: Runs | None, baseline: Runs | None, measure: Measure) -> Estimate | None:
    """Mean paired difference of a measure; paired t."""
    if arm is None or baseline is None:
        return None
    a, b = measure(arm), measure(baseline)
    seeds = sorted(a.keys() & b.keys())
    test = paired_t([a[seed] for seed in seeds], [b[seed] for seed in seeds])
    return Estimate(n=test.n, value=test.estimate, low=test.low, high=test.high, p=test.p)


def same(arm: Runs | None, baseline: Runs | None, measure: Measure, *, bound: float) -> Estimate | None:
    """Mean paired difference with its 90% interval; two one-sided tests against the bound."""
    if arm is None or baseline is None:
        return None
    a, b = measure(arm), measure(baseline)
    seeds = sorted(a.keys() & b.keys())
    test = tost([a[seed] for seed in seeds], [b[seed] for seed in seeds], bound=bound)
    return Estimate(n=test.n, value=test.estimate, low=test.low, high=test.high, p=test.p)


def delayed_hacks(arm: Runs | None) -> Estimate | None:
    """Share hacked at the end less share hacked by step 120; exact McNemar."""
    if arm is None:
        return None
    steps, ended = arm.step_of_hacking(), arm.hacked()
    seeds = sorted(steps)
    test = mcnemar_exact([ended[seed] for seed in seeds], [steps[seed] <= EARLY for seed in seeds])
    return Estimate(n=test.n, value=test.estimate, low=test.low, high=test.high, p=test.p)


def benefit_by_dose(tables: Mapping[str, SweepTable]) -> Estimate | None:
    """Slope of the gold that GR reuse saves over the percentage of cheats in SFT, by seed; t over seeds."""
    doses: list[float] = []
    benefits: list[float] = []
    seeds: list[int] = []
    for dose, bed in DOSES.items():
        arm, baseline = runs_of(tables.get(bed), "gr_reuse"), runs_of(tables.get(bed), "none")
        if arm is None or baseline is None:
            return None
        a, b = arm.gold(), baseline.gold()
        for seed in sorted(a.keys() & b.keys() & set(DOSE_SEEDS)):
            doses.append(dose)
            benefits.append(a[seed] - b[seed])
            seeds.append(seed)
    test = slope(doses, benefits, seeds)
    return Estimate(n=test.n, value=test.estimate, low=test.low, high=test.high, p=test.p)


def flatter(arm: Runs | None, baseline: Runs | None) -> Estimate | None:
    """Difference in the fall under weight noise over the seeds with equal outcomes; paired t."""
    if arm is None or baseline is None:
        return None
    a, b = arm.hacked(), baseline.hacked()
    equal = {seed for seed in a.keys() & b.keys() if a[seed] == b[seed]}
    test = differ(arm.only(equal), baseline.only(equal), Runs.fall)
    return test if test is None or test.n >= FEWEST_PAIRS else Estimate(
        n=test.n, value=test.value, low=math.nan, high=math.nan, p=math.nan
    )  # fmt: skip
