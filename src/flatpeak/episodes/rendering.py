"""The continuation of an episode's tokens: which calls a turn makes, and which tokens follow it.

Sampled tokens are never rendered or tokenized again; a renderer says only which token ids to append to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol

from flatpeak.episodes.calls import CALL_READERS, CallReader, json_calls, plain_calls
from flatpeak.episodes.tools import ParsedCall
from flatpeak.errors import UserError, brief
from flatpeak.utils.answers import THINK_CLOSE, THINK_OPEN
from flatpeak.utils.control_tokens import TextEncoder, render_chat

_Message = Mapping[str, Any]
_USER: Final[_Message] = {"role": "user", "content": "?"}
_END: Final = "Zq7end"
"""The word that ends a sample turn of the assistant: what follows it is the template's."""
_THOUGHTS: Final = ("", "Let me see. ", f"{THINK_OPEN}\nHm.\n{THINK_CLOSE}\n\n")
"""Beginnings of sample turns; the continuation may not depend on them."""


class Renderer(Protocol):
    """The form of calls and of their answers."""

    stop: tuple[str, ...]
    """The strings that end a turn at a call."""

    @property
    def describes_tools(self) -> bool:
        """Whether prompts of this format describe the tools."""
        ...

    def calls(self, token_ids: Sequence[int]) -> tuple[ParsedCall, ...]:
        """The calls in the sampled tokens of a turn."""
        ...

    def bridge(
        self, token_ids: Sequence[int], answers: Sequence[tuple[str, str]], *, stopped: bool
    ) -> tuple[int, ...] | None:
        """The token ids to append so that the policy writes its next turn; None if the template cannot continue.

        `token_ids` are the sampled tokens of the turn and `answers` the name and the answer of each call, or ("",
        observation) in a game. `stopped`: the turn ended itself, with an end-of-sequence token or a stop string.
        """
        ...


class PlainRenderer:
    """Calls and answers in running text: `<call>name(x=1)</call>` and `<result>2</result>`."""

    stop: tuple[str, ...] = ("</call>",)
    describes_tools = False

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder

    def calls(self, token_ids: Sequence[int]) -> tuple[ParsedCall, ...]:
        """The calls in the sampled tokens of a turn."""
        return plain_calls(self._encoder.tokenizer.decode(list(token_ids)))

    def bridge(
        self, token_ids: Sequence[int], answers: Sequence[tuple[str, str]], *, stopped: bool
    ) -> tuple[int, ...] | None:
        """The answers' token ids."""
        # Tags inside an answer stay: calls are read only from sampled tokens, so an answer cannot make one.
        return tuple(self._encoder.encode_text("".join(f"<result>{answer}</result>" for _, answer in answers)))


class _UnfitError(Exception):
    """A chat template that cannot continue after a turn, and the reason."""


class ChatRenderer:
    """Calls and answers in the form of the tokenizer's chat template.

    The template renders only sample conversations with the real answers in them; the text after the assistant's
    message is what is appended.
    """

    stop: tuple[str, ...] = ()

    def __init__(
        self, tokenizer: Any, schemas: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any]
    ) -> None:
        self._encoder = TextEncoder(tokenizer)
        self._schemas = [dict(schema) for schema in schemas]
        self._kwargs = dict(chat_template_kwargs)
        self._read: CallReader = json_calls
        self._control = frozenset(tokenizer.convert_tokens_to_ids(sorted(self._encoder.control_tokens)))

    @cached_property
    def describes_tools(self) -> bool:
        """Whether the template writes the tools' descriptions into the prompt."""
        return bool(self._schemas) and self._render([_USER]) != self._render([_USER], tools=None)

    @cached_property
    def _opened(self) -> str:
        """The tag of the reasoning, if the header of the assistant's turn already has it."""
        return THINK_OPEN if self._render([_USER], asking=True).rstrip().endswith(THINK_OPEN) else ""

    def calls(self, token_ids: Sequence[int]) -> tuple[ParsedCall, ...]:
        """The calls in the sampled tokens of a turn."""
        decode, ids = self._encoder.tokenizer.decode, list(token_ids)
        whole, bare = (self._opened + decode(ids, skip_special_tokens=skip) for skip in (False, True))
        return self._read(whole, bare, self._schemas)

    def bridge(
        self, token_ids: Sequence[int], answers: Sequence[tuple[str, str]], *, stopped: bool
    ) -> tuple[int, ...] | None:
        """The token ids that the template puts after a turn with these answers."""
        role = "tool" if self._schemas and self.calls(token_ids) else "user"
        quote = self._encoder.quote
        try:
            sample, quoted = self._continuation(role, [(quote(name), quote(answer)) for name, answer in answers])
        except _UnfitError:
            return None
        expected, ids = self._encoder.encode(sample), self._encoder.encode(quoted)
        control = [[token for token in one if token in self._control] for one in (expected, ids)]
        # A template that cuts something out of an answer could make a control token of what is left.
        if control[0] != control[1]:
            return None
        return tuple(ids[1:] if stopped and ids[:1] == list(token_ids[-1:]) else ids)

    def probe(self) -> None:
        """Raise UserError if the template cannot continue after an answer."""
        role = "tool" if self._schemas else "user"
        try:
            if self._schemas:
                self._read = self._reader()
            contexts = [(begin, again) for begin in _THOUGHTS for again in (False, True)]
            samples = {
                self._continuation(role, [("tool", "0")], begin=begin, again=again)[0] for begin, again in contexts
            }
            if len(samples) > 1:
                raise _UnfitError("what it writes after a turn depends on earlier text")
        except _UnfitError as error:
            what = "a tool's answer" if self._schemas else "an observation"
            raise UserError(
                f"prompt.template=chat: the chat template cannot continue after {what} ({error}): use "
                "episodes.format=plain or another template"
            ) from error

    def _reader(self) -> CallReader:
        """The reader of the calls that the template writes; _UnfitError if there is none."""
        # A header may open the reasoning, which the template drops from turns, or writes again.
        header = self._render([_USER], asking=True).partition(THINK_OPEN)[0]
        # The system message that describes tools for other templates asks for JSON.
        readers = CALL_READERS if self.describes_tools else (json_calls,)
        for turn in _turns("tool", ["tool"]):
            try:
                text = self._render([_USER, turn])
            except _UnfitError:
                continue
            if _END not in text:
                continue
            if "tool_calls" in turn:
                closing = _after_end(self._render([_USER, *_turns("user", [])]))
                body = text.removesuffix(closing).removeprefix(header)
                sample = (ParsedCall(name="tool", arguments={"x": _END}),)
                reader = next((read for read in readers if read(body, body, self._schemas) == sample), None)
                if reader is None:
                    raise _UnfitError("it writes calls in a form that is not read")
                if not text.endswith(closing):
                    raise _UnfitError("it ends a turn with a call differently from other turns")
                return reader
            if self.describes_tools:
                raise _UnfitError("it describes tools, and leaves out calls")
        return json_calls

    def _continuation(
        self, role: str, answers: Sequence[tuple[str, str]], *, begin: str = "", again: bool = False
    ) -> tuple[str, str]:
        """The template's text after a turn, with sample words for the answers, and with the answers themselves.

        `begin`: the beginning of the turn. `again`: such a turn and its answers came before.
        """
        words = [("tool", f"Zq{index}word") for index in range(len(answers))]
        names = [name for name, _ in words]
        reason = ""
        turns = (_turns(role, names, begin=begin, end=end) for end in (_END, "0"))
        for turn, earlier in zip(*turns, strict=True):
            before = [_USER, earlier, *_replies(role, words)] if again else [_USER]
            try:
                sample = self._after(before, turn, _replies(role, words))
                if any(word not in sample for _, word in words):
                    raise _UnfitError("it leaves out the answer")
                return sample, self._after(before, turn, _replies(role, answers))
            except _UnfitError as error:
                reason = str(error)
        raise _UnfitError(reason)

    def _after(self, before: Sequence[_Message], turn: _Message, replies: Sequence[_Message]) -> str:
        """The template's text after a sample turn and the word that it ends with."""
        suffix = _after_end(self._render([*before, turn, *replies], asking=True))
        if "tool_calls" not in turn:
            return suffix
        closing = _after_end(self._render([*before, {"role": "assistant", "content": _END}]))
        alone = _after_end(self._render([*before, turn]))
        if not alone.endswith(closing) or not suffix.startswith(alone):
            raise _UnfitError("it ends a turn with a call differently from other turns")
        return suffix[len(alone) - len(closing) :]

    def _render(self, messages: Sequence[_Message], *, asking: bool = False, **kwargs: Any) -> str:
        """A conversation in the chat template; _UnfitError if it refuses."""
        kwargs = {"tools": self._schemas or None, **self._kwargs, **kwargs}
        try:
            return render_chat(self._encoder.tokenizer, messages, add_generation_prompt=asking, **kwargs)
        except Exception as error:  # a template may raise anything, not only jinja2's errors
            raise _UnfitError(brief(error)) from error


def _turns(role: str, names: Sequence[str], *, begin: str = "", end: str = _END) -> Iterator[_Message]:
    """Sample turns of the assistant in the forms that templates accept, each of which has `end` last."""
    values = [*("0" for _ in names[1:]), end]
    # Templates read arguments as a mapping, or as JSON.
    for write in (dict, json.dumps) if role == "tool" else ():
        functions = [
            {"name": name, "arguments": write({"x": value})} for name, value in zip(names, values, strict=True)
        ]
        calls = [
            {"id": _call_id(index), "type": "function", "function": function}
            for index, function in enumerate(functions)
        ]
        yield {"role": "assistant", "content": begin, "tool_calls": calls}
    yield {"role": "assistant", "content": begin + end}


def _replies(role: str, answers: Sequence[tuple[str, str]]) -> list[_Message]:
    """The messages that answer a turn."""
    if role != "tool":
        return [{"role": role, "content": answer} for _, answer in answers]
    return [
        {"role": role, "name": name, "tool_call_id": _call_id(index), "content": answer}
        for index, (name, answer) in enumerate(answers)
    ]


def _call_id(index: int) -> str:
    """The id of a call: nine letters or digits, as some templates demand."""
    return f"call{index:05}"


def _after_end(text: str) -> str:
    """The text after `_END`; _UnfitError if it is missing."""
    _, match, tail = text.partition(_END)
    if not match:
        raise _UnfitError("it leaves out the assistant's message")
    return tail


def make_renderer(
    tokenizer: Any,
    *,
    format: Literal["chat", "plain"],
    schemas: Sequence[Mapping[str, Any]],
    chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Renderer:
    """The renderer of a format; no schemas: a game. UserError if the chat template cannot continue a conversation."""
    if format == "plain":
        return PlainRenderer(TextEncoder(tokenizer))
    renderer = ChatRenderer(tokenizer, schemas, chat_template_kwargs)
    renderer.probe()
    return renderer
