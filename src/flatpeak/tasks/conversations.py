"""Chat messages as data sets have them: a list of `{role, content}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatpeak.errors import UserError
from flatpeak.types import Message


def is_conversation(value: Any) -> bool:
    """Whether a cell is a non-empty list of messages, each with a role and a content that are texts."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        )
    )


def read_messages(value: Any, *, where: str) -> tuple[Message, ...]:
    """The messages of a cell, which `where` names, without other keys. UserError if it is no conversation."""
    if not is_conversation(value):
        raise UserError(f"{where} is neither text nor a list of messages with role and content; repair it")
    if any(message.get("tool_calls") for message in value):
        raise UserError(
            f"{where} has tool_calls, which are not read from messages: write the calls into a column of rationales as "
            "the policy writes them (docs/agents.md), or leave these rows out"
        )
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def split_answer(messages: Sequence[Message], *, where: str) -> tuple[tuple[Message, ...], str | None]:
    """The messages up to the user's last one, and the assistant's reply to it; None without a reply."""
    asked, reply = tuple(messages), None
    if asked[-1]["role"] == "assistant":
        asked, reply = asked[:-1], asked[-1]["content"]
    if not asked or asked[-1]["role"] != "user":
        by = repr(asked[-1]["role"]) if asked else "nobody"
        raise UserError(f"{where}: the question is by {by}; the last message before the answer must be the user's")
    return asked, reply


def conversation_text(messages: Sequence[Message]) -> str:
    """A conversation as text: a single user message unchanged, else one paragraph per message, `role: content`."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
