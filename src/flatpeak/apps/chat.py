"""`flatpeak chat`: questions to a model, worded and answered as its run's recipe says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatpeak.config.load import load_recipe, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.pipeline.model_source import ModelSource, locate_model, recipe_of
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.rollout.hf_generate import GenerateEngine
from flatpeak.runs.checkpoints import is_checkpoint
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.rollout_log import first_row, logged_steps
from flatpeak.tasks.arithmetic import ArithmeticConfig
from flatpeak.tasks.prompts import CHAT, PLACEHOLDER, PromptConfig, build_prompts, prompt_texts, word_messages
from flatpeak.tasks.rows import RowsConfig
from flatpeak.types import Completion, Example, Message, Prompt, SamplingParams
from flatpeak.utils.control_tokens import TextEncoder
from flatpeak.utils.huggingface import unknown_characters

LONGEST_ANSWER = 256
"""Tokens, where neither a recipe nor the caller sets a limit."""
LONGEST_EXAMPLE = 300
"""Characters of an example question that is printed."""
_ANY_LENGTH = 2**30
_MARK = "FLATPEAKQUESTION"
_UNKNOWN = "how questions were worded in training is unknown; --recipe or --template can say it"


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The wording of questions and the sampling of answers."""

    prompt: PromptConfig
    sampling: SamplingParams
    conversation: bool
    """Whether a question includes the messages before it, by the chat template; else each is asked by itself."""


@dataclass(frozen=True, kw_only=True)
class Console:
    """The functions by which a chat reads and writes."""

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
    template: str | None = None,
    system: str | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    console: Console | None = None,
) -> None:
    """Answer questions with a run's model as they were worded in training, or with any model by its chat template.

    `recipe` replaces the run's; `template`, `system`, `temperature` and `max_new_tokens` have precedence over both.
    UserError where the model or the template cannot be used.
    """
    console = console or Console()
    source = locate_model(path)
    own_recipe = recipe_of(source)
    own = parse_config(own_recipe) if own_recipe else None
    config = own if recipe is None else parse_config(load_recipe(recipe))
    wording = None if config is None and template is None else _wording(config, template=template, system=system)
    model = own.model if own is not None else ModelConfig()
    policy = load_policy(ModelConfig(path=source.path, dtype=model.dtype, trust_remote_code=model.trust_remote_code))
    tokenizer: Any = policy.tokenizer
    if wording is None:
        wording = _own_wording(tokenizer, system=system)
    if wording.template == CHAT and not tokenizer.chat_template:
        raise UserError(f"{path}: its tokenizer has no chat template: give --template plain, r1_zero or a file")
    settings = ChatSettings(
        prompt=wording,
        sampling=_sampling(config, wording, temperature=temperature, max_new_tokens=max_new_tokens),
        conversation=wording.template == CHAT and (config is None or template is not None),
    )
    chat_prompt(
        tokenizer, [{"role": "user", "content": "?"}], settings
    )  # refused now rather than at the first question
    for line in _opening(source, config, settings, recipe=recipe, chat_template=bool(tokenizer.chat_template)):
        console.note(line)
    from_python = source.record is not None and "task" in source.record.objects
    has_task = recipe is not None or ("task" in own_recipe and not from_python)
    example = None if config is None or not has_task else example_question(config, tokenizer, source.run)
    if example is not None:
        console.note(f"try: {example}")
    converse(policy, settings, console)


def converse(policy: Policy, settings: ChatSettings, console: Console) -> None:
    """Answer lines until an empty one or the end of input."""
    messages: list[Message] = []
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
            if set("".join(question.split())) <= set("".join(unknown)):
                console.note("the model would see nothing of this question, and is not asked")
                continue
        messages.append({"role": "user", "content": question})
        prompt, room = _fitted(policy, settings, messages, console)
        if not prompt.token_ids or room < 1:
            console.note(
                f"the question has {len(prompt.token_ids)} tokens and the model's context {policy.context_length}: ask "
                "a shorter one"
                if prompt.token_ids
                else "this model's tokenizer knows nothing of that text"
            )
            messages.pop()
            continue
        sampling = replace(settings.sampling, max_new_tokens=min(room, settings.sampling.max_new_tokens))
        answer = reply(policy, prompt, sampling=sampling, seed=seed)
        messages.append({"role": "assistant", "content": answer.text})
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


def chat_prompt(tokenizer: Any, messages: Sequence[Message], settings: ChatSettings) -> Prompt:
    """The prompt of the last message, the user's; those before it are part of it in a conversation only."""
    question = messages[-1]["content"]
    example = Example(id="chat", question=question, gold="")
    if settings.conversation:
        system = settings.prompt.system
        opening: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)
        encoder = TextEncoder(tokenizer)
        dialogue, quoted = (
            (*opening, *(_spoken(message, text(message["content"]), settings.prompt) for message in messages))
            for text in (str, encoder.quote)
        )
        text, ids = word_messages(encoder, quoted, settings.prompt)
        return Prompt(id="chat", token_ids=ids, text=text, example=example, messages=dialogue)
    whole = settings.prompt.model_copy(update={"overlong": "error", "max_tokens": None})
    return build_prompts([example], tokenizer, whole, max_tokens=_ANY_LENGTH).prompts[0]


def _spoken(message: Message, text: str, prompt: PromptConfig) -> Message:
    """A message with this text, a question among the words of `prompt.user`."""
    return {**message, "content": prompt.user_message(text) if message["role"] == "user" else text}


def _fitted(policy: Policy, settings: ChatSettings, messages: list[Message], console: Console) -> tuple[Prompt, int]:
    """The prompt, and the tokens that the context leaves for the answer.

    The oldest messages of a conversation that does not fit are removed from `messages`.
    """
    context = policy.context_length or _ANY_LENGTH
    # In a small context, older messages are removed only until a quarter of it is left for the answer.
    reserved = min(settings.sampling.max_new_tokens, context // 4)
    prompt = chat_prompt(policy.tokenizer, messages, settings)
    removed = 0
    while settings.conversation and len(messages) > 2 and len(prompt.token_ids) + reserved > context:
        del messages[:2]
        removed += 2
        prompt = chat_prompt(policy.tokenizer, messages, settings)
    if removed:
        console.note(f"the conversation's first {removed} turns no longer fit into the model's context of {context}")
    return prompt, context - len(prompt.token_ids)


def example_question(config: RunConfig, tokenizer: Any, run: Path | None) -> str | None:
    """A question of the task in one line: a held-out one where the task is generated, else one of the run's logged
    rollouts. None where neither is at hand: loading a data set would take too long."""
    question: str | None = None
    try:
        if isinstance(config.task, ArithmeticConfig):
            question = config.task.load().test[0].question
        elif run is not None:
            question = _logged_question(config, tokenizer, RunPaths(run))
    except (UserError, OSError, ValueError, KeyError, IndexError):  # an example is not worth an error
        return None
    usable = question is not None and question.isprintable() and 0 < len(question) <= LONGEST_EXAMPLE
    return question if usable else None


def _logged_question(config: RunConfig, tokenizer: Any, run: RunPaths) -> str | None:
    """The question in the first prompt of the newest logged step, cut out by the template around it."""
    logged = list(logged_steps(run.rollouts).values())
    if not logged:
        return None
    prompt: str = first_row(logged[-1])["prompt"]
    settings = ChatSettings(prompt=config.prompt, sampling=SamplingParams(), conversation=False)
    before, mark, after = chat_prompt(tokenizer, [{"role": "user", "content": _MARK}], settings).text.partition(_MARK)
    if not mark or not (prompt.startswith(before) and prompt.endswith(after)):
        return None
    return prompt[len(before) : len(prompt) - len(after)]


def _wording(config: RunConfig | None, *, template: str | None, system: str | None) -> PromptConfig:
    """The recipe's wording, or that of `template`; `system` replaces the recipe's system message."""
    prompt = PromptConfig() if config is None else config.prompt
    if template is not None and (config is None or template != prompt.template):
        prompt = PromptConfig(template=template)
    if system is not None:
        prompt = prompt.model_copy(update={"system": system})
    if prompt.template != CHAT:
        if system is not None:
            raise UserError(
                f"--system needs a chat template, and the questions are worded by {prompt.template}: add --template "
                "chat, or leave --system out"
            )
        _check_template(prompt, given=template is not None)
    return prompt


def _check_template(prompt: PromptConfig, *, given: bool) -> None:
    """UserError where the template is a file that is not here."""
    try:
        prompt_texts((), prompt)
    except UserError as error:
        if given:
            raise UserError(str(error).replace("prompt.template=", "--template ", 1)) from error
        raise UserError(
            f"{error}; start the chat in the directory where the run was started, or give --template"
        ) from error


def _own_wording(tokenizer: Any, *, system: str | None) -> PromptConfig:
    """The model's own chat template where it has one, else the question alone."""
    if tokenizer.chat_template:
        return PromptConfig(template=CHAT, system=system)
    if system is not None:
        raise UserError("--system: this model's tokenizer has no chat template; leave --system out")
    return PromptConfig(template="plain")


def _sampling(
    config: RunConfig | None, wording: PromptConfig, *, temperature: float | None, max_new_tokens: int | None
) -> SamplingParams:
    """The sampling of the recipe's evaluations; without a recipe, temperature 1."""
    sampling = SamplingParams(max_new_tokens=LONGEST_ANSWER)
    if config is not None:
        evaluation, rollout = config.evaluation, config.rollout
        sampling = SamplingParams(
            temperature=0.0 if evaluation.greedy else evaluation.temperature,
            top_p=1.0 if evaluation.greedy else evaluation.top_p,
            top_k=0 if evaluation.greedy else evaluation.top_k,
            max_new_tokens=evaluation.max_new_tokens or rollout.max_new_tokens,
            # With another wording the model was not trained to write them.
            stop=rollout.stop if wording.template == config.prompt.template else (),
        )
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    return sampling if max_new_tokens is None else replace(sampling, max_new_tokens=max_new_tokens)


def _opening(
    source: ModelSource,
    config: RunConfig | None,
    settings: ChatSettings,
    *,
    recipe: str | None,
    chat_template: bool,
) -> list[str]:
    """The lines before the first question: the wording of questions and the sampling of answers."""
    template = _name_of(settings.prompt.template, source)
    form = "as a conversation" if settings.conversation else "each question by itself"
    lines = []
    if config is not None and settings.prompt.template == config.prompt.template:
        other = "" if settings.conversation or not chat_template else "; --template chat for the model's own"
        if template == CHAT and other:
            other = "; --template chat for a conversation"
        words = _task_words(config.task)
        if words is None:
            lines.append(f"asked as in {'training' if recipe is None else recipe}: {template}, {form}{other}")
        else:
            lines.append(f"asked by {template}, {form}{other}; the task words its questions as {words!r}: write so too")
        shots = getattr(config.task, "shots", 0)
        if shots:
            lines.append(f"without the {shots} worked examples that the task puts before each question")
    elif config is not None:
        lines.append(
            f"asked by --template {template}, {form}; training asked by {_name_of(config.prompt.template, source)}"
        )
    else:
        if source.run is not None:
            lines.append(f"{source.run / 'config.yaml'} is missing, so {_UNKNOWN}")
        elif source.path is not None and is_checkpoint(Path(source.path)):
            lines.append(f"this checkpoint lies outside its run, so {_UNKNOWN}")
        lines.append(f"asked by {'its chat template' if template == CHAT else template}, {form}")
    sampling = settings.sampling
    lines.append(f"temperature {sampling.temperature:g}, at most {sampling.max_new_tokens} tokens (see --help)")
    return lines


def _task_words(task: object) -> str | None:
    """The first format of a task's questions that adds words to its columns; None where there is none."""
    for source in task.train if isinstance(task, RowsConfig) else ():
        words, fields = re.subn(r"\{[^{}]*\}", "", source.question)
        if fields and words.strip():
            return source.question
    return None


def _name_of(template: str, source: ModelSource) -> str:
    """The name of a template, also where it is given as a text."""
    if PLACEHOLDER not in template:
        return template
    record = source.record
    return record.template_name if record and record.template_name and template == record.template else "its own text"
