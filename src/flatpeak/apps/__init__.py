"""Applications: one for each command besides training. An application never imports another."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.apps.compare import compare_checkpoints as compare_checkpoints

__getattr__ = lazy_names(__name__, {"compare_checkpoints": "compare"})
