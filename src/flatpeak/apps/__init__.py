"""Applications: what the commands do beside training. An application imports no other one."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.apps.compare import compare_checkpoints as compare_checkpoints

__getattr__ = lazy_names(__name__, {"compare_checkpoints": "compare"})
