"""RunConfig, the schema of a recipe, composed of the components' configurations."""

from __future__ import annotations

from pydantic import Field, model_validator

from flatpeak.config.distribution import refuse_undistributable
from flatpeak.config.unused_settings import refuse_unused
from flatpeak.distributed.config import DistributedConfig
from flatpeak.episodes.config import EpisodesConfig
from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.policy.config import ModelConfig, ReferenceConfig
from flatpeak.rewards.base import RESERVED_REWARD_NAMES
from flatpeak.rewards.config import NumberConfig, RewardConfig
from flatpeak.rollout.config import RolloutConfig
from flatpeak.runs.config import RunSectionConfig
from flatpeak.runs.paid_patterns import SPREADS
from flatpeak.tasks.arithmetic import ArithmeticConfig
from flatpeak.tasks.config import TaskConfig
from flatpeak.tasks.prompts import PromptConfig
from flatpeak.tracking.config import TrackingConfig
from flatpeak.training.config import (
    CurriculumConfig,
    MixtureItemConfig,
    OptimizerConfig,
    RewardModelConfig,
    SFTConfig,
    TrainingConfig,
)
from flatpeak.training.objective_config import ADVANTAGE_ARGUMENTS, AdvantageConfig, KLConfig, ObjectiveConfig
from flatpeak.utils.schema import StrictConfig

__all__ = [
    "AdvantageConfig",
    "CurriculumConfig",
    "DistributedConfig",
    "EpisodesConfig",
    "EvaluationConfig",
    "GradientRegularizationConfig",
    "KLConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PromptConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RunConfig",
    "RunSectionConfig",
    "SFTConfig",
    "TaskConfig",
    "TrackingConfig",
    "TrainingConfig",
]


class RunConfig(StrictConfig):
    """Everything that determines what a run does; its fields are the sections of a recipe."""

    run: RunSectionConfig = RunSectionConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = ArithmeticConfig()
    """Questions and their gold answers; each type of task has its own keys."""
    tasks: tuple[MixtureItemConfig, ...] = ()
    """A mixture of tasks in place of `task`, each with its share of the prompts (docs/tasks.md)."""
    prompt: PromptConfig = PromptConfig()
    rollout: RolloutConfig = RolloutConfig()
    tools: tuple[str, ...] = ()
    """Functions that the policy may call, file.py:name or module:name: their type hints and docstrings describe them
    (docs/agents.md)."""
    environment: str | None = None
    """A class whose methods are tools or steps, file.py:name or module:name, in place of `tools`; null: none
    (docs/agents.md)."""
    episodes: EpisodesConfig = EpisodesConfig()
    rewards: dict[str, RewardConfig] = Field(default={"correctness": NumberConfig()}, min_length=1)
    """The components of the reward, by names of your choice; each type of reward has its own keys."""
    advantage: AdvantageConfig = AdvantageConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    kl: KLConfig = KLConfig()
    reference: ReferenceConfig = ReferenceConfig()
    gradient_regularization: GradientRegularizationConfig = GradientRegularizationConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    curriculum: CurriculumConfig | None = None
    """A first task, used until a step or a pass rate is reached; null: only the main task."""
    sft: SFTConfig = SFTConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    distributed: DistributedConfig = DistributedConfig()

    @property
    def acts(self) -> bool:
        """Whether completions are episodes, with tools or in an environment."""
        return bool(self.tools) or self.environment is not None

    @model_validator(mode="after")
    def _acts_in_one_way(self) -> RunConfig:
        if self.tools and self.environment is not None:
            raise ValueError("tools beside environment: its methods are the tools; leave one of them out")
        if self.acts and self.rollout.staleness:
            raise ValueError(
                f"rollout.staleness={self.rollout.staleness} with tools or an environment: turns are drawn one after "
                "the other, by one policy; set rollout.staleness=0"
            )
        if self.environment is None and any(reward.type == "environment" for reward in self.rewards.values()):
            raise ValueError("rewards of type environment need an environment: name its class as environment")
        return self

    @model_validator(mode="after")
    def _credits_turns(self) -> RunConfig:
        """Refuse credit by turn without rewards of turns, or with a loss that mixes the turns of an episode."""
        if self.advantage.credit == "episode":
            return self
        if self.environment is None:
            raise ValueError("advantage.credit=turn needs a game: name a class with a method step as environment")
        first = self.curriculum.rewards if self.curriculum else None
        for name, rewards in (("rewards", self.rewards), ("curriculum.rewards", first)):
            if rewards is not None and not any(one.type == "environment" and one.weight for one in rewards.values()):
                raise ValueError(
                    f"advantage.credit=turn needs {name} of type environment with a weight: without them no turn has a "
                    "reward of its own"
                )
        self._refuse_mixing("advantage.credit=turn", what="the advantages of their turns")
        return self

    def _refuse_mixing(self, setting: str, *, what: str) -> None:
        """Refuse a loss whose gradient mixes the advantages of a completion's tokens."""
        if self.objective.ratio == "sequence" or self.objective.loss == "gmpo":
            key = "ratio=sequence" if self.objective.ratio == "sequence" else "loss=gmpo"
            raise ValueError(
                f"objective.{key} with {setting}: the gradient of a ratio of whole completions mixes {what}; set "
                "objective.loss=clipped_surrogate and objective.ratio=token"
            )

    @model_validator(mode="after")
    def _changes_rewards(self) -> RunConfig:
        """Refuse changes of the reward that the advantages do not see, or that they cannot divide by."""
        function, kl = self.advantage.function, self.kl
        if kl.coefficient and kl.placement == "reward_to_go":
            self._refuse_mixing("kl.placement=reward_to_go", what="the penalties of their tokens")
        if kl.coefficient and kl.placement == "reward" and function in ("gdpo", "max_rl"):
            why = "compares the components" if function == "gdpo" else "divides by the mean reward"
            raise ValueError(
                f"kl.placement=reward with advantage.function={function}, which {why}: set kl.placement=loss"
            )
        truncated = self.objective.truncated
        if function == "gdpo" and truncated in ("zero_reward", "soft_penalty"):
            raise ValueError(
                f"objective.truncated={truncated} changes the sum of the rewards, and advantage.function=gdpo compares "
                "the components: set objective.truncated=mask, or add a reward that a truncated completion fails"
            )
        if function == "max_rl" and truncated == "soft_penalty":
            raise ValueError(
                "objective.truncated=soft_penalty with advantage.function=max_rl, which divides by the mean reward: "
                "set objective.truncated=zero_reward or mask"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        advantage = self.advantage
        if self.training.difficulty is not None and self.rollout.staleness:
            raise ValueError(
                "training.difficulty with rollout.staleness=1: the next questions depend on the rewards of this step, "
                "which are not there when they are drawn ahead; set rollout.staleness=0 or training.difficulty=null"
            )
        if self.kl.groups == "informative" and (self.objective.has_entropy or self.objective.token_weights.function):
            other = "an entropy term" if self.objective.has_entropy else "objective.token_weights"
            raise ValueError(
                f"kl.groups=informative with {other}, which needs all groups: set kl.groups=all, or leave the other out"
            )
        alone = advantage.function == "remax" or (advantage.function is None and advantage.baseline == "none")
        if advantage.limit_spreads is not None and (alone or self.rollout.group_size < 2):
            raise ValueError(
                f"advantage.limit_spreads={advantage.limit_spreads:g} needs advantages that compare the completions of "
                "a group: one of equal rewards has no spread, and would teach nothing; use advantage.limit"
            )
        if self.rollout.group_size < 2 and advantage.function in ADVANTAGE_ARGUMENTS.keys() - {"remax"}:
            raise ValueError(
                f"rollout.group_size={self.rollout.group_size} with advantage.function={advantage.function}, which "
                "compares the completions of a group: raise rollout.group_size"
            )
        if self.rollout.group_size < 2 and advantage.baseline != "none" and advantage.function is None:
            raise ValueError(
                f"rollout.group_size={self.rollout.group_size} with advantage.baseline={advantage.baseline}: "
                "a group baseline needs at least 2 completions; raise rollout.group_size or set "
                "advantage.baseline=none and advantage.scale=none"
            )
        if self.rollout.group_size < 2 and self.training.dynamic_sampling.max_resamples:
            raise ValueError(
                f"rollout.group_size={self.rollout.group_size} with training.dynamic_sampling.max_resamples="
                f"{self.training.dynamic_sampling.max_resamples}: one completion is a group of equal rewards, which "
                "dynamic sampling replaces; raise rollout.group_size, or set training.dynamic_sampling.max_resamples=0"
            )
        self._check_minibatches()
        buffer, limit = self.objective.overlong_buffer, self.rollout.max_new_tokens
        if self.objective.truncated == "soft_penalty" and buffer >= limit:
            raise ValueError(
                f"objective.overlong_buffer={buffer} punishes every completion of at most rollout.max_new_tokens="
                f"{limit}: set a smaller buffer"
            )
        taken = sorted(RESERVED_REWARD_NAMES & self.rewards.keys())
        if taken:
            raise ValueError(f"rewards.{taken[0]}: metrics of that name exist already; call this reward something else")
        if self.evaluation.samples and max(self.evaluation.k) > self.evaluation.samples:
            raise ValueError(
                f"evaluation.k={list(self.evaluation.k)} needs evaluation.samples of at least {max(self.evaluation.k)}"
            )
        return self

    def _check_minibatches(self) -> None:
        count, groups = self.training.minibatches, self.rollout.prompts_per_step
        if self.training.minibatch_of == "groups" and count > groups:
            raise ValueError(
                f"training.minibatches={count} exceeds rollout.prompts_per_step={groups}: each minibatch needs at "
                "least one whole group; set fewer, or training.minibatch_of=completions"
            )
        if count > groups * self.rollout.group_size:
            raise ValueError(
                f"training.minibatches={count} exceeds the {groups * self.rollout.group_size} completions of a step "
                f"(rollout.prompts_per_step={groups} times rollout.group_size={self.rollout.group_size}): set fewer"
            )

    @model_validator(mode="after")
    def _effective(self) -> RunConfig:
        """Refuse written settings that have no effect."""
        refuse_unused(self)
        refuse_undistributable(self)
        curriculum, steps = self.curriculum, self.training.steps
        if curriculum and curriculum.until_pass_rate is None and 0 < steps <= curriculum.steps:
            raise ValueError(
                f"curriculum.steps={curriculum.steps} leaves none of training.steps={steps} to the main task: lower "
                "curriculum.steps, raise training.steps, or set curriculum=null"
            )
        return self

    @model_validator(mode="after")
    def _logs_what_stops(self) -> RunConfig:
        stop = self.training.stop_when
        if stop is None:
            return self
        if self.kl.estimator == "exact" and stop.metric in ("rollout/kl_reference", "rollout/kl_sequence"):
            raise ValueError(
                f"training.stop_when.metric={stop.metric} with kl.estimator=exact, whose reference does not score what "
                "was sampled: set kl.estimator=k3, or training.stop_when.metric=policy/kl_reference"
            )
        if stop.metric != SPREADS:
            return self
        if self.run.log_rollouts_every != 1:
            raise ValueError(
                f"training.stop_when.metric={stop.metric} reads the logged rollouts of every step: set "
                "run.log_rollouts_every=1"
            )
        if self.rollout.group_size < 2:
            raise ValueError(
                f"training.stop_when.metric={stop.metric} compares completions: set rollout.group_size=2 or more"
            )
        return self

    @model_validator(mode="after")
    def _shadow_rewards_exist(self) -> RunConfig:
        for name, reward in self.rewards.items():
            shadow = getattr(reward, "shadow", None)
            if shadow is not None and (shadow == name or shadow not in self.rewards):
                others = ", ".join(other for other in self.rewards if other != name) or "there is no other yet"
                raise ValueError(f"rewards.{name}.shadow={shadow}: name another reward ({others})")
        return self

    @model_validator(mode="after")
    def _measurable_sharpness(self) -> RunConfig:
        """Refuse a sharpness that would call judges without permission, or whose loss would have no advantages."""
        sharpness = self.evaluation.sharpness
        if sharpness is None:
            return self
        judges = [name for name, reward in self.rewards.items() if reward.type == "judge"]
        if judges and not sharpness.judges:
            raise ValueError(sharpness.refusal_of(judges[0]))
        advantage = self.advantage
        if not sharpness.eigenvalue or advantage.baseline == "none":
            return self
        if advantage.function == "remax":
            raise ValueError(
                "evaluation.sharpness.eigenvalue with advantage.function=remax: evaluations draw no greedy completions "
                "to compare with; set evaluation.sharpness.eigenvalue=false or another advantage"
            )
        k = advantage.arguments.get("k") if advantage.function == "pass_at_k" else None
        needed = k + 1 if isinstance(k, int) else 2
        if sharpness.samples < needed:
            raise ValueError(
                f"evaluation.sharpness.eigenvalue with samples={sharpness.samples}: advantages within a group need at "
                f"least {needed} completions; raise evaluation.sharpness.samples"
            )
        return self

    @property
    def main_tasks(self) -> tuple[TaskConfig, ...]:
        """The tasks of the mixture, or the single task."""
        return tuple(item.task for item in self.tasks) or (self.task,)

    @property
    def may_lack_accuracy(self) -> bool:
        """Whether accuracy is measured by default only: no setting names its reward part or needs right and wrong."""
        goal = self.training.stop_at if self.evaluation.metric == "accuracy" else None
        rates = (*self._pass_rates.values(), goal)
        return self.evaluation.may_lack_accuracy and all(rate is None for rate in rates)

    @property
    def _pass_rates(self) -> dict[str, float | None]:
        until = self.curriculum.until_pass_rate if self.curriculum else None
        return {"sft.stop_at": self.sft.stop_at, "curriculum.until_pass_rate": until}

    @model_validator(mode="after")
    def _measured_accuracy(self) -> RunConfig:
        """Refuse thresholds of accuracy in a run that does not measure it."""
        if self.evaluation.accuracy is not None:
            return self
        for option, rate in self._pass_rates.items():
            if rate is not None:
                raise ValueError(
                    f"{option}={rate} with evaluation.accuracy=null: nothing says which answers are right; remove it, "
                    "or name the reward part that does in evaluation.accuracy"
                )
        return self
