"""From a recipe to the parts of a run. Whatever is wrong with the input is found here, before a run begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.evaluation.evaluate import Evaluator, PolicyEvaluator
from flatpeak.evaluation.ranking import LetterRanker
from flatpeak.pipeline.checks import (
    check_aside,
    check_policy,
    check_regularization,
    overlong_demonstrations,
    recipe_notices,
    renamed_settings,
)
from flatpeak.pipeline.components import (
    SamplerFactory,
    build_sampler,
    callers_sampler,
    first_reward,
    main_reward,
    open_workers,
    prepare,
)
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import check_source, load_policy, restore_weights
from flatpeak.policy.model import Policy
from flatpeak.policy.reference import check_reference
from flatpeak.protocols import Progress, Sampler, Task
from flatpeak.rewards.reward_set import RewardSet
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.rollout.randomness import derive_seed
from flatpeak.runs.signals import StopSignals
from flatpeak.tasks.config import build_task
from flatpeak.tasks.custom import check_task
from flatpeak.tasks.prompts import build_prompts, prompt_texts
from flatpeak.training.config import CurriculumConfig
from flatpeak.training.curriculum import Phase, Stream
from flatpeak.training.diagnostics import Unanswered
from flatpeak.training.sft import Demonstration, demonstrations
from flatpeak.types import Example, Prompt

UNBOUNDED_CONTEXT = 2**30
Closing = TypeVar("Closing", RewardSet, WorkerPool, RewardSet | None, WorkerPool | None)


@dataclass(frozen=True, kw_only=True)
class CallerObjects:
    """What a Python caller brings instead of naming it in the recipe; None is what the recipe says."""

    model: Any = None
    tokenizer: Any = None
    task: Task | None = None
    reward: Any = None
    sampler: Sampler | SamplerFactory | None = None


@dataclass(kw_only=True)
class Components:
    """What a run is made of."""

    policy: Policy
    sampler: Sampler
    phases: tuple[Phase, ...]
    test: tuple[Prompt, ...]
    demonstrations: Stream[Demonstration]
    reference: Policy | None
    """What `reference.model` names; the policy as RL begins does not exist yet."""
    evaluator: Evaluator
    """Measures the policy on the held-out prompts."""
    sft_check: Evaluator
    """Measures it on the training prompts that are set aside for `sft.stop_at`."""
    workers: WorkerPool | None = None
    """Grade for the phases' rewards; processes start when there is something to grade, and end with `close`."""

    def attach(self, directory: Path, stop: StopSignals) -> None:
        """Let rewards write into the run's directory, and stop waiting when a signal asks for it."""
        for reward in self._reward_sets():
            reward.attach(directory, stopping=lambda: stop.signal is not None)

    def take_reference(self) -> Policy | None:
        """The named reference, once: a reset replaces it, and nothing may keep it in memory then."""
        reference, self.reference = self.reference, None
        return reference

    def prepare(self) -> None:
        """Let rewards check themselves before anything is spent on the run: UserError where one is unfit."""
        for reward in self._reward_sets():
            prepare(reward, next(phase.prompts.items for phase in self.phases if phase.reward is reward))

    def unanswered(self, part: str | None) -> Unanswered | None:
        """Test of whether that part of the reward finds an answer; None where nothing reads answers.

        Where the first task has rewards of its own too: what reads one task's answers may refuse the other's questions.
        """
        reward = self.phases[-1].reward
        if part is None or not reward.weights or any(one.reward is not reward for one in self.phases):
            return None
        return lambda group: [reward.answer(part, one, group.prompt) is None for one in group.completions]

    def _reward_sets(self) -> list[RewardSet]:
        return list(dict.fromkeys(phase.reward for phase in self.phases))

    def close(self) -> None:
        """End what would outlive the run, and give the model back. Whatever one of them raises, the others end too."""
        with ExitStack() as ends:
            ends.callback(self.policy.release)
            for reward in self._reward_sets():
                ends.callback(reward.close)
            if self.workers is not None:
                ends.callback(self.workers.close)


def build_components(
    config: RunConfig, given: CallerObjects, *, checkpoint: Path | None, progress: Progress
) -> Components:
    """Load or build every part; with `checkpoint`, the policy is the one saved there.

    Where the parts do not fit together, processes end and a caller's model is given back as it was.
    """
    with ExitStack() as made:
        parts = _assemble(config, given, made, checkpoint=checkpoint, progress=progress)
        made.pop_all()
    return parts


def _assemble(
    config: RunConfig, given: CallerObjects, made: ExitStack, *, checkpoint: Path | None, progress: Progress
) -> Components:
    """`made` is given what undoes each part."""
    if given.model is None and checkpoint is None:
        check_source(config.model)
    task = check_task(given.task, where="task") if given.task else build_task(config.task)
    first_task = build_task(config.curriculum.task) if config.curriculum else None
    workers = _closed(open_workers(config), made)
    reward = _closed(main_reward(config, given.reward, workers=workers, progress=progress), made)
    examples = [*task.train, *task.test, *(first_task.train if first_task else ())] if config.model.new else []
    policy = _policy(config, given, examples, checkpoint=checkpoint)
    made.callback(policy.release)
    check_policy(config, policy)
    check_regularization(config, policy)
    for notice in (*getattr(task, "notices", ()), *recipe_notices(config, policy)):
        progress.notice(notice)

    train, test = (
        _prompts(examples, policy, config, progress, what=f"{task.name} {split}")
        for examples, split in ((task.train, "train"), (task.test, "test"))
    )
    _check_ranking(config, policy, test)
    aside = config.sft.check_size if config.sft.steps and config.sft.stop_at is not None else 0
    check_aside(aside, train)
    main = Phase(
        task=task.name, prompts=_stream(train, config, "main"), reward=reward, accuracy=config.evaluation.accuracy
    )
    phases: tuple[Phase, ...] = (main,)
    shown = train[aside:]
    if config.curriculum and first_task:
        first_train = _prompts(first_task.train, policy, config, progress, what=f"{first_task.name} train")
        own = _closed(first_reward(config, workers=workers, progress=progress), made)
        phases = (_first_phase(config, config.curriculum, first_task.name, first_train, own or reward), main)
        shown = (*shown, *first_train) if config.curriculum.in_sft else shown
    sampler = build_sampler(policy, config) if given.sampler is None else callers_sampler(given.sampler, policy, config)
    evaluator = _evaluator(config, policy, sampler, reward, task=task.name, prompts=test)
    return Components(
        policy=policy,
        sampler=sampler,
        phases=phases,
        test=test,
        demonstrations=_demonstrations(config, shown, policy, progress),
        reference=named_reference(config, policy),
        evaluator=evaluator,
        sft_check=replace(evaluator, prompts=train[:aside]),
        workers=workers,
    )


def _first_phase(
    config: RunConfig, curriculum: CurriculumConfig, task: str, prompts: tuple[Prompt, ...], reward: RewardSet
) -> Phase:
    return Phase(
        task=task,
        prompts=_stream(prompts, config, "first"),
        reward=reward,
        accuracy=config.evaluation.accuracy,
        max_steps=curriculum.steps,
        until_pass_rate=curriculum.until_pass_rate,
    )


@contextmanager
def open_evaluation(config: RunConfig, given: CallerObjects, *, progress: Progress) -> Iterator[PolicyEvaluator]:
    """An evaluator on the held-out prompts, and no more of a run than that takes. Graders' processes end with it."""
    task = given.task or build_task(config.task)
    with ExitStack() as made:
        workers = _closed(open_workers(config), made)
        reward = _closed(main_reward(config, given.reward, workers=workers, progress=progress), made)
        examples: list[Example] = []
        if config.model.new is not None:  # its tokenizer is made of all that `build_components` has
            first = build_task(config.curriculum.task).train if config.curriculum else ()
            examples = [*task.train, *task.test, *first]
        policy = _policy(config, given, examples, checkpoint=None)
        made.callback(policy.release)
        for notice in renamed_settings(config):
            progress.notice(notice)
        prompts = _prompts(task.test, policy, config, progress, what=f"{task.name} test")
        _check_ranking(config, policy, prompts)
        prepare(reward, prompts)
        yield _evaluator(config, policy, build_sampler(policy, config), reward, task=task.name, prompts=prompts)


def _closed(component: Closing, made: ExitStack) -> Closing:
    """The reward or the worker pool, where there is one, closed with the stack."""
    if component is not None:
        made.callback(component.close)
    return component


def named_reference(config: RunConfig, policy: Policy) -> Policy | None:
    """The model that `reference.model` names, if it names one."""
    path = config.reference.model
    if path is None:
        return None
    try:
        reference = load_policy(
            ModelConfig(
                path=path,
                device=config.model.device,
                dtype=config.model.dtype,
                trust_remote_code=config.model.trust_remote_code,
            )
        )
    except UserError as error:
        raise UserError(f"reference.model: {error}") from error
    reference.model.requires_grad_(False)
    check_reference(policy, reference)
    return reference


def _policy(config: RunConfig, given: CallerObjects, examples: Sequence[Example], *, checkpoint: Path | None) -> Policy:
    """The caller's model, the one a recipe names, or a new one, whose tokenizer is made of `examples`."""
    if given.model is not None:
        if given.tokenizer is None:
            raise UserError("train(model=...) needs tokenizer=... too")
        if checkpoint is not None:
            restore_weights(given.model, checkpoint)
        return Policy(given.model, given.tokenizer, dropout=config.model.dropout)
    model = config.model
    if checkpoint is not None:
        model = model.model_copy(update={"path": str(checkpoint), "new": None, "revision": None})
    texts: list[str] = []
    if model.new is not None:
        texts = [*prompt_texts(examples, config.prompt), *(e.rationale for e in examples if e.rationale)]
    return load_policy(model, texts=texts, seed=derive_seed(config.run.seed, "weights"))


def _prompts(
    examples: Iterable[Example], policy: Policy, config: RunConfig, progress: Progress, *, what: str
) -> tuple[Prompt, ...]:
    limit = _longest_prompt(config, policy)
    built = build_prompts(tuple(examples), policy.tokenizer, config.prompt, max_tokens=limit)
    if built.dropped or built.truncated:
        progress.notice(f"{what}: {built.dropped} overlong prompts dropped, {built.truncated} shortened")
    if built.fewer_shots:
        progress.notice(
            f"{what}: {built.fewer_shots} of {len(built.prompts)} prompts have fewer worked examples, to fit"
        )
    return built.prompts


def _stream(prompts: tuple[Prompt, ...], config: RunConfig, name: str) -> Stream[Prompt]:
    if not prompts:
        raise UserError("the task has no training prompts left: check task and prompt.overlong")
    return Stream(items=prompts, seed=derive_seed(config.run.seed, "prompts", name))


def _demonstrations(
    config: RunConfig, prompts: Sequence[Prompt], policy: Policy, progress: Progress
) -> Stream[Demonstration]:
    found: list[Demonstration] = []
    if config.sft.steps:
        found, dropped = demonstrations(prompts, policy, max_tokens=policy.context_length)
        if dropped:
            progress.notice(overlong_demonstrations(dropped, left=len(found), context=policy.context_length))
        elif not found:
            raise UserError(
                "sft.steps is set but no training row has a rationale: map task.rationale, or set sft.steps=0"
            )
    return Stream(items=found, seed=derive_seed(config.run.seed, "demonstrations"))


def _check_ranking(config: RunConfig, policy: Policy, prompts: Sequence[Prompt]) -> None:
    if config.evaluation.choices == "rank":
        LetterRanker(policy=policy, tokenizer=policy.tokenizer).check(prompts)


def _evaluator(
    config: RunConfig, policy: Policy, sampler: Sampler, reward: RewardSet, *, task: str, prompts: Sequence[Prompt]
) -> PolicyEvaluator:
    rank = config.evaluation.choices == "rank"
    return PolicyEvaluator(
        config=config.evaluation,
        task=task,
        prompts=prompts,
        sampler=sampler,
        reward=reward,
        max_new_tokens=config.rollout.max_new_tokens,
        stop=config.rollout.stop,
        tokenizer=policy.tokenizer,
        prompt=config.prompt,
        longest_prompt=_longest_prompt(config, policy),
        ranker=LetterRanker(policy=policy, tokenizer=policy.tokenizer) if rank else None,
    )


def _longest_prompt(config: RunConfig, policy: Policy) -> int:
    """Tokens that the context leaves beside a completion. UserError where that is none."""
    context, limit = policy.context_length or UNBOUNDED_CONTEXT, config.rollout.max_new_tokens
    if limit >= context:
        raise UserError(
            f"rollout.max_new_tokens={limit} leaves no room for a prompt in the model's context of {context} tokens: "
            "lower it, or take a model with a longer context"
        )
    return context - limit
