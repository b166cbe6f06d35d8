"""What is logged of regularized updates: means since the last log."""

from __future__ import annotations

import math
from collections import defaultdict

from flatpeak.gradreg.statistics import Report


class LogBook:
    """Collects reports between two logs, and counts for good."""

    def __init__(self) -> None:
        self.skipped = 0
        """Updates without their penalty, and those dropped because their gradient was not finite."""
        self._values: dict[str, list[float]] = defaultdict(list)
        self._after_first_pass = 0.0
        self._whole = 0.0

    def update(self, report: Report, *, dropped: bool) -> None:
        """One update that had, or should have had, a penalty."""
        skipped = dropped or report.skipped is not None
        self.skipped += skipped
        for name, value in {**report.metrics(), "gradreg/skipped": float(skipped)}.items():
            if math.isfinite(value):
                self._values[name].append(value)
        self._after_first_pass += report.seconds

    def spent(self, seconds: float) -> None:
        """On a training step, its second pass included."""
        self._whole += seconds

    def take(self) -> dict[str, float]:
        """The means by the names of docs/metrics.md; empty where no update was regularized."""
        means = {name: sum(values) / len(values) for name, values in self._values.items()}
        if means and self._whole > 0:
            means["gradreg/time_share"] = self._after_first_pass / self._whole
        self._values.clear()
        self._after_first_pass = self._whole = 0.0
        return means
