"""The display of a sweep: a line per finished run, with the counts and an estimate of the time left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

from flatpeak.experiments.plan import PlannedRun, PrefixStep, SweepPlan

_MINUTE, _HOUR = 60, 3600


class SweepProgress:
    """Lines about a sweep's cells, and the durations from which the time left is estimated."""

    def __init__(self, plan: SweepPlan, *, notice: Callable[[str], None]) -> None:
        self.plan = plan
        self.notice = notice
        self._seconds: dict[str, list[float]] = {}
        """Durations of finished cells, by arm or prefix step."""

    def begin(self, phases: Mapping[str, str]) -> None:
        """Print how much there is to do."""
        runs = len(self.plan.runs)
        done = sum(phases[run.label] == "done" for run in self.plan.runs)
        kept = f", {done} of them done" if done else ""
        processes = "1 process" if self.plan.processes == 1 else f"{self.plan.processes} processes"
        for line in self.plan.choices:
            self.notice(line)
        self.notice(f"sweep {self.plan.config.name}: {runs} runs{kept}, {processes}, in {self.plan.directory}")

    def observe(self, cell: PrefixStep | PlannedRun, seconds: float) -> None:
        """Record the duration of a finished cell, also from earlier starts of the sweep."""
        self._seconds.setdefault(_kind(cell), []).append(seconds)

    def finish(
        self,
        cell: PrefixStep | PlannedRun,
        status: str,
        *,
        reason: str | None,
        seconds: float,
        phases: Mapping[str, str],
    ) -> None:
        """Print the outcome of a cell, the counts of runs, and the time left."""
        if status == "done":
            self.observe(cell, seconds)
        done, failed = (sum(phases[run.label] == kind for run in self.plan.runs) for kind in ("done", "failed"))
        left = len(self.plan.runs) - done - failed
        counts = f"{done} done" + (f", {failed} failed" if failed else "") + f", {left} left"
        expected = self.seconds_left(phases)
        time_left = "" if expected is None or not left else f", about {duration(expected)}"
        if status == "done":
            outcome = f"done in {seconds:.1f} s"
        else:
            outcome = f"{status}: {reason}" if reason else status
        self.notice(f"[{counts}{time_left}] {cell.label} {outcome}")

    def seconds_left(self, phases: Mapping[str, str]) -> float | None:
        """Seconds for all unfinished cells, each estimated by the mean duration of its arm or prefix step.

        An arm without finished runs counts as the mean of the others; None before the first run is finished.
        """
        means = {kind: fmean(values) for kind, values in self._seconds.items()}
        arms = [means[arm] for arm in self.plan.config.arms if arm in means]
        if not arms:
            return None
        mean = fmean(arms)
        waiting = [cell for cell in self.plan.by_seed if phases[cell.label] in ("waiting", "busy")]
        return sum(means.get(_kind(cell), mean) for cell in waiting) / self.plan.processes


def _kind(cell: PrefixStep | PlannedRun) -> str:
    return cell.arm if isinstance(cell, PlannedRun) else f"prefix/{cell.name}"


def duration(seconds: float) -> str:
    """Seconds in words, such as `40 s`, `12 min` or `3.1 h`."""
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / _MINUTE:.0f} min" if seconds < 2 * _HOUR else f"{seconds / _HOUR:.1f} h"
