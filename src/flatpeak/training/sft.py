"""Supervised fine-tuning on rationales: the loss of RL's learner with advantage 1, on completions only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatpeak.functional.weights import completion_weights
from flatpeak.policy.policy import Policy
from flatpeak.rollout.randomness import derive_seed
from flatpeak.training.config import KLConfig, ObjectiveConfig, SFTConfig
from flatpeak.training.data import Stream
from flatpeak.training.journal import Journal
from flatpeak.training.learner import Learner, seeded
from flatpeak.training.metrics import Clock, policy_metrics
from flatpeak.training.objective import Objective
from flatpeak.training.optimizer import learning_rate
from flatpeak.types import Batch, Prompt

LIKELIHOOD = Objective(config=ObjectiveConfig(loss="policy_gradient"), kl=KLConfig())
"""-log p of every target token: the policy gradient with advantage 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A prompt and the completion to imitate."""

    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    """The rationale's tokens and an end-of-sequence token."""


def demonstrations(
    prompts: Sequence[Prompt], policy: Policy, *, max_tokens: int | None
) -> tuple[list[Demonstration], int]:
    """Those of the prompts that have a rationale and fit into the context, and how many do not fit."""
    eos = policy.tokenizer.eos_token_id
    end = min(policy.eos_token_ids) if eos is None else eos
    found = [
        Demonstration(
            prompt_ids=prompt.token_ids,
            target_ids=(*policy.tokenizer.encode(prompt.example.rationale, add_special_tokens=False), end),
        )
        for prompt in prompts
        if prompt.example.rationale
    ]
    fitting = [d for d in found if max_tokens is None or len(d.prompt_ids) + len(d.target_ids) <= max_tokens]
    return fitting, len(found) - len(fitting)


class SFTTrainer:
    """Imitates demonstrations."""

    name = "sft"

    def __init__(
        self,
        policy: Policy,
        stream: Stream[Demonstration],
        *,
        config: SFTConfig,
        micro_batch_tokens: int | None,
        check: Callable[[], float],
        journal: Journal,
    ) -> None:
        self.learner = Learner(
            policy, LIKELIHOOD, config.optimizer, temperature=1.0, micro_batch_tokens=micro_batch_tokens
        )
        self.stream = stream
        self.longest = max(len(demonstration.target_ids) for demonstration in stream.items)
        """Of all demonstrations: what `normalization: constant` divides by in every step."""
        self.config = config
        self.check = check
        self.journal = journal
        self.finished = False

    def train(self, *, first_step: int = 1) -> None:
        """Step until the steps are done, the check passes, or a signal asks to stop."""
        if first_step == 1:
            self.journal.evaluate_start(size=self.journal.evaluation.size)
        for step in range(first_step, self.config.steps + 1):
            with seeded(derive_seed(self.stream.seed, "dropout", step)):
                metrics = self.train_step(step)
            self.journal.record(self.name, step, self.config.steps, metrics)
            self.finished = step == self.config.steps or self.good_enough(step)
            if self.finished:
                self.journal.evaluate_after_sft(step)
            self.journal.checkpoint_if_due(self, step, last=self.finished)
            if self.finished or self.journal.stopped:
                break

    def train_step(self, step: int) -> dict[str, float]:
        """Raise the likelihood of one batch of demonstrations."""
        clock = Clock()
        size = self.config.batch_size
        drawn = [item for _, item in self.stream.take((step - 1) * size, size)]
        batch = demonstration_batch(drawn, self.config, longest=self.longest, device=self.learner.policy.device)
        rate = learning_rate(self.learner.config, step=step, total_steps=self.config.steps)
        update = self.learner.update(batch, rate=rate)
        policy = policy_metrics([update])
        return {
            "sft/loss": policy["policy/loss"],
            "sft/entropy": policy["policy/entropy"],
            "sft/grad_norm": policy["policy/grad_norm"],
            "optimizer/learning_rate": rate,
            "time/step": clock.seconds(),
        }

    def good_enough(self, step: int) -> bool:
        """Whether `sft.stop_at` is set, a check is due, and it passes."""
        goal = self.config.stop_at
        return goal is not None and step % self.config.check_every == 0 and self.check() >= goal

    def state(self) -> dict[str, bool]:
        """Whether SFT is over; the data's order follows from the step."""
        return {"finished": self.finished}

    def tensors(self) -> dict[str, Tensor]:
        """The learner's."""
        return self.learner.tensors()


def demonstration_batch(
    drawn: Sequence[Demonstration], config: SFTConfig, *, device: torch.device, longest: int | None = None
) -> Batch:
    """Pack demonstrations, each with a prompt of its own.

    `longest` is the token count that `normalization: constant` divides by, which no batch may decide; the other
    normalizations need none.
    """
    lengths_N = torch.tensor([len(d.target_ids) for d in drawn], device=device)
    tokens_T = torch.tensor([token for d in drawn for token in d.target_ids], device=device)
    return Batch(
        prompts=tuple(d.prompt_ids for d in drawn),
        prompt_N=torch.arange(len(drawn), device=device),
        lengths_N=lengths_N,
        tokens_T=tokens_T,
        sequence_T=torch.arange(len(drawn), device=device).repeat_interleave(lengths_N),
        advantages_N=torch.ones(len(drawn), device=device),
        weights_N=completion_weights(lengths_N, config.normalization, max_tokens=longest),
        old_logprobs_T=torch.zeros(len(tokens_T), device=device),
    )
