"""`flatpeak chat`: asks a model questions, worded and answered as in its run's recipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError, plural
from flatpeak.pipeline.answering import ChatModel, ChatSettings, chat_prompt, open_chat, reply
from flatpeak.pipeline.evaluators import UNBOUNDED_CONTEXT
from flatpeak.pipeline.model_source import ModelSource, recipe_of
from flatpeak.policy.model import Policy
from flatpeak.runs.checkpoints import is_checkpoint
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.rollout_log import first_row, logged_steps
from flatpeak.tasks.arithmetic import ArithmeticConfig
from flatpeak.tasks.prompts import CHAT, PLACEHOLDER
from flatpeak.tasks.rows import RowsConfig
from flatpeak.types import Message, Prompt, SamplingParams
from flatpeak.utils.huggingface import unknown_characters

LONGEST_EXAMPLE = 300
"""The most characters of an example question that is printed."""
_MARK = "FLATPEAKQUESTION"
_UNKNOWN = "how questions were worded in training is unknown; --recipe or --template can say it"


@dataclass(frozen=True, kw_only=True)
class Console:
    """The functions with which a chat reads and writes."""

    read: Callable[[str], str] = input
    """Reads the next question after a prompt; EOFError at the end."""
    write: Callable[[str], None] = print
    """Writes an answer."""
    note: Callable[[str], None] = print
    """Writes everything else."""


def chat_loop(
    path: str,
    *,
    recipe: str | None = None,
    console: Console | None = None,
    **options: Any,
) -> None:
    """Answer questions with a run's model, worded as in training, or with any model by its chat template.

    `recipe` and `options` are those of `open_chat`. UserError if the model or the template cannot be used.
    """
    console = console or Console()
    model = open_chat(path, recipe=recipe, **options)
    source, config, settings, tokenizer = model.source, model.config, model.settings, model.policy.tokenizer
    for line in _opening(source, config, settings, recipe=recipe, chat_template=bool(tokenizer.chat_template)):
        console.note(line)
    from_python = source.record is not None and "task" in source.record.objects
    has_task = recipe is not None or (bool({"task", "tasks"} & recipe_of(source).keys()) and not from_python)
    example = None if config is None or not has_task else example_question(config, tokenizer, source.run)
    if example is not None:
        console.note(f"try: {example}")
    converse(model, console)


def converse(model: ChatModel, console: Console) -> None:
    """Answer lines until an empty line or the end of input."""
    policy, settings = model.policy, model.settings
    messages: list[Message] = []
    for seed in count():
        try:
            question = console.read("> ")
        except EOFError:
            return
        if not question:
            return
        unknown = unknown_characters(policy.tokenizer, question)
        if unknown:
            console.note(f"not in this model's vocabulary: {' '.join(map(repr, unknown))}")
            if set("".join(question.split())) <= set("".join(unknown)):
                console.note("the model would see nothing of this question, and is not asked")
                continue
        messages.append({"role": "user", "content": question})
        prompt = _fitted(policy, settings, messages, console)
        length, context = len(prompt.token_ids), policy.context_length or UNBOUNDED_CONTEXT
        if not 0 < length < context:
            too_long = f"the question has {length} tokens and the model's context {context}: ask a shorter one"
            console.note(too_long if length else "this model's tokenizer knows nothing of that text")
            messages.pop()
            continue
        sampling = replace(settings.sampling, max_new_tokens=min(context - length, settings.sampling.max_new_tokens))
        answer = reply(model, prompt, sampling=sampling, seed=seed)
        for call in (call for turn in answer.turns for call in turn.calls):
            arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
            console.note(f"{call.name}({arguments}) -> {call.answer}")
        messages.append({"role": "assistant", "content": answer.text})
        console.write(answer.text)
        if answer.finish_reason == "length":
            by_episode = answer.stop_reason in ("max_turns", "max_calls", "timeout")
            cut = f"cut after {plural(sampling.max_new_tokens, 'token')}"
            console.note(f"(ended by episodes.{answer.stop_reason})" if by_episode else f"({cut})")


def _fitted(policy: Policy, settings: ChatSettings, messages: list[Message], console: Console) -> Prompt:
    """The prompt; if a conversation does not fit, its oldest messages are removed from `messages`."""
    context = policy.context_length or UNBOUNDED_CONTEXT
    # In a small context, older messages are removed only until a quarter of the context is left for the answer.
    limit = context - min(settings.sampling.max_new_tokens, context // 4)
    before = len(messages)
    prompt = chat_prompt(policy.tokenizer, messages, settings)
    while settings.conversation and len(messages) > 2 and len(prompt.token_ids) > limit:
        del messages[:2]
        prompt = chat_prompt(policy.tokenizer, messages, settings)
    if len(messages) < before:
        removed = plural(before - len(messages), "turn")
        console.note(f"the conversation's first {removed} no longer fit into the model's context of {context}")
    return prompt


def example_question(config: RunConfig, tokenizer: Any, run: Path | None) -> str | None:
    """A question of the task in one line: a held-out question if the task is generated, else a question of the run's
    logged rollouts. None if there is neither: loading a data set would take too long."""
    question: str | None = None
    with suppress(UserError, OSError, ValueError, KeyError, IndexError):  # an example is not worth an error
        if isinstance(task := config.main_tasks[0], ArithmeticConfig):
            question = task.load().test[0].question
        elif run is not None:
            question = _logged_question(config, tokenizer, RunPaths(run))
    if question is None or not question.isprintable() or not 0 < len(question) <= LONGEST_EXAMPLE:
        return None
    return question


def _logged_question(config: RunConfig, tokenizer: Any, run: RunPaths) -> str | None:
    """The question in the first prompt of the newest logged step, extracted with the template around it."""
    logged = list(logged_steps(run.rollouts).values())
    if not logged:
        return None
    prompt: str = first_row(logged[-1])["prompt"]
    settings = ChatSettings(prompt=config.prompt, sampling=SamplingParams(), conversation=False)
    before, mark, after = chat_prompt(tokenizer, [{"role": "user", "content": _MARK}], settings).text.partition(_MARK)
    if not mark or not (prompt.startswith(before) and prompt.endswith(after)):
        return None
    return prompt[len(before) : len(prompt) - len(after)]


def _opening(
    source: ModelSource, config: RunConfig | None, settings: ChatSettings, *, recipe: str | None, chat_template: bool
) -> list[str]:
    """The lines before the first question: the wording of questions and the sampling of answers."""
    template = _name_of(settings.prompt.template, source)
    form = "as a conversation" if settings.conversation else "each question by itself"
    lines = []
    if config is None:
        if source.run is not None:
            lines.append(f"{source.run / 'config.yaml'} is missing, so {_UNKNOWN}")
        elif source.path is not None and is_checkpoint(Path(source.path)):
            lines.append(f"this checkpoint lies outside its run, so {_UNKNOWN}")
        lines.append(f"asked by {'its chat template' if template == CHAT else template}, {form}")
    elif settings.prompt.template != config.prompt.template:
        trained = _name_of(config.prompt.template, source)
        lines.append(f"asked by --template {template}, {form}; training asked by {trained}")
    else:
        if chat_template and not settings.conversation:
            gained = "a conversation" if template == CHAT else "the model's own"
            form += f"; --template chat for {gained}"
        words = _task_words(config.main_tasks[0])
        if words is None:
            lines.append(f"asked as in {recipe or 'training'}: {template}, {form}")
        else:
            lines.append(f"asked by {template}, {form}; the task words its questions as {words!r}: write so too")
        shots = getattr(config.main_tasks[0], "shots", 0)
        if shots:
            lines.append(f"without the {shots} worked examples that the task puts before each question")
    sampling = settings.sampling
    lines.append(f"temperature {sampling.temperature:g}, at most {sampling.max_new_tokens} tokens (see --help)")
    return lines


def _task_words(task: object) -> str | None:
    """The first format of a task's questions that adds words to its columns; None if there is none."""
    for source in task.train if isinstance(task, RowsConfig) else ():
        words, fields = re.subn(r"\{[^{}]*\}", "", source.question)
        if fields and words.strip():
            return source.question
    return None


def _name_of(template: str, source: ModelSource) -> str:
    """The name of a template, even if it is given as a text."""
    if PLACEHOLDER not in template:
        return template
    record = source.record
    return record.template_name if record and record.template_name and template == record.template else "its own text"
