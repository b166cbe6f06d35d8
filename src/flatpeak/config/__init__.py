"""The whole configuration of a run: its schema, and how recipes are read, merged and checked."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.config.load import load_recipe as load_recipe
    from flatpeak.config.load import merge as merge
    from flatpeak.config.load import parse_config as parse_config
    from flatpeak.config.run_config import RunConfig as RunConfig

__getattr__ = lazy_names(
    __name__, {"RunConfig": "run_config", "load_recipe": "load", "merge": "load", "parse_config": "load"}
)
