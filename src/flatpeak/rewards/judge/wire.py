"""What an endpoint sends back, read with care."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flatpeak.rewards.judge.protocol import JudgeReply, JudgeRequest

_MESSAGE_TOKENS: Final = 8
_BYTES_PER_TOKEN: Final = 3
_MOST_TOKENS: Final = 10**7


def expected_tokens(request: JudgeRequest) -> int:
    """Of the prompt: an estimate, on the high side for English and about right for most other languages."""
    content = sum(len(message["content"].encode()) for message in request.messages)
    return content // _BYTES_PER_TOKEN + _MESSAGE_TOKENS * len(request.messages)


def plain(text: str) -> str:
    """The text as it can be written to a file: JSON can spell half a character, and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _tokens(value: Any) -> int | None:
    """A count of tokens; None where it cannot be one."""
    counted = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS
    return value if counted else None


def error_text(error: Any) -> str:
    """The endpoint's own words: in OpenAI's layout, in FastAPI's (`detail`), or the body as it is."""
    body = error.body
    if isinstance(body, Mapping):
        found = next((body[name] for name in ("message", "detail", "error") if body.get(name)), body)
        return str(found)
    return str(body or error.response.text)


def error_in(answer: Any) -> tuple[int | None, str] | None:
    """The status and the words of an error that came as a success (HTTP 200), as OpenRouter sends them; else None."""
    choices = getattr(answer, "choices", None)
    first = choices[0] if isinstance(choices, list) and choices else None
    error = getattr(first, "error", None) or (getattr(answer, "error", None) if first is None else None)
    if not error and getattr(first, "finish_reason", None) != "error":
        return None
    fields = error if isinstance(error, Mapping) else {}
    code = fields.get("code")
    text = str(fields.get("message") or error or "it says only that something went wrong")
    return code if isinstance(code, int) and not isinstance(code, bool) else None, text


def as_reply(answer: Any, *, latency: float) -> JudgeReply:
    """Whatever came back, read with care: servers that are nearly compatible leave fields out."""
    try:
        choice = answer.choices[0]
        content, finish = choice.message.content, choice.finish_reason
        refusal = getattr(choice.message, "refusal", None)
    except (AttributeError, IndexError, KeyError, TypeError):
        return JudgeReply(text="", reason="the endpoint's reply holds no message", latency=latency)
    usage = getattr(answer, "usage", None)
    used = [_tokens(getattr(usage, name, None)) for name in ("prompt_tokens", "completion_tokens")]
    # Half a count would make a call look cheaper than it was.
    prompt_tokens, completion_tokens = (0, 0) if None in used else (used[0] or 0, used[1] or 0)
    reason = f"the judge refused: {' '.join(str(refusal).split())[:100]}" if refusal else None
    if not isinstance(content, str) or finish == "content_filter":
        content, reason = None if reason else "", reason or f"no text (finish_reason {finish})"
    return JudgeReply(
        text=content,
        reason=reason,
        cut=finish == "length",
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        latency=latency,
    )
