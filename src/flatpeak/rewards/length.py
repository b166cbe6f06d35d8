"""A reward for being short enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatpeak.types import Completion, Prompt, Score


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthReward:
    """clip((limit - tokens) / (limit - target), 0, 1): 1 up to `target` tokens, 0 from `limit` on."""

    target: int
    """Tokens, the end-of-sequence token included."""
    limit: int
    """More than `target`."""

    def __call__(self, completion: Completion, prompt: Prompt) -> Score:
        """By the number of sampled tokens."""
        return min(1.0, max(0.0, (self.limit - len(completion.token_ids)) / (self.limit - self.target)))
