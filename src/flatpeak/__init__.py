"""flatpeak: GRPO post-training that climbs to flat reward peaks.

Importing this package does not import torch; the names below load what they need on first use. It sets environment
variables that torch reads when it loads (utils/environment.py), so import it before torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flatpeak.utils.environment import set_defaults, without_collection

if TYPE_CHECKING:
    from flatpeak.apps.evaluate_model import EvaluationResult, evaluate
    from flatpeak.apps.fork.fork_run import fork
    from flatpeak.config.run_config import RunConfig
    from flatpeak.errors import UserError
    from flatpeak.gradreg.config import GradientRegularizationConfig
    from flatpeak.gradreg.regularizer import GradientRegularizer
    from flatpeak.pipeline.run_result import RunResult, load_run
    from flatpeak.pipeline.train import sft, train
    from flatpeak.pipeline.train_reward_model import train_reward_model
    from flatpeak.policy.model import Policy
    from flatpeak.rollout.engine import NativeEngine
    from flatpeak.runs.callbacks import Callback
    from flatpeak.training.batch import collate

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "EvaluationResult",
    "GradientRegularizationConfig",
    "GradientRegularizer",
    "NativeEngine",
    "Policy",
    "RunConfig",
    "RunResult",
    "UserError",
    "__version__",
    "collate",
    "evaluate",
    "fork",
    "load_run",
    "sft",
    "train",
    "train_reward_model",
]

_HOMES = {
    "Callback": "flatpeak.runs.callbacks",
    "EvaluationResult": "flatpeak.apps.evaluate_model",
    "GradientRegularizationConfig": "flatpeak.gradreg.config",
    "GradientRegularizer": "flatpeak.gradreg.regularizer",
    "NativeEngine": "flatpeak.rollout.engine",
    "Policy": "flatpeak.policy.model",
    "RunConfig": "flatpeak.config.run_config",
    "RunResult": "flatpeak.pipeline.run_result",
    "UserError": "flatpeak.errors",
    "collate": "flatpeak.training.batch",
    "evaluate": "flatpeak.apps.evaluate_model",
    "fork": "flatpeak.apps.fork.fork_run",
    "load_run": "flatpeak.pipeline.run_result",
    "sft": "flatpeak.pipeline.train",
    "train": "flatpeak.pipeline.train",
    "train_reward_model": "flatpeak.pipeline.train_reward_model",
}

set_defaults()


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        with without_collection():
            return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flatpeak' has no attribute {name!r}")
