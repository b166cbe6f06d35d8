"""The canvas for all plots: a matplotlib figure that becomes the text of an SVG; equal input gives equal text."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def svg_canvas(
    name: str, inches: tuple[float, float], *, font_size: float = 9, transparent: bool = False
) -> Iterator[tuple[Any, io.StringIO]]:
    """An empty figure, and the text of its SVG once the block has ended."""
    import matplotlib
    from matplotlib.figure import Figure

    text = io.StringIO()
    # The salt names clip paths and markers: equal for equal figures, different for two figures in one document.
    # Names of arms and metrics may contain dollar signs, but are not formulas.
    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": font_size, "text.parse_math": False}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=inches, layout="constrained")
        yield figure, text
        figure.savefig(text, format="svg", transparent=transparent, metadata={"Date": None, "Creator": None})


def notebook_figure(inches: tuple[float, float]) -> Figure:
    """An empty figure that a notebook displays as a picture, even if nothing has imported pyplot."""
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png")
            return picture.getvalue()

    return NotebookFigure(figsize=inches, layout="constrained")


def tidy(axes: Any, *, without: Sequence[str] = ("top", "right")) -> None:
    """Give axes a faint grid and plain numbers, and remove the lines on these sides."""
    axes.grid(alpha=0.25)
    axes.spines[list(without)].set_visible(False)
    axes.ticklabel_format(useOffset=False)
