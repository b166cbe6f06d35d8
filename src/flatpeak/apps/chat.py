"""`flatpeak chat`: asks a model questions, worded and answered as in its run's recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from flatpeak.config.load import load_recipe, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError, plural
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
"""In tokens, if neither a recipe nor the caller sets a limit."""
LONGEST_EXAMPLE = 300
"""The most characters of an example question that is printed."""
_ANY_LENGTH = 2**30
_MARK = "FLATPEAKQUESTION"
_UNKNOWN = "how questions were worded in training is unknown; --recipe or --template can say it"


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The wording of questions and the sampling of answers."""

    prompt: PromptConfig
    sampling: SamplingParams
    conversation: bool
    """Whether a question includes the earlier messages, by the chat template; otherwise each is asked separately."""


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
    template: str | None = None,
    system: str | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    console: Console | None = None,
) -> None:
    """Answer questions with a run's model, worded as in training, or with any model by its chat template.

    `recipe` replaces the run's; `template`, `system`, `temperature` and `max_new_tokens` take precedence over both.
    UserError if the model or the template cannot be used.
    """
    console = console or Console()
    source = locate_model(path)
    own_recipe = recipe_of(source)
    own = parse_config(own_recipe) if own_recipe else None
    config = own if recipe is None else parse_config(load_recipe(recipe))
    wording = _wording(config, template=template, system=system)
    model = own.model if own is not None else ModelConfig()
    policy = load_policy(ModelConfig(path=source.path, dtype=model.dtype, trust_remote_code=model.trust_remote_code))
    tokenizer: Any = policy.tokenizer
    wording = wording or _own_wording(tokenizer, system=system)
    if wording.template == CHAT and not tokenizer.chat_template:
        raise UserError(f"{path}: its tokenizer has no chat template: give --template plain, r1_zero or a file")
    settings = ChatSettings(
        prompt=wording,
        sampling=_sampling(config, wording, temperature=temperature, max_new_tokens=max_new_tokens),
        conversation=wording.template == CHAT and (config is None or template is not None),
    )
    # Fails now instead of at the first question.
    chat_prompt(tokenizer, [{"role": "user", "content": "?"}], settings)
    for line in _opening(source, config, settings, recipe=recipe, chat_template=bool(tokenizer.chat_template)):
        console.note(line)
    from_python = source.record is not None and "task" in source.record.objects
    has_task = recipe is not None or (bool({"task", "tasks"} & own_recipe.keys()) and not from_python)
    example = None if config is None or not has_task else example_question(config, tokenizer, source.run)
    if example is not None:
        console.note(f"try: {example}")
    converse(policy, settings, console)


def converse(policy: Policy, settings: ChatSettings, console: Console) -> None:
    """Answer lines until an empty line or the end of input."""
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
        length, context = len(prompt.token_ids), policy.context_length or _ANY_LENGTH
        if not 0 < length < context:
            too_long = f"the question has {length} tokens and the model's context {context}: ask a shorter one"
            console.note(too_long if length else "this model's tokenizer knows nothing of that text")
            messages.pop()
            continue
        sampling = replace(settings.sampling, max_new_tokens=min(context - length, settings.sampling.max_new_tokens))
        answer = reply(policy, prompt, sampling=sampling, seed=seed)
        messages.append({"role": "assistant", "content": answer.text})
        console.write(answer.text)
        if answer.finish_reason == "length":
            console.note(f"(cut after {plural(sampling.max_new_tokens, 'token')})")


def reply(policy: Policy, prompt: Prompt, *, sampling: SamplingParams, seed: int) -> Completion:
    """One completion of a prompt."""
    if policy.native:
        engine: NativeEngine | GenerateEngine = NativeEngine(policy)
    else:
        engine = GenerateEngine(policy.model, policy.tokenizer, eos_token_ids=policy.eos_token_ids)
    return engine.generate([prompt], group_size=1, sampling=sampling, seed=seed)[0].completions[0]


def chat_prompt(tokenizer: Any, messages: Sequence[Message], settings: ChatSettings) -> Prompt:
    """The prompt of the last message, which is the user's; it includes earlier messages only in a conversation."""
    example = Example(id="chat", question=messages[-1]["content"], gold="")
    if not settings.conversation:
        whole = settings.prompt.model_copy(update={"overlong": "error", "max_tokens": None})
        return build_prompts([example], tokenizer, whole, max_tokens=_ANY_LENGTH).prompts[0]
    encoder = TextEncoder(tokenizer)
    text, ids = word_messages(encoder, _dialogue(messages, settings.prompt, encoder.quote), settings.prompt)
    dialogue = _dialogue(messages, settings.prompt, str)
    return Prompt(id="chat", token_ids=ids, text=text, example=example, messages=dialogue)


def _dialogue(messages: Sequence[Message], prompt: PromptConfig, spell: Callable[[str], str]) -> tuple[Message, ...]:
    """The messages after the system's, with the questions inserted into `prompt.user`."""
    dialogue: list[Message] = []
    if prompt.system is not None:
        dialogue.append({"role": "system", "content": prompt.system})
    for message in messages:
        text = spell(message["content"])
        dialogue.append({**message, "content": prompt.user_message(text) if message["role"] == "user" else text})
    return tuple(dialogue)


def _fitted(policy: Policy, settings: ChatSettings, messages: list[Message], console: Console) -> Prompt:
    """The prompt; if a conversation does not fit, its oldest messages are removed from `messages`."""
    context = policy.context_length or _ANY_LENGTH
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


def _wording(config: RunConfig | None, *, template: str | None, system: str | None) -> PromptConfig | None:
    """The wording of `template`, else of the recipe, with another system message; None if neither is given."""
    if config is None and template is None:
        return None
    prompt = PromptConfig() if config is None else config.prompt
    if template is not None and (config is None or template != prompt.template):
        prompt = PromptConfig(template=template)
    if prompt.template == CHAT:
        return prompt if system is None else prompt.model_copy(update={"system": system})
    if system is not None:
        raise UserError(
            f"--system needs a chat template, and the questions are worded by {prompt.template}: add --template "
            "chat, or leave --system out"
        )
    try:
        prompt_texts((), prompt)
    except UserError as error:  # the file is not in this directory
        if template is not None:
            raise UserError(str(error).replace("prompt.template=", "--template ", 1)) from error
        raise UserError(
            f"{error}; start the chat in the directory where the run was started, or give --template"
        ) from error
    return prompt


def _own_wording(tokenizer: Any, *, system: str | None) -> PromptConfig:
    """The model's own chat template if it has one, else only the question."""
    if tokenizer.chat_template:
        return PromptConfig(template=CHAT, system=system)
    if system is not None:
        raise UserError("--system: this model's tokenizer has no chat template; leave --system out")
    return PromptConfig(template="plain")


def _sampling(config: RunConfig | None, wording: PromptConfig, **given: Any) -> SamplingParams:
    """The sampling of the recipe's evaluations, except for what is given; without a recipe, temperature 1."""
    sampling = SamplingParams(max_new_tokens=LONGEST_ANSWER)
    if config is not None:
        evaluation, rollout = config.evaluation, config.rollout
        sampling = SamplingParams(
            max_new_tokens=evaluation.max_new_tokens or rollout.max_new_tokens,
            # With another wording, the model was not trained to write them.
            stop=rollout.stop if wording.template == config.prompt.template else (),
        )
        if evaluation.greedy:
            sampling = replace(sampling, temperature=0.0)
        else:
            sampling = replace(
                sampling, temperature=evaluation.temperature, top_p=evaluation.top_p, top_k=evaluation.top_k
            )
    return replace(sampling, **{name: value for name, value in given.items() if value is not None})


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
