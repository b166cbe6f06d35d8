"""Rewards independent of the answer's text: the tags of the r1_zero form, the length, and an environment's verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flatpeak.rewards.base import Rule
from flatpeak.utils.answers import ANSWER_CLOSE, ANSWER_OPEN, THINK_CLOSE, THINK_OPEN, is_blank, judged_text

if TYPE_CHECKING:
    from flatpeak.types import Completion, Prompt, Score


def format_checks(text: str) -> dict[str, bool]:
    """Three independent checks of the form `<think>...</think> <answer>...</answer>`.

    - `thinking`: one `<think>`, preceded only by whitespace and closed by one `</think>` before any answer; it contains
      text.
    - `answer`: one `<answer>`, closed by one `</answer>`; it contains text.
    - `nothing_else`: the two checks above hold, with only whitespace between them and at the end.

    Tags without visible text in between do not count: they would be the cheapest text to earn a reward.
    """
    opening, _, thoughts = text.partition(THINK_OPEN)
    thoughts, closed, rest = thoughts.partition(THINK_CLOSE)
    thinking = (
        not opening.strip()
        and bool(closed)
        and not is_blank(thoughts)
        and text.count(THINK_OPEN) == text.count(THINK_CLOSE) == 1
        and ANSWER_OPEN not in thoughts
    )
    content = text.partition(ANSWER_OPEN)[2].partition(ANSWER_CLOSE)[0]
    answer = (
        text.count(ANSWER_OPEN) == text.count(ANSWER_CLOSE) == 1
        and text.index(ANSWER_OPEN) < text.index(ANSWER_CLOSE)
        and not is_blank(content)
    )
    between, after = rest.partition(ANSWER_OPEN)[0], text.rpartition(ANSWER_CLOSE)[2]
    nothing_else = thinking and answer and not between.strip() and not after.strip()
    return {"thinking": thinking, "answer": answer, "nothing_else": nothing_else}


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatReward(Rule):
    """The mean of the three checks: 0, 1/3, 2/3 or 1, so that every step towards the form is rewarded."""

    def __call__(self, completion: Completion, prompt: Prompt) -> Score:
        """The fraction of `format_checks` that hold."""
        checks = format_checks(judged_text(completion, prompt))
        return sum(checks.values()) / len(checks)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthReward(Rule):
    """clip((limit - tokens) / (limit - target), 0, 1): 1 up to `target` tokens, 0 from `limit` on."""

    target: int
    """In tokens, including the end-of-sequence token."""
    limit: int
    """More than `target`."""

    def __call__(self, completion: Completion, prompt: Prompt) -> Score:
        """The reward for the number of sampled tokens."""
        return min(1.0, max(0.0, (self.limit - len(completion.sampled_ids)) / (self.limit - self.target)))


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentReward(Rule):
    """The reward that the episode's environment gave."""

    by_turn: ClassVar[bool] = True

    def __call__(self, completion: Completion, prompt: Prompt) -> Score:
        """The same, None where it is missing."""
        return completion.reward
