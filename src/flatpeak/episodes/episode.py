"""An episode: what its policy sampled, what was added after each turn, and why it ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from flatpeak.episodes.environments import Session
from flatpeak.functional.kept_tokens import ALL_BUT
from flatpeak.protocols import Tokenizer
from flatpeak.types import Completion, Prompt, StopReason, Turn


@dataclass(kw_only=True, slots=True)
class Episode:
    """An episode so far."""

    prompt: Prompt
    index: int
    """Its place in the group."""
    session: Session
    begun: float
    limit: int
    """The most tokens after the prompt."""
    drawn: list[Completion] = field(default_factory=list)
    """The policy's sampled tokens of each turn."""
    added: list[tuple[int, ...]] = field(default_factory=list)
    """The tokens that were added after each turn but the last."""
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason | None = None
    version: int | None = None
    """Of the policy; see Group."""
    answering: Future[Any] | None = None
    """The session and the answer after the last turn, while they are waited for."""

    @property
    def left(self) -> int:
        """The tokens that its limit leaves."""
        return self.limit - sum(len(completion.token_ids) for completion in self.drawn) - sum(map(len, self.added))

    @property
    def read(self) -> int:
        """The tokens of its next prompt."""
        return len(self.prompt.token_ids) + self.limit - self.left

    @property
    def next_id(self) -> str:
        """The id of the next turn's prompt."""
        return f"{self.prompt.id}#{self.index}.{len(self.drawn)}"

    def next_prompt(self) -> Prompt:
        """The prompt of the next turn."""
        turns = zip(self.drawn, self.added, strict=True)
        after = (token for completion, added in turns for token in (*completion.token_ids, *added))
        return replace(self.prompt, id=self.next_id, token_ids=(*self.prompt.token_ids, *after))

    def completion(self) -> Completion:
        """All turns as one completion, of which the policy is trained on what it sampled."""
        last = self.drawn[-1]
        ended_by_limit = self.stop_reason in ("max_turns", "max_calls", "max_tokens", "timeout")
        # The last action of a game that has ended is whole, also where it has as many tokens as an action may have.
        of_last = "stop" if self.stop_reason == "done" else last.finish_reason
        whole = replace(
            last,
            turns=tuple(self.turns),
            stop_reason=self.stop_reason,
            finish_reason="length" if ended_by_limit else of_last,
        )
        if not self.added:
            return whole
        # Only the first turn has a least length, so that its tokens alone may be filtered.
        filtered = any(turn.filtered_logprobs is not None for turn in self.drawn)
        kept = any(turn.kept is not None for turn in self.drawn)
        return replace(
            whole,
            token_ids=self._joined(lambda completion: completion.token_ids, lambda token: token),
            logprobs=self._joined(lambda completion: completion.logprobs, lambda _: 0.0),
            filtered_logprobs=self._joined(lambda turn: turn.filtered_logprobs or turn.logprobs, lambda _: 0.0)
            if filtered
            else None,
            kept=self._joined(lambda turn: turn.kept or ((ALL_BUT,),) * len(turn.token_ids), lambda _: (ALL_BUT,))
            if kept
            else None,
            trained=self._joined(lambda completion: (True,) * len(completion.token_ids), lambda _: False),
        )

    def _joined(self, sampled: Callable[[Completion], Any], added: Callable[[int], Any]) -> tuple[Any, ...]:
        """A value of each token: as sampled, or of a token that was added."""
        turns = zip(self.drawn, [*self.added, ()][: len(self.drawn)], strict=True)
        return tuple(value for completion, tokens in turns for value in (*sampled(completion), *map(added, tokens)))


def cut_turn(completion: Completion, left: int, tokenizer: Tokenizer) -> Completion:
    """A turn without the tokens beyond its episode's limit: what a request of this limit alone would have drawn."""
    if len(completion.token_ids) <= left:
        return completion
    return replace(
        completion,
        token_ids=completion.token_ids[:left],
        logprobs=completion.logprobs[:left],
        filtered_logprobs=None if completion.filtered_logprobs is None else completion.filtered_logprobs[:left],
        kept=None if completion.kept is None else completion.kept[:left],
        finish_reason="length",
        text=tokenizer.decode(completion.token_ids[:left], skip_special_tokens=True),
    )
