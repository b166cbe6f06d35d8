"""The work of a planned run: its data, prompts, completions, tokens, steps and updates, before anything is spent.

Nothing is fetched but a model's config.json. Where data or a tokenizer are not at hand, numbers of tokens are upper
bounds, and notes say so.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flatpeak.apps.planning.planned_model import PlannedModel, new_model, read_model
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UnreachableDataError, UserError
from flatpeak.pipeline.evaluators import longest_prompt
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import adapter_source, build_tokenizer
from flatpeak.protocols import Task
from flatpeak.tasks.config import build_task
from flatpeak.tasks.preferences import PreferencesConfig
from flatpeak.tasks.prompts import build_prompts, prompt_texts
from flatpeak.utils.control_tokens import TextEncoder
from flatpeak.utils.huggingface import cache_alone, has_tokenizer, load_errors, load_tokenizer, local_or_hub

ASSUMED_PROMPT: Final = 1024
"""Tokens of a prompt where nothing at hand says more, and neither recipe nor context less."""
ASSUMED_ROWS: Final = 512
"""Held-out rows where the data are not at hand, and `evaluation.size` is not set."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The largest evaluation of a run."""

    prompt_lengths: tuple[int, ...]
    """Tokens of its prompts, the longest first."""
    completions: int
    """Completions of a prompt that are decoded in one request."""
    new_tokens: int
    """Tokens of a completion at most."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The data and the size of a run."""

    task: str
    train_rows: int | None
    """None where the data are not at hand."""
    test_rows: int | None
    prompt_lengths: tuple[int, ...]
    """Tokens of the longest training prompts, as many as a step has, the longest first."""
    group_size: int
    new_tokens: int
    """Tokens of a completion at most."""
    draws: int
    """Rounds of rollouts in a step at most: dynamic sampling may draw more than one."""
    steps: int
    updates: int
    """Updates of all steps at most."""
    sft_steps: int
    demonstrations: tuple[tuple[int, int], ...]
    """(tokens of the prompt, tokens of the target) of the longest demonstrations, as many as an SFT step has."""
    evaluation: Evaluated
    notes: tuple[str, ...]
    """Assumptions that stand in for what is not at hand."""

    @property
    def completions(self) -> int:
        """Completions of a step."""
        return len(self.prompt_lengths) * self.group_size

    @property
    def step_tokens(self) -> int:
        """Tokens sampled in a step at most."""
        return self.draws * self.completions * self.new_tokens


def plan_workload(config: RunConfig) -> tuple[Workload, PlannedModel]:
    """The work of a recipe, and its model without weights; UserError where either is unusable."""
    notes: list[str] = []
    task, first = _tasks(config, notes)
    model, tokenizer = _model(config, task, first, notes)
    data = _Data.read(config, task, first, tokenizer, context=model.context, notes=notes)
    evaluation, rollout, training = config.evaluation, config.rollout, config.training
    per_epoch = min(training.minibatches, rollout.prompts_per_step * rollout.group_size)
    work = Workload(
        task=task.name if task is not None else config.task.type,
        train_rows=len(task.train) if task is not None else None,
        test_rows=len(task.test) if task is not None else None,
        prompt_lengths=_longest(data.train, rollout.prompts_per_step),
        group_size=rollout.group_size,
        new_tokens=rollout.max_new_tokens,
        draws=1 + training.dynamic_sampling.max_resamples,
        steps=training.steps,
        updates=training.steps * training.epochs_per_rollout * per_epoch,
        sft_steps=config.sft.steps,
        demonstrations=data.longest_demonstrations(config),
        evaluation=Evaluated(
            prompt_lengths=tuple(sorted(data.test[: _evaluation_size(config, len(data.test))], reverse=True)),
            completions=max(evaluation.samples, 1),
            new_tokens=evaluation.max_new_tokens or rollout.max_new_tokens,
        ),
        notes=tuple(notes),
    )
    return work, model


def _tasks(config: RunConfig, notes: list[str]) -> tuple[Task | None, Task | None]:
    """(the task, the first one of a curriculum); None for a task whose data are not at hand."""
    if isinstance(config.task, PreferencesConfig):
        raise UserError(
            "task.type=preferences: a plan is of SFT and RL, and preference pairs train a reward model; plan the "
            "recipe of the policy, whose rewards name the reward model"
        )
    sections = [config.task, *([config.curriculum.task] if config.curriculum is not None else [])]
    tasks: list[Task | None] = []
    for section in sections:
        try:
            with cache_alone():
                tasks.append(build_task(section))
        except UnreachableDataError:
            notes.append(f"the data of task {section.type} are not on this machine and are not fetched for a plan")
            tasks.append(None)
    return tasks[0], tasks[1] if len(tasks) > 1 else None


def _model(config: RunConfig, task: Task | None, first: Task | None, notes: list[str]) -> tuple[PlannedModel, Any]:
    """The model, and its tokenizer where that is at hand."""
    source = config.model
    if source.new is None:
        return read_model(source), _tokenizer(adapter_source(source))
    examples = [*(task.train if task else ()), *(task.test if task else ()), *(first.train if first else ())]
    texts = [*prompt_texts(examples, config.prompt), *(e.rationale for e in examples if e.rationale)]
    if task is None:
        notes.append("the vocabulary of model.new depends on the data: that of printable ASCII is assumed")
    tokenizer = build_tokenizer(source.new.tokenizer, texts or [string.printable])
    return new_model(source, tokenizer), tokenizer if task is not None else None


def _tokenizer(source: ModelConfig) -> Any:
    """The tokenizer of a directory, or of the Hub's cache; None where neither has one."""
    assert source.path is not None
    settings = {"revision": source.revision or "main", "trust_remote_code": source.trust_remote_code}
    with cache_alone():
        try:
            with load_errors(source.path, where="model.path"):
                return load_tokenizer(local_or_hub(source.path, revision=source.revision), **settings)
        except UserError:
            if has_tokenizer(Path(source.path).expanduser()):
                raise
            return None


@dataclass(frozen=True, kw_only=True)
class _Data:
    """Tokens of the data: of every prompt where they are at hand, else bounds."""

    train: list[int]
    test: list[int]
    demonstrations: list[tuple[int, int]]
    """(prompt, target); empty where the recipe has no SFT."""

    @classmethod
    def read(
        cls,
        config: RunConfig,
        task: Task | None,
        first: Task | None,
        tokenizer: Any,
        *,
        context: int | None,
        notes: list[str],
    ) -> _Data:
        """Count tokens where task and tokenizer are at hand, else bound them, with a note."""
        limit = longest_prompt(config, context)
        if task is None or tokenizer is None or (first is None and config.curriculum is not None):
            return cls._bounded(config, task, limit=limit, notes=notes)
        train, others, test = (
            build_prompts(tuple(examples), tokenizer, config.prompt, max_tokens=limit).prompts
            for examples in (task.train, first.train if first else (), task.test)
        )
        encoder = TextEncoder(tokenizer)
        steps = ([len(prompt.token_ids) for prompt in prompts] for prompts in (train, others))
        return cls(
            train=max(steps, key=lambda lengths: sum(sorted(lengths)[-config.rollout.prompts_per_step :])),
            test=[len(prompt.token_ids) for prompt in test],
            demonstrations=[
                (len(prompt.token_ids), target)
                for prompt in ((*train, *others) if config.sft.steps else ())
                if prompt.example.rationale
                # Its own tokens, and one that ends it.
                if (target := 1 + len(encoder.encode_text(prompt.example.rationale)))
                if context is None or len(prompt.token_ids) + target <= context
            ],
        )

    @classmethod
    def _bounded(cls, config: RunConfig, task: Task | None, *, limit: int, notes: list[str]) -> _Data:
        named = config.prompt.max_tokens
        bound = min(limit, named or ASSUMED_PROMPT)
        missing = "the tokenizer is" if task is not None and config.curriculum is None else "the data are"
        source = (
            "prompt.max_tokens" if named == bound else "an assumption; set prompt.max_tokens to a bound of your data"
        )
        notes.append(f"every prompt is taken to have {bound} tokens ({source}), since {missing} not at hand")
        rows = len(task.test) if task is not None else config.evaluation.size or ASSUMED_ROWS
        demonstrations = []
        if config.sft.steps:
            target = config.rollout.max_new_tokens
            notes.append(f"every demonstration is taken to have {target} tokens, as rollout.max_new_tokens")
            demonstrations = [(bound, target)]
        return cls(train=[bound] * config.rollout.prompts_per_step, test=[bound] * rows, demonstrations=demonstrations)

    def longest_demonstrations(self, config: RunConfig) -> tuple[tuple[int, int], ...]:
        """The longest, as many as an SFT step has."""
        ordered = sorted(self.demonstrations, key=sum, reverse=True)
        return tuple(ordered[index % len(ordered)] for index in range(config.sft.batch_size)) if ordered else ()


def _longest(lengths: Sequence[int], count: int) -> tuple[int, ...]:
    """The longest `count` of them, the first ones again where there are fewer."""
    if not lengths:
        raise UserError("the task has no training prompts left: check task and prompt.overlong")
    ordered = sorted(lengths, reverse=True)
    return tuple(ordered[index % len(ordered)] for index in range(count))


def _evaluation_size(config: RunConfig, rows: int) -> int:
    sizes = [config.evaluation.size or rows, config.evaluation.final_size or 0]
    return min(rows, max(sizes))
