"""The question and answer loop of `flatpeak chat`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.rollout.hf_generate import GenerateEngine
from flatpeak.tasks.config import PromptConfig
from flatpeak.tasks.prompts import build_prompts, word_messages
from flatpeak.types import Completion, Example, Message, Prompt, SamplingParams

_ANY_LENGTH = 2**30


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """How questions are worded and answers drawn."""

    prompt: PromptConfig
    sampling: SamplingParams
    conversation: bool
    """Whether a question includes the turns before it, by the chat template; else each is asked by itself."""


@dataclass(frozen=True, kw_only=True)
class Console:
    """Where a chat reads and writes; tests replace it."""

    read: Callable[[str], str] = input
    """The next question, given the text that asks for it; EOFError at the end."""
    write: Callable[[str], None] = print
    """Answers."""
    note: Callable[[str], None] = print
    """Everything else."""


def converse(policy: Policy, settings: ChatSettings, console: Console) -> None:
    """Answer lines until an empty one or the end of input."""
    turns: list[Message] = []
    for seed in range(10**9):
        try:
            question = console.read("> ")
        except EOFError:
            return
        if not question:
            return
        unknown = unknown_characters(policy.tokenizer, question)
        if unknown:
            console.note(f"not in this model's vocabulary: {' '.join(map(repr, unknown))}")
        turns.append({"role": "user", "content": question})
        prompt, room = _fitted(policy, settings, turns, console)
        if not prompt.token_ids or room < 1:
            console.note(
                f"the question has {len(prompt.token_ids)} tokens and the model's context {policy.context_length}: ask "
                "a shorter one"
                if prompt.token_ids
                else "this model's tokenizer knows nothing of that text"
            )
            turns.pop()
            continue
        sampling = replace(settings.sampling, max_new_tokens=min(room, settings.sampling.max_new_tokens))
        answer = reply(policy, prompt, sampling=sampling, seed=seed)
        turns.append({"role": "assistant", "content": answer.text})
        console.write(answer.text)
        if answer.finish_reason == "length":
            console.note(f"(cut after {sampling.max_new_tokens} tokens)")


def reply(policy: Policy, prompt: Prompt, *, sampling: SamplingParams, seed: int) -> Completion:
    """One completion of a prompt."""
    if policy.native:
        engine: NativeEngine | GenerateEngine = NativeEngine(policy)
    else:
        engine = GenerateEngine(policy.model, policy.tokenizer, eos_token_ids=policy.eos_token_ids)
    return engine.generate([prompt], group_size=1, sampling=sampling, seed=seed)[0].completions[0]


def chat_prompt(tokenizer: Any, turns: Sequence[Message], settings: ChatSettings) -> Prompt:
    """The prompt of the last turn, which is the user's; the turns before it count in a conversation only."""
    question = turns[-1]["content"]
    example = Example(id="chat", question=question, gold="")
    if settings.conversation:
        system = settings.prompt.system
        opening: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)
        messages = (*opening, *turns)
        text, ids = word_messages(tokenizer, messages, settings.prompt)
        return Prompt(id="chat", token_ids=tuple(ids), text=text, example=example, messages=messages)
    whole = settings.prompt.model_copy(update={"overlong": "error", "max_tokens": None})
    return build_prompts([example], tokenizer, whole, max_tokens=_ANY_LENGTH).prompts[0]


def unknown_characters(tokenizer: Any, text: str) -> list[str]:
    """The pieces of a text that a tokenizer drops or replaces by its unknown token, each once; of one that cannot say
    where its tokens come from, none."""
    if not getattr(tokenizer, "is_fast", False):
        return []
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    unknown, covered = list[str](), set[int]()
    for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        covered.update(range(start, end))
        if token == tokenizer.unk_token_id and end > start:
            unknown.append(text[start:end])
    # Behind a character that was dropped, offsets are not to be relied on: each is looked at by itself.
    if any(at not in covered and not one.isspace() for at, one in enumerate(text)):
        single = (one for one in text if not one.isspace())
        unknown += [one for one in single if not tokenizer.encode(one, add_special_tokens=False)]
    return list(dict.fromkeys(unknown))


def _fitted(policy: Policy, settings: ChatSettings, turns: list[Message], console: Console) -> tuple[Prompt, int]:
    """The prompt, and how many tokens the context leaves for the answer.

    The oldest turns of a conversation that does not fit are removed from `turns`.
    """
    context = policy.context_length or _ANY_LENGTH
    # Of a small context, answers may take a quarter before turns have to give way to them.
    wanted = min(settings.sampling.max_new_tokens, context // 4)
    prompt = chat_prompt(policy.tokenizer, turns, settings)
    removed = 0
    while settings.conversation and len(turns) > 2 and len(prompt.token_ids) + wanted > context:
        del turns[:2]
        removed += 2
        prompt = chat_prompt(policy.tokenizer, turns, settings)
    if removed:
        console.note(f"the conversation's first {removed} turns no longer fit into the model's context of {context}")
    return prompt, context - len(prompt.token_ids)
