"""Training of one model in several processes."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.distributed.config import DistributedConfig as DistributedConfig
    from flatpeak.distributed.ranks import Ranks as Ranks

__getattr__ = lazy_names(__name__, {"DistributedConfig": "config", "Ranks": "ranks"})
