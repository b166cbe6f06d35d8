"""Redaction of secrets: API keys, tokens and passwords stay out of everything that a run writes or prints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flatpeak.errors import UserError

HIDDEN: Final = "[redacted]"
NO_KEY: Final = "none"
"""The key of a request that names none: local servers want some text."""
# Rollouts are redacted too, so ordinary words ("task-oriented-dialog", "a bearer instrument") must not look like keys.
_PATTERNS: Final = re.compile(
    r"""(?<=://)[^/\s:@]+:[^/\s@]+(?=@)                # user:password@ in a URL; first, for a user shaped like a token
    |   (?:(?<![a-z])|(?<=%[0-9a-f]{2}))               # within a word none begins, but for a percent-escape before it
        (?:sk-|hf_|gsk_|AIza|xai-)[A-Za-z0-9_*-]{12,}  # OpenAI, Anthropic, Hugging Face, Groq, Google, xAI; starred out
    |   gh[pousr]_[A-Za-z0-9]{20,}                     # GitHub
    |   github_pat_[A-Za-z0-9_]{20,}                   # GitHub, fine-grained
    |   (?<=hooks\.slack\.com/services/)[A-Za-z0-9/]+   # incoming webhooks, whose address is the key
    |   (?<=/api/webhooks/)[0-9]+/[A-Za-z0-9._-]+      # Discord
    |   (?i:bearer)\s+(?=\S*[0-9*=])[A-Za-z0-9._~+/=*-]{8,}  # an Authorization header
    """,
    re.VERBOSE,
)
_SECRET_VARIABLE: Final = re.compile(r"(^|_)(TOKEN|KEY|APIKEY|SECRET|PASSWORD|PASSWD|PAT|CREDENTIALS?)(_|$)")
_SECRET_FIELD: Final = re.compile(r"(^|_)(api_?key|secret|password|passwd|(access|auth|hf|bearer)_?token)$")
_SECRET_ENTRY: Final = re.compile(
    r"""(?i)((?<![a-z])(?:\w+_)?(?:api_?key|secret|password|passwd|(?:access|auth|hf|bearer)_?token)["']?\s*:\s*)
        ("[^"]*"|'[^']*'|[^\s,}\]"'][^,}\]]*)""",
    re.VERBOSE,
)
"""An entry of a YAML or JSON mapping within a text whose key is that of a secret."""
HIDDEN_DIRECTORY: Final = "path/to"
"""The replacement for the directories of a local path."""
_ABSOLUTE: Final = re.compile(r"(?:/[^/\s]+|~[^/\s]*)(?:/[^/]+)+/?")
"""An absolute path of two levels or more, or one that begins with a home directory; its first level has no space."""
_LONGEST_PATH: Final = 4096
"""Characters of the longest text that may be a path."""
_SHORTEST_VARIABLE: Final = 8
"""Characters of a variable's value that make it a secret: shorter ones ("1", "true") are flags and ordinary text."""
_SHORTEST_KEY: Final = 6
"""Characters of an endpoint's key that make it a secret."""


def redact(value: Any, *, secrets: Sequence[str] = ()) -> Any:
    """Replace every secret in `value` (text, or any nesting of mappings and lists) by `[redacted]`.

    Secrets are those given, the values of environment variables with names like HF_TOKEN or OPENAI_API_KEY, text
    shaped like a token (`hf_...`, `sk-...`, `Bearer ...`, `user:password@` in a URL), and texts under a key such as
    `api_key`.
    """
    # The longest first: a secret that contains another is replaced whole.
    known = sorted({*secrets, *_environment_secrets()}, key=len, reverse=True)
    return _redact(value, known)


def _redact(value: Any, secrets: Sequence[str]) -> Any:
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


def redact_command(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without the values of settings that `redact` hides in a recipe.

    Both `rewards.f.arguments.api_key=VALUE` and `rewards.f={arguments: {api_key: VALUE}}` are settings of this kind.
    """
    hidden = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = equals and _SECRET_FIELD.search(name.rpartition(".")[2].lower())
        hidden.append(f"{name}={HIDDEN}" if is_secret else _SECRET_ENTRY.sub(rf"\g<1>{HIDDEN}", argument))
    return hidden


def _environment_secrets() -> set[str]:
    return {
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST_VARIABLE and _SECRET_VARIABLE.search(name.upper())
    }


def local_roots(*directories: Path) -> list[str]:
    """The absolute paths of these directories, the working and the home directory, the longest first."""
    paths = {one for path in (*directories, Path.cwd(), Path.home()) for one in (path.absolute(), path.resolve())}
    return sorted((str(path) for path in paths if len(path.parts) > 1), key=len, reverse=True)


def without_local_paths(value: Any, roots: Iterable[str]) -> Any:
    """Replace every absolute path in `value` (text, or any nesting of mappings and lists).

    A text that is a path as a whole, such as a setting, becomes `path/to/NAME`; within a text, each of `roots` (the
    longest first, as `local_roots` gives them) becomes `path/to`.
    """
    if isinstance(value, str):
        if _is_absolute(value):
            return f"{HIDDEN_DIRECTORY}/{Path(value).name}"
        for root in roots:
            value = re.sub(rf"(?<![\w.-]){re.escape(root)}(?![\w-])", HIDDEN_DIRECTORY, value)
        return value
    if isinstance(value, Mapping):
        return {key: without_local_paths(item, roots) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_local_paths(item, roots) for item in value]
    return value


def _is_absolute(text: str) -> bool:
    """Whether a whole text is an absolute path: by its form, or because it is there."""
    other = any(character in text for character in "\n\0{")  # a template, say
    if not text.startswith(("/", "~")) or other or len(text) > _LONGEST_PATH:
        return False
    try:
        path = Path(text).expanduser()
        return bool(_ABSOLUTE.fullmatch(text)) or (len(path.parts) > 1 and path.exists())
    except (OSError, RuntimeError):  # no such user, or a name that is too long
        return False


class Secret:
    """An API key that prints as `[redacted]`."""

    def __init__(self, value: str) -> None:
        self._value = value

    @classmethod
    def from_environment(cls, variable: str | None, *, where: str = "backend.api_key_env") -> Secret:
        """Read the key from a variable, which the setting `where` names; UserError if it is not set."""
        if variable is None:
            return cls(NO_KEY)
        value = os.environ.get(variable, "").strip()
        if not value:
            raise UserError(f"{where}={variable}: set this environment variable to the endpoint's key")
        if not value.isascii() or not value.isprintable():
            raise UserError(f"{where}={variable}: its value has characters that no key has")
        return cls(value)

    def reveal(self) -> str:
        """The key itself, for the client alone."""
        return self._value

    def scrub(self, text: str) -> str:
        """Redact the key, and every other secret, in a text."""
        is_key = self._value != NO_KEY and len(self._value) >= _SHORTEST_KEY
        redacted: str = redact(text, secrets=(self._value,) if is_key else ())
        return redacted

    def __repr__(self) -> str:
        return f"Secret({HIDDEN})"
