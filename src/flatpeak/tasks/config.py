"""The union of all tasks' configurations, and the task that one of them describes.

Each configuration lies beside its task and loads it. None of these modules imports torch or `datasets` at the top.
"""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import Field

from flatpeak.protocols import Task
from flatpeak.tasks.arithmetic import ArithmeticConfig, CountdownTaskConfig
from flatpeak.tasks.custom import CustomTaskConfig
from flatpeak.tasks.math import GSM8KConfig, MATHConfig
from flatpeak.tasks.mmlu import MMLUConfig, MMLUProConfig
from flatpeak.tasks.multiple_choice import ChoicesConfig
from flatpeak.tasks.preferences import PreferencesConfig
from flatpeak.tasks.reasoning_gym import ReasoningGymConfig
from flatpeak.tasks.rows import RowsConfig
from flatpeak.tasks.science import CamelAIConfig, DrSCIConfig

TaskConfig = Annotated[
    ArithmeticConfig
    | GSM8KConfig
    | MATHConfig
    | MMLUConfig
    | MMLUProConfig
    | ChoicesConfig
    | RowsConfig
    | CamelAIConfig
    | DrSCIConfig
    | CountdownTaskConfig
    | ReasoningGymConfig
    | PreferencesConfig
    | CustomTaskConfig,
    Field(discriminator="type"),
]


def build_task(config: TaskConfig) -> Task:
    """Load or generate the configured task. UserError where its data is missing or broken."""
    # The protocol's members are writable to a type checker, a frozen dataclass's are not.
    return cast("Task", config.load())
