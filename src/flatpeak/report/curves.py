"""Curves over steps, drawn as SVG for the report page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from flatpeak.report.canvas import svg_canvas, tidy

_MANY_POINTS: Final = 40
"""Curves with more points than this are drawn faint, under their moving average."""
_REACH_FRACTION: Final = 0.05
"""Neighbours on either side in the moving average, as a fraction of all points."""
_MAX_LINE_WIDTH: Final = 2.2
_SIZE_INCHES: Final = (5.4, 3.2)
_LEGEND_ROW_INCHES: Final = 0.26
"""Height that a row of the legend adds, so that the axes of all charts have equal heights."""
_LEGEND_COLUMNS: Final = 3
_BLACK: Final = "#000000"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line of a chart."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    """Finite values, one per step."""
    intervals: Sequence[tuple[float, float] | None] = ()
    """The (low, high) of each value, drawn as bars; empty for none."""


def curve_svg(
    title: str,
    curves: Sequence[Curve],
    *,
    right: Sequence[Curve] = (),
    unit: str = "",
    right_unit: str = "",
    legend: bool = False,
) -> str:
    """Draw the curves over the steps as an `<svg>` element; the same input gives the same text.

    The curves of `right` are dashed and have their own y axis on the right. `unit` and `right_unit` are the units of
    the two axes. Several curves always have a legend, a single curve only with `legend`.
    """
    from matplotlib.ticker import MaxNLocator

    with svg_canvas(title, _SIZE_INCHES, font_size=10, transparent=True) as (figure, text):
        axes = figure.add_subplot()
        other = axes.twinx() if right else axes
        for index, curve in enumerate([*curves, *right]):
            on_the_right = index >= len(curves)
            style: dict[str, Any] = {"color": f"C{index}", "linestyle": "--" if on_the_right else "-"}
            # If curves coincide, the wider lower curve remains visible.
            style["linewidth"] = max(1.2, _MAX_LINE_WIDTH - 0.5 * index)
            _draw(other if on_the_right else axes, curve, style)
        # At the left edge of the figure: the left end of the axes depends on the width of their numbers.
        figure.suptitle(title, x=0.01, horizontalalignment="left")
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        tidy(axes, without=["top"] if right else ["top", "right"])
        if right:
            other.set_ylabel(right_unit)
            other.spines["top"].set_visible(False)
        _set_limits(axes, curves, unit)
        if legend or len(curves) + len(right) > 1:
            _add_legend(figure, (axes, other))
    # Without the XML declaration and document type, which are invalid inside HTML; black becomes the page's text
    # colour, which is light on a dark page.
    return text.getvalue()[text.getvalue().index("<svg") :].replace(_BLACK, "currentColor")


def _add_legend(figure: Any, sides: Sequence[Any]) -> None:
    """Name the curves of both axes below the axes, and enlarge the figure by the height of the names."""
    handles = [handle for side in dict.fromkeys(sides) for handle in side.get_legend_handles_labels()[0]]
    columns = min(_LEGEND_COLUMNS, len(handles))
    rows = math.ceil(len(handles) / columns)
    figure.set_size_inches(_SIZE_INCHES[0], _SIZE_INCHES[1] + rows * _LEGEND_ROW_INCHES)
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=columns)


def moving_average(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each value and its `reach` neighbours on either side, fewer at the ends."""
    windows = [values[max(0, index - reach) : index + reach + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _set_limits(axes: Any, curves: Sequence[Curve], unit: str) -> None:
    """Draw shares from 0 to a tenth at least, so that small ones look small, and a constant value between 0 and 1."""
    values = [value for curve in curves for value in curve.values]
    intervals = [interval for curve in curves for interval in curve.intervals if interval is not None]
    if len(set(values)) == 1 and 0 <= values[0] <= 1 and not intervals:
        axes.set_ylim(-0.05, 1.05)
    elif unit.startswith("share") and min(values) >= 0:
        highest = max([*values, *(high for _, high in intervals)])
        axes.set_ylim(-0.02 * max(0.1, highest), 1.05 * max(0.1, highest))


def _draw(axes: Any, curve: Curve, style: dict[str, Any]) -> None:
    many = len(curve.steps) > _MANY_POINTS
    if curve.intervals:
        bars = [interval or (value, value) for interval, value in zip(curve.intervals, curve.values, strict=True)]
        # Rounding may put an end of an interval slightly on the wrong side of its value.
        below = [max(0.0, value - low) for (low, _), value in zip(bars, curve.values, strict=True)]
        above = [max(0.0, high - value) for (_, high), value in zip(bars, curve.values, strict=True)]
        settings = {"marker": "o", "markersize": 4, "capsize": 3, "elinewidth": 1.2}
        axes.errorbar(curve.steps, curve.values, yerr=[below, above], label=curve.label, **style, **settings)
        return
    marker = "o" if len(curve.steps) == 1 else None
    label = None if many else curve.label
    alpha = 0.3 if many else 1.0
    width = 1.2 if many else style["linewidth"]
    axes.plot(curve.steps, curve.values, **(style | {"linewidth": width}), alpha=alpha, marker=marker, label=label)
    if many:
        means = moving_average(curve.values, round(len(curve.values) * _REACH_FRACTION))
        axes.plot(curve.steps, means, **style, label=curve.label)
