"""How a question becomes the tokens that the model continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from jinja2.exceptions import TemplateError

from flatpeak.errors import UserError, did_you_mean
from flatpeak.protocols import Tokenizer
from flatpeak.tasks.config import PromptConfig
from flatpeak.types import Example, Message, Prompt


def field_names(template: str, *, option: str) -> tuple[str, ...]:
    """The names between braces, in order. UserError where braces do not pair up or nothing stands between them."""
    try:
        parts = [(name, conversion) for _, name, _, conversion in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise UserError(f"{option}={template!r}: {error}; write {{{{ or }}}} for a brace in the text") from error
    for name, conversion in parts:
        if not name or conversion:
            raise UserError(f"{option}={template!r}: fields look like {{name}}, write {{{{ or }}}} for a brace")
    return tuple(name for name, _ in parts)


def check_fields(template: str, *, allowed: Iterable[str], required: Iterable[str] = (), option: str) -> None:
    """UserError unless every field of the template is allowed and every required one is there."""
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
    """The template with every field replaced by its value; a field's name is looked up whole, dots and all."""
    pieces = []
    for literal, name, spec, _ in Formatter().parse(template):
        pieces.append(literal)
        if name is not None:
            try:
                pieces.append(format(values[name], spec or ""))
            except ValueError as error:
                raise UserError(f"{option}={template!r}: field {{{name}:{spec}}}: {error}") from error
    return "".join(pieces)


PLACEHOLDER = "{question}"
R1_ZERO = (
    "What follows is a dialogue. A User poses a problem and an Assistant works it out: it reasons step by step first, "
    "and only then states its result. It writes the reasoning between <think> and </think> and the result between "
    "<answer> and </answer>, like this: <think> the reasoning </think> <answer> the result </answer>.\n"
    "User: {question}\n"
    "Assistant: <think>"
)
"""The protocol of DeepSeek-R1-Zero (arXiv 2501.12948, table 1): its roles, tags and order, with the opening tag of the
reasoning already written. The wording is flatpeak's; a published one can be given as a file."""
TEXT_TEMPLATES = {"plain": PLACEHOLDER, "question_only": PLACEHOLDER, "r1_zero": R1_ZERO}
CHAT = "chat"


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts that fit, and what was done to those that did not."""

    prompts: tuple[Prompt, ...]
    """In the order of the examples."""
    dropped: int
    """How many were left out as too long."""
    truncated: int
    """How many had their question shortened."""
    fewer_shots: int = 0
    """How many of the prompts had worked examples left out so that they fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wording:
    text: str
    token_ids: tuple[int, ...]
    messages: tuple[Message, ...] | None = None


_Word = Callable[[str], _Wording]


def build_prompts(
    examples: Sequence[Example], tokenizer: Tokenizer, config: PromptConfig, *, max_tokens: int
) -> PromptSet:
    """Word and tokenize the examples: preamble, shots and question stand where the template has `{question}`.

    A prompt may have `max_tokens` tokens (what the context leaves beside the completion), or `config.max_tokens` where
    that is less. Of a longer one, shots are left out from the last on until it fits; `overlong` decides on those that
    are too long without any. UserError for a template that cannot be used, an empty prompt, and, with
    `overlong=error`, for prompts that are too long.
    """
    limit = _longest(config, max_tokens)
    word = _chat_wording(tokenizer, config) if config.template == CHAT else _text_wording(tokenizer, config)
    prompts: list[Prompt] = []
    too_long: list[int] = []
    fewer_shots = 0
    shared: dict[int, int] = {}
    for example in examples:
        wording, left_out = _fitted(example, word, limit=limit)
        if not wording.token_ids:
            raise UserError(
                f"example {example.id!r} makes an empty prompt: give it a question, or use a prompt.template"
            )
        if len(wording.token_ids) > limit:
            too_long.append(len(wording.token_ids))
            if config.overlong != "truncate_left":
                continue
            wording = _shortened(example, word, limit=limit)
        fewer_shots += left_out > 0
        prompts.append(
            Prompt(
                id=example.id,
                # One object per token id: thousands of long prompts would hold millions of equal ones.
                token_ids=tuple(shared.setdefault(token, token) for token in wording.token_ids),
                text=wording.text,
                example=example,
                messages=wording.messages,
            )
        )
    if too_long and (config.overlong == "error" or not prompts):
        raise UserError(_overlong(too_long, config, total=len(examples), limit=limit))
    truncated = len(too_long) if config.overlong == "truncate_left" else 0
    return PromptSet(
        prompts=tuple(prompts), dropped=len(too_long) - truncated, truncated=truncated, fewer_shots=fewer_shots
    )


def prompt_texts(examples: Sequence[Example], config: PromptConfig) -> list[str]:
    """The worded questions as text alone, which a new tokenizer is built from; then every preamble and shot, once."""
    if config.template == CHAT:
        raise UserError(
            "prompt.template=chat needs a tokenizer with a chat template, which a new model (model.new) lacks"
        )
    template = _template(config.template)
    parts = dict.fromkeys(part for example in examples for part in (example.preamble, *example.shots) if part)
    return [*(template.replace(PLACEHOLDER, example.question) for example in examples), *parts]


def word_messages(tokenizer: Tokenizer, messages: Sequence[Message], config: PromptConfig) -> tuple[str, list[int]]:
    """A conversation by the tokenizer's chat template, up to and including the header of the assistant's turn, as text
    and as token ids. UserError where the template cannot be used."""
    if not tokenizer.chat_template:
        raise UserError(
            "prompt.template=chat: this tokenizer has no chat template; use prompt.template=r1_zero, plain or a file, "
            "or an instruction-tuned model"
        )
    for key in ("tokenize", "add_generation_prompt"):
        if key in config.chat_template_kwargs:
            raise UserError(f"prompt.chat_template_kwargs.{key} is not a choice here: remove it")
    kwargs: dict[str, Any] = {**config.chat_template_kwargs, "tokenize": False, "add_generation_prompt": True}
    try:
        text = tokenizer.apply_chat_template(list(messages), **kwargs)
    except TemplateError as error:
        raise UserError(
            f"prompt.template=chat: the chat template refuses the messages ({error}); remove prompt.system or "
            "change prompt.chat_template_kwargs"
        ) from error
    # The template has written every special token into the text, the beginning of the sequence included.
    return text, tokenizer.encode(text, add_special_tokens=False)


def _text_wording(tokenizer: Tokenizer, config: PromptConfig) -> _Word:
    """A wording that puts the question into a text."""
    if config.system is not None or config.chat_template_kwargs:
        key = "system" if config.system is not None else "chat_template_kwargs"
        raise UserError(f"prompt.{key} needs a chat template: set prompt.template=chat, or remove prompt.{key}")
    template = _template(config.template)

    def word(question: str) -> _Wording:
        # Not str.format: other braces in the template (LaTeX, JSON) are text.
        text = template.replace(PLACEHOLDER, question)
        return _Wording(text=text, token_ids=tuple(_encode(tokenizer, text)))

    return word


def _template(name: str) -> str:
    if name in TEXT_TEMPLATES:
        return TEXT_TEMPLATES[name]
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
    # Editors end a file with a line break that nobody means as part of the prompt; a second one is meant.
    return text.removesuffix("\n")


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids with the beginning-of-sequence token where the tokenizer has one, and no end that it appended."""
    ids = tokenizer.encode(text, add_special_tokens=True)
    if ids and ids[-1] == tokenizer.eos_token_id:
        bare = tokenizer.encode(text, add_special_tokens=False)
        if ids[len(ids) - 1 - len(bare) : -1] == bare:
            return ids[:-1]
    return ids


def _chat_wording(tokenizer: Tokenizer, config: PromptConfig) -> _Word:
    """A wording of single questions by the tokenizer's chat template."""
    system: tuple[Message, ...] = () if config.system is None else ({"role": "system", "content": config.system},)
    word_messages(tokenizer, (*system, {"role": "user", "content": "?"}), config)  # refuses at once what it cannot use

    def word(question: str) -> _Wording:
        messages = (*system, {"role": "user", "content": question})
        text, token_ids = word_messages(tokenizer, messages, config)
        return _Wording(text=text, token_ids=tuple(token_ids), messages=messages)

    return word


def _longest(config: PromptConfig, max_tokens: int) -> int:
    """How many tokens a prompt may have. UserError where that is none."""
    if config.max_tokens is not None and config.max_tokens < 1:
        raise UserError(f"prompt.max_tokens={config.max_tokens}: a prompt has at least 1 token; raise it")
    if max_tokens < 1:
        raise UserError(
            "completions leave no room for a prompt in the model's context: lower rollout.max_new_tokens, or take a "
            "model with a longer context"
        )
    return max_tokens if config.max_tokens is None else min(max_tokens, config.max_tokens)


def _fitted(example: Example, word: _Word, *, limit: int) -> tuple[_Wording, int]:
    """The wording with as many shots as fit, from the first on, and how many were left out."""
    for kept in range(len(example.shots), -1, -1):
        wording = word("".join((example.preamble, *example.shots[:kept], example.question)))
        if len(wording.token_ids) <= limit:
            break
    return wording, len(example.shots) - kept


def _shortened(example: Example, word: _Word, *, limit: int) -> _Wording:
    """The wording without shots and with the longest end of the question that fits, by bisection over where that end
    starts."""
    preamble, question = example.preamble, example.question
    too_early, start = 0, len(question) - 1
    best = word(preamble + question[start:])
    if len(best.token_ids) > limit:
        raise UserError(
            f"example {example.id!r}: with one character of the question left the prompt has {len(best.token_ids)} "
            f"tokens, and {limit} fit; use a shorter prompt.template, raise prompt.max_tokens or lower "
            "rollout.max_new_tokens"
        )
    while start - too_early > 1:
        middle = (too_early + start) // 2
        wording = word(preamble + question[middle:])
        if len(wording.token_ids) <= limit:
            start, best = middle, wording
        else:
            too_early = middle
    return best


def _overlong(lengths: Sequence[int], config: PromptConfig, *, total: int, limit: int) -> str:
    choices = "prompt.overlong=truncate_left" if config.overlong == "drop" else "prompt.overlong=drop or truncate_left"
    room = "a larger prompt.max_tokens" if config.max_tokens == limit else "a smaller rollout.max_new_tokens"
    return (
        f"{len(lengths)} of {total} prompts exceed {limit} tokens (the longest has {max(lengths)}): set {choices}, "
        f"or {room}"
    )
