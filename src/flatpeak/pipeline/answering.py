"""Answers of a run's model to questions asked one at a time, worded and drawn as in its recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatpeak.config.load import load_recipe, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.episodes.build import worded_prompt
from flatpeak.errors import UserError
from flatpeak.pipeline.evaluators import UNBOUNDED_CONTEXT
from flatpeak.pipeline.model_source import ModelSource, locate_model, recipe_of
from flatpeak.pipeline.samplers import acting
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.policy.model import Policy
from flatpeak.protocols import Sampler
from flatpeak.rollout.engine import NativeEngine
from flatpeak.rollout.hf_generate import GenerateEngine
from flatpeak.tasks.prompts import CHAT, PromptConfig, build_prompts, prompt_texts, word_messages
from flatpeak.types import Completion, Example, Message, Prompt, SamplingParams
from flatpeak.utils.control_tokens import TextEncoder

LONGEST_ANSWER = 256
"""In tokens, if neither a recipe nor the caller sets a limit."""


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The wording of questions and the sampling of answers."""

    prompt: PromptConfig
    sampling: SamplingParams
    conversation: bool
    """Whether a question includes the earlier messages, by the chat template; otherwise each is asked separately."""


@dataclass(frozen=True, kw_only=True)
class ChatModel:
    """A model that answers questions."""

    source: ModelSource
    config: RunConfig | None
    """The recipe that questions are worded by; None without one."""
    settings: ChatSettings
    policy: Policy
    calls_tools: bool = False
    """Whether answers are episodes with the recipe's tools."""

    def answer(self, question: str, *, seed: int = 0, **sampling: Any) -> str:
        """The answer to a question by itself; `sampling` replaces settings. UserError for one that does not fit."""
        prompt = chat_prompt(self.policy.tokenizer, [{"role": "user", "content": question}], self.settings)
        params = self.settings.sampling
        params = replace(params, **{name: value for name, value in sampling.items() if value is not None})
        length, context = len(prompt.token_ids), self.policy.context_length or UNBOUNDED_CONTEXT
        if not 0 < length < context:
            raise UserError(f"the question has {length} tokens and the model's context {context}: ask another")
        params = replace(params, max_new_tokens=min(context - length, params.max_new_tokens))
        return reply(self, prompt, sampling=params, seed=seed).text


def open_chat(
    path: str,
    *,
    recipe: str | None = None,
    template: str | None = None,
    system: str | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
) -> ChatModel:
    """Load a run's model, or any other, with the wording of its training or its chat template.

    `recipe` replaces the run's; `template`, `system`, `temperature` and `max_new_tokens` take precedence over both.
    UserError if the model or the template cannot be used.
    """
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
    tools = config.tools if config is not None and wording.template == config.prompt.template else []
    if config is not None and tools:
        wording = worded_prompt(wording, tools, None, config.episodes, tokenizer)
    settings = ChatSettings(
        prompt=wording,
        sampling=_sampling(config, wording, temperature=temperature, max_new_tokens=max_new_tokens),
        conversation=wording.template == CHAT and (config is None or template is not None),
    )
    # Fails now instead of at the first question.
    chat_prompt(tokenizer, [{"role": "user", "content": "?"}], settings)
    return ChatModel(source=source, config=config, settings=settings, policy=policy, calls_tools=bool(tools))


def reply(model: ChatModel, prompt: Prompt, *, sampling: SamplingParams, seed: int) -> Completion:
    """One completion of a prompt, or an episode with tools."""
    policy = model.policy
    if policy.native:
        sampler: Sampler = NativeEngine(policy)
    else:
        sampler = GenerateEngine(policy.model, policy.tokenizer, eos_token_ids=policy.eos_token_ids)
    if model.calls_tools and model.config is not None:
        sampler = acting(model.config, sampler, policy)
    try:
        return sampler.generate([prompt], group_size=1, sampling=sampling, seed=seed)[0].completions[0]
    finally:
        sampler.close()


def chat_prompt(tokenizer: Any, messages: Sequence[Message], settings: ChatSettings) -> Prompt:
    """The prompt of the last message, which is the user's; it includes earlier messages only in a conversation."""
    example = Example(id="chat", question=messages[-1]["content"], gold="")
    if not settings.conversation:
        whole = settings.prompt.model_copy(update={"overlong": "error", "max_tokens": None})
        return build_prompts([example], tokenizer, whole, max_tokens=UNBOUNDED_CONTEXT).prompts[0]
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
        stop = rollout.stop if evaluation.stop is None else evaluation.stop
        sampling = SamplingParams(
            max_new_tokens=evaluation.max_new_tokens or rollout.max_new_tokens,
            # With another wording, the model was not trained to write them.
            stop=stop if wording.template == config.prompt.template else (),
        )
        if evaluation.greedy:
            sampling = replace(sampling, temperature=0.0)
        else:
            sampling = replace(
                sampling, temperature=evaluation.temperature, top_p=evaluation.top_p, top_k=evaluation.top_k
            )
    return replace(sampling, **{name: value for name, value in given.items() if value is not None})
