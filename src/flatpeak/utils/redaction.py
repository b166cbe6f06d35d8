"""Secrets are kept out of everything a run writes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from flatpeak.errors import UserError

HIDDEN = "[redacted]"

_PATTERNS = re.compile(
    r"""hf_[A-Za-z0-9]{16,}          # Hugging Face
    |   sk-[A-Za-z0-9_-]{16,}        # OpenAI, Anthropic and the services that copy their layout
    |   gh[pousr]_[A-Za-z0-9]{20,}   # GitHub
    |   (?<=://)[^/\s:@]+:[^/\s@]+(?=@)  # user:password@ in a URL
    """,
    re.VERBOSE,
)
_SECRET_VARIABLE = re.compile(r"(^|_)(TOKEN|KEY|APIKEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)")
_SECRET_FIELD = re.compile(r"(^|_)(api_?key|secret|password|passwd|(access|auth|hf|bearer)_?token)$")
# Shorter values ("1", "true") are flags, and replacing them would mangle ordinary text.
_SHORTEST_SECRET = 8


def redact(value: Any) -> Any:
    """`value` (text, or any nesting of mappings and lists) with every secret in it replaced by `[redacted]`.

    A secret is the value of an environment variable named like one (HF_TOKEN, OPENAI_API_KEY), text shaped like a
    token (`hf_...`, `sk-...`, `user:password@` in a URL), or a text field named like one (`api_key`).
    """
    return _redact(value, _secrets_of_environment())


def _redact(value: Any, secrets: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return _PATTERNS.sub(HIDDEN, value)
    if isinstance(value, Mapping):
        return {
            _redact(key, secrets): HIDDEN
            if isinstance(key, str) and isinstance(item, str) and item and _SECRET_FIELD.search(key.lower())
            else _redact(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redact(item, secrets) for item in value]
    return value


def _secrets_of_environment() -> tuple[str, ...]:
    found = {
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST_SECRET and _SECRET_VARIABLE.search(name.upper())
    }
    # The longest first: a secret that contains another is replaced whole.
    return tuple(sorted(found, key=len, reverse=True))


NO_KEY: Final = "none"
"""Sent where no key is named: local servers want some text."""

_SHORTEST: Final = 6
_SHAPES: Final = re.compile(r"(?:sk-|hf_|gsk_|AIza|xai-)[A-Za-z0-9_*-]{12,}|(?i:bearer)\s+[A-Za-z0-9._~+/=*-]{8,}")


class Secret:
    """A key that prints as [redacted]."""

    def __init__(self, value: str) -> None:
        self._value = value

    @classmethod
    def from_environment(cls, variable: str | None) -> Secret:
        """The value of that variable; UserError if it is not set."""
        if variable is None:
            return cls(NO_KEY)
        value = os.environ.get(variable, "").strip()
        if not value:
            raise UserError(f"backend.api_key_env={variable}: set this environment variable to the endpoint's key")
        if not value.isascii() or not value.isprintable():
            raise UserError(f"backend.api_key_env={variable}: its value has characters that no key has")
        return cls(value)

    def reveal(self) -> str:
        """The key itself, for the client alone."""
        return self._value

    def scrub(self, text: str) -> str:
        """A text without the key, and without anything shaped like one."""
        if self._value != NO_KEY and len(self._value) >= _SHORTEST:
            text = text.replace(self._value, HIDDEN)
        return _SHAPES.sub(HIDDEN, text)

    def __repr__(self) -> str:
        return f"Secret({HIDDEN})"
