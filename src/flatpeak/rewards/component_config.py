"""The configuration that all components of a reward share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from flatpeak.utils.schema import StrictConfig

if TYPE_CHECKING:
    from flatpeak.rewards.base import Scorer


class ComponentConfig(StrictConfig, ABC):
    """A component of the reward, which `build` makes; its dependencies are imported then."""

    type: str
    weight: float = 1.0
    """Its factor in the total reward; 0: logged only, without effect on training."""

    @abstractmethod
    def build(self, name: str) -> Scorer:
        """The scorer of the component with that name; UserError if it cannot be made."""
