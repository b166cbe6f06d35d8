"""The work of a planned run: its data, prompts, completions, tokens, steps and updates, before anything is spent.

Nothing is fetched except a model's config.json. If data or a tokenizer are not available here, numbers of tokens are
upper bounds, and notes say so.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from flatpeak.apps.planning.planned_model import PlannedModel, new_model, read_model
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UnreachableDataError, UserError
from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.pipeline.evaluators import longest_prompt
from flatpeak.pipeline.run_data import open_tasks
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import adapter_source, build_tokenizer
from flatpeak.protocols import Task
from flatpeak.tasks.config import TaskConfig, build_task
from flatpeak.tasks.preferences import PreferencesConfig
from flatpeak.tasks.prompts import build_prompts, prompt_texts
from flatpeak.types import Batch, Example
from flatpeak.utils.control_tokens import TextEncoder
from flatpeak.utils.huggingface import cache_alone, has_tokenizer, load_errors, load_tokenizer, local_or_hub

ASSUMED_PROMPT: Final = 1024
"""Assumed tokens of a prompt if nothing says more, and neither recipe nor context limit it to less."""
ASSUMED_ROWS: Final = 512
"""Assumed held-out rows if the data are not available here and `evaluation.size` is not set."""

Length = TypeVar("Length")


@dataclass(frozen=True, kw_only=True)
class Request:
    """Completions that are requested from a sampler at once."""

    prompt_lengths: tuple[int, ...]
    """Tokens of its prompts, the longest first."""
    group_size: int
    """Completions per prompt."""
    new_tokens: int
    """The most tokens of a completion."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The data and the size of a run."""

    task: str
    train_rows: int | None
    """None if the data are not available here."""
    test_rows: int | None
    prompt_lengths: tuple[int, ...]
    """Tokens of the longest training prompts, as many as in a step, the longest first."""
    group_size: int
    new_tokens: int
    """The most tokens of a completion."""
    draws: int
    """The most rounds of rollouts in a step: dynamic sampling may draw more than one."""
    steps: int
    updates: int
    """The most updates in all steps."""
    sft_steps: int
    demonstrations: tuple[tuple[int, int], ...]
    """(tokens of the prompt, tokens of the target) of the longest demonstrations, as many as in an SFT step."""
    evaluation: Request
    """The largest evaluation of the run."""
    notes: tuple[str, ...]
    """Assumptions in place of what is not available here."""

    @property
    def completions(self) -> int:
        """The completions of a step."""
        return len(self.prompt_lengths) * self.group_size

    @property
    def step_tokens(self) -> int:
        """The most tokens sampled in a step."""
        return self.draws * self.completions * self.new_tokens

    @property
    def request(self) -> Request:
        """The completions of a step of training."""
        return Request(prompt_lengths=self.prompt_lengths, group_size=self.group_size, new_tokens=self.new_tokens)


def plan_workload(config: RunConfig) -> tuple[Workload, PlannedModel]:
    """The work of a recipe, and its model without weights; UserError if either is unusable."""
    notes: list[str] = []
    task, first, sets = _tasks(config, notes)
    model, tokenizer = _model(config, task, first, sets, notes)
    limit = longest_prompt(config, model.context)
    if task is None or tokenizer is None or (first is None and config.curriculum is not None):
        train, test, demonstrations = _bounds(config, task, limit=limit, notes=notes)
    else:
        train, test, demonstrations = _counted(config, task, first, sets, tokenizer, limit=limit, context=model.context)
    if not train:
        raise UserError("the task has no training prompts left: check task and prompt.overlong")
    evaluation, rollout, training = config.evaluation, config.rollout, config.training
    per_epoch = min(training.minibatches, rollout.prompts_per_step * rollout.group_size)
    evaluated = max(evaluation.size or len(test), evaluation.final_size or 0) * len(config.main_tasks)
    work = Workload(
        task=task.name if task is not None else " and ".join(one.type for one in config.main_tasks),
        train_rows=len(task.train) if task is not None else None,
        test_rows=len(task.test) if task is not None else None,
        prompt_lengths=_first(sorted(train, reverse=True), rollout.prompts_per_step),
        group_size=rollout.group_size,
        new_tokens=rollout.max_new_tokens,
        draws=1 + training.dynamic_sampling.max_resamples,
        steps=training.steps,
        updates=training.steps * training.epochs_per_rollout * per_epoch,
        sft_steps=config.sft.steps,
        demonstrations=_first(sorted(demonstrations, key=sum, reverse=True), config.sft.batch_size),
        evaluation=Request(
            prompt_lengths=tuple(sorted(test[:evaluated], reverse=True)),
            group_size=max(evaluation.samples, 1),
            new_tokens=evaluation.max_new_tokens or rollout.max_new_tokens,
        ),
        notes=tuple(notes),
    )
    return work, model


def _tasks(config: RunConfig, notes: list[str]) -> tuple[Task | None, Task | None, list[Sequence[Example]]]:
    """(the task or mixture, the first task of a curriculum, the evaluation sets); None for a task whose data are not
    available here, and no set without data."""
    if any(isinstance(task, PreferencesConfig) for task in config.main_tasks):
        raise UserError(
            "task.type=preferences: a plan is of SFT and RL, and preference pairs train a reward model; plan the "
            "recipe of the policy, whose rewards name the reward model"
        )
    main_alone = config.model_copy(update={"curriculum": None, "evaluation": EvaluationConfig()})
    main = _built(lambda: open_tasks(main_alone).main, config.main_tasks, notes)
    curriculum = config.curriculum
    first = _built(lambda: build_task(curriculum.task), (curriculum.task,), notes) if curriculum else None
    sets = [
        _built(partial(build_task, section), (section,), notes) for section in (config.evaluation.sets or {}).values()
    ]
    return main, first, [one.test for one in sets if one is not None]


def _built(build: Callable[[], Task], sections: Sequence[TaskConfig], notes: list[str]) -> Task | None:
    try:
        with cache_alone():
            return build()
    except UnreachableDataError:
        types = " and ".join(section.type for section in sections)
        notes.append(f"the data of task {types} are not on this machine and are not fetched for a plan")
        return None


def _model(
    config: RunConfig, task: Task | None, first: Task | None, sets: Sequence[Sequence[Example]], notes: list[str]
) -> tuple[PlannedModel, Any]:
    """The model, and its tokenizer if that is available here."""
    source = config.model
    if source.new is None:
        return read_model(source), _tokenizer(adapter_source(source))
    examples = [*(task.train if task else ()), *(task.test if task else ()), *(first.train if first else ())]
    examples += [example for one in sets for example in one]
    texts = [*prompt_texts(examples, config.prompt), *(e.rationale for e in examples if e.rationale)]
    texts += [string.printable] if config.acts and texts else []
    if task is None:
        notes.append("the vocabulary of model.new depends on the data: that of printable ASCII is assumed")
    tokenizer = build_tokenizer(source.new.tokenizer, texts or [string.printable])
    return new_model(source, tokenizer), tokenizer if task is not None else None


def _tokenizer(source: ModelConfig) -> Any:
    """The tokenizer of a directory, or of the Hub's cache; None if neither has one."""
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


Tokens = tuple[list[int], list[int], list[tuple[int, int]]]
"""Tokens of training prompts, of held-out prompts, and of demonstrations: (prompt, target)."""


def _counted(
    config: RunConfig,
    task: Task,
    first: Task | None,
    sets: Sequence[Sequence[Example]],
    tokenizer: Any,
    *,
    limit: int,
    context: int | None,
) -> Tokens:
    """The tokens of all prompts; with a curriculum, those of the stage whose steps are larger.

    Held-out prompts are those of the task or of an evaluation set, whichever are larger in all.
    """
    train, others, *asked = (
        build_prompts(tuple(examples), tokenizer, config.prompt, max_tokens=limit).prompts
        for examples in (task.train, first.train if first else (), task.test, *sets)
    )
    stages = [[len(prompt.token_ids) for prompt in prompts] for prompts in (train, others)]
    largest = max(stages, key=lambda lengths: sum(sorted(lengths)[-config.rollout.prompts_per_step :]))
    encoder = TextEncoder(tokenizer)
    demonstrations = []
    for prompt in (*train, *others) if config.sft.steps else ():
        if prompt.example.rationale:
            target = len(encoder.encode_text(prompt.example.rationale)) + 1  # plus the end-of-sequence token
            if context is None or len(prompt.token_ids) + target <= context:
                demonstrations.append((len(prompt.token_ids), target))
    tests = [[len(prompt.token_ids) for prompt in prompts] for prompts in asked]
    return largest, max(tests, key=lambda lengths: sum(lengths[: config.evaluation.size])), demonstrations


def _bounds(config: RunConfig, task: Task | None, *, limit: int, notes: list[str]) -> Tokens:
    """Upper bounds of the same numbers, with a note."""
    named = config.prompt.max_tokens
    bound = min(limit, named or ASSUMED_PROMPT)
    missing = "the tokenizer is" if task is not None and config.curriculum is None else "the data are"
    source = "prompt.max_tokens" if named == bound else "an assumption; set prompt.max_tokens to a bound of your data"
    notes.append(f"every prompt is taken to have {bound} tokens ({source}), since {missing} not at hand")
    rows = len(task.test) if task is not None else config.evaluation.size or ASSUMED_ROWS
    demonstrations = []
    if config.sft.steps:
        target = config.rollout.max_new_tokens
        notes.append(f"every demonstration is taken to have {target} tokens, as rollout.max_new_tokens")
        demonstrations = [(bound, target)]
    return [bound] * config.rollout.prompts_per_step, [bound] * rows, demonstrations


def _first(ordered: Sequence[Length], count: int) -> tuple[Length, ...]:
    """The first `count` elements, starting again from the beginning if there are fewer."""
    return tuple(ordered[index % len(ordered)] for index in range(count)) if ordered else ()


def share_of_rollouts(work: Workload, processes: int) -> Workload:
    """The work with the prompts that one rank samples and evaluates at most: the longest ones."""

    def share(lengths: tuple[int, ...]) -> tuple[int, ...]:
        return lengths[: -(-len(lengths) // processes)]

    evaluation = replace(work.evaluation, prompt_lengths=share(work.evaluation.prompt_lengths))
    return replace(work, prompt_lengths=share(work.prompt_lengths), evaluation=evaluation)


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """The largest possible micro-batch of a minibatch, and whether there are others."""

    micro_batch: Batch
    several: bool
    padded: bool = False

    @property
    def tokens(self) -> int:
        """The tokens of the micro-batch, as the budget counts them."""
        prompts, batch = self.micro_batch.prompts, self.micro_batch
        times = len(batch.lengths_N) // len(prompts) if self.padded else 1
        return times * sum(map(len, prompts)) + len(batch.tokens_T)


def plan_minibatch(config: RunConfig, work: Workload, *, token_budget: int, padded: bool) -> Minibatch:
    """The largest micro-batch of RL."""
    prompts, group = work.prompt_lengths, work.group_size
    count = config.training.minibatches
    if config.training.minibatch_of == "groups":
        prompts = prompts[: -(-len(prompts) // count)]
    else:
        group = -(-group // count)
    return largest_micro_batch(prompts, group, work.new_tokens, token_budget=token_budget, padded=padded)


def plan_sft_minibatch(work: Workload, *, token_budget: int, padded: bool) -> Minibatch:
    """The largest micro-batch of SFT: each demonstration has its own prompt, and none is longer than the longest.

    UserError if there is nothing to learn from.
    """
    if not work.demonstrations:
        raise UserError("sft.steps is set but no training row has a rationale: map task.rationale, or set sft.steps=0")
    prompts, targets = zip(*work.demonstrations, strict=True)
    return largest_micro_batch(prompts, 1, max(targets), token_budget=token_budget, padded=padded)


def largest_micro_batch(
    prompts: Sequence[int], group: int, new_tokens: int, *, token_budget: int, padded: bool
) -> Minibatch:
    """The whole minibatch if its tokens are within the budget, else a part with as many tokens as the budget.

    Completions may have any length, so nearly every budget can be filled. `padded`: the tokens of a prompt count for
    each of its completions.
    """
    completions = len(prompts) * group
    if padded:
        rows = max(1, min(token_budget // (prompts[0] + new_tokens), completions))
        batch = full_batch(prompts[:1], rows, new_tokens)
        return Minibatch(micro_batch=batch, several=rows < completions, padded=True)
    if sum(prompts) + completions * new_tokens <= token_budget:
        return Minibatch(micro_batch=full_batch(prompts, group, new_tokens), several=False)
    if prompts[0] + group * new_tokens > token_budget:
        rows = max(1, min(group, -(-(token_budget - prompts[0]) // new_tokens)))
        tokens = (token_budget - prompts[0]) // rows if rows > 1 else new_tokens
        batch = full_batch(prompts[:1], rows, max(1, min(tokens, new_tokens)))
        return Minibatch(micro_batch=batch, several=True)
    return Minibatch(micro_batch=_filled(prompts, group, new_tokens, token_budget), several=True)


def _filled(prompts: Sequence[int], group: int, new_tokens: int, token_budget: int) -> Batch:
    """Whole groups with as many tokens as the budget: full groups, and perhaps one with shorter completions."""
    full = 1
    while full < len(prompts) and sum(prompts[: full + 1]) + (full + 1) * group * new_tokens <= token_budget:
        full += 1
    batch, more = full_batch(prompts[:full], group, new_tokens), prompts[: full + 1]
    shorter = (token_budget - sum(more)) // (len(more) * group)
    if len(more) == full or shorter < 1:
        return batch
    fuller = full_batch(more, group, shorter)
    return max(batch, fuller, key=lambda one: sum(map(len, one.prompts)) + len(one.tokens_T))


def full_batch(prompt_lengths: Sequence[int], group: int, new_tokens: int) -> Batch:
    """A batch of groups whose completions all have `new_tokens` tokens, with arbitrary token ids."""
    count = len(prompt_lengths) * group
    lengths_N = torch.full((count,), new_tokens, dtype=torch.int64)
    return Batch(
        prompts=tuple((0,) * length for length in prompt_lengths),
        prompt_N=torch.arange(len(prompt_lengths)).repeat_interleave(group),
        lengths_N=lengths_N,
        tokens_T=torch.zeros(count * new_tokens, dtype=torch.int64),
        sequence_T=torch.arange(count).repeat_interleave(lengths_N),
        advantages_T=torch.ones(count * new_tokens),
        weights_N=torch.ones(count),
        old_logprobs_T=None,
    )
