"""From a recipe to the components of a run; unusable input is refused here, before the run begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.ranks import ALONE, Ranks
from flatpeak.errors import UserError
from flatpeak.evaluation.choice_ranking import LetterRanker
from flatpeak.evaluation.evaluate import Evaluator, PolicyEvaluator
from flatpeak.pipeline.components import (
    build_sampler,
    check_policy,
    check_regularization,
    check_sft_split,
    configure_policy,
    first_reward,
    main_reward,
    notice_of_overlong_demonstrations,
    open_workers,
    prepare_reward,
    recipe_notices,
)
from flatpeak.pipeline.evaluators import build_evaluator, longest_prompt
from flatpeak.pipeline.samplers import make_sampler
from flatpeak.pipeline.user_objects import Algorithm, CallerObjects, check_given_again, make_algorithm
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import check_source, load_policy, restore_weights, resumed_source
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
from flatpeak.utils.adapter_base import check_base
from flatpeak.utils.adapters import check_own_adapters
from flatpeak.utils.control_tokens import notice_of_control_tokens
from flatpeak.utils.huggingface import notice_of_unknown_characters

Closing = TypeVar("Closing", RewardSet, WorkerPool, RewardSet | None, WorkerPool | None)


@dataclass(kw_only=True)
class Components:
    """The objects that a run of a policy consists of."""

    policy: Policy
    task: str
    """The name of the task."""
    sampler: Sampler
    algorithm: Algorithm
    phases: tuple[Phase, ...]
    test: tuple[Prompt, ...]
    demonstrations: Stream[Demonstration]
    reference: Policy | None
    """The model of `reference.model`; the policy as RL begins does not exist yet."""
    evaluator: Evaluator
    """Measures the policy on the held-out prompts."""
    sft_check: Evaluator
    """Measures it on the training prompts that are set aside for `sft.stop_at`."""
    workers: WorkerPool | None = None
    """The grading processes of the rewards; they end with `close`."""

    def attach(self, directory: Path, stop: StopSignals) -> None:
        """Give rewards the run's directory to write into, and them and servers the signal that ends all waiting."""
        for reward in self._rewards():
            reward.attach(directory, stopping=lambda: stop.asked)
        self.sampler.stop_when(lambda: stop.asked)

    def stoppable_evaluator(self, stopping: Callable[[], bool]) -> Evaluator:
        """The evaluator, whose sharpness raises StoppedError once `stopping()`."""
        evaluator = self.evaluator
        if not isinstance(evaluator, PolicyEvaluator) or evaluator.sharpness is None:
            return evaluator
        return replace(evaluator, sharpness=replace(evaluator.sharpness, stopping=stopping))

    def take_reference(self) -> Policy | None:
        """Hand over the named reference: a reset replaces it, and then nothing else may keep it in memory."""
        reference, self.reference = self.reference, None
        return reference

    def prepare(self) -> None:
        """Let rewards check themselves before anything is spent on the run; UserError where one is unfit."""
        for reward in self._rewards():
            prepare_reward(reward, next(phase.prompts.items for phase in self.phases if phase.reward is reward))

    def unanswered(self, name: str | None) -> Unanswered | None:
        """A test of whether the reward component of that name extracts an answer; None where none reads answers.

        None also where the first task has rewards of its own: one task's grader may refuse the other's questions.
        """
        reward = self.phases[-1].reward
        if name is None or not reward.weights or any(phase.reward is not reward for phase in self.phases):
            return None
        return lambda group: [reward.answer(name, one, group.prompt) is None for one in group.completions]

    def _rewards(self) -> list[RewardSet]:
        return list(dict.fromkeys(phase.reward for phase in self.phases))

    def close(self) -> None:
        """End all processes and give the model back; where one of them raises, the others end all the same."""
        with ExitStack() as resources:
            resources.callback(self.policy.release)
            resources.callback(self.sampler.close)
            for reward in self._rewards():
                resources.callback(reward.close)
            if self.workers is not None:
                resources.callback(self.workers.close)


def build_components(
    config: RunConfig, objects: CallerObjects, *, checkpoint: Path | None, progress: Progress, ranks: Ranks = ALONE
) -> Components:
    """Load or build every component; with `checkpoint`, the policy is the one saved there. Sends no message to ranks.

    Where the components do not fit together, processes end and a caller's model is given back as it was.
    """
    if objects.model is None and checkpoint is None:
        check_source(config.model)
    check_given_again(checkpoint, config, objects)
    with ExitStack() as resources:
        components = _build(config, objects, resources, checkpoint=checkpoint, progress=progress, ranks=ranks)
        resources.pop_all()
    return components


def _build(
    config: RunConfig,
    objects: CallerObjects,
    resources: ExitStack,
    *,
    checkpoint: Path | None,
    progress: Progress,
    ranks: Ranks,
) -> Components:
    """Build the components, each of them closed with `resources`."""
    algorithm = make_algorithm(config, objects)
    task = check_task(objects.task, where="task") if objects.task else build_task(config.task)
    first_task = build_task(config.curriculum.task) if config.curriculum else None
    workers = _closing(open_workers(config), resources)
    reward = _closing(main_reward(config, objects.reward, workers=workers, progress=progress), resources)
    examples = [*task.train, *task.test, *(first_task.train if first_task else ())] if config.model.new else []
    policy = _open_policy(config, objects, examples, resources, checkpoint=checkpoint)
    _check_and_announce(config, policy, task, progress)
    train, test = (
        _prompts(examples, policy, config, progress, split=f"{task.name} {split}")
        for examples, split in ((task.train, "train"), (task.test, "test"))
    )
    _check_ranking(config, policy, test)
    check_size = config.sft.check_size if config.sft.steps and config.sft.stop_at is not None else 0
    check_sft_split(check_size, train)
    stream = _stream(train, config, "main")
    main = Phase(task=task.name, prompts=stream, reward=reward, accuracy=config.evaluation.accuracy_part)
    phases: tuple[Phase, ...] = (main,)
    demonstrated = train[check_size:]
    if config.curriculum and first_task:
        first_train = _prompts(first_task.train, policy, config, progress, split=f"{first_task.name} train")
        own = _closing(first_reward(config, workers=workers, progress=progress), resources)
        phases = (_first_phase(config, config.curriculum, first_task.name, first_train, own or reward), main)
        demonstrated = (*demonstrated, *first_train) if config.curriculum.in_sft else demonstrated
    sampler = make_sampler(config, objects.sampler, policy, ranks=ranks)
    resources.callback(sampler.close)
    evaluator = build_evaluator(config, policy, sampler, reward, lambda: algorithm, task=task.name, prompts=test)
    return Components(
        policy=policy,
        task=task.name,
        sampler=sampler,
        algorithm=algorithm,
        phases=phases,
        test=test,
        demonstrations=_demonstrations(config, demonstrated, policy, progress),
        reference=named_reference(config, policy),
        evaluator=evaluator,
        sft_check=replace(evaluator, prompts=train[:check_size], sharpness=None),
        workers=workers,
    )


def _check_and_announce(config: RunConfig, policy: Policy, task: Task, progress: Progress) -> None:
    """Check that the recipe can train this policy, and give the notices of task and recipe."""
    check_policy(config, policy)
    if not config.distributed.divides_model:  # else its copies of the weights are made of shards
        check_regularization(config, policy)
    for notice in (*getattr(task, "notices", ()), *recipe_notices(config, policy)):
        progress.notice(notice)


def _first_phase(
    config: RunConfig, curriculum: CurriculumConfig, task: str, prompts: tuple[Prompt, ...], reward: RewardSet
) -> Phase:
    return Phase(
        task=task,
        prompts=_stream(prompts, config, "first"),
        reward=reward,
        accuracy=config.evaluation.accuracy_part,
        max_steps=curriculum.steps,
        until_pass_rate=curriculum.until_pass_rate,
    )


@contextmanager
def open_evaluation(config: RunConfig, *, progress: Progress) -> Iterator[PolicyEvaluator]:
    """An evaluator on the held-out prompts, and no more of a run than that takes; graders' processes end with it."""
    task = build_task(config.task)
    with ExitStack() as resources:
        workers = _closing(open_workers(config), resources)
        reward = _closing(main_reward(config, None, workers=workers, progress=progress), resources)
        examples: list[Example] = []
        if config.model.new is not None:  # its tokenizer is made of the same texts as in `build_components`
            first = build_task(config.curriculum.task).train if config.curriculum else ()
            examples = [*task.train, *task.test, *first]
        policy = _open_policy(config, CallerObjects(), examples, resources, checkpoint=None)
        prompts = _prompts(task.test, policy, config, progress, split=f"{task.name} test")
        _check_ranking(config, policy, prompts)
        prepare_reward(reward, prompts)
        sampler = build_sampler(policy, config, trains=False)
        resources.callback(sampler.close)
        yield build_evaluator(
            config,
            policy,
            sampler,
            reward,
            lambda: make_algorithm(config, CallerObjects()),
            task=task.name,
            prompts=prompts,
        )


def _closing(component: Closing, resources: ExitStack) -> Closing:
    """The reward or the worker pool, closed with `resources` if there is one."""
    if component is not None:
        resources.callback(component.close)
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
    configure_policy(reference, config)
    check_reference(policy, reference)
    if config.reference.offload:
        reference.offload()
    return reference


def _open_policy(
    config: RunConfig,
    objects: CallerObjects,
    examples: Sequence[Example],
    resources: ExitStack,
    *,
    checkpoint: Path | None,
) -> Policy:
    """The policy of `_policy`, given back with `resources`."""
    policy = _policy(config, objects, examples, checkpoint=checkpoint)
    resources.callback(policy.release)
    return policy


def _policy(
    config: RunConfig, objects: CallerObjects, examples: Sequence[Example], *, checkpoint: Path | None
) -> Policy:
    """The caller's model, the one a recipe names, or a new one, whose tokenizer is made of `examples`."""
    if objects.model is not None:
        if objects.tokenizer is None:
            raise UserError("train(model=...) needs tokenizer=... too")
        check_own_adapters(objects.model)
        if checkpoint is not None:
            check_base(objects.model, checkpoint, where=str(checkpoint))
            restore_weights(objects.model, checkpoint)
        return Policy(objects.model, objects.tokenizer, dropout=config.model.dropout)
    model = config.model
    if checkpoint is not None:
        model = resumed_source(model, checkpoint)
    texts: list[str] = []
    if model.new is not None:
        texts = [*prompt_texts(examples, config.prompt), *(e.rationale for e in examples if e.rationale)]
    return load_policy(model, texts=texts, seed=derive_seed(config.run.seed, "weights"))


def _prompts(
    examples: Iterable[Example], policy: Policy, config: RunConfig, progress: Progress, *, split: str
) -> tuple[Prompt, ...]:
    limit = longest_prompt(config, policy.context_length)
    built = build_prompts(tuple(examples), policy.tokenizer, config.prompt, max_tokens=limit)
    if built.dropped or built.truncated:
        progress.notice(f"{split}: {built.dropped} overlong prompts dropped, {built.truncated} shortened")
    if built.fewer_shots:
        progress.notice(
            f"{split}: {built.fewer_shots} of {len(built.prompts)} prompts have fewer worked examples, to fit"
        )
    unknown = notice_of_unknown_characters([prompt.text for prompt in built.prompts], policy.tokenizer)
    if unknown is not None:
        progress.notice(f"{split}: {unknown}")
    asked = ("".join((e.preamble, *e.shots, e.question)) for e in (prompt.example for prompt in built.prompts))
    spelled = notice_of_control_tokens(asked, policy.tokenizer, what="questions")
    if spelled is not None:
        progress.notice(f"{split}: {spelled}")
    return built.prompts


def _stream(prompts: tuple[Prompt, ...], config: RunConfig, name: str) -> Stream[Prompt]:
    if not prompts:
        raise UserError("the task has no training prompts left: check task and prompt.overlong")
    return Stream(items=prompts, seed=derive_seed(config.run.seed, "prompts", name))


def _demonstrations(
    config: RunConfig, prompts: Sequence[Prompt], policy: Policy, progress: Progress
) -> Stream[Demonstration]:
    fitting: list[Demonstration] = []
    if config.sft.steps:
        fitting, dropped = demonstrations(prompts, policy, max_tokens=policy.context_length)
        rationales = (prompt.example.rationale for prompt in prompts if prompt.example.rationale)
        spelled = notice_of_control_tokens(rationales, policy.tokenizer, what="rationales")
        if spelled is not None:
            progress.notice(spelled)
        if dropped:
            progress.notice(
                notice_of_overlong_demonstrations(dropped, left=len(fitting), context=policy.context_length)
            )
        elif not fitting:
            raise UserError(
                "sft.steps is set but no training row has a rationale: map task.rationale, or set sft.steps=0"
            )
    return Stream(items=fitting, seed=derive_seed(config.run.seed, "demonstrations"))


def _check_ranking(config: RunConfig, policy: Policy, prompts: Sequence[Prompt]) -> None:
    if config.evaluation.choices == "rank":
        LetterRanker(policy=policy, tokenizer=policy.tokenizer).check(prompts)
