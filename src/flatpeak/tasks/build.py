"""From a task's configuration to its examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from flatpeak.protocols import Task
from flatpeak.tasks.arithmetic import arithmetic_examples
from flatpeak.tasks.config import ArithmeticConfig, CustomTaskConfig, GSM8KConfig, RowsConfig, TaskConfig
from flatpeak.tasks.custom import custom_task
from flatpeak.tasks.gsm8k import gsm8k_examples
from flatpeak.tasks.rows import rows_examples
from flatpeak.types import Example


@dataclass(frozen=True, kw_only=True)
class ExampleTask:
    """A task whose examples are all at hand."""

    name: str
    """Names the task in metrics: `eval/<name>/accuracy`."""
    train: Sequence[Example]
    """What is trained on."""
    test: Sequence[Example]
    """What is held out."""


def build_task(config: TaskConfig) -> Task:
    """Load or generate the configured task. UserError where its data is missing or broken."""
    match config:
        case ArithmeticConfig():
            return _task("arithmetic", *arithmetic_examples(config))
        case GSM8KConfig():
            return _task("gsm8k", *gsm8k_examples(config))
        case RowsConfig():
            return _task(config.name, *rows_examples(config))
        case CustomTaskConfig():
            return custom_task(config)


def _task(name: str, train: Sequence[Example], test: Sequence[Example]) -> Task:
    # The protocol's members are writable to a type checker, a frozen dataclass's are not.
    return cast("Task", ExampleTask(name=name, train=train, test=test))
