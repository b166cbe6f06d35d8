"""GRPO and its relatives: `train_step` is the paper's algorithm box, which `StageTrainer.train` repeats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from flatpeak.policy.config import ReferenceConfig
from flatpeak.policy.model import Policy
from flatpeak.policy.reference import ReferenceResets
from flatpeak.protocols import Sampler
from flatpeak.rollout.config import RolloutConfig
from flatpeak.rollout.randomness import derive_seed
from flatpeak.training.batch import collate, minibatches, per_token, take
from flatpeak.training.collect import Rollouts, advantage_inputs, collect, pass_rates, rollout_seed, with_greedy
from flatpeak.training.config import TrainingConfig
from flatpeak.training.curriculum import Phase, Progression, take_prompts
from flatpeak.training.history import SequenceWeightMonitor
from flatpeak.training.learner import Learner, PolicyStatistics, score_minibatches, uses_trainer_logprobs
from flatpeak.training.optimizer import learning_rate, split_prefix, with_prefix
from flatpeak.training.recorder import SAMPLER_STATE, Recorder
from flatpeak.training.reward_tensors import (
    Advantages,
    RewardTensors,
    in_band,
    kl_penalty_N,
    kl_to_go_T,
    reward_tensors,
)
from flatpeak.training.stage import StageTrainer
from flatpeak.training.step_metrics import Clock, kl_metrics, staleness_metrics, step_metrics
from flatpeak.types import Batch, Group, PackedCompletions, Score, Scores

REFERENCE = "reference."
"""Prefix of the reference's tensors in a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The sections of a recipe that the trainer reads."""

    seed: int
    rollout: RolloutConfig
    training: TrainingConfig
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)


class Trainer(StageTrainer):
    """Trainer of a policy by reinforcement learning."""

    learner: Learner

    def __init__(
        self,
        learner: Learner,
        *,
        advantages: Advantages,
        sampler: Sampler,
        phases: Sequence[Phase],
        reference: Policy | None,
        config: TrainerConfig,
        recorder: Recorder,
    ) -> None:
        training = config.training
        super().__init__(
            steps=training.steps,
            seed=config.seed,
            recorder=recorder,
            max_skipped_updates=training.max_skipped_updates,
            goal=training.stop_at,
            stop_when=training.stop_when,
        )
        self.learner = learner
        self.group_advantages = advantages
        self.sampler = sampler
        self.phases = phases
        self.learner.reference = reference
        self.config = config
        self.reward_tensors = partial(
            reward_tensors,
            config=learner.objective.config,
            max_new_tokens=config.rollout.max_new_tokens,
            group_baseline=advantages.compare_groups(config.rollout.group_size),
            by_turn=advantages.config.credit == "turn",
        )
        self.progression = Progression.start(phases)
        self.resets = ReferenceResets(config.reference)
        self.sequence_weights = SequenceWeightMonitor(learner.objective.config.sampler_correction)

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Read a step's metrics, which may end the stage, and which say what a cap takes from the weights."""
        super().observe(step, metrics)
        self.sequence_weights.observe(metrics, notice=self.recorder.progress.notice)

    def ended_by(self) -> str | None:
        """The condition that ended the run, in words; None where its steps did."""
        if self.condition.met or not self.finished:
            return self.condition.reason
        return f"training.stop_at={self.goal:g} was reached"

    def train_step(self, step: int) -> dict[str, float]:
        """Sample groups, score them, improve the policy."""
        clock = Clock()
        rollouts = self.collect(step)
        rewards = self.reward_tensors(rollouts.groups, rollouts.scores)
        completions = self.pack(rollouts.groups, rewards)
        inputs = rollouts.advantage_inputs(self.group_advantages.asks)
        advantages_PG, advantages_T = self.advantages(rewards, completions, **inputs)

        rate = learning_rate(self.learner.config, step=step, total_steps=self.steps)
        minibatches = self.minibatches(step, completions, rewards, advantages_T)
        with self.learner.memory.phase("update"), self.next_rollouts(step + 1):
            updates = [self.learner.update(*batches, rate=rate) for batches in minibatches]

        metrics = step_metrics(rollouts, rewards, updates, clock=clock, learning_rate=rate)
        metrics |= self.kl_metrics(completions)
        return self.finish(step, rollouts, advantages_PG, updates, metrics)

    def collect(self, step: int) -> Rollouts:
        """Sample and score the step's groups, and move on in the data."""
        progression, rollout = self.progression, self.config.rollout
        self.sampler.use_version(step - 1)
        resamples = self.config.training.dynamic_sampling.max_resamples
        with self.learner.memory.phase("rollout"):
            rollouts = collect(
                self.sampler,
                self.phases[progression.phase],
                rollout,
                cursor=progression.cursors[progression.phase],
                seed=self.step_seed(step),
                has_signal=self.has_signal,
                # Without a baseline a group of equal rewards has a gradient like any other.
                max_resamples=resamples if self.group_advantages.compare_groups(rollout.group_size) else 0,
                skips=progression.skips(self.config.training.difficulty, seed=self.seed),
            )
            if "greedy_P" in self.group_advantages.asks:
                phase, seed = self.phases[progression.phase], rollout_seed(self.step_seed(step))
                rollouts = with_greedy(rollouts, self.sampler, phase, rollout, seed=seed, as_trained=self.rewards_alone)
        progression.cursors[progression.phase] = rollouts.cursor
        if self.config.training.difficulty is not None:
            progression.rates |= rollouts.rates
        return rollouts

    def next_rollouts(self, step: int) -> AbstractContextManager[None]:
        """A context in which a later step's groups are drawn by the policy as it is on entry, where the sampler can."""
        if step > self.steps:
            return nullcontext()
        rollout, progression = self.config.rollout, self.progression
        # Where the curriculum moves on before that step, these prompts are not asked for, and nothing of them is used.
        stream, cursor = self.phases[progression.phase].prompts, progression.cursors[progression.phase]
        return self.sampler.ahead(
            take_prompts(stream, cursor, rollout.prompts_per_step),
            group_size=rollout.group_size,
            sampling=rollout.sampling(),
            seed=rollout_seed(self.step_seed(step)),
        )

    def step_seed(self, step: int) -> int:
        """The seed of all that a step samples."""
        return derive_seed(self.seed, "step", step)

    def has_signal(self, groups: Sequence[Group], scores: Scores) -> list[bool]:
        """Whether each group has a policy gradient, by the rewards as trained, before a KL penalty in them.

        Advantages by the reward's components, as GDPO's, may differ where the totals are equal.
        """
        rewards, asks = self.reward_tensors(groups, scores), self.group_advantages.asks
        rule, phase = self.config.training.dynamic_sampling, self.phases[self.progression.phase]
        signal_P = rewards.informative_P
        if "parts" in asks:
            inputs = advantage_inputs(asks, groups, scores, weights=phase.reward.weights, greedy=[None] * len(groups))
            signal_P = self.group_advantages(rewards.rewards_PG, rewards.valid_PG, **inputs).any(dim=1)
        signal_P &= in_band(rewards, torch.tensor(pass_rates(phase, scores)), rule)
        return [bool(signal) for signal in signal_P & rewards.trained_PG.any(dim=1)]

    def rewards_alone(self, groups: Sequence[Group], scores: Scores) -> list[Score]:
        """The rewards as trained of groups of one completion each."""
        rewards = self.reward_tensors(groups, scores, group_baseline=False)
        known = zip(rewards.rewards_PG[:, 0].tolist(), rewards.valid_PG[:, 0].tolist(), strict=True)
        return [reward if valid else None for reward, valid in known]

    def pack(self, groups: Sequence[Group], rewards: RewardTensors) -> PackedCompletions:
        """The completions with a reward, scored once by the reference, if one is kept: it serves every epoch.

        Where each minibatch is scored by itself, only a KL in the reward needs the reference beforehand.
        """
        completions = collate(groups, rewards.valid_PG, device=self.learner.policy.device)
        by_minibatch = uses_trainer_logprobs(self.learner)
        reference = self.learner.scored_reference
        if reference is None or (by_minibatch and not self.learner.objective.kl_in_reward):
            return completions
        return replace(completions, reference_logprobs_T=self.learner.score(reference, completions))

    def advantages(
        self, rewards: RewardTensors, completions: PackedCompletions, **inputs: Any
    ) -> tuple[Tensor, Tensor]:
        """Advantages of completions [P, G] and of their tokens [T], less the KL penalty where that is placed there.

        With credit by turn, that of a completion is the mean over its trained tokens.
        """
        valid_PG, penalties_T = rewards.valid_PG, None
        kl = self.learner.objective.kl
        if self.learner.objective.kl_in_reward:
            logprobs_T = self.learner.score(self.learner.policy, completions)
            if kl.placement == "reward":
                penalty_N = kl_penalty_N(completions, logprobs_T, kl).cpu()
                rewards = rewards.less(torch.zeros_like(rewards.rewards_PG).masked_scatter(valid_PG, penalty_N))
            else:
                penalties_T = kl_to_go_T(completions, logprobs_T, kl)
        advantages_PG = self.group_advantages(rewards.rewards_PG, valid_PG, **inputs)
        advantages_N, turns_T = advantages_PG[valid_PG], self.group_advantages.by_turn(rewards, valid_PG)
        advantages_T = self.group_advantages.per_token(
            advantages_N, completions, penalties_T, turns_T, counted_N=rewards.trained_PG[valid_PG]
        )
        logged_N = self.group_advantages.of_completions(advantages_T, completions, without_N=advantages_N)
        return advantages_PG.masked_scatter(valid_PG, logged_N.cpu()), advantages_T

    def minibatches(
        self, step: int, completions: PackedCompletions, rewards: RewardTensors, advantages_T: Tensor
    ) -> Iterator[tuple[Batch, ...]]:
        """The minibatches of every epoch in their order, without the completions that are masked out of the loss.

        Each is whole, or in the subsets of an update where those are scored by the trainer beforehand.
        """
        trained_N = rewards.trained_PG[rewards.valid_PG]
        if not bool(trained_N.all()):
            advantages_T = advantages_T[per_token(trained_N, completions)]
            completions = take(completions, torch.nonzero(trained_N)[:, 0])
        by_minibatch = uses_trainer_logprobs(self.learner)
        epochs = (
            minibatches(
                completions,
                self.config.training.minibatches,
                advantages_T=advantages_T,
                old_logprobs_T=None if by_minibatch else completions.sampler_logprobs_T,
                of=self.config.training.minibatch_of,
                normalization=self.learner.objective.config.normalization,
                max_tokens=self.config.rollout.max_new_tokens,
                seed=derive_seed(self.seed, "minibatches", step, epoch),
                all_tokens=self.learner.objective.needs_all_tokens,
                whole_groups=self.learner.objective.kl_in_loss,
            )
            for epoch in range(self.config.training.epochs_per_rollout)
        )
        if by_minibatch:
            yield from score_minibatches(self.learner, chain.from_iterable(epochs))
        else:
            yield from ((minibatch,) for minibatch in chain.from_iterable(epochs))

    def kl_metrics(self, completions: PackedCompletions) -> dict[str, float]:
        """The KL over all sampled tokens, where the log-probabilities at hand can be compared.

        Where the old ones are the trainer's own, the sampler's are not comparable with the reference's, which are there
        for some tokens only.
        """
        return {} if uses_trainer_logprobs(self.learner) else kl_metrics(completions)

    def finish(
        self,
        step: int,
        rollouts: Rollouts,
        advantages_PG: Tensor,
        updates: Sequence[PolicyStatistics],
        metrics: Mapping[str, float],
    ) -> dict[str, float]:
        """Log the rollouts, move the curriculum on, reset the reference where that is due; all metrics of the step."""
        self.skipped.observe(update.skipped for update in updates)
        self.recorder.rollouts(step, rollouts, advantages_PG)
        self.progression.step_done(self.phases, pass_rate=rollouts.pass_rate)
        policy, optimizer = self.learner.policy, self.learner.optimizer
        self.learner.reference = self.resets.after_step(
            step, metrics, reference=self.learner.reference, policy=policy, optimizer=optimizer
        )
        staleness = staleness_metrics(rollouts.groups, version=step - 1)
        objective = self.learner.objective
        # The first rank's: conditions on them, also on times, then hold on all ranks or on none.
        own = {**metrics, **staleness, **self.resets.metrics(), **objective.metrics(), **self.learner.memory.metrics()}
        shared = self.learner.parallel.ranks.first(lambda: {**own, **self.condition.measure(self.recorder, step)})
        self.learner.objective = objective.adapted(shared, advantages_PG.numel())
        return shared

    def state(self) -> dict[str, Any]:
        """The position in curriculum and data; steps derive all their randomness from their number."""
        return {
            **asdict(self.progression),
            "reached": self.finished,
            "resets": self.resets.count,
            **self.learner.objective.state(),
            **super().state(),
            SAMPLER_STATE: self.sampler.state(),
        }

    def tensors(self) -> dict[str, Tensor]:
        """The learner's tensors, and the reference's once it was reset."""
        return super().tensors() | with_prefix(REFERENCE, self.resets.tensors(self.learner.reference))

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint; the policy is the one saved there already."""
        reference, others = split_prefix(REFERENCE, tensors)
        super().load(state, others)
        stage = state["stage"]
        self.finished = stage["reached"] and self.recorder.history.reached(self.goal)
        self.learner.reference = self.resets.load(
            stage["resets"], reference, reference=self.learner.reference, policy=self.learner.policy
        )
        self.learner.objective = self.learner.objective.loaded(stage)
        self.progression = Progression(
            **{name: stage[name] for name in ("phase", "phase_steps", "cursors", "rates") if name in stage}
        )
