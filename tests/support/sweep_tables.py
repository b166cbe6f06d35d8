"""Small tables of sweeps, as a sweep writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatpeak.experiments.table import SweepTable, write_table

SETTINGS = ("kl.coefficient",)
FACTS = ("status", "reason", "steps", "end")
METRICS = (
    "reward/gold.best",
    "reward/gold.final",
    "reward/exploit.best",
    "reward/exploit.final",
    "reward/exploit.first",
)
COLUMNS = ("arm", *SETTINGS, "seed", *FACTS, *METRICS, "seconds")
HEADER = {"sweep": "sharp, 9 runs", "flatpeak": "0.1.0", "commit": "abc (clean)"}


def row(arm: str, seed: int, gold: float | None, exploit: float | None, first: int | None, **changes: Any) -> Any:
    """A finished run of 60 steps."""
    values = {
        "arm": arm,
        "kl.coefficient": 0.3 if arm == "kl" else 0.0,
        "seed": seed,
        "status": "done",
        "steps": 60,
        "end": "steps",
        "reward/gold.best": gold,
        "reward/gold.final": gold,
        "reward/exploit.best": exploit,
        "reward/exploit.final": exploit,
        "reward/exploit.first": first,
        "seconds": 1.5,
    }
    return {**dict.fromkeys(COLUMNS), **values, **changes}


def failed(arm: str, seed: int, reason: str) -> Any:
    """A run without results."""
    empty = dict.fromkeys((*METRICS, "steps", "end", "seconds"))
    return row(arm, seed, None, None, None, **empty, status="failed", reason=reason)


ROWS = (
    row("none", 1, 0.0, 0.9, 10),
    row("none", 2, 0.2, 0.8, 20),
    row("none", 3, 0.1, 1.0, 30),
    row("none", 4, 0.1, 0.9, 40),
    row("kl", 1, 0.5, 0.1, None),
    row("kl", 2, 0.6, 0.0, None),
    failed("kl", 3, "RunError: the loss is nan"),
    row("kl", 4, 0.9, 0.7, 50),
    row("gr", 1, 0.0, 0.9, 10),
    row("gr", 2, 0.3, 0.8, 15),
    row("gr", 3, None, None, None),
    row("gr", 4, 0.2, 0.2, None),
)
"""Three arms on four seeds: one run failed, and one has logged neither reward."""


def table(rows: Sequence[Any] = ROWS, columns: Sequence[str] = COLUMNS) -> SweepTable:
    """A table of the rows."""
    return SweepTable(
        header=HEADER, columns=tuple(columns), rows=tuple({name: one[name] for name in columns} for one in rows)
    )


def write_sweep(directory: Path) -> Path:
    """Write table.csv, and curves.csv of two steps, as a sweep does; the directory."""
    directory.mkdir(exist_ok=True)
    write_table(table(), directory / "table.csv")
    columns = ("arm", *SETTINGS, "seed", "step", "reward/gold", "reward/mean", "rollout/kl_sequence")
    rows = tuple(
        {
            **{name: one[name] for name in ("arm", *SETTINGS, "seed")},
            "step": step,
            "reward/gold": one["reward/gold.final"],
            "reward/mean": 1.0 + step / 100,
            "rollout/kl_sequence": step / 10,
        }
        for one in ROWS
        if one["status"] == "done"
        for step in (40, 90)
    )
    write_table(SweepTable(header=HEADER, columns=columns, rows=rows), directory / "curves.csv")
    return directory
