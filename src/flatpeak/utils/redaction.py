"""Redaction of secrets: keeps API keys, tokens and passwords out of everything that a run writes or prints."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from flatpeak.errors import UserError

HIDDEN: Final = "[redacted]"
NO_KEY: Final = "none"
"""The key of a request without a key, because local servers require some text."""
# Rollouts are redacted too, so ordinary words ("task-oriented-dialog", "a bearer instrument") must not look like keys.
_PATTERNS: Final = re.compile(
    r"""(?<=://)[^/\s:@"']*:[^/\s@"']+(?=@)            # user:password@ in a URL; first, for a user shaped like a token
    |   (?<=://)(?=[A-Za-z_-]*[0-9])[\w-]{16,}(?=@)     # token@
    |   (?:(?<![a-z])|(?<=%[0-9a-f]{2}))               # never starts inside a word, except after a percent-escape
        (?:(?:sk-|gsk_|AIza|xai-|nvapi-)[A-Za-z0-9_*-]{12,}  # OpenAI, Anthropic, Groq, Google, xAI, NVIDIA
        |hf_[A-Za-z0-9*]{16,})                         # Hugging Face; no name in code, such as hf_hub_download
    |   (?<![A-Za-z])[sr]k_(?:live|test)_[A-Za-z0-9]{12,}  # Stripe
    |   (?<![A-Za-z0-9_-])(?:r8|fw|tgp|jina|npm|pplx)[_-](?=[A-Za-z_-]*[0-9])[\w-]{24,}  # Replicate, Fireworks, ...
    |   gh[pousr]_[A-Za-z0-9]{20,}                     # GitHub
    |   github_pat_[A-Za-z0-9_]{20,}                   # GitHub, fine-grained
    |   glpat-[A-Za-z0-9_-]{12,}                       # GitLab
    |   (?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])  # Amazon
    |   xox[a-z]-[A-Za-z0-9-]{10,}                     # Slack
    |   (?:(?<![\w-])|(?<=%[0-9a-f]{2}))eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?  # a JSON Web Token
    |   -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----(?:(?!-----END)[A-Za-z0-9+/=\s\\:,-])*
        (?:-----END\ [A-Z ]*PRIVATE\ KEY-----)?
    |   (?<=hooks\.slack\.com/services/)[A-Za-z0-9/]+   # incoming webhooks, whose address is the key
    |   (?<=/api/webhooks/)[0-9]+/[A-Za-z0-9._-]+      # Discord
    |   (?i:bearer)\s+(?=\S*[0-9*=])(?=[^A-Za-z*\s]*[A-Za-z*])[A-Za-z0-9._~+/=*-]{8,}  # an Authorization header
    """,
    re.VERBOSE,
)
_SECRET_VARIABLE: Final = re.compile(
    r"(^|_)(TOKEN|KEY|APIKEY|SECRET|(PG)?PASSWORD|PASSWD|PASSPHRASE|PAT|CREDENTIALS?|WEBHOOK|COOKIE|DSN|AUTHORIZATION"
    r"|CONNECTION_STRING)(_(?!PATH$|FILE$|DIR$|DIRECTORY$)|$)|_PASS$"
)
_WORD_BOUNDARY: Final = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SECRET_NAME: Final = re.compile(
    r"""(?:^|_)(?:
        (?:api|access|private|secret|session|signing|encryption|master|account|service|subscription|auth|ssh|deploy
          |openai|anthropic|wandb|hf|azure|aws|gemini|openrouter|mistral|judge|endpoint|server)_?keys?
    |   (?:api|access|auth|hf|hub|bearer|refresh|session|security|personal|bot)_?tokens?
    |   token | pat | secrets? | pass(?:word|wd|phrase|code)s? | (?:db|user|smtp|api|admin|root)_?pass
    |   pgpassword | pwd | credentials? | creds
    |   webhooks?(?:_ur[il])? | cookies? | auth | authorization | bearer | jwt | dsn | conn(?:ection)?_?str(?:ing)?
    )$""",
    re.VERBOSE,
)
"""The end of a secret's name, as `_spelled` gives it; includes `token` alone, but not `max_tokens`."""
_SPECIAL_TOKEN: Final = re.compile(
    r"(?:^|_)(?:eos|bos|pad|unk|sep|cls|mask|stop|start|end|begin|special|think|answer|image|first|last|next|new"
    r"|target|tool|design|prefix|suffix|middle)_token$"
)
_QUERY_NAMES: Final = frozenset({"key", "sig", "signature", "x_amz_signature", "x_amz_credential"})
"""More names of secrets in the query of a URL."""
_NAMED: Final = re.compile(
    r"""(?<![\w.-])(?:(?P<option>--)|(?P<pair>(?<=\(["'])|(?<=\(b["']))|-)?
        (?P<name>(?i:api|access)[ ](?i:key)|[A-Za-z_][\w.-]*+)(?:[ ]provided)?\\*+["']?
        (?:\s*+(?::\s*str\s*=|[:=]>?)\s*+(?:[|>][+-]?\n\s*+)?
          |(?(option)\s++|(?(pair)(?<=["']),\s*+(?=b?["'])|(?!))))""",
    re.VERBOSE,
)
"""A name in a text, up to its value: in a mapping in YAML, JSON or Python, in a pair such as a header, in a command, or
in a URL's query."""
_VALUE: Final = re.compile(
    r"""(?:[bfr](?=["']))?(?P<quote>\\["']|\"{3}|'{3}|["']|)
        (?P<content>(?<=\\["'])[^"'\\]{0,2000}|(?<=")(?:[^"\\]|\\.){0,2000}|(?<=')(?:[^'\\]|\\.){0,2000}
                   |(?:(?i:basic|bearer|token|api-?key|digest)\s+)?[^\s,;&}\])"'<>({\[\\]{1,2000})""",
    re.VERBOSE,
)
"""A value in a text; its length is bounded, because a text may contain any number of values."""
_VALUE_IN_COMMAND: Final = re.compile(
    r"""(?P<quote>)(?P<content>"[^"]*"|'[^']*'|\{[^{}]*\}|\[[^\[\]]*\]|[^\s,}\]"'{\[][^,}\]]*)"""
)
HIDDEN_DIRECTORY: Final = "path/to"
"""Replaces the directories of a local path."""
_ABSOLUTE: Final = re.compile(r"(?:/[^/\s]+|~[^/\s]*)(?:/[^/]+)+/?")
"""An absolute path of two levels or more, or starting at a home directory; its first level has no space."""
_LONGEST_PATH: Final = 4096
"""The most characters of a text that may be a path."""
_DIGIT: Final = re.compile(r"\d")
_TRUTH: Final = re.compile(r"(?i:true|false|none|null)")
_NUMBER: Final = re.compile(rf"[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?[.%]?|{_TRUTH.pattern}")
_SHORTEST_VARIABLE: Final = 8
"""Characters from which a value is a secret anywhere: shorter values ("1", "true") are ordinary text."""
_LONGEST_WORD: Final = 12
"""Characters from which a recipe's secret is a secret anywhere even without a digit."""
_SHORTEST_KEY: Final = 6
"""Characters from which an endpoint's key is a secret."""

_recipe_secrets: set[str] = set()
"""The secrets of the recipes that this process has run. They are hidden like those of its environment."""


def redact(value: Any, *, secrets: Sequence[str] = (), prose: bool = False) -> Any:
    """Replace every secret in `value` (text, or any nesting of mappings and lists) by `[redacted]`.

    Secrets are the given ones, the values of environment variables with names like HF_TOKEN or OPENAI_API_KEY, text
    shaped like a token (`hf_...`, `sk-...`, `Bearer ...`, `user:password@` in a URL), values under a key such as
    `api_key` or `accessToken`, and text after such a name. In `prose`, such as a model's answer, text after a name must
    also look like a key, even if there is no other text: an answer may be `Secret: 24`.
    """
    # The longest first, so that a secret that contains another is replaced whole.
    known = sorted({*secrets, *_recipe_secrets, *_environment_secrets()}, key=len, reverse=True)
    return _redact(value, known, prose)


def hide_secrets_of(recipe: Mapping[str, Any]) -> None:
    """Let `redact` hide a recipe's secrets everywhere from now on, for example in an error's text or a print.

    Short words stay, because they would be hidden in ordinary text too.
    """
    spellings = (spelling for text in _texts_of_secrets(recipe) for spelling in _spellings(text))
    _recipe_secrets.update(spelling for spelling in spellings if _is_distinctive(spelling))


def _texts_of_secrets(value: Any, *, named: bool = False) -> Iterator[str]:
    if isinstance(value, str | int) and named:
        yield str(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts_of_secrets(item, named=named or is_secret(key, item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_of_secrets(item, named=named)


def _spellings(text: str) -> Iterator[str]:
    """A secret as it is, as written in Python, JSON and a URL, and line by line."""
    yield from (text, repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
    yield from (quote(text), quote(text, safe=""))
    yield from text.splitlines()


def _is_distinctive(text: str) -> bool:
    return len(text) >= _LONGEST_WORD or _looks_like_a_key(text)


def _is_word(text: str) -> bool:
    """Whether a text may be an ordinary word, such as `password`, or `EMPTY` as the key of a server without keys."""
    return len(text) < _LONGEST_WORD and text.isalpha() and (text.islower() or text.isupper() or text.istitle())


def _redact(value: Any, secrets: Sequence[str], prose: bool) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return _redact_entries(_PATTERNS.sub(HIDDEN, value), prose)
    if isinstance(value, Mapping):
        return {
            _redact(key, secrets, prose): _hide(item) if is_secret(key, item) else _redact(item, secrets, prose)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redact(item, secrets, prose) for item in value]
    return value


def is_secret(name: object, value: Any) -> bool:
    """Whether a value is a secret by its name, in any spelling (`api_key`, `apiKey`, `X-API-Key`).

    The markers of a tokenizer and the patterns of an expression are not secrets, and neither is a number under `token`.
    """
    if not isinstance(name, str) or isinstance(value, bool) or not value:
        return False
    spelled = _spelled(name)
    if not _SECRET_NAME.search(spelled) or _SPECIAL_TOKEN.search(spelled):
        return False
    if isinstance(value, Mapping):
        return "type" not in value and "settings" not in value  # a reward of that name, or an arm of a sweep
    if not spelled.endswith(("token", "pat")):
        return True
    if isinstance(value, list | tuple):
        return any(isinstance(item, str) for item in value)
    return isinstance(value, str) and value[0] not in "<[" and "\\" not in value


def _may_name_a_secret(spelled: str) -> bool:
    return spelled in _QUERY_NAMES or bool(_SECRET_NAME.search(spelled))


def _spelled(name: str) -> str:
    """The words of a name in lower case, joined by underscores, without a number, `value` or `pem` at its end."""
    spelled = "_".join(filter(None, _WORD_BOUNDARY.split(name))).lower().rstrip("_0123456789")
    return spelled.removesuffix("_value").removesuffix("_pem")


def _hide(value: Any) -> Any:
    """`[redacted]` in place of a value, or of every value in a mapping or list."""
    if isinstance(value, Mapping):
        return {key: _hide(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(item) for item in value]
    return value if value is None or isinstance(value, bool) or value == "" else HIDDEN


def _redact_entries(text: str, prose: bool) -> str:
    """The text without the values after names of secrets, if these values look like keys.

    In a text that is a single entry, such as a header or a variable, any value counts, unless the text is prose.
    """

    def is_hidden(name: re.Match[str], value: re.Match[str]) -> bool:
        content = value["content"]
        in_query = text[max(0, name.start() - 1)] in "?&"
        is_named = is_secret(name["name"], content) or (in_query and _spelled(name["name"]) in _QUERY_NAMES)
        is_named = is_named and (bool(value["quote"]) or not _is_plain(name["name"], content, prose=prose))
        is_whole = not prose and name.start() == 0 and value.end() + len(value["quote"]) == len(text)
        return is_named and (is_whole or in_query or _looks_like_a_key(content))

    return _replace_values(text, _VALUE, is_hidden)


def _is_plain(name: str, value: str, *, prose: bool = False) -> bool:
    """Whether an unquoted value is a truth value, or a number after `token` or in prose: `is_secret` checks texts."""
    numbers = prose or _spelled(name).endswith("token")
    return bool((_NUMBER if numbers else _TRUTH).fullmatch(value))


def _looks_like_a_key(value: str) -> bool:
    """Whether a value is one long word with a digit, unlike the words after `token = ` or `Password: ` in prose."""
    return len(value) >= _SHORTEST_VARIABLE and bool(_DIGIT.search(value))


def _replace_values(
    text: str, pattern: re.Pattern[str], is_hidden: Callable[[re.Match[str], re.Match[str]], bool]
) -> str:
    """The text with `[redacted]` in place of hidden values, which a pattern matches after their names."""
    pieces, end = [], 0
    for name in _NAMED.finditer(text):
        if name.start() < end or not _may_name_a_secret(_spelled(name["name"])):
            continue
        value = pattern.match(text, name.end())
        if value is not None and value["content"] != HIDDEN and is_hidden(name, value):
            pieces += [text[end : value.start("content")], HIDDEN]
            end = value.end()
    return "".join([*pieces, text[end:]])


def redact_command(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without the values of settings that `redact` hides in a recipe.

    Both `rewards.f.arguments.api_key=VALUE` and `rewards.f={arguments: {api_key: VALUE}}` are settings of this kind.
    """
    return [_redact_argument(argument) for argument in arguments]


def _redact_argument(argument: str) -> str:
    def is_hidden(name: str, value: str) -> bool:
        return is_secret(name, value) and not _is_plain(name, value)

    name, equals, value = argument.partition("=")
    if equals and is_hidden(name, value):
        return f"{name}={HIDDEN}"
    return _replace_values(argument, _VALUE_IN_COMMAND, lambda name, value: is_hidden(name["name"], value["content"]))


def is_key(value: str) -> bool:
    """Whether an endpoint's key is a real key: `none`, `EMPTY` or `dummy` would be hidden in ordinary text."""
    return len(value) >= _SHORTEST_KEY and not _is_word(value)


def _environment_secrets() -> set[str]:
    return {
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST_VARIABLE and not _is_word(value) and _SECRET_VARIABLE.search(name.upper())
    }


def local_roots(*directories: Path) -> list[str]:
    """The absolute paths of these directories, the working and the home directory, the longest first."""
    paths = {one for path in (*directories, Path.cwd(), Path.home()) for one in (path.absolute(), path.resolve())}
    return sorted((str(path) for path in paths if len(path.parts) > 1), key=len, reverse=True)


def without_local_paths(value: Any, roots: Iterable[str]) -> Any:
    """Replace every absolute path in `value` (text, or any nesting of mappings and lists).

    A text that is a path as a whole, such as a setting, becomes `path/to/NAME`; within a text, each of `roots` (the
    longest first, as `local_roots` returns them) becomes `path/to`.
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
    """Whether a whole text is an absolute path, by its form or because it exists."""
    other = any(character in text for character in "\n\0{")  # such as a template
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
        """The key itself, only for the client."""
        return self._value

    def scrub(self, text: str) -> str:
        """Redact the key, and every other secret, in a text."""
        redacted: str = redact(text, secrets=(self._value,) if is_key(self._value) else ())
        return redacted

    def __repr__(self) -> str:
        return f"Secret({HIDDEN})"
