"""Plots of arms over seeds as SVG texts: curves with bands, paired dots, gold against sqrt(KL), survival, strips.

Equal input gives equal bytes. An arm has the same colour, marker and dash in every figure (colours: Paul Tol's muted
scheme, SRON/EPS/TN/09-002, distinct for any colour vision; markers and dashes for prints in grey).
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from flatpeak.experiments.statistics import Difference, MeanEstimate, mean_over_seeds, scipy_stats
from flatpeak.report.canvas import svg_canvas, tidy

Series = Mapping[int, float]
"""The values of one run by step."""

_COLORS: Final = ("#332288", "#CC6677", "#117733", "#882255", "#44AA99", "#999933", "#AA4499", "#88CCEE", "#DDCC77")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_DASHES: Final[tuple[Any, ...]] = ("-", (0, (6, 2)), (0, (4, 1, 1, 1)), (0, (1.5, 1)), (0, (8, 2, 1, 2, 1, 2)))
_BASELINE: Final = "#000000"
_MARGIN: Final = 0.05
"""The share of the scale that is left free above and below."""
_FAINT: Final = 0.18
_MOST_TOGETHER: Final = 5
"""The most arms in one pair of axes; if there are more, each has a panel beside the baseline."""
_COLUMNS: Final = 3
_PANEL_INCHES: Final = (3.0, 2.5)
_LETTER_INCHES: Final = 0.07
"""The width of a letter in legends and titles."""
_SHORT: Final = 20
"""Letters of arms' names up to which a legend has room for a second column."""
_SINGLE_INCHES: Final = (5.6, 3.6)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmStyle:
    """The appearance of an arm in all figures."""

    color: str
    marker: str
    dash: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedValues:
    """The values of an arm and the baseline on shared seeds, and their mean difference."""

    baseline: Sequence[float]
    arm: Sequence[float]
    difference: Difference


def arm_styles(arms: Sequence[str], *, baseline: str | None) -> dict[str, ArmStyle]:
    """Give each arm its style by its position; the baseline is black with a full line."""
    others = [arm for arm in arms if arm != baseline]
    styles = {} if baseline is None else {baseline: ArmStyle(color=_BASELINE, marker="o", dash="-")}
    styles |= {
        arm: ArmStyle(
            color=_COLORS[index % len(_COLORS)],
            marker=_MARKERS[(index + 1 + index // len(_COLORS)) % len(_MARKERS)],
            dash=_DASHES[1 + index % (len(_DASHES) - 1)],
        )
        for index, arm in enumerate(others)
    }
    return {arm: styles[arm] for arm in arms}


def curves_with_bands(
    runs: Mapping[str, Sequence[Series]],
    *,
    styles: Mapping[str, ArmStyle],
    baseline: str | None,
    label: str,
    every_run: bool = False,
) -> str:
    """Draw each arm's mean over seeds at every step with its 95% t interval, or with a thin line per run."""
    with _figure(f"curves {label}", runs, baseline, x="training step", y=label) as (panels, text):
        for axes, arms in panels:
            for arm in arms:
                style = styles[arm]
                steps, means = _means_by_step(runs[arm])
                _draw_mean(axes, steps, means, style, label=_with_n(arm, means), interval=not every_run)
                for run in runs[arm] if every_run else ():
                    axes.plot(list(run), list(run.values()), color=style.color, linewidth=0.5, alpha=0.5)
        _limit(panels, (value for own in runs.values() for run in own for value in run.values()))
    return text.getvalue()


def gold_against_kl(
    runs: Mapping[str, Sequence[Mapping[str, Series]]],
    *,
    styles: Mapping[str, ArmStyle],
    baseline: str | None,
    gold: str,
    proxy: str,
    kl: str,
) -> str:
    """Draw gold and proxy over the square root of the KL (Gao et al. 2022), the proxy dashed and without a band.

    A run has its series by metric. A point is a step: the root of the mean KL over seeds, and the mean reward there.
    """
    x_label, y_label = f"√KL to the reference ({kl}), √nat", f"{gold} (full), {proxy} (dashed)"
    with _figure(f"{gold} against {kl}", runs, baseline, x=x_label, y=y_label) as (panels, text):
        for axes, arms in panels:
            for arm in arms:
                kl_steps, kl_means = _means_by_step([run[kl] for run in runs[arm]])
                roots = {
                    step: math.sqrt(max(0.0, mean.estimate)) for step, mean in zip(kl_steps, kl_means, strict=True)
                }
                style = styles[arm]
                for metric in (proxy, gold):
                    steps, means = _means_by_step([run[metric] for run in runs[arm]])
                    points = [(roots[step], mean) for step, mean in zip(steps, means, strict=True) if step in roots]
                    x, y = [root for root, _ in points], [mean for _, mean in points]
                    if metric == gold:
                        solid = ArmStyle(color=style.color, marker=style.marker, dash="-")
                        _draw_mean(axes, x, y, solid, label=_with_n(arm, y))
                    else:
                        axes.plot(x, [mean.estimate for mean in y], color=style.color, linestyle="--", linewidth=1.1)
        _limit(
            panels, (value for own in runs.values() for run in own for m in (gold, proxy) for value in run[m].values())
        )
    return text.getvalue()


def survival(
    runs: Mapping[str, Sequence[tuple[int, bool]]],
    *,
    styles: Mapping[str, ArmStyle],
    baseline: str | None,
    label: str,
) -> str:
    """Draw the share of runs that have not passed a threshold yet, over steps (Kaplan and Meier 1958).

    A run is (step, passed): the step at which it passed, or its last step, which the curve marks with a tick.
    """
    with _figure(f"survival {label}", runs, baseline, x="training step", y=label) as (panels, text):
        for axes, arms in panels:
            for index, arm in enumerate(arms):
                style = styles[arm]
                last = [step for step, passed in runs[arm] if not passed]
                passed = [step for step, passed in runs[arm] if passed]
                stats = scipy_stats()
                curve = stats.ecdf(stats.CensoredData(uncensored=passed, right=last)).sf
                # If curves coincide, the wider lower curve remains visible.
                width = max(1.2, 3.2 - 0.6 * index)
                axes.step(
                    [0, *curve.quantiles], [1, *curve.probabilities], where="post", color=style.color,
                    linestyle=style.dash, linewidth=width, label=f"{arm}, n = {len(runs[arm])}",
                )  # fmt: skip
                if last:
                    axes.plot(last, curve.evaluate(last), linestyle="", marker="|", color=style.color)
            axes.set_ylim(-0.04, 1.04)
            axes.set_xlim(left=0)
    return text.getvalue()


def strip(
    values: Mapping[str, Sequence[float]],
    *,
    styles: Mapping[str, ArmStyle],
    label: str,
) -> str:
    """Draw one dot per run in a row per arm, with the mean over seeds and its 95% t interval above."""
    inches = 4.5 + _LETTER_INCHES * _longest(values), 1.0 + 0.42 * len(values)
    with svg_canvas(f"strip {label}", inches) as (figure, text):
        axes = figure.add_subplot()
        tidy(axes)
        for row, (arm, own) in enumerate(values.items()):
            style, mean = styles[arm], mean_over_seeds(list(own))
            axes.plot(
                own, [row + offset for offset in _spread(own)], linestyle="", marker=style.marker, markersize=4,
                color=style.color, alpha=0.55, markeredgewidth=0,
            )  # fmt: skip
            if own:
                _draw_interval(axes, mean.estimate, mean, row - 0.3, style, horizontal=True)
        axes.set_yticks(range(len(values)), [f"{arm}, n = {len(own)}" for arm, own in values.items()])
        axes.set_ylim(len(values) - 0.5, -0.6)
        axes.set_xlabel(label)
    return text.getvalue()


def paired_dots(
    pairs: Mapping[str, PairedValues],
    *,
    styles: Mapping[str, ArmStyle],
    baseline: str,
    label: str,
) -> str:
    """Draw each seed as a line from the baseline to the arm, and beside it the mean difference with its 95% interval.

    The difference has the axis on the right, whose 0 is level with the baseline's mean.
    """
    lowest = min(value for pair in pairs.values() for value in (*pair.baseline, *pair.arm))
    highest = max(value for pair in pairs.values() for value in (*pair.baseline, *pair.arm))
    ends = [lowest, highest]
    for pair in pairs.values():
        level = math.fsum(pair.baseline) / len(pair.baseline)
        ends += [level + end for end in (pair.difference.low, pair.difference.high) if not math.isnan(end)]
    margin = 0.06 * (max(ends) - min(ends)) or 0.5
    with _grid(f"paired {label}", len(pairs), longest=_longest(pairs), x=f"baseline: {baseline}", y=label) as grid:
        all_axes, text = grid
        for axes, (arm, pair) in zip(all_axes, pairs.items(), strict=False):
            for before, after in zip(pair.baseline, pair.arm, strict=True):
                # Equal pairs darken each other.
                axes.plot([0, 1], [before, after], color=_BASELINE, alpha=0.3, linewidth=0.8)
            for place, own, style in ((0, pair.baseline, styles[baseline]), (1, pair.arm, styles[arm])):
                axes.plot([place] * len(own), own, linestyle="", marker=style.marker, markersize=4, color=style.color)
            level = math.fsum(pair.baseline) / len(pair.baseline)
            axes.plot([0, 2.3], [level, level], color=_BASELINE, linewidth=0.6, linestyle=":")
            _draw_interval(axes, level + pair.difference.estimate, pair.difference, 2, styles[arm], offset=level)
            axes.set_title(f"{arm}, n = {pair.difference.n}", fontsize=8)
            axes.set_xticks([0, 1, 2], ["baseline", "arm", "difference"])
            axes.set_xlim(-0.3, 2.4)
            axes.set_ylim(min(ends) - margin, max(ends) + margin)
            right = axes.twinx()
            right.set_ylim(min(ends) - margin - level, max(ends) + margin - level)
            right.spines["top"].set_visible(False)
    return text.getvalue()


def _means_by_step(runs: Sequence[Series]) -> tuple[list[int], list[MeanEstimate]]:
    steps = sorted({step for run in runs for step in run})
    return steps, [mean_over_seeds([run[step] for run in runs if step in run]) for step in steps]


def _limit(panels: Sequence[tuple[Any, list[str]]], values: Iterable[float]) -> None:
    """Fit the common vertical scale to the single runs: the interval of two seeds would dwarf everything else."""
    known = [value for value in values if math.isfinite(value)]
    if known:
        low, high = min(known), max(known)
        margin = _MARGIN * (high - low) or 0.5
        panels[0][0].set_ylim(low - margin, high + margin)


def _with_n(arm: str, means: Sequence[MeanEstimate]) -> str:
    """The arm with its number of seeds, which may decrease if runs end early."""
    counts = sorted({mean.n for mean in means})
    return f"{arm}, n = {'-'.join(map(str, dict.fromkeys([*counts[:1], *counts[-1:]])))}"


def _draw_mean(
    axes: Any,
    x: Sequence[float],
    means: Sequence[MeanEstimate],
    style: ArmStyle,
    *,
    label: str,
    interval: bool = True,
) -> None:
    axes.plot(
        x, [mean.estimate for mean in means], color=style.color, linestyle=style.dash, linewidth=1.6,
        marker=style.marker, markersize=4, markevery=max(1, len(x) // 6), label=label,
    )  # fmt: skip
    if interval:
        low, high = [mean.low for mean in means], [mean.high for mean in means]
        axes.fill_between(x, low, high, color=style.color, alpha=_FAINT, linewidth=0)


def _draw_interval(
    axes: Any,
    estimate: float,
    interval: MeanEstimate | Difference,
    place: float,
    style: ArmStyle,
    *,
    horizontal: bool = False,
    offset: float = 0.0,
) -> None:
    ends = (
        None if math.isnan(interval.low) else [[estimate - interval.low - offset], [interval.high + offset - estimate]]
    )
    at, errors = ([estimate], [place]), {"xerr": ends} if horizontal else {"yerr": ends}
    x, y = at if horizontal else (at[1], at[0])
    axes.errorbar(
        x, y, **errors, linestyle="", marker=style.marker, markersize=6, color=style.color,
        markeredgecolor="white", markeredgewidth=0.6, elinewidth=1.4, capsize=3,
    )  # fmt: skip


def _spread(values: Sequence[float]) -> list[float]:
    """Offsets around 0.1 that separate equal and near values, at most 0.3 away; equal values give equal offsets."""
    reach = (max(values) - min(values)) / 40 if values else 0.0
    before = [sum(abs(value - other) <= reach for other in values[:index]) for index, value in enumerate(values)]
    step = min(0.08, 0.6 / (max(before, default=0) + 1))
    return [0.1 + step * ((count + 1) // 2) * (-1) ** count for count in before]


def _longest(arms: Iterable[str]) -> int:
    return max((len(arm) for arm in arms), default=0)


@contextmanager
def _figure(
    name: str, runs: Mapping[str, Any], baseline: str | None, *, x: str, y: str
) -> Iterator[tuple[list[tuple[Any, list[str]]], io.StringIO]]:
    """Axes with their arms: all arms in one pair of axes, or if there are many, one pair per arm with the baseline."""
    arms = list(runs)
    others = [arm for arm in arms if arm != baseline]
    first = [baseline] if baseline in runs and baseline is not None else []
    groups = [arms] if len(arms) <= _MOST_TOGETHER else [[*first, arm] for arm in others]
    with _grid(name, len(groups), longest=_longest(arms), x=x, y=y) as (all_axes, text):
        yield list(zip(all_axes, groups, strict=False)), text
        for axes in all_axes[: len(groups)]:
            above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
            together = len(groups) == 1 and _longest(arms) <= _SHORT
            axes.legend(frameon=False, fontsize=8, ncols=2 if together else 1, **above)


@contextmanager
def _grid(name: str, panels: int, *, longest: int, x: str, y: str) -> Iterator[tuple[list[Any], io.StringIO]]:
    """Rows of panels on common scales with one label per axis; unused panels stay empty."""
    columns = min(_COLUMNS, panels)
    rows = -(-panels // columns)
    panel_width = max(_PANEL_INCHES[0], _LETTER_INCHES * (longest + 20))
    width, height = _SINGLE_INCHES if panels == 1 else (columns * panel_width, rows * _PANEL_INCHES[1])
    with svg_canvas(name, (width, height)) as (figure, text):
        grid = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
        for index, axes in enumerate(grid):
            axes.set_visible(index < panels)
            # The lowest panel of each column shows the numbers of the common axis.
            axes.tick_params(labelbottom=index + columns >= panels)
            tidy(axes)
        figure.supxlabel(x, fontsize=9)
        figure.supylabel(y, fontsize=9)
        yield grid, text
