"""From a recipe to the components of a run; unusable input is refused here, before the run begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.ranks import ALONE, Ranks
from flatpeak.evaluation.choice_ranking import LetterRanker
from flatpeak.evaluation.evaluate import PolicyEvaluator
from flatpeak.pipeline.evaluators import build_evaluator
from flatpeak.pipeline.policies import announce_recipe, check_model, named_reference, open_policy
from flatpeak.pipeline.request import Algorithm, CallerObjects, check_given_again, make_algorithm
from flatpeak.pipeline.rollout_engines import build_sampler
from flatpeak.pipeline.run_data import RunData, RunTasks, make_data, make_prompts, make_sets, open_tasks
from flatpeak.pipeline.run_rewards import RunRewards, open_rewards, prepare_reward, rewards_of
from flatpeak.pipeline.samplers import DisplayedSampler, acting, make_sampler
from flatpeak.policy.model import Policy
from flatpeak.protocols import Progress, Sampler
from flatpeak.runs.signals import StopSignals
from flatpeak.training.curriculum import Phase


@dataclass(kw_only=True)
class Components:
    """The objects that a run of a policy consists of."""

    policy: Policy
    task: str
    """The name of the task."""
    data: RunData
    sampler: Sampler
    algorithm: Algorithm
    phases: tuple[Phase, ...]
    reference: Policy | None
    """The model of `reference.model`; the policy as RL begins does not exist yet."""
    evaluator: PolicyEvaluator
    """Measures the policy on the held-out prompts."""
    sft_check: PolicyEvaluator
    """Measures it on the training prompts that are set aside for `sft.stop_at`."""
    resources: ExitStack
    """Gives the model back, and ends the processes of sampler and rewards; where one raises, the others end too."""

    def attach(self, directory: Path, stop: StopSignals) -> None:
        """Give rewards the run's directory to write into, and them and servers the signal that ends all waiting."""
        for reward in rewards_of(self.phases):
            reward.attach(directory, stopping=lambda: stop.asked, at_once=stop.at_once)
        self.sampler.stop_when(lambda: stop.asked)

    def stoppable_evaluator(self, stopping: Callable[[], bool]) -> PolicyEvaluator:
        """The evaluator, whose parts without a sampler raise StoppedError once `stopping()`."""
        sharpness, ranker = self.evaluator.sharpness, self.evaluator.ranker
        return replace(
            self.evaluator,
            sharpness=replace(sharpness, stopping=stopping) if sharpness else None,
            ranker=replace(ranker, stopping=stopping) if isinstance(ranker, LetterRanker) else ranker,
        )

    def take_reference(self) -> Policy | None:
        """Hand over the named reference: a reset replaces it, and then nothing else may keep it in memory."""
        reference, self.reference = self.reference, None
        return reference

    def prepare(self) -> None:
        """Let rewards check themselves before anything is spent on the run; UserError where one is unfit."""
        for reward in rewards_of(self.phases):
            prepare_reward(reward, next(phase.prompts.items for phase in self.phases if phase.reward is reward))

    def close(self) -> None:
        """End all processes and give the model back."""
        self.resources.close()


def build_components(
    config: RunConfig, objects: CallerObjects, *, checkpoint: Path | None, progress: Progress, ranks: Ranks = ALONE
) -> Components:
    """Load or build every component; with `checkpoint`, the policy is the one saved there. Sends no message to ranks.

    Where the components do not fit together, processes end and a caller's model is given back as it was.
    """
    check_model(config, objects, checkpoint=checkpoint)
    check_given_again(checkpoint, config, objects)
    with ExitStack() as resources:
        algorithm = make_algorithm(config, objects)
        tasks = open_tasks(config, objects.task)
        rewards = open_rewards(config, objects.reward, resources, progress=progress)
        policy = open_policy(config, objects, tasks.examples, checkpoint=checkpoint)
        resources.callback(policy.release)
        announce_recipe(config, policy, tasks.main, progress)
        data = make_data(config, tasks, policy, progress)
        sampler = DisplayedSampler(make_sampler(config, objects.sampler, policy, ranks=ranks), progress)
        resources.callback(sampler.close)
        name = tasks.main.name
        evaluator = build_evaluator(
            config,
            policy,
            sampler,
            rewards.main,
            lambda: algorithm,
            task=name,
            shares=tasks.shares,
            prompts=data.test,
            sets=data.sets,
        )
        phases = _phases(config, tasks, data, rewards)
        for phase in phases:
            phase.reward.check_rows(phase.prompts.items)
        rewards.main.check_rows(chain(data.test, *data.sets.values()))
        return Components(
            policy=policy,
            task=name,
            data=data,
            sampler=sampler,
            algorithm=algorithm,
            phases=phases,
            reference=named_reference(config, policy),
            evaluator=evaluator,
            sft_check=replace(evaluator, prompts=data.check, sets=(), sharpness=None),
            resources=resources.pop_all(),
        )


def _phases(config: RunConfig, tasks: RunTasks, data: RunData, rewards: RunRewards) -> tuple[Phase, ...]:
    """The main task, after the first one where there is a curriculum."""
    accuracy = config.evaluation.accuracy_part
    main = Phase(task=tasks.main.name, prompts=data.main, reward=rewards.main, accuracy=accuracy)
    if config.curriculum is None or tasks.first is None or data.first is None:
        return (main,)
    first = Phase(
        task=tasks.first.name,
        prompts=data.first,
        reward=rewards.first,
        accuracy=accuracy,
        max_steps=config.curriculum.steps,
        until_pass_rate=config.curriculum.until_pass_rate,
    )
    return (first, main)


@contextmanager
def open_evaluation(
    config: RunConfig, objects: CallerObjects | None = None, *, progress: Progress
) -> Iterator[PolicyEvaluator]:
    """An evaluator on the held-out prompts, and no more of a run than that takes; graders' processes end with it.

    `objects` are the caller's model, task and reward in place of the recipe's; the task need not have training rows.
    """
    objects = objects or CallerObjects()
    alone = config.model_copy(update={"curriculum": None})
    if objects.task is not None:
        tasks = RunTasks(main=objects.task, first=None, sets={})
    else:
        tasks = open_tasks(config if config.model.new else alone)  # a new model's tokenizer is made of all texts
    with ExitStack() as resources:
        reward = open_rewards(alone, objects.reward, resources, progress=progress).main
        policy = open_policy(config, objects, tasks.examples, checkpoint=None)
        resources.callback(policy.release)
        prompts = make_prompts(config, tasks.main.test, policy, progress, split=f"{tasks.main.name} test")
        sampler = DisplayedSampler(acting(config, build_sampler(policy, config, trains=False), policy), progress)
        sampler.announce_with(progress.notice)
        resources.callback(sampler.close)
        evaluator = build_evaluator(
            config,
            policy,
            sampler,
            reward,
            lambda: make_algorithm(config, CallerObjects()),
            task=tasks.main.name,
            shares=tasks.shares,
            prompts=prompts,
            sets=make_sets(config, tasks, policy, progress),
        )
        prepare_reward(reward, prompts)
        yield evaluator
