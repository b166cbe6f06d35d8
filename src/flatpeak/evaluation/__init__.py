"""Evaluation on held-out questions: metrics, estimates with intervals, and comparisons of models."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.evaluation.config import EvaluationConfig as EvaluationConfig
    from flatpeak.evaluation.result import Evaluation as Evaluation

__getattr__ = lazy_names(__name__, {"Evaluation": "result", "EvaluationConfig": "config"})
