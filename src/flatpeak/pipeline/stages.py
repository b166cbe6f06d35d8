"""The stages of a run: SFT and RL, each from its checkpoint on."""

from __future__ import annotations

from pathlib import Path

from flatpeak.config.run_config import RunConfig
from flatpeak.pipeline.build import Components
from flatpeak.pipeline.policies import own_reference
from flatpeak.pipeline.run_start import restore_trainer
from flatpeak.rollout.randomness import derive_seed
from flatpeak.runs.checkpoints import CheckpointState
from flatpeak.training.recorder import Recorder
from flatpeak.training.regularized import build_learner
from flatpeak.training.sft import SFTTrainer
from flatpeak.training.trainer import Trainer, TrainerConfig


def run_sft(config: RunConfig, components: Components, recorder: Recorder, checkpoint: CheckpointState | None) -> None:
    """Fine-tune the policy on demonstrations; the optimizer's memory is freed at the end."""
    trainer = SFTTrainer(
        components.policy,
        components.data.demonstrations,
        config=config.sft,
        micro_batch_tokens=config.training.micro_batch_tokens,
        max_skipped_updates=config.training.max_skipped_updates,
        check=components.sft_check,
        sampler=components.sampler,
        recorder=recorder,
    )
    trainer.train(first_step=restore_trainer(trainer, checkpoint))


def run_rl(
    config: RunConfig,
    components: Components,
    recorder: Recorder,
    checkpoint: CheckpointState | None,
    reference_checkpoint: Path | None,
) -> None:
    """Train the policy by reinforcement learning."""
    learner = build_learner(
        components.policy,
        components.algorithm.objective,
        config.optimizer,
        config.gradient_regularization,
        temperature=config.rollout.temperature,
        micro_batch_tokens=config.training.micro_batch_tokens,
        notice=recorder.progress.notice,
        seed=derive_seed(config.run.seed, "gradient_regularization"),
        ranks=recorder.ranks,
    )
    trainer = Trainer(
        learner,
        advantages=components.algorithm.advantages,
        sampler=components.sampler,
        phases=components.phases,
        reference=components.take_reference() or own_reference(config, components.policy, start=reference_checkpoint),
        config=TrainerConfig(
            seed=derive_seed(config.run.seed, "train"),
            rollout=config.rollout,
            training=config.training,
            reference=config.reference,
        ),
        recorder=recorder,
    )
    trainer.train(first_step=restore_trainer(trainer, checkpoint))
