"""Text stays text: only templates make control tokens, whatever a question, an answer or a rationale contains.

A tokenizer reads `<|im_end|>` as the end of a turn anywhere in its input. `TextEncoder.quote` puts a mark into every
such string of a text; `encode` reads the mark as a separate token, which splits the string, and then drops it. If a
text and the template next to it together would make a control token, `encode` splits them too. Other texts get the
tokenizer's usual tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import cached_property
from itertools import groupby, pairwise, takewhile
from typing import Any, Final

from flatpeak.utils.answers import ANSWER_CLOSE, ANSWER_OPEN, THINK_CLOSE, THINK_OPEN

MARK: Final = "\ufddf\ufdd0\ufdde"
"""Unicode noncharacters, in an order that no text has; filters in chat templates do not change them."""
_EDGE: Final = "\ufddf\ufdd1\ufdde"
"""A mark at an end of a text, which counts only if a control token would cross that end."""
_WRITTEN_BY_MODELS: Final = frozenset({THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE})
"""Tags of a completion's form: text, even if a tokenizer has a token for them."""
DAY: Final = date(2026, 1, 1)
"""The date in every chat template: with today's, a run that is resumed tomorrow would go on with other prompts."""
_TODAY: Final = re.compile(r"""strftime_now\(\s*(['"])([^'"\\]*)\1\s*\)""")
_ANSWER: Final = "Zq7answer"
"""An answer that no template changes."""
_LISTED: Final = 4
"""The most control tokens that a notice lists."""


class TextEncoder:
    """A tokenizer that takes control tokens only from templates.

    Control tokens are the tokenizer's special tokens, and the added tokens with which its chat template marks turns
    (DeepSeek's are not special). Tokens of one character, or of whitespace, count as text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = getattr(backend, "normalizer", None)

    def quote(self, text: str) -> str:
        """The text with a mark inside every string that the tokenizer would read as a control token."""
        return self._with_edges(self._broken_up(text))

    def quote_all(self, value: Any) -> Any:
        """The value with every text quoted, also inside lists and mappings.

        Templates look up keys and single words (a role, a type) and make tokens from them, so these get no edges.
        """
        if isinstance(value, str):
            return self._broken_up(value) if value.isidentifier() else self.quote(value)
        if isinstance(value, Mapping):
            return {self._broken_up(str(key)): self.quote_all(inner) for key, inner in value.items()}
        return [self.quote_all(inner) for inner in value] if isinstance(value, list | tuple) else value

    def encode(self, quoted: str, *, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a template around quoted texts."""
        quoted = self._without_edges(quoted)
        if MARK not in quoted:
            return list(self.tokenizer.encode(quoted, add_special_tokens=add_special_tokens))
        if self._splitting is None:
            return self._encode_pieces(quoted, add_special_tokens=add_special_tokens)
        mark = self._splitting.convert_tokens_to_ids(MARK)
        ids = self._splitting.encode(quoted, add_special_tokens=add_special_tokens)
        return [token for token in ids if token != mark]

    def encode_text(self, text: str) -> list[int]:
        """The token ids of a text without a template."""
        return self.encode(self.quote(text))

    @cached_property
    def control_tokens(self) -> frozenset[str]:
        """The control tokens, as text."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        others = {str(token) for token in added if not token.special}
        control = {str(token) for token in added if token.special} | {
            *getattr(self.tokenizer, "all_special_tokens", ())
        }
        if others and self.tokenizer.chat_template:
            dialogues = _dialogues(self.tokenizer)
            control |= {token for token in others if token in dialogues}
        return frozenset(token for token in control - _WRITTEN_BY_MODELS if len(token) > 1 and not token.isspace())

    def _broken_up(self, text: str) -> str:
        """The text with a mark inside every control token that is completely in it."""
        while starts := self.control_strings(text):
            cuts = [0, *(start + 1 for start in starts), len(text)]
            text = MARK.join(text[begin:end] for begin, end in pairwise(cuts))
        return text

    def control_strings(self, text: str) -> list[int]:
        """The places where control tokens begin in a text, as written, or else as the normalizer writes it."""
        if self._pattern is None:
            return []
        written = [match.start() for match in self._pattern.finditer(text)]
        if written or not self._spells_one(text) or self._splitting is None:
            return written
        encoded = self._splitting(text, add_special_tokens=False, return_offsets_mapping=True)
        control = set(self.tokenizer.convert_tokens_to_ids(sorted(self.control_tokens)))
        return [
            start
            for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
            # Unknown characters may have the id of a control token.
            if token in control and end - start > 1 and self._spells_one(text[start:end])
        ]

    def _spells_one(self, text: str) -> bool:
        """Whether the normalized text contains a control token."""
        if self._normalizer is None or self._pattern is None:
            return False
        return self._pattern.search(self._normalizer.normalize_str(text)) is not None

    @cached_property
    def _names(self) -> frozenset[str]:
        """Control tokens, as written and as normalized."""
        if self._normalizer is None:
            return self.control_tokens
        normalized = map(self._normalizer.normalize_str, self.control_tokens)
        return self.control_tokens.union(name for name in normalized if len(name) > 1)

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """A pattern of the control tokens; None if there are none."""
        return re.compile(_any_of(self._names)) if self._names else None

    def _with_edges(self, text: str) -> str:
        """The text with an edge at every end that could be part of a control token."""
        body = text.strip()
        if not body:
            return text
        written = {body} if self._normalizer is None else {body, self._normalizer.normalize_str(body)}
        beginnings, ends, longest = self._halves
        inside = len(body) < longest and any(one in name for one in written for name in self._names)
        halves = [(one[:size], one[-size:]) for one in written for size in range(1, longest)]
        before, after = text.split(body, 1)
        if inside or any(first in ends for first, _ in halves):
            before += _EDGE
        after = (_EDGE if inside or any(last in beginnings for _, last in halves) else "") + after
        return f"{before}{body}{after}"

    @cached_property
    def _halves(self) -> tuple[frozenset[str], frozenset[str], int]:
        """(beginnings of control tokens, their ends, the length of the longest)."""
        halves = [(name[:cut], name[cut:]) for name in self._names for cut in range(1, len(name))]
        beginnings, ends = zip(*halves, strict=True) if halves else ((), ())
        return frozenset(beginnings), frozenset(ends), max(map(len, self._names), default=0)

    def _without_edges(self, quoted: str) -> str:
        """The text with edges replaced by marks; edges that no control token would cross are removed."""
        joined = quoted.replace(_EDGE, "")
        if joined == quoted or self._outline(joined) == [one.replace(_EDGE, "") for one in self._outline(quoted)]:
            return joined
        return quoted.replace(_EDGE, MARK)

    def _outline(self, text: str) -> list[str]:
        """The text, as written and as normalized, with every control token between two marks."""
        texts = [text] if self._normalizer is None else [text, self._normalizer.normalize_str(text)]
        return [text if self._pattern is None else self._pattern.sub(rf"{MARK}\g<0>{MARK}", text) for text in texts]

    @cached_property
    def _splitting(self) -> Any | None:
        """A copy of the tokenizer that reads the mark as a separate token; None if the tokenizer does not allow it."""
        from transformers import AddedToken

        with suppress(Exception):  # a caller's tokenizer may refuse copies and new tokens in any way
            splitting = copy.deepcopy(self.tokenizer)
            splitting.add_tokens([AddedToken(MARK, normalized=False)])
            if splitting.convert_tokens_to_ids(MARK) in splitting.encode(MARK, add_special_tokens=False):
                return splitting
        return None

    def _encode_pieces(self, quoted: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of the pieces between the marks, together with special tokens that the tokenizer adds."""
        encode = self.tokenizer.encode
        first, *others = (list(encode(piece, add_special_tokens=False)) for piece in quoted.split(MARK))
        rest = [token for piece in others for token in piece]
        if not add_special_tokens:
            return first + rest
        whole = list(encode(quoted[: quoted.index(MARK)], add_special_tokens=True))
        end = next((end for end in range(len(first), len(whole)) if whole[end - len(first) : end] == first), len(whole))
        return whole[:end] + rest + whole[end:]


def _any_of(names: Iterable[str]) -> str:
    """A pattern for the longest of these names that branches where they differ, so that a thousand names are fast."""
    names = sorted(names)
    shared = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(names[0], names[-1], strict=False)))
    rests = groupby((name[len(shared) :] for name in names), key=lambda rest: rest[:1])
    branches = [_any_of(group) for first, group in rests if first]
    ending = "?" if shared in names else ""
    return re.escape(shared) + (f"(?:{'|'.join(branches)}){ending}" if branches else "")


def unquote(quoted: str) -> str:
    """The text without the marks of `TextEncoder.quote`."""
    return quoted.replace(MARK, "").replace(_EDGE, "")


def render_chat(tokenizer: Any, messages: Iterable[Mapping[str, Any]], **kwargs: Any) -> str:
    """A conversation in the tokenizer's chat template, as text. A template that writes today's date writes `DAY`."""
    template = kwargs.get("chat_template", tokenizer.chat_template)
    if isinstance(template, str) and _TODAY.search(template):
        kwargs["chat_template"] = _TODAY.sub(lambda call: repr(DAY.strftime(call[2])), template)
    return str(tokenizer.apply_chat_template([dict(one) for one in messages], tokenize=False, **kwargs))


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the chat template writes right after an assistant's message; None if it writes none.

    Base models may have a template with an end of turn and another token as the end of the sequence.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    asked = {"role": "user", "content": "?"}
    answered = [asked, {"role": "assistant", "content": _ANSWER}]
    with suppress(Exception):  # a template is code that may refuse the messages, or fail
        added = {token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
        special = added.union(tokenizer.all_special_ids) - {tokenizer.unk_token_id, tokenizer.bos_token_id}
        # What ends a turn also stands before the next one; a header that asks for an answer does not.
        texts = [render_chat(tokenizer, messages).rpartition(_ANSWER) for messages in (answered, [*answered, asked])]
        first, again = (tokenizer.encode(after, add_special_tokens=False)[:1] for _, _, after in texts)
        if all(answer for _, answer, _ in texts) and first == again and special.intersection(first):
            return int(first[0])
    return None


def _dialogues(tokenizer: Any) -> str:
    """Dialogues in the tokenizer's chat template, with and without a system message, if it accepts them."""
    from jinja2.exceptions import TemplateError

    texts = []
    for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
        messages = [{"role": role, "content": "?"} for role in roles]
        # A template is code that may refuse a role, or fail.
        with suppress(TemplateError, TypeError, ValueError, LookupError, AttributeError):
            texts.append(render_chat(tokenizer, messages))
    return "\n".join(texts)


def notice_of_control_tokens(texts: Iterable[str], tokenizer: Any, *, what: str) -> str | None:
    """A notice about texts that contain control tokens; None if there are none."""
    encoder = TextEncoder(tokenizer)
    texts = list(texts)
    spelled: Sequence[str] = [text for text in texts if encoder.control_strings(text)]
    if not spelled:
        return None
    names = [name for name in sorted(encoder.control_tokens) if any(name in text for text in spelled)]
    listed = " ".join(names[:_LISTED]) + (" ..." if len(names) > _LISTED else "")
    return (
        f"{len(spelled)} of {len(texts)} {what} spell control tokens{listed and f' ({listed})'}, which the model reads "
        "as text: only templates make control tokens (see prompt.template)"
    )
