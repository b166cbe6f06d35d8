"""Prompts: the template around a question, the tokens of the result, and what happens to prompts that are too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, Final, Literal

from pydantic import Field, field_validator

from flatpeak.errors import UserError, check_characters, did_you_mean
from flatpeak.protocols import Tokenizer
from flatpeak.tasks.conversations import conversation_text
from flatpeak.tasks.long_texts import bounded_tokens, whole_up_to
from flatpeak.types import Example, Message, Prompt
from flatpeak.utils.control_tokens import TextEncoder, render_chat, unquote
from flatpeak.utils.schema import StrictConfig

PLACEHOLDER: Final = "{question}"
R1_ZERO: Final = (
    "What follows is a dialogue. A User poses a problem and an Assistant works it out: it reasons step by step first, "
    "and only then states its result. It writes the reasoning between <think> and </think> and the result between "
    "<answer> and </answer>, like this: <think> the reasoning </think> <answer> the result </answer>.\n"
    "User: {question}\n"
    "Assistant: <think>"
)
"""The protocol of DeepSeek-R1-Zero (arXiv 2501.12948, table 1): its roles, tags and order, with the opening tag of the
reasoning already written. The wording is flatpeak's; use a file for the published wording."""
TEXT_TEMPLATES: Final = {"plain": PLACEHOLDER, "question_only": PLACEHOLDER, "r1_zero": R1_ZERO}
CHAT: Final = "chat"
_CHAT_SETTINGS: Final = ("system", "user", "chat_template_kwargs")


class PromptConfig(StrictConfig):
    """The wording of prompts: the template around each question, and the limit of their length."""

    template: str = "plain"
    """plain, r1_zero, question_only, chat, the path of a text file that contains {question}, or such a text itself."""
    system: str | None = None
    """The system message of a chat template, for rows that bring none; null: none."""
    user: str = PLACEHOLDER
    """The user's message of a chat template: the text around {question}."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the tokenizer's chat template, such as enable_thinking: false. A template that writes today's date
    writes 2026-01-01 on every day, so that prompts do not change overnight."""
    max_tokens: int | None = None
    """Most tokens in a prompt, at most the model's context minus rollout.max_new_tokens; null: that maximum."""
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    """The treatment of prompts that are still too long after their worked examples are left out. error: raise an error.
    drop: leave them out and count them. truncate_left: cut off the beginning of the question (of a conversation, that
    of its last message), and keep the rest whole."""

    @field_validator("user")
    @classmethod
    def _has_a_question(cls, user: str) -> str:
        if PLACEHOLDER not in user:
            raise ValueError(f"prompt.user={user!r}: write {PLACEHOLDER} where the question belongs")
        return user

    def user_message(self, question: str) -> str:
        """The user's message that asks a question in a chat template."""
        return self.user.replace(PLACEHOLDER, question)


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts that fit the limit, and counts of those that did not."""

    prompts: tuple[Prompt, ...]
    """In the order of the examples."""
    dropped: int
    """The number of prompts left out because they are too long."""
    truncated: int
    """The number of prompts whose question was shortened."""
    fewer_shots: int = 0
    """The number of prompts that have fewer worked examples in order to fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wording:
    """A question inside its template, as text and as tokens."""

    text: str
    token_ids: tuple[int, ...]
    messages: tuple[Message, ...] | None = None
    ends_in_question: bool


_Word = Callable[[str, Sequence[Message]], _Wording]
"""A template, from a question and the chat messages before it to its wording."""


def build_prompts(
    examples: Sequence[Example], tokenizer: Tokenizer, config: PromptConfig, *, max_tokens: int
) -> PromptSet:
    """Word and tokenize the examples: preamble, shots and question replace `{question}` in the template.

    A prompt may have `max_tokens` tokens (what the context leaves after the completion), or `config.max_tokens` if that
    is less. If a prompt is longer, its last shots are dropped until it fits; `overlong` decides about prompts that are
    too long even without shots. UserError for an unusable template, an empty prompt, and, with `overlong=error`, for
    prompts that are too long.
    """
    _check_chat_template(tokenizer)
    limit = _token_limit(config, max_tokens)
    encoder = TextEncoder(tokenizer)
    in_chat = config.template == CHAT
    word = _chat_wording(encoder, config, limit) if in_chat else _text_wording(encoder, config, limit)
    prompts: list[Prompt] = []
    too_long: list[tuple[bool, int, str]] = []
    fewer_shots = 0
    interned: dict[int, int] = {}
    for example in examples:
        _check_example(example)
        wording, shots_left_out = _fit_shots(example, word, in_chat=in_chat, limit=limit)
        if not wording.token_ids:
            raise UserError(
                f"example {example.id!r} makes an empty prompt: give it a question, or use a prompt.template"
            )
        if len(wording.token_ids) > limit:
            too_long.append((len(wording.text) > whole_up_to(limit), len(wording.token_ids), example.id))
            if config.overlong != "truncate_left":
                continue
            wording = _shorten_question(example, word, in_chat=in_chat, limit=limit)
        fewer_shots += shots_left_out > 0
        prompts.append(
            Prompt(
                id=example.id,
                # One int object per token id: thousands of long prompts would otherwise hold millions of equal objects.
                token_ids=tuple(interned.setdefault(token, token) for token in wording.token_ids),
                text=wording.text,
                example=example,
                messages=wording.messages,
                ends_in_question=wording.ends_in_question,
            )
        )
    if too_long and (config.overlong == "error" or not prompts):
        raise UserError(_overlong_message(too_long, config, total=len(examples), limit=limit))
    truncated = len(too_long) if config.overlong == "truncate_left" else 0
    return PromptSet(
        prompts=tuple(prompts), dropped=len(too_long) - truncated, truncated=truncated, fewer_shots=fewer_shots
    )


def _check_example(example: Example) -> None:
    """Raise UserError for texts that no tokenizer accepts."""
    check_characters(example.question, where=f"the question of example {example.id!a}")
    check_characters(example.rationale or "", where=f"the rationale of example {example.id!a}")
    context = "".join((example.preamble, *example.shots))
    check_characters(context, where=f"the preamble or shots of example {example.id!a}")


def _check_chat_template(tokenizer: Tokenizer) -> None:
    """Raise UserError for a chat template that a checkpoint could not store, even if prompts do not use it."""
    templates = getattr(tokenizer, "chat_template", None)  # a caller's tokenizer may lack this attribute
    for name, text in templates.items() if isinstance(templates, Mapping) else [("chat_template", templates)]:
        if isinstance(text, str):
            check_characters(text, where=f"the tokenizer's chat template ({name})")


def prompt_texts(examples: Sequence[Example], config: PromptConfig) -> list[str]:
    """The worded questions as text, then each distinct preamble and shot: the corpus of a new tokenizer."""
    if config.template == CHAT:
        raise UserError(
            "prompt.template=chat needs a tokenizer with a chat template, which a new model (model.new) lacks"
        )
    for example in examples:
        _check_example(example)
    template = template_text(config.template)
    contexts = dict.fromkeys(text for example in examples for text in (example.preamble, *example.shots) if text)
    return [*(template.replace(PLACEHOLDER, example.question) for example in examples), *contexts]


def word_messages(
    encoder: TextEncoder, messages: Sequence[Message], config: PromptConfig
) -> tuple[str, tuple[int, ...]]:
    """A conversation in the tokenizer's chat template, up to and including the header of the assistant's turn, as text
    and as token ids.

    The contents of `messages` count as part of the template, except for texts quoted in them. UserError if the template
    cannot be used.
    """
    text = _render(encoder.tokenizer, messages, config)
    # The template has already written every special token into the text, including the beginning of the sequence.
    return unquote(text), tuple(encoder.encode(text))


def _render(tokenizer: Tokenizer, messages: Sequence[Message], config: PromptConfig) -> str:
    """The quoted text of a conversation in the chat template. UserError if the template cannot be used."""
    if not tokenizer.chat_template:
        raise UserError(
            "prompt.template=chat: this tokenizer has no chat template; use prompt.template=r1_zero, plain or a file, "
            "or an instruction-tuned model"
        )
    for key in ("tokenize", "add_generation_prompt"):
        if key in config.chat_template_kwargs:
            raise UserError(f"prompt.chat_template_kwargs.{key} is not a choice here: remove it")
    try:
        return render_chat(tokenizer, messages, **config.chat_template_kwargs, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything, not only jinja2's errors
        raise UserError(
            f"prompt.template=chat: the chat template refuses the messages ({error}); remove prompt.system or "
            "change prompt.chat_template_kwargs"
        ) from error


def _text_wording(encoder: TextEncoder, config: PromptConfig, limit: int) -> _Word:
    """The wording that inserts the question into a text template."""
    for key in _CHAT_SETTINGS:
        if getattr(config, key) != getattr(PromptConfig(), key):
            raise UserError(f"prompt.{key} needs a chat template: set prompt.template=chat, or remove prompt.{key}")
    template = template_text(config.template)
    ends_in_question = template.rstrip().endswith(PLACEHOLDER)

    def word(question: str, before: Sequence[Message]) -> _Wording:
        # Not str.format: other braces in the template (LaTeX, JSON) are text.
        text = template.replace(PLACEHOLDER, encoder.quote(question))
        token_ids = bounded_tokens(text, limit, encode=partial(_encode, encoder))
        return _Wording(text=unquote(text), token_ids=token_ids, ends_in_question=ends_in_question)

    return word


def template_text(name: str) -> str:
    """The text of a template other than `chat`; UserError for a file that is missing or lacks {question}."""
    if name in TEXT_TEMPLATES:
        return TEXT_TEMPLATES[name]
    if PLACEHOLDER in name:
        return name
    names = (*TEXT_TEMPLATES, CHAT)
    file = Path(name).expanduser()
    if not file.is_file():
        raise UserError(
            f"prompt.template={name}: neither a file nor one of {', '.join(names)}{did_you_mean(name, names)}"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"prompt.template={name}: not UTF-8 text; save the file as UTF-8") from error
    if PLACEHOLDER not in text:
        raise UserError(f"prompt.template={name}: no {PLACEHOLDER} in the file; write it where the question belongs")
    # Editors end a file with a line break that is not part of the prompt; a second line break is.
    return text.removesuffix("\n")


def _encode(encoder: TextEncoder, text: str) -> list[int]:
    """Token ids, with a beginning-of-sequence token if the tokenizer has one, without an appended end token."""
    ids = encoder.encode(text, add_special_tokens=True)
    if len(ids) > 1 and ids[0] == ids[1] == getattr(encoder.tokenizer, "bos_token_id", None):
        ids = ids[1:]  # the template has written it
    if ids and ids[-1] == encoder.tokenizer.eos_token_id:
        bare = encoder.encode(text)
        if ids[len(ids) - 1 - len(bare) : -1] == bare:
            return ids[:-1]
    return ids


def _chat_wording(encoder: TextEncoder, config: PromptConfig, limit: int) -> _Word:
    """The wording that inserts the question into the tokenizer's chat template, as the user's message."""
    system: tuple[Message, ...] = () if config.system is None else ({"role": "system", "content": config.system},)
    # Fails early if the template is unusable.
    sample, _ = word_messages(encoder, (*system, {"role": "user", "content": "?"}), config)

    def word(question: str, before: Sequence[Message]) -> _Wording:
        own_system = () if before and before[0]["role"] == "system" else system
        asked, quoted = (
            (
                *own_system,
                *({"role": turn["role"], "content": quote(turn["content"])} for turn in before),
                {"role": "user", "content": config.user_message(quote(question))},
            )
            for quote in (str, encoder.quote)
        )
        text = _render(encoder.tokenizer, quoted, config)
        return _Wording(
            text=unquote(text),
            token_ids=bounded_tokens(text, limit, encode=encoder.encode),
            messages=asked,
            ends_in_question=sample.rstrip().endswith("?"),
        )

    return word


def _token_limit(config: PromptConfig, max_tokens: int) -> int:
    """The most tokens that a prompt may have. UserError if there is no room for any."""
    if config.max_tokens is not None and config.max_tokens < 1:
        raise UserError(f"prompt.max_tokens={config.max_tokens}: a prompt has at least 1 token; raise it")
    if max_tokens < 1:
        raise UserError(
            "completions leave no room for a prompt in the model's context: lower rollout.max_new_tokens, or take a "
            "model with a longer context"
        )
    return max_tokens if config.max_tokens is None else min(max_tokens, config.max_tokens)


def _question(example: Example, *, in_chat: bool) -> tuple[str, Sequence[Message]]:
    """The text to ask, and the messages before it: a chat template gets a conversation as it is, others as one text."""
    if in_chat and example.messages:
        return example.messages[-1]["content"], example.messages[:-1]
    return conversation_text(example.messages) if example.messages else example.question, ()


def _fit_shots(example: Example, word: _Word, *, in_chat: bool, limit: int) -> tuple[_Wording, int]:
    """The wording with as many of the first shots as fit, and the number left out."""
    question, before = _question(example, in_chat=in_chat)
    for kept in range(len(example.shots), -1, -1):
        wording = word("".join((example.preamble, *example.shots[:kept], question)), before)
        if len(wording.token_ids) <= limit:
            break
    return wording, len(example.shots) - kept


def _shorten_question(example: Example, word: _Word, *, in_chat: bool, limit: int) -> _Wording:
    """The wording without shots and with the longest suffix of the question that fits, by bisection over its start."""
    preamble = example.preamble
    question, before = _question(example, in_chat=in_chat)
    too_early, start = 0, len(question) - 1
    best = word(preamble + question[start:], before)
    if len(best.token_ids) > limit:
        raise UserError(
            f"example {example.id!r}: with one character of the question left the prompt has {len(best.token_ids)} "
            f"tokens, and {limit} fit; use a shorter prompt.template, raise prompt.max_tokens or lower "
            "rollout.max_new_tokens"
        )
    while start - too_early > 1:
        middle = (too_early + start) // 2
        wording = word(preamble + question[middle:], before)
        if len(wording.token_ids) <= limit:
            start, best = middle, wording
        else:
            too_early = middle
    return best


def _overlong_message(
    too_long: Sequence[tuple[bool, int, str]], config: PromptConfig, *, total: int, limit: int
) -> str:
    """The error about prompts that are too long, given for each whether `tokens` is a bound, tokens, and its id."""
    is_bound, tokens, example_id = max(too_long)
    choices = "prompt.overlong=truncate_left" if config.overlong == "drop" else "prompt.overlong=drop or truncate_left"
    has = "has at least" if is_bound else "has"
    room = "a larger prompt.max_tokens" if config.max_tokens == limit else "a smaller rollout.max_new_tokens"
    return (
        f"{len(too_long)} of {total} prompts exceed {limit} tokens (the longest {has} {tokens}, example "
        f"{example_id!r}): set {choices}, or {room}"
    )


def field_names(template: str, *, option: str) -> tuple[str, ...]:
    """The names between braces, in order. UserError if braces are unbalanced or empty."""
    try:
        fields = [(name, conversion) for _, name, _, conversion in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise UserError(f"{option}={template!r}: {error}; write {{{{ or }}}} for a brace in the text") from error
    for name, conversion in fields:
        if not name or conversion:
            raise UserError(f"{option}={template!r}: fields look like {{name}}, write {{{{ or }}}} for a brace")
    return tuple(name for name, _ in fields)


def check_fields(template: str, *, allowed: Iterable[str], required: Iterable[str] = (), option: str) -> None:
    """Check that every field of a template is allowed and every required field is present; UserError otherwise."""
    names = field_names(template, option=option)
    allowed = tuple(allowed)
    listed = ", ".join(f"{{{name}}}" for name in allowed)
    for name in names:
        if name not in allowed:
            raise UserError(
                f"{option}={template!r}: unknown field {{{name}}}{did_you_mean(name, allowed)}; use {listed}"
            )
    for name in required:
        if name not in names:
            raise UserError(
                f"{option}={template!r}: {{{name}}} is missing; without it two problems would read the same"
            )


def fill(template: str, values: Mapping[str, object], *, option: str) -> str:
    """The template with every field replaced by its value. A name with dots is one key instead of an attribute path."""
    pieces = []
    for literal, name, spec, _ in Formatter().parse(template):
        pieces.append(literal)
        if name is not None:
            try:
                pieces.append(format(values[name], spec or ""))
            except ValueError as error:
                raise UserError(f"{option}={template!r}: field {{{name}:{spec}}}: {error}") from error
    return "".join(pieces)
