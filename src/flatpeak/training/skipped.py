"""Updates that were skipped because their gradient was not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flatpeak.errors import RunError
from flatpeak.rewards.calls import passes_power_of_ten

FIX = (
    "lower optimizer.learning_rate (sft.optimizer.learning_rate in SFT) or look for a loss or reward that overflows, "
    "and start anew or fork the run from an earlier checkpoint: flatpeak fork RUN STEP --name NEW key=value"
)


@dataclass(kw_only=True, slots=True)
class SkippedUpdates:
    """Counts them over a stage of a run."""

    updates: int = 0
    skipped: int = 0
    in_a_row: int = 0
    """Up to the last update."""
    told: int = 0
    """Number of skipped updates at the last notice."""
    here: int = 0
    """Updates since the run was started or resumed last."""

    def see(self, skipped: Iterable[bool]) -> None:
        """Count the updates of a step, in their order."""
        for one in skipped:
            self.updates, self.here = self.updates + 1, self.here + 1
            self.skipped += one
            self.in_a_row = self.in_a_row + 1 if one else 0

    def check(self, stage: str, step: int, *, limit: int, at_end: bool, notice: Callable[[str], None]) -> None:
        """Give a notice of the first skipped update, the 10th, the 100th, ...

        Raises RunError where `limit` in a row were skipped, or, at the end of the stage, all since the run was started
        or resumed.
        """
        if passes_power_of_ten(self.told, self.skipped):
            self.told = self.skipped
            notice(
                f"{stage} step {step}: {self.skipped} of {self.updates} updates so far skipped, because the gradient "
                "was NaN or infinite; the weights are left as they were"
            )
        if self.in_a_row >= limit:
            raise RunError(
                f"the last {self.in_a_row} updates were skipped, because the gradient was NaN or infinite "
                f"(training.max_skipped_updates={limit}); the weights are those of the last finite one: {FIX}"
            )
        if at_end and self.here and self.in_a_row >= self.here:
            raise RunError(
                f"all {self.in_a_row} updates up to the end were skipped, because the gradient was NaN or infinite, so "
                f"nothing was learned: {FIX}"
            )

    def state(self) -> dict[str, int]:
        """The counts that a checkpoint keeps."""
        return {name: count for name, count in asdict(self).items() if name != "here"}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> SkippedUpdates:
        """From the state of a stage, which has none where an earlier version wrote it."""
        return cls(**state.get("skipped_updates", {}))
