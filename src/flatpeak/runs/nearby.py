"""Suggestions of a run's path where a name was given that is neither a run nor a model."""

from __future__ import annotations

import difflib
from pathlib import Path

from flatpeak.runs.directory import RunPaths

PARENT = Path("runs")
"""Where runs lie unless `run.directory` says otherwise."""


def suggested_run(name: str | Path) -> Path | None:
    """`runs/NAME` where that is a run, else the run beside the path whose name is most similar; None without either."""
    path = Path(name).expanduser()
    if not path.is_absolute() and path.parts and RunPaths(PARENT / path).is_run():
        return PARENT / path
    if len(path.parts) < 2:
        return None
    try:
        beside = [other.name for other in path.parent.iterdir() if RunPaths(other).is_run()]
    except OSError:
        return None
    close = difflib.get_close_matches(path.name, beside, n=1)
    return path.parent / close[0] if close else None


def run_hint(name: str | Path, *, after: str = ": ") -> str:
    """`: did you mean runs/x?`, or nothing."""
    found = suggested_run(name)
    return "" if found is None else f"{after}did you mean {found}?"
