"""Curves as SVG text, to be set into a page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# More points than this are drawn faint, with their running mean over them.
_MANY = 40
_REACH_FRACTION = 0.05
_SIZE_INCHES = (5.2, 2.9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line of a chart."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    """As long as `steps`, finite."""
    intervals: Sequence[tuple[float, float] | None] = ()
    """(low, high) per value, drawn as bars; empty for none."""


def curve_svg(title: str, curves: Sequence[Curve]) -> str:
    """An `<svg>` element with the curves over the steps; the same input gives the same text."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # The salt names the clip paths: charts of one page must not share them.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for index, curve in enumerate(curves):
            _draw(axes, curve, color=f"C{index}")
        axes.set_title(title, loc="left")
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(curves) > 1:
            axes.legend(frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    # Without the XML declaration and document type, which have no place inside HTML.
    return text.getvalue()[text.getvalue().index("<svg") :]


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each value and its `reach` neighbours on either side (of those there are, at the ends)."""
    parts = [values[max(0, index - reach) : index + reach + 1] for index in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _draw(axes: Any, curve: Curve, *, color: str) -> None:
    many = len(curve.steps) > _MANY
    if curve.intervals:
        bars = [interval or (value, value) for interval, value in zip(curve.intervals, curve.values, strict=True)]
        below = [value - low for (low, _), value in zip(bars, curve.values, strict=True)]
        above = [high - value for (_, high), value in zip(bars, curve.values, strict=True)]
        axes.errorbar(curve.steps, curve.values, yerr=[below, above], color=color, marker="o", markersize=4, capsize=3)
        return
    marker = "o" if len(curve.steps) == 1 else None
    label = None if many else curve.label
    axes.plot(curve.steps, curve.values, color=color, alpha=0.3 if many else 1.0, marker=marker, label=label)
    if many:
        means = running_mean(curve.values, round(len(curve.values) * _REACH_FRACTION))
        axes.plot(curve.steps, means, color=color, linewidth=2, label=curve.label)
