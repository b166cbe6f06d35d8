"""Figures that a notebook displays."""

from __future__ import annotations

import subprocess
import sys


def test_a_notebook_displays_a_figure_as_a_picture_without_pyplot() -> None:
    code = (
        "import sys; from flatpeak.report.canvas import notebook_figure; figure = notebook_figure((2.0, 1.0)); "
        "figure.subplots().plot([1, 2]); picture = figure._repr_png_(); assert 'matplotlib.pyplot' not in sys.modules; "
        "print(picture[:4], int.from_bytes(picture[16:20]), int.from_bytes(picture[20:24]))"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.split() == [r"b'\x89PNG'", "200", "100"]
