"""The union of all tasks' configurations, and the task that a configuration describes.

Each configuration is in the module of its task and loads it. None of these modules imports torch or `datasets` at the
top.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

from pydantic import Field

from flatpeak.protocols import Task
from flatpeak.tasks.arithmetic import COUNTDOWN_HUB_NAME, ArithmeticConfig, CountdownTaskConfig
from flatpeak.tasks.custom import CustomTaskConfig
from flatpeak.tasks.math import GSM8K_HUB_NAME, MATH500_HUB_NAME, MATH_HUB_NAME, GSM8KConfig, MATHConfig
from flatpeak.tasks.mmlu import MMLU_HUB_NAME, MMLU_PRO_HUB_NAME, MMLUConfig, MMLUProConfig
from flatpeak.tasks.multiple_choice import ChoicesConfig
from flatpeak.tasks.preferences import PreferencesConfig
from flatpeak.tasks.reasoning_gym import ReasoningGymConfig
from flatpeak.tasks.rows import RowsConfig
from flatpeak.tasks.science import DR_SCI_HUB_NAME, CamelAIConfig, DrSCIConfig
from flatpeak.utils.huggingface import is_surely_local

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
    """Load or generate the configured task. UserError if its data is missing or broken."""
    # A type checker sees the protocol's members as writable, and those of a frozen dataclass as read-only.
    return cast("Task", config.load())


def hub_datasets(config: TaskConfig) -> tuple[str, ...]:
    """The names of the Hub data sets that a task reads; empty if its data are local or generated."""
    names: tuple[str | None, ...] = ()
    match config:
        case ChoicesConfig() | RowsConfig():
            names = tuple(one.hub if one.path is None else None for one in (*config.train, *config.test))
        case GSM8KConfig(path=None):
            names = (GSM8K_HUB_NAME,)
        case MATHConfig(path=None):
            own_test = config.split == "math500" and config.math500_path is None
            names = (MATH_HUB_NAME, MATH500_HUB_NAME if own_test else None)
        case MMLUConfig(path=None):
            names = (MMLU_HUB_NAME,)
        case MMLUProConfig(path=None):
            names = (MMLU_PRO_HUB_NAME,)
        case CamelAIConfig(path=None):
            names = tuple(f"camel-ai/{subject}" for subject in config.subjects)
        case DrSCIConfig(path=None):
            names = (DR_SCI_HUB_NAME,)
        case CountdownTaskConfig(source="published", path=None):
            names = (COUNTDOWN_HUB_NAME,)
        case PreferencesConfig(path=None):
            names = (config.hub,)
    # `datasets` also accepts a local directory here.
    named = [name for name in names if name and not (is_surely_local(name) or Path(name).is_dir())]
    return tuple(dict.fromkeys(named))


def is_generated(config: TaskConfig) -> bool:
    """Whether a generator of flatpeak makes a task's problems, without a data set."""
    return isinstance(config, ArithmeticConfig) or (
        isinstance(config, CountdownTaskConfig) and config.source == "generated"
    )
