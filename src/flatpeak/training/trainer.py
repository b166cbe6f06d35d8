"""GRPO and its relatives: `train_step` is the paper's algorithm box, `train` repeats it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flatpeak.functional import group_advantages
from flatpeak.policy.config import ReferenceConfig
from flatpeak.policy.model import Policy
from flatpeak.protocols import ResumableSampler, Sampler
from flatpeak.rollout.config import RolloutConfig
from flatpeak.rollout.randomness import derive_seed
from flatpeak.training.batch import collate, minibatches, take
from flatpeak.training.collect import Rollouts, collect
from flatpeak.training.config import AdvantageConfig, TrainingConfig
from flatpeak.training.curriculum import Phase, Progression
from flatpeak.training.diagnostics import SkippedUpdates
from flatpeak.training.learner import Learner, seeded, trainer_is_old, with_comparisons
from flatpeak.training.optimizer import learning_rate
from flatpeak.training.recorder import Recorder
from flatpeak.training.reference_resets import ReferenceResets, split_reference
from flatpeak.training.reward_tensors import RewardTensors, informative, kl_penalty_N, reward_tensors
from flatpeak.training.state import SAMPLER_STATE
from flatpeak.training.step_metrics import Clock, step_metrics
from flatpeak.types import Batch, Group, Scores


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The sections of a recipe that the trainer reads."""

    seed: int
    rollout: RolloutConfig
    advantage: AdvantageConfig
    training: TrainingConfig
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)


class Trainer:
    """Improves a policy by reinforcement learning."""

    name = "train"

    def __init__(
        self,
        learner: Learner,
        *,
        sampler: Sampler,
        phases: Sequence[Phase],
        reference: Policy | None,
        config: TrainerConfig,
        recorder: Recorder,
    ) -> None:
        self.learner = learner
        self.sampler = sampler
        self.phases = phases
        self.reference = reference
        self.config = config
        self.recorder = recorder
        self.progression = Progression.start(phases)
        self.resets = ReferenceResets(config.reference)
        self.reached = False
        """Whether `training.stop_at` is reached."""
        self.skipped = SkippedUpdates()

    def train(self, *, first_step: int = 1) -> None:
        """Step, record, evaluate, save: until the steps are done, the goal is reached, or a signal asks to stop."""
        config = self.config.training
        if first_step == 1:
            self.reached = self.recorder.begin(self, goal=config.stop_at)
        elif not self.recorder.evaluated:
            self.finish_step(first_step - 1)
        for step in range(first_step, config.steps + 1):
            if self.reached or self.recorder.stopped:
                break
            self.recorder.begin_step(self, step)
            with seeded(derive_seed(self.config.seed, "dropout", step)):
                metrics = self.train_step(step)
            self.learner.zero_grad()  # evaluation and the next rollouts can have the memory
            due = self.recorder.evaluation_due(step, total=config.steps)
            self.recorder.complete(self, step, config.steps, metrics, evaluation_due=due)
            self.finish_step(step)

    def finish_step(self, step: int) -> None:
        """Evaluate and save where it is due. RunError where too many updates were skipped."""
        config = self.config.training
        last = step == config.steps
        self.recorder.check_skipped(self.name, step, self.skipped, limit=config.max_skipped_updates, at_end=last)
        self.reached = self.recorder.evaluate_if_due("train", step, total=config.steps, goal=config.stop_at)
        self.recorder.checkpoint_if_due(self, step, last=self.reached or last)

    def train_step(self, step: int) -> dict[str, float]:
        """Sample groups, score them, improve the policy."""
        clock = Clock()
        rollouts = self.collect(step)
        shaped = self.shape(rollouts.groups, rollouts.scores)
        batch = self.attach_reference(collate(rollouts.groups, shaped.valid_PG, device=self.learner.policy.device))
        advantages_PG = self.advantages(shaped, batch)
        batch = attach_advantages(batch, advantages_PG, shaped)

        rate = learning_rate(self.learner.config, step=step, total_steps=self.config.training.steps)
        cut = with_comparisons(self.learner, self.minibatches(batch, step), reference=self.reference)
        updates = [self.learner.update(*parts, rate=rate) for parts in cut]
        self.skipped.see(update.skipped for update in updates)

        metrics = step_metrics(rollouts, shaped, updates, clock=clock, learning_rate=rate)
        self.recorder.rollouts(step, rollouts, advantages_PG)
        self.progression.step_done(self.phases, pass_rate=rollouts.pass_rate)
        self.reference = self.resets.after_step(step, metrics, reference=self.reference, learner=self.learner)
        return metrics | self.resets.metrics()

    def collect(self, step: int) -> Rollouts:
        """Sample and score the step's groups, and move on in the data."""
        place = self.progression
        resamples = self.config.training.dynamic_sampling.max_resamples
        rollouts = collect(
            self.sampler,
            self.phases[place.phase],
            self.config.rollout,
            cursor=place.cursors[place.phase],
            seed=derive_seed(self.config.seed, "step", step),
            teaches=self.teaches,
            # Without a baseline a group of equal rewards has a gradient like any other.
            max_resamples=resamples if self.config.advantage.baseline != "none" else 0,
        )
        place.cursors[place.phase] = rollouts.cursor
        return rollouts

    def teaches(self, groups: Sequence[Group], scores: Scores) -> list[bool]:
        """Whether each group has a policy gradient, by the rewards as trained, before a KL penalty in them."""
        shaped = self.shape(groups, scores)
        found_P = informative(shaped.rewards_PG, shaped.valid_PG) & shaped.trained_PG.any(dim=1)
        return [bool(found) for found in found_P]

    def shape(self, groups: Sequence[Group], scores: Scores) -> RewardTensors:
        """Scores as tensors, truncated completions treated as the objective says."""
        return reward_tensors(
            groups,
            scores,
            self.learner.objective.config,
            max_new_tokens=self.config.rollout.max_new_tokens,
            group_baseline=self.config.advantage.baseline != "none",
        )

    def minibatches(self, batch: Batch, step: int) -> Iterator[Batch]:
        """The minibatches of every epoch, in their order."""
        for epoch in range(self.config.training.epochs_per_rollout):
            yield from minibatches(
                batch,
                self.config.training.minibatches,
                of=self.config.training.minibatch_of,
                normalization=self.learner.objective.config.normalization,
                max_tokens=self.config.rollout.max_new_tokens,
                seed=derive_seed(self.config.seed, "minibatches", step, epoch),
                all_tokens=self.learner.objective.needs_all_tokens,
            )

    def attach_reference(self, batch: Batch) -> Batch:
        """Score the batch once with the reference, if one is kept: its log-probabilities serve every epoch.

        Where each cut is scored by itself, only a KL in the reward needs them beforehand.
        """
        by_cut = trainer_is_old(self.learner.policy)
        if self.reference is None or (by_cut and not self.learner.objective.kl_in_reward):
            return batch
        return replace(batch, reference_logprobs_T=self.learner.score(self.reference, batch))

    def advantages(self, shaped: RewardTensors, batch: Batch) -> Tensor:
        """Advantages [P, G] of the rewards, less the KL penalty where that is placed in the reward."""
        rewards_PG, kl = shaped.rewards_PG, self.learner.objective.kl
        if self.learner.objective.kl_in_reward:
            logprobs_T = self.learner.score(self.learner.policy, batch)
            penalty_N = kl_penalty_N(batch, logprobs_T, estimator=kl.estimator, coefficient=kl.coefficient).cpu()
            rewards_PG = rewards_PG.masked_scatter(shaped.valid_PG, rewards_PG[shaped.valid_PG] - penalty_N)
        config = self.config.advantage
        return group_advantages(
            rewards_PG, baseline=config.baseline, scale=config.scale, eps=config.eps, valid_PG=shaped.valid_PG
        )

    def state(self) -> dict[str, Any]:
        """Where the run stands in its curriculum and data; steps derive all their randomness from their number."""
        return asdict(self.progression) | {
            "reached": self.reached,
            "resets": self.resets.count,
            "skipped_updates": self.skipped.state(),
            SAMPLER_STATE: dict(self.sampler.state()) if isinstance(self.sampler, ResumableSampler) else {},
        }

    def tensors(self) -> dict[str, Tensor]:
        """The learner's, and the reference's once it was reset."""
        return self.learner.tensors() | self.resets.tensors(self.reference)

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint; the policy is the one saved there already."""
        reference, others = split_reference(tensors)
        self.learner.load(state["learner"], others)
        place = dict(state["stage"])
        self.reached = place.pop("reached") and self.recorder.goal_reached(self.config.training.stop_at)
        self.skipped = SkippedUpdates.of(place)
        place.pop("skipped_updates", None)
        place.pop(SAMPLER_STATE, None)  # loaded by the pipeline, whatever the stage
        self.reference = self.resets.load(
            place.pop("resets"), reference, reference=self.reference, policy=self.learner.policy
        )
        self.progression = Progression(**place)


def attach_advantages(batch: Batch, advantages_PG: Tensor, shaped: RewardTensors) -> Batch:
    """Give each completion its advantage, and drop those masked out of the loss."""
    advantages_N = advantages_PG[shaped.valid_PG].to(batch.advantages_N.device)
    batch = replace(batch, advantages_N=advantages_N)
    trained_N = shaped.trained_PG[shaped.valid_PG]
    return batch if bool(trained_N.all()) else take(batch, torch.nonzero(trained_N)[:, 0])
