"""Configuration of the run directory."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from flatpeak.utils.schema import StrictConfig


class RunSectionConfig(StrictConfig):
    """Name, directory, checkpoints and logs of a run, its grading processes, and the seed of everything random."""

    name: str = "run"
    """The run's name, and that of its directory."""
    directory: str = "runs"
    """The directory that holds the directories of runs."""
    seed: int = 0
    """The seed of weights, order of the data, sampling and dropout; tasks and evaluation have their own."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 50
    """Steps between checkpoints; 0: only at the start and the end. The best and the last step are always saved."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """The number of periodic checkpoints that stay beside the first, the best and the last. Each has the weights and
    the optimizer's state, with AdamW 12 bytes per trained weight in float32 and 14 in bfloat16: of 135 million weights,
    1.6 GB each. `flatpeak plan` adds them up."""
    log_rollouts_every: Annotated[int, Field(ge=0)] = 1
    """Steps of RL between steps whose completions are all logged to `rollouts/`; 0: never."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """torch threads; null leaves torch's choice. 1 is best below about a million parameters (docs/engine.md)."""
    grading_workers: Annotated[int, Field(ge=0)] | None = None
    """Processes that call reward functions while other groups are sampled, and that can be killed. null: two, which
    start when a function needs them. A number: that many, which grade the built-in rewards too. 0: the trainer's
    process grades everything, after sampling, and a function that hangs stops the run. The scores are the same."""
    grading_timeout: Annotated[float, Field(ge=0.1, allow_inf_nan=False)] = 2.0
    """Seconds that a worker may take for one call: a completion, or a group where the function or the built-in reward
    grades groups. Then it is killed, and those scores are missing (or `on_timeout`). A function's own `timeout` comes
    first."""
    grading_memory: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 4.0
    """GiB that a grading process may allocate (on Linux); a score that needs more is missing. null: no limit."""
    grading_budget: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 30.0
    """Seconds that a training step may lose to answers whose grading runs out of time or memory, the built-in rewards'
    answers too. What is not graded by then counts as timed out. Calls that give a score cost nothing of it, a function
    called once for all completions has its own limit only, and evaluations have no budget. null: no limit."""
