"""The sampler of a run's episodes, of its tools or its environment."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flatpeak.episodes.config import EpisodesConfig
from flatpeak.episodes.environments import LONGEST_ANSWER, Environment, EnvironmentHost, make_environment
from flatpeak.episodes.episode_sampler import CHARACTERS_PER_TOKEN, EpisodeSampler
from flatpeak.episodes.rendering import Renderer, make_renderer
from flatpeak.errors import UserError
from flatpeak.protocols import Sampler, Tokenizer
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.tasks.prompts import CHAT, PromptConfig, build_prompts
from flatpeak.types import Example, Prompt
from flatpeak.utils.control_tokens import TextEncoder

_ANSWER = re.compile(r"<result>(.*?)</result>", re.DOTALL)
_ANSWERS = re.compile(r"\s*<result>.*?</result>(?:\s*<result>.*?</result>)*", re.DOTALL)
Piece = tuple[tuple[int, ...], bool]
"""Tokens, and whether the policy writes them."""
_CALLING = (
    'You can call tools. Write a call as <tool_call>{"name": "...", "arguments": {...}}</tool_call> and wait for its '
    "answer. These are the tools:"
)


def episode_prompts(
    prompt: PromptConfig, environment: Environment, config: EpisodesConfig, tokenizer: Tokenizer
) -> PromptConfig:
    """The wording of chat prompts that say which tools there are: by the template, or else by the system message."""
    if not environment.schemas or not _in_chat(prompt, config):
        return prompt
    if episode_renderer(prompt, environment, config, tokenizer).describes_tools:
        kwargs = {**prompt.chat_template_kwargs, "tools": environment.schemas}
        return prompt.model_copy(update={"chat_template_kwargs": kwargs})
    described = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in environment.schemas)
    system = "\n\n".join(text for text in (prompt.system, f"{_CALLING}\n{described}") if text)
    return prompt.model_copy(update={"system": system})


def read_environment(tools: Sequence[Any], environment: Any) -> Environment | None:
    """The environment of a recipe's `tools` or `environment`; None where it has neither. UserError for unfit ones."""
    return make_environment(tools=tools, environment=environment) if tools or environment is not None else None


def worded_prompt(
    prompt: PromptConfig, tools: Sequence[Any], environment: Any, config: EpisodesConfig, tokenizer: Tokenizer
) -> PromptConfig:
    """The wording of a recipe's prompts, with its tools if it has any."""
    read = read_environment(tools, environment)
    return prompt if read is None else episode_prompts(prompt, read, config, tokenizer)


def with_tools(example: Example, prompt: PromptConfig, worded: PromptConfig) -> Example:
    """The example, whose own system message, if it has one, also describes the tools."""
    if worded.system == prompt.system or not example.messages or example.messages[0]["role"] != "system":
        return example
    described = (worded.system or "").removeprefix(prompt.system or "").strip()
    first = {**example.messages[0], "content": f"{example.messages[0]['content']}\n\n{described}"}
    return replace(example, messages=(first, *example.messages[1:]))


def demonstrated(rationale: str, end: int, *, renderer: Renderer, encoder: TextEncoder) -> list[Piece]:
    """A demonstration's tokens as an episode has them: turns that the policy writes, and answers that it reads.

    `<result>2</result>` after a call stands for its answer, also where a chat template writes answers in another form;
    several calls of a turn are followed by as many. UserError for calls without their answers: they would be imitated.
    """
    pieces, start = list[Piece](), 0
    for match in _ANSWERS.finditer(rationale):
        turn = tuple(encoder.encode_text(rationale[start : match.start()]))
        turn = turn if renderer.stop else (*turn, end)  # a stop string ends a turn by itself
        names, answers = [call.name for call in renderer.calls(turn)], _ANSWER.findall(match[0])
        if names and (len(names) != len(answers) or (renderer.stop and len(names) > 1)):
            raise UserError(
                f"a demonstration has {len(names)} calls and then {len(answers)} <result> in {rationale!r:.200}: write "
                "the answer of each call after it, and of several calls of a chat template's turn after the last"
            )
        added = renderer.bridge(turn, list(zip(names, answers, strict=True)), stopped=True) if names else None
        if added is not None:  # else the text speaks of a result
            pieces += [(turn, True), (tuple(added), False)]
            start = match.end()
    return [*pieces, (tuple(encoder.encode_text(rationale[start:])), True)]


def episode_sampler(
    sampler: Sampler,
    environment: Environment,
    pool: WorkerPool,
    *,
    config: EpisodesConfig,
    prompt: PromptConfig,
    tokenizer: Tokenizer,
    longest_prompt: int,
    context: int,
) -> EpisodeSampler:
    """A sampler of episodes by this one; it closes the pool, whose processes call tools, when it is closed."""
    worded = episode_prompts(prompt, environment, config, tokenizer)

    # An observation that is too long cannot be dropped from a step.
    fitting = worded.model_copy(update={"overlong": "truncate_left"}) if worded.overlong == "drop" else worded

    def word(example: Example) -> Prompt:
        example = with_tools(example, prompt, worded)
        return build_prompts([example], tokenizer, fitting, max_tokens=longest_prompt).prompts[0]

    longest = max(LONGEST_ANSWER, CHARACTERS_PER_TOKEN * config.answer_tokens)
    return EpisodeSampler(
        sampler,
        host=EnvironmentHost(environment, pool, call_timeout=config.call_timeout, longest_answer=longest),
        renderer=episode_renderer(prompt, environment, config, tokenizer),
        config=config,
        tokenizer=tokenizer,
        word=word,
        context=context,
        close=pool.close,
    )


def episode_renderer(
    prompt: PromptConfig, environment: Environment, config: EpisodesConfig, tokenizer: Tokenizer
) -> Renderer:
    """The form of calls and answers; UserError for a chat template that cannot continue an episode."""
    return make_renderer(
        tokenizer,
        format="chat" if _in_chat(prompt, config) else "plain",
        schemas=environment.schemas,
        chat_template_kwargs=prompt.chat_template_kwargs,
    )


def _in_chat(prompt: PromptConfig, config: EpisodesConfig) -> bool:
    """Whether calls have the form of the chat template."""
    return prompt.template == CHAT and config.format == "auto"
