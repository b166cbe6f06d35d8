"""Configuration of the mathematical rewards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flatpeak.utils.schema import StrictConfig

MathExtraction = Literal["auto", "any", "boxed"]


class _VerifiedConfig(StrictConfig):
    weight: float = 1.0
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    """Seconds that one answer may take where the rules cannot decide; beyond, it is wrong."""
    workers: Annotated[int, Field(ge=1)] = 2
    """Processes for such answers, started when the first one comes."""
    evaluated: bool = False
    """Whether an answer has to be worked out as far as the gold answer is: one that leaves operations which the gold
    does not have, or is copied from the question, is wrong."""


class MathConfig(_VerifiedConfig):
    """1 if the last box or answer block is mathematically equal to the gold answer, else 0."""

    type: Literal["math"] = "math"
    extraction: MathExtraction = "auto"
    """`auto`: the last box or answer block. `boxed`: the last box. `any`: where there is neither box nor block,
    `#### x`, or a short text as a whole."""


class R1ZeroConfig(_VerifiedConfig):
    """1 if the answer is right and in the layout `</think> <answer>...</answer>`, else 0."""

    type: Literal["r1_zero"] = "r1_zero"


class QuestionOnlyConfig(_VerifiedConfig):
    """1 if the answer is right and in a box, else 0."""

    type: Literal["question_only"] = "question_only"
