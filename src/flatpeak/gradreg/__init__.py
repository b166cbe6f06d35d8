"""Gradient regularization: perturb, recompute, restore, combine, and guard against rounding and long steps."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.gradreg.config import GradientRegularizationConfig as GradientRegularizationConfig
    from flatpeak.gradreg.regularizer import GradientRegularizer as GradientRegularizer

__getattr__ = lazy_names(__name__, {"GradientRegularizationConfig": "config", "GradientRegularizer": "regularizer"})
