"""Configuration of the run directory."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from flatpeak.utils.schema import StrictConfig

OTHER_CHECKPOINTS: Final = 3
"""Checkpoints in addition to the periodic ones: the first, the best and the last."""


class RunSectionConfig(StrictConfig):
    """Name, directory, checkpoints, logs and grading processes of a run, and the seed of its random numbers."""

    name: str = "run"
    """The name of the run and of its directory."""
    directory: str = "runs"
    """The parent directory of all runs' directories."""
    seed: int = 0
    """The seed of initial weights, data order, sampling and dropout; tasks and evaluation have separate seeds."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 50
    """Steps between checkpoints; 0: only at the start and the end. The best and the last step are always saved."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """The number of periodic checkpoints to keep besides the first, the best and the last. Each contains the weights
    and the optimizer's state: with AdamW, 12 bytes per trained weight in float32 and 14 in bfloat16, or 1.6 GB for 135
    million float32 weights. `flatpeak plan` adds them up."""
    log_rollouts_every: Annotated[int, Field(ge=0)] = 1
    """RL steps between steps whose completions are logged to `rollouts/`, all of them; 0: never."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """The number of torch threads; null: torch's default. 1 is best below about a million parameters
    (docs/engine.md)."""
    grading_workers: Annotated[int, Field(ge=0)] | None = None
    """The number of processes that call reward functions while other groups are sampled, and that can be killed. null:
    two, started when a function needs them. A positive number: they also grade the built-in rewards. 0: the training
    process grades everything after sampling, and a function that hangs blocks the run. Scores are the same in all
    cases. With tools or an environment, as many further processes make their calls; two for 0."""
    grading_timeout: Annotated[float, Field(ge=0.1, allow_inf_nan=False)] = 2.0
    """Seconds that a worker may take for one call, which grades a completion, or a group if the function or built-in
    reward grades groups. After that it is killed, and the scores are missing (or `on_timeout`). A function's `timeout`
    setting takes precedence."""
    grading_memory: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 4.0
    """GiB that a grading process may allocate (Linux only); scores that need more are missing. null: no limit."""
    grading_budget: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 30.0
    """Seconds per training step that may be spent on answers whose grading runs out of time or memory, including
    answers graded by built-in rewards. Answers not graded by then count as timed out. Calls that return a score do not
    use the budget. A function called once for all completions has only its `timeout`, and evaluations have no budget.
    null: no limit."""

    def most_checkpoints(self, *stages: int) -> int:
        """The most checkpoints that exist at once in stages of so many steps, with the one that is being written."""
        count = sum(self._kept(steps) for steps in stages if steps)
        return count + 1 if count else 0

    def _kept(self, steps: int) -> int:
        """The most checkpoints of a stage that are kept, limited by their number in the whole stage."""
        every = self.checkpoint_every
        periodic = min(self.keep_checkpoints, steps // every) if every else 0
        return min(OTHER_CHECKPOINTS + periodic, 1 + steps)
