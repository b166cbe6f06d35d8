"""From a task's configuration to its examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from flatpeak.protocols import Task
from flatpeak.tasks.arithmetic import arithmetic_examples, countdown_examples
from flatpeak.tasks.config import (
    ArithmeticConfig,
    CamelAIConfig,
    ChoicesConfig,
    CountdownTaskConfig,
    CustomTaskConfig,
    DrSCIConfig,
    GSM8KConfig,
    MATHConfig,
    MMLUConfig,
    MMLUProConfig,
    PreferencesConfig,
    ReasoningGymConfig,
    RowsConfig,
    TaskConfig,
)
from flatpeak.tasks.custom import custom_task
from flatpeak.tasks.math import gsm8k_examples, math_examples
from flatpeak.tasks.mmlu import mmlu_examples, mmlu_pro_examples
from flatpeak.tasks.multiple_choice import choices_examples
from flatpeak.tasks.preferences import preference_examples
from flatpeak.tasks.reasoning_gym import reasoning_gym_examples
from flatpeak.tasks.rows import rows_examples
from flatpeak.tasks.science import camel_ai_examples, dr_sci_examples
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
    notices: tuple[str, ...] = ()
    """What was left out while loading, for the user to know."""


Loaded = tuple[Sequence[Example], Sequence[Example]] | tuple[Sequence[Example], Sequence[Example], tuple[str, ...]]
"""Train and test, and notices where a task has some."""


def build_task(config: TaskConfig) -> Task:
    """Load or generate the configured task. UserError where its data is missing or broken."""
    if isinstance(config, CustomTaskConfig):
        return custom_task(config)
    name: str
    sides: Loaded
    match config:
        case ArithmeticConfig():
            name, sides = "arithmetic", arithmetic_examples(config)
        case GSM8KConfig():
            name, sides = "gsm8k", gsm8k_examples(config)
        case MATHConfig():
            name, sides = "math" if config.split == "official" else config.split, math_examples(config)
        case MMLUConfig():
            name, sides = "mmlu", mmlu_examples(config)
        case MMLUProConfig():
            name, sides = "mmlu_pro", mmlu_pro_examples(config)
        case ChoicesConfig():
            name, sides = config.name, choices_examples(config)
        case RowsConfig():
            name, sides = config.name, rows_examples(config)
        case CamelAIConfig():
            name, sides = "camel_ai", camel_ai_examples(config)
        case DrSCIConfig():
            name, sides = "dr_sci", dr_sci_examples(config)
        case CountdownTaskConfig():
            name, sides = "countdown", countdown_examples(config)
        case ReasoningGymConfig():
            name, sides = "reasoning_gym", reasoning_gym_examples(config)
        case PreferencesConfig():
            name, sides = config.name, preference_examples(config)
    train, test, notices = sides if len(sides) == 3 else (*sides, ())
    # The protocol's members are writable to a type checker, a frozen dataclass's are not.
    return cast("Task", ExampleTask(name=name, train=train, test=test, notices=notices))
