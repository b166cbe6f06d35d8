"""flatpeak: GRPO post-training that climbs to flat reward peaks.

Importing this package imports no torch; the names below load what they need on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatpeak.api import RunResult, sft, train
    from flatpeak.config.run_config import RunConfig
    from flatpeak.errors import UserError
    from flatpeak.forking import fork
    from flatpeak.gradreg.config import GradientRegularizationConfig
    from flatpeak.gradreg.regularizer import GradientRegularizer
    from flatpeak.reward_model import train_reward_model

__version__ = "0.1.0"
__all__ = [
    "GradientRegularizationConfig",
    "GradientRegularizer",
    "RunConfig",
    "RunResult",
    "UserError",
    "__version__",
    "fork",
    "sft",
    "train",
    "train_reward_model",
]

_HOMES = {
    "GradientRegularizationConfig": "flatpeak.gradreg.config",
    "GradientRegularizer": "flatpeak.gradreg.regularizer",
    "RunConfig": "flatpeak.config.run_config",
    "RunResult": "flatpeak.api",
    "UserError": "flatpeak.errors",
    "fork": "flatpeak.forking",
    "sft": "flatpeak.api",
    "train": "flatpeak.api",
    "train_reward_model": "flatpeak.reward_model",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flatpeak' has no attribute {name!r}")
