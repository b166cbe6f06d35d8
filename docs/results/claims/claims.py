"""The claims of the page: what is said, how it is tested, what is measured, and the verdict by a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collapse import SIGNS, collapses, leads
from tables import difference, finals, interval, mean, rows_of, signed, steps, where

from flatpeak.experiments.statistics import Difference, mean_over_seeds

HOLDS, FAILS, OPEN = "holds", "does not hold", "undecided"
LOSS_AT_MOST = 1e-6
"""A logged loss below this counts as 0: rounding of float32."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A row of the table."""

    text: str
    source: str
    command: str
    n: int
    measured: str
    verdict: str


def side(one: Difference, *, expected: int) -> str:
    """Holds where the interval lies on the expected side of 0, does not where on the other."""
    low, high = (one.low, one.high) if expected > 0 else (-one.high, -one.low)
    return HOLDS if low > 0 else FAILS if high < 0 else OPEN


def no_effect_of_the_clip() -> Claim:
    """The clip with one update per batch, and with four."""
    once, four = (where("weights", "different", arm=arm) for arm in ("grpo", "four_updates"))
    equal, differ = sum(count == 0 for count in once), sum(count > 0 for count in four)
    clipped = mean(list(finals("four_updates", "policy/clip_fraction.final").values()))
    gap = max(finals("grpo", "policy/ratio_max_gap.best").values())
    return Claim(
        text="On policy the clip does nothing: with one update per batch every ratio is 1.",
        source="GRPO from Scratch, Blog on GRPO",
        command="arms.yaml, read_runs.py weights",
        n=len(once),
        measured=f"weights after 40 steps bit-equal with and without a clip in {equal} of {len(once)} seeds (ratios "
        f"are off 1 by at most {gap:.0e}); with four updates a step they differ in {differ} of {len(four)}, where "
        f"{clipped:.1%} of tokens are clipped",
        verdict=HOLDS if equal == len(once) else FAILS,
    )


def loss_reads_zero() -> Claim:
    """The logged loss by normalization."""
    zero, other = (max_loss(arm) for arm in ("grpo", "constant"))
    gradient = min(min(values) for values in steps("grpo", "policy/grad_norm").values())
    return Claim(
        text="The logged loss is 0 on policy while its gradient is not.",
        source="Blog on GRPO",
        command="arms.yaml",
        n=len(finals("grpo", "policy/loss.last")),
        measured=f"sequence mean: at most {zero:.0e}, with a gradient norm of at least {gradient:.2f}; constant: up to "
        f"{other:.2f}, token mean: up to {max_loss('token_mean'):.2f}",
        verdict="holds for the sequence mean only" if zero < LOSS_AT_MOST < other else FAILS,
    )


def max_loss(arm: str) -> float:
    """The largest size of an arm's logged loss in any step of any seed."""
    return max(abs(value) for values in steps(arm, "policy/loss").values() for value in values)


def length_bias() -> Claim:
    """The length of wrong answers, and accuracy, with Dr. GRPO's constant against the sequence mean."""
    wrong = difference("constant", "reward/correctness/wrong_length.final", of="training")
    accuracy, greedy = accuracies("constant")
    return Claim(
        text="The sequence mean favours long wrong answers, a constant removes that; accuracy is the same.",
        source="Dr. GRPO with GR; GRPO from Scratch, one seed",
        command="training.yaml",
        n=wrong.n,
        measured=f"constant minus sequence mean: {signed(wrong)} characters of wrong answers at the end, "
        f"{signed(accuracy)} of the accuracy of samples, {signed(greedy)} of greedy answers",
        verdict=f"length: {side(wrong, expected=-1)}; accuracy of samples: {no_difference(accuracy)}, "
        f"greedy: {no_difference(greedy)}",
    )


def accuracies(arm: str) -> tuple[Difference, Difference]:
    """An arm minus GRPO by the accuracy of samples and by that of held-out greedy answers."""
    samples, greedy = "reward/mean.final", "eval/sorting/accuracy.last"
    return difference(arm, samples, of="training"), difference(arm, greedy, of="training")


def no_difference(one: Difference) -> str:
    """The verdict on equality: it does not hold where the interval leaves 0 out, and else shows how large it may be."""
    if one.low > 0 or one.high < 0:
        return FAILS
    return f"no difference above {max(-one.low, one.high):.3f}"


def weight_of_extremes() -> Claim:
    """The size of advantages in easy and hard groups against that in middling ones."""
    sizes = {scale: {row["pass_rate"]: row[scale] for row in rows_of("groups")} for scale in ("std", "none")}
    ratio = {scale: sizes[scale][0.05] / sizes[scale][0.5] for scale in sizes}
    return Claim(
        text="The standard deviation gives easy and hard questions more weight.",
        source="Dr. GRPO with GR",
        command="advantages.py groups",
        n=0,
        measured=f"sum of advantages' sizes at a pass rate of 0.05 or 0.95 against 0.5: {ratio['std']:.2f} with it, "
        f"{ratio['none']:.2f} without, {ratio['std'] / ratio['none']:.2f} times as much",
        verdict="holds; middling ones still have the most" if ratio["none"] < ratio["std"] < 1 else FAILS,
    )


def effect_of_std() -> Claim:
    """Training without the standard deviation, and the spread between seeds."""
    one, greedy = accuracies("no_std")
    samples = side(one, expected=-1)
    return Claim(
        text="Keep the standard deviation: without it accuracy is lower.",
        source="GRPO from Scratch, one seed",
        command="training.yaml",
        n=one.n,
        measured=f"without: {signed(one)} of the accuracy of samples, {signed(greedy)} of greedy answers; GRPO's "
        f"standard deviations between seeds are {one.baseline_sd:.3f} and {greedy.baseline_sd:.3f}",
        verdict=f"samples: {no_difference(one) if samples == OPEN else samples}; greedy: {side(greedy, expected=-1)}",
    )


def baseline_needed() -> Claim:
    """REINFORCE on raw rewards against GRPO."""
    one, greedy = accuracies("no_baseline")
    entropy = difference("no_baseline", "policy/entropy.final", of="training")
    return Claim(
        text="A baseline is essential: without it accuracy is lower.",
        source="GRPO from Scratch, one seed",
        command="training.yaml",
        n=one.n,
        measured=f"without: {signed(one)} of the accuracy of samples, {signed(greedy)} of greedy answers, "
        f"{signed(entropy)} nats of entropy",
        verdict=f"{side(one, expected=-1)} within 50 steps",
    )


def estimators_of_kl() -> Claim:
    """Bias and variance of k3 against k1."""
    sds = {
        noise: {name: mean(where("kl_estimators", "relative_sd", noise=noise, estimator=name)) for name in ("k1", "k3")}
        for noise in sorted({row["noise"] for row in rows_of("kl_estimators")})
    }
    worse = [noise for noise, sd in sds.items() if sd["k3"] > sd["k1"]]
    bias = max(abs(row["relative_bias"]) for row in rows_of("kl_estimators") if row["estimator"] == "k3")
    negative = max(row["negative"] for row in rows_of("kl_estimators") if row["estimator"] == "k3")
    near, far = (
        interval(where("kl_estimators", "gradient_cosine", noise=noise, estimator="k3"), 2) for noise in (0.1, 3.0)
    )
    kl = mean(where("kl_estimators", "kl", noise=min(worse, default=math.nan), estimator="k3"))
    return Claim(
        text="k3 estimates the KL without bias, never below 0, and with less variance than k1.",
        source="Dr. GRPO with GR, LLM course, Blog on GRPO",
        command="kl_estimators.py",
        n=len(where("kl_estimators", "kl", noise=0.1, estimator="k3")),
        measured=f"bias at most {bias:.0e} of the KL, below 0 for {negative:.0%} of tokens; more variable than k1 from "
        f"{kl:.1f} nats on; as a loss its gradient has a cosine of {near} with the KL's near the reference, {far} at "
        f"{mean(where('kl_estimators', 'kl', noise=3.0, estimator='k3')):.1f} nats",
        verdict="holds near the reference" if worse and negative == 0 else OPEN,
    )


def early_signs() -> Claim:
    """The steps from each metric leaving the range of healthy runs to the collapse."""
    ends, seeds = collapses(), finals("high_rate", "reward/mean.final")
    early = {sign: mean_over_seeds(leads(sign)) for sign in SIGNS}
    named = ", ".join(f"{SIGNS[sign]} {interval(leads(sign), 1)}" for sign in SIGNS)
    warn = [SIGNS[sign] for sign, one in early.items() if one.low > 0]
    return Claim(
        text="KL, gradient norm, entropy and length show a collapse by too high a rate before it comes.",
        source="GRPO from Scratch, at 1e-4",
        command="arms.yaml",
        n=len(seeds),
        measured=f"at 30 times the rate {len(ends)} of {len(seeds)} seeds collapse; steps from leaving the range of "
        f"healthy runs to the collapse: {named}",
        verdict=f"holds for {' and '.join(warn)} only" if 0 < len(warn) < len(SIGNS) else HOLDS if warn else OPEN,
    )


def informative_groups() -> Claim:
    """The share of groups whose rewards differ, early and late."""
    early, late = (
        {seed: mean(values[window]) for seed, values in steps("grpo", "groups/informative_fraction").items()}
        for window in (slice(0, 5), slice(-5, None))
    )
    return Claim(
        text="Most groups have equal rewards and teach nothing (0.9 of them, or 7 of 16 late in training).",
        source="Dr. GRPO with GR, GRPO from Scratch",
        command="arms.yaml, read_runs.py groups",
        n=len(early),
        measured=f"informative groups in the first five steps {interval(list(early.values()), 2)}, in the last five "
        f"{interval(list(late.values()), 2)}; by difficulty below",
        verdict="does not hold on this bed" if min(*early.values(), *late.values()) > 0.5 else OPEN,
    )


def memory() -> Claim:
    """Memory of cross-entropy against log_softmax and chunks."""
    ways = ("log_softmax", "cross_entropy", "token_logprobs")
    peaks, kept, seconds = (
        [mean(where("memory", column, way=way)) for way in ways] for column in ("peak_mib", "kept_mib", "cpu_seconds")
    )
    return Claim(
        text="Cross-entropy in place of log_softmax saves memory.",
        source="Dr. GRPO with GR",
        command="memory.py",
        n=len(where("memory", "peak_mib", way=ways[0])),
        measured=f"peak of forward and backward for 2,048 tokens and a vocabulary of 50,257: log_softmax "
        f"{peaks[0]:,.0f} MiB, cross_entropy {peaks[1]:,.0f}, flatpeak's chunks {peaks[2]:,.0f}, in "
        f"{seconds[2] / seconds[0]:.2f} times the CPU time; kept between the passes: {kept[0]:,.0f}, {kept[1]:,.0f} "
        f"and {kept[2]:,.0f}",
        verdict=HOLDS if peaks[1] < 0.9 * peaks[0] else "does not hold on the CPU; chunks do save it",
    )


def equal_rewards() -> Claim:
    """Advantages of groups with equal rewards."""
    rows = rows_of("equal_rewards")
    wrong = [row for row in rows if row["formula_1e-08"] > 0.01]
    ours = max(row[f"flatpeak_{eps}"] for row in rows for eps in ("1e-08", "1e-06", "0.0001"))
    at = next(row["formula_1e-08"] for row in rows if row["reward"] == 1.2)
    return Claim(
        text="A group with equal rewards has advantage 0.",
        source="Blog on GRPO, float32 and eps 1e-8",
        command="advantages.py equal",
        n=0,
        measured=f"the formula gives eight rewards of 1.2 an advantage of size {at:.3f}, and {len(wrong)} of "
        f"{len(rows)} rewards from 0.1 to 3 one above 0.01; flatpeak at most {ours:g}",
        verdict="does not hold for the formula as written",
    )


def rounding() -> Claim:
    """Weights in bfloat16 under a small rate."""
    low, masters, high = (
        mean(where("rounding", "share_of_way", rate=rate, masters=kind))
        for rate, kind in ((1e-6, "False"), (1e-6, "True"), (3e-5, "False"))
    )
    first = mean(where("rounding", "changed_by_first", rate=1e-6, masters="False"))
    return Claim(
        text="A rate of 1e-6 barely moves the model.",
        source="GRPO from Scratch, whose weights are bfloat16",
        command="rounding.py",
        n=len(where("rounding", "changed_by_first", rate=1e-6, masters="False")),
        measured=f"simulated, weights of sd 0.02: an update changes {first:.3f} of them, and 20 updates of one sign go "
        f"{low:.3f} of their way ({high:.2f} at 3e-5); with float32 masters {masters:.2f}, which lag by half "
        "a rounding step",
        verdict="holds, but rounding is most of it" if low < 0.5 * masters else OPEN,
    )


def splits() -> Claim:
    """The gradient where micro-batches normalize by themselves."""
    longest, tokens = (
        interval(where("splits", "relative_difference", normalization=name, micro_batch=4), 2)
        for name in ("longest", "token_mean")
    )
    alike = max(where("splits", "from_sequence_mean", normalization="longest", micro_batch=1))
    return Claim(
        text="Micro-batches only save memory; the gradient is the same.",
        source="GRPO from Scratch by longest, LLM course by token mean",
        command="splits.py",
        n=len(where("splits", "relative_difference", normalization="longest", micro_batch=4)),
        measured=f"micro-batches of 4 that normalize by themselves are off by {longest} of the gradient's norm "
        f"(longest) and {tokens} (token mean); of 1, longest is the sequence mean (difference {alike:g})",
        verdict="does not hold where each micro-batch normalizes by itself",
    )


def adapter_dropout() -> Claim:
    """Ratios under the dropout of adapters."""
    gaps = {arm: list(steps(arm, "policy/ratio_max_gap").values()) for arm in ("adapters", "adapters_dropout")}
    first = [values[0] for values in gaps["adapters_dropout"]]
    later = [max(values[1:]) for values in gaps["adapters_dropout"]]
    without = max(map(max, gaps["adapters"]))
    return Claim(
        text="Dropout in adapters makes ratios other than 1 before any update.",
        source="Blog on GRPO, its defaults",
        command="arms.yaml",
        n=len(first),
        measured=f"largest distance from 1 in step 1: {max(first):.0e}, in steps 2 to 5: {interval(later, 3)}; without "
        f"dropout at most {without:.0e}",
        verdict="does not hold in step 1, holds after it" if max(first) < 1e-5 < min(later) else OPEN,
    )


CLAIMS: Sequence[Callable[[], Claim]] = (
    no_effect_of_the_clip,
    loss_reads_zero,
    length_bias,
    weight_of_extremes,
    effect_of_std,
    baseline_needed,
    estimators_of_kl,
    early_signs,
    informative_groups,
    memory,
    equal_rewards,
    rounding,
    splits,
    adapter_dropout,
)
