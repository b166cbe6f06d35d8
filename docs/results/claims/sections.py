"""The tables of single claims, by the name of their place on the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from claims import max_loss
from collapse import SIGNS, collapses, leads, onsets
from pages import markdown
from tables import difference, finals, interval, mean, rows_of, signed, steps, where

ARMS = {
    "grpo": "GRPO: sequence mean, std",
    "constant": "constant",
    "token_mean": "token mean",
    "no_std": "no std",
    "no_baseline": "no baseline",
}


def losses() -> str:
    """The logged loss and the gradient by arm."""
    rows = []
    for arm, name in ARMS.items():
        gradients = [mean(values) for values in steps(arm, "policy/grad_norm").values()]
        sizes = [mean([abs(value) for value in values]) for values in steps(arm, "policy/loss").values()]
        rows.append([name, f"{max_loss(arm):.1e}", f"{mean(sizes):.1e}", interval(gradients, 2)])
    return markdown(["Arm", "Largest loss, without sign", "Mean", "Mean gradient norm"], rows)


def training() -> str:
    """Accuracy and lengths at the end by sweep and arm, as differences from GRPO."""
    columns = {
        "Accuracy of samples": "reward/mean.final",
        "greedy, held out": "eval/sorting/accuracy.last",
        "Characters of wrong answers": "reward/correctness/wrong_length.final",
        "of right ones": "reward/correctness/right_length.final",
        "Entropy, nats": "policy/entropy.final",
    }
    rows = []
    for name, label in {"training": "four updates a step", "arms": "one update a step"}.items():
        rows.append(
            [
                f"**{label}**, GRPO",
                *(interval(list(finals("grpo", one, of=name).values())) for one in columns.values()),
            ]
        )
        for arm in (arm for arm in list(ARMS)[1:] if finals(arm, "reward/mean.final", of=name)):
            rows.append([ARMS[arm], *(signed(difference(arm, one, of=name)) for one in columns.values())])
    return markdown(["Arm", *columns], rows)


def groups() -> str:
    """The size of advantages by pass rate, exact."""
    rows = rows_of("groups")
    middle = next(row for row in rows if row["pass_rate"] == 0.5)
    header = ["Pass rate", *(f"{row['pass_rate']:g}" for row in rows)]
    lines = [["informative groups", *(f"{row['informative']:.2f}" for row in rows)]]
    for scale, name in (("none", "mean alone"), ("std", "mean and std")):
        lines.append([f"{name}, against 0.5", *(f"{row[scale] / middle[scale]:.2f}" for row in rows)])
    return markdown(header, lines)


def kl() -> str:
    """Bias, spread and gradient of the estimators by distance."""
    rows = []
    for noise in sorted({row["noise"] for row in rows_of("kl_estimators")}):
        own = {name: {"noise": noise, "estimator": name} for name in ("k1", "k2", "k3")}
        rows.append(
            [
                f"{mean(where('kl_estimators', 'kl', **own['k1'])):.2g}",
                f"{mean(where('kl_estimators', 'negative', **own['k1'])):.0%}",
                interval(where("kl_estimators", "relative_bias", **own["k2"]), 2),
                *(interval(where("kl_estimators", "relative_sd", **one), 2) for one in own.values()),
                interval(where("kl_estimators", "gradient_cosine", **own["k3"]), 2),
            ]
        )
    spreads = ["sd of k1 / KL", "of k2", "of k3"]
    return markdown(["KL, nats", "k1 below 0", "bias of k2 / KL", *spreads, "cosine of k3's gradient"], rows)


def collapse() -> str:
    """The first step out of the healthy range by seed and sign."""
    ends = collapses()
    rows = []
    for seed in sorted(steps("high_rate", "reward/mean")):
        first = onsets(seed)
        rows.append([str(seed), *(str(first.get(sign, "")) for sign in SIGNS), str(ends.get(seed, ""))])
    rows.append(["steps before", *(interval(leads(sign), 1) for sign in SIGNS), ""])
    return markdown(["Seed", *SIGNS.values(), "collapsed"], rows)


def informative() -> str:
    """Informative groups by digits, early and late, over all seeds; of two digits there are too few."""
    rows = []
    for digits in (3.0, 4.0, 5.0):
        cells = []
        for period in ("early", "late"):
            own = [row for row in rows_of("informative") if row["digits"] == digits and row["period"] == period]
            count = sum(row["groups"] for row in own)
            rewards = sum(row["reward"] * row["groups"] for row in own) / count
            cells += [f"{rewards:.2f}", f"{sum(row['informative'] for row in own) / count:.2f} of {count:.0f}"]
        rows.append([f"{digits:.0f}", *cells])
    return markdown(
        ["Digits", "Steps 1 to 10: accuracy", "informative", "Steps 31 to 40: accuracy", "informative"], rows
    )


def splits() -> str:
    """Distance of the split gradient by normalization and micro-batch."""
    names = {"sequence_mean": "sequence mean", "constant": "constant", "token_mean": "token mean", "longest": "longest"}
    rows = [
        [
            label,
            *(
                interval(where("splits", "relative_difference", normalization=name, micro_batch=size), 2)
                for size in (1, 4, 16)
            ),
        ]
        for name, label in names.items()
    ]
    return markdown(["Normalization", "micro-batches of 1", "of 4", "of 16"], rows)


SECTIONS: Mapping[str, Callable[[], str]] = {
    "losses": losses,
    "training": training,
    "groups": groups,
    "kl": kl,
    "collapse": collapse,
    "informative": informative,
    "splits": splits,
}
