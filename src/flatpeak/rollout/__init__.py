"""Rollouts: from prompts to groups of completions."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.rollout.config import RolloutConfig as RolloutConfig
    from flatpeak.rollout.engine import NativeEngine as NativeEngine
    from flatpeak.rollout.randomness import derive_seed as derive_seed

__getattr__ = lazy_names(__name__, {"NativeEngine": "engine", "RolloutConfig": "config", "derive_seed": "randomness"})
