"""Configuration of held-out evaluation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from flatpeak.schema import StrictConfig


class EvaluationConfig(StrictConfig):
    """One fixed held-out set, its own sampling settings."""

    every: Annotated[int, Field(ge=0)] = 50
    """Evaluate at step 0, every so many steps and at the end; 0: only at step 0 and at the end."""
    size: Annotated[int, Field(ge=1)] | None = None
    """The first so many held-out questions; null is all."""
    final_size: Annotated[int, Field(ge=1)] | None = None
    """So many after SFT, before RL, and at the end; null is `size`."""
    accuracy: str = "correctness"
    """The reward part that says whether a completion is right (1) or not."""
    metric: str = "accuracy"
    """What chooses the best checkpoint: accuracy, reward, pass@k, or a reward part."""
    samples: Annotated[int, Field(ge=0)] = 0
    """Sampled completions per question beside the greedy one; 0: greedy only."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    """null: rollout.max_new_tokens."""
    k: tuple[int, ...] = (1,)
    """The k of pass@k and maj@k, each at most `samples`."""
    seed: int = 0
