"""Tasks: data sets of questions with gold answers, and the prompts made from them."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.tasks.config import TaskConfig as TaskConfig
    from flatpeak.tasks.config import build_task as build_task
    from flatpeak.tasks.prompts import build_prompts as build_prompts

__getattr__ = lazy_names(__name__, {"TaskConfig": "config", "build_prompts": "prompts", "build_task": "config"})
