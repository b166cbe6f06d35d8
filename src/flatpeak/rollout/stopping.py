"""The end of a completion: an end-of-sequence token, or the first token that completes a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from flatpeak.errors import UserError

if TYPE_CHECKING:
    from flatpeak.protocols import Tokenizer

_REPLACEMENT = "�"  # decoded from bytes that are not a whole character
_CONTEXT = 8  # extra tokens to decode before a possible stop string, so that few tails need a second, longer decode


def is_end_of_sequence(tokens: Tensor, eos_tokens_K: Tensor) -> Tensor:
    """Whether each token ends a completion: bool, in the shape of `tokens`."""
    return (tokens[..., None] == eos_tokens_K).any(-1)


class StopStrings:
    """Finds the token that completes a stop string; decodes text only if a token could complete one.

    Text is decoded with special tokens, so that "<|im_end|>" can be a stop string. A stop string may begin and end
    inside tokens, and its characters may be split over byte tokens.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Tokenizer):
        if any(not string for string in strings):
            raise UserError("rollout.stop has an empty string, which would end every completion immediately: remove it")
        self._strings = tuple(strings)
        self._longest = max(len(string) for string in strings)
        self._span = max(len(string.encode("utf-8", "surrogatepass")) for string in strings)
        self._last_characters = frozenset(string[-1] for string in strings)
        self._tokenizer = tokenizer
        self._candidates: dict[int, bool] = {}

    def first_completed(self, tokens: Sequence[int], positions: Iterable[int]) -> int | None:
        """The first of these positions whose token completes a stop string in the text so far, or None."""
        for position in positions:
            if self._is_candidate(tokens[position]) and self._completes(tokens, position):
                return position
        return None

    def _is_candidate(self, token: int) -> bool:
        """Whether this token can contain a stop string's last character; usually a single look-up."""
        known = self._candidates.get(token)
        if known is None:
            text = self._decode([token])
            # Alone, a token may lose its leading space, and part of a character becomes U+FFFD: decode both cases.
            uncertain = not text or _REPLACEMENT in text or " " in self._last_characters
            known = uncertain or not self._last_characters.isdisjoint(text)
            self._candidates[token] = known
        return known

    def _completes(self, tokens: Sequence[int], position: int) -> bool:
        """Whether the token at `position` completes a stop string; decodes as few earlier tokens as possible."""
        length = self._span + _CONTEXT
        while True:
            start = max(0, position - length)
            before = self._decode(tokens[start:position])
            text = self._decode(tokens[start : position + 1])
            shared = _shared_prefix(before, text)
            if any(text.find(string, max(0, shared - len(string) + 1)) >= 0 for string in self._strings):
                return True
            if start == 0 or self._is_conclusive(text, shared):
                return False
            length *= 2

    def _is_conclusive(self, text: str, shared: int) -> bool:
        """Whether earlier tokens could not change the result in `text`, whose first `shared` characters are old.

        A tail that begins inside a character decodes to U+FFFD there; byte-fallback vocabularies do so up to the next
        token that is not a byte. After a whole character, the text is the same as in the full text.
        """
        clean = text.rstrip(_REPLACEMENT)
        if clean != text:
            return bool(clean)
        return shared - (text.rfind(_REPLACEMENT) + 1) >= self._longest - 1

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


def _shared_prefix(first: str, second: str) -> int:
    if second.startswith(first):
        return len(first)
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
