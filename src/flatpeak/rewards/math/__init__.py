"""Grading of mathematical answers: extraction, reading by rules, comparison with a gold answer."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.rewards.math.grader import MathGrader as MathGrader
    from flatpeak.rewards.math.rule_grader import read_number as read_number

__getattr__ = lazy_names(__name__, {"MathGrader": "grader", "read_number": "rule_grader"})
