"""Supervised fine-tuning on rationales: the loss of RL's learner with advantage 1, on completions only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flatpeak.evaluation.evaluate import Evaluator
from flatpeak.functional.weights import completion_weights
from flatpeak.policy.model import Policy
from flatpeak.protocols import Sampler
from flatpeak.training.config import SFTConfig
from flatpeak.training.curriculum import Stream
from flatpeak.training.learner import Learner
from flatpeak.training.objective import Objective
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.training.optimizer import learning_rate
from flatpeak.training.recorder import SAMPLER_STATE, Recorder
from flatpeak.training.stage import StageTrainer
from flatpeak.training.step_metrics import Clock, policy_metrics
from flatpeak.types import Batch, Prompt
from flatpeak.utils.control_tokens import TextEncoder

LIKELIHOOD = Objective(config=ObjectiveConfig(loss="policy_gradient"), kl=KLConfig())
"""-log p of every target token: the policy gradient with advantage 1."""
UNDIVIDED_WORK = 4e9
"""Floating-point operations of an update that several ranks do not divide: 0.1 s of a CPU core, and on a GPU less time
than its kernels take to be launched. Hundreds of updates from nothing would make other weights of another rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A prompt and the completion to imitate."""

    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    """The rationale's tokens and an end-of-sequence token."""
    trained: tuple[bool, ...] | None = None
    """Whether each of them is imitated; None: all. An answer of a tool is read."""


def demonstrations(
    prompts: Sequence[Prompt],
    policy: Policy,
    *,
    max_tokens: int | None,
    pieces: Callable[[str, int], Sequence[tuple[Sequence[int], bool]]] | None = None,
) -> tuple[list[Demonstration], int]:
    """Demonstrations of the prompts that have a rationale and fit into the context, and the number that do not fit.

    `pieces` makes the tokens of a rationale, in pieces with whether they are imitated, given an end-of-sequence token;
    None: all of its text is imitated.
    """
    eos = policy.tokenizer.eos_token_id
    end = min(policy.eos_token_ids) if eos is None else eos
    encoder = TextEncoder(policy.tokenizer)
    encoded = []
    for prompt in prompts:
        if prompt.example.rationale:
            text = prompt.example.rationale
            cut = [(encoder.encode_text(text), True)] if pieces is None else pieces(text, end)
            trained = (*(own for ids, own in cut for _ in ids), True)
            encoded.append(
                Demonstration(
                    prompt_ids=prompt.token_ids,
                    target_ids=(*(token for ids, _ in cut for token in ids), end),
                    trained=None if all(trained) else trained,
                )
            )
    fitting = [d for d in encoded if max_tokens is None or len(d.prompt_ids) + len(d.target_ids) <= max_tokens]
    return fitting, len(encoded) - len(fitting)


class SFTTrainer(StageTrainer):
    """Trainer that imitates demonstrations, by their likelihood."""

    name = title = "sft"
    learner: Learner

    def __init__(
        self,
        policy: Policy,
        stream: Stream[Demonstration],
        *,
        config: SFTConfig,
        micro_batch_tokens: int | None,
        max_skipped_updates: int,
        check: Evaluator,
        sampler: Sampler,
        recorder: Recorder,
    ) -> None:
        super().__init__(
            steps=config.steps, seed=stream.seed, recorder=recorder, max_skipped_updates=max_skipped_updates
        )
        self.learner = Learner(
            policy,
            LIKELIHOOD,
            config.optimizer,
            temperature=1.0,
            micro_batch_tokens=micro_batch_tokens,
            ranks=recorder.ranks,
            undivided_work=UNDIVIDED_WORK,
        )
        self.stream = stream
        self.longest = max(map(imitated, stream.items))
        """Of all demonstrations: what `normalization: constant` divides by in every step."""
        self.config = config
        self.check = check
        """Measures the pass rate that `sft.stop_at` is compared with."""
        self.sampler = sampler
        """The sampler of `check` and of evaluations, whose state checkpoints keep."""

    def begin(self) -> None:
        """Evaluate the model before the first step; it is not saved, since nothing has changed it."""
        self.recorder.evaluate_start(size=self.recorder.evaluation.size)

    def train_step(self, step: int) -> dict[str, float]:
        """Raise the likelihood of one batch of demonstrations."""
        clock = Clock()
        size = self.config.batch_size
        drawn = [item for _, item in self.stream.take((step - 1) * size, size)]
        batch = demonstration_batch(drawn, self.config, longest=self.longest, device=self.learner.policy.device)
        rate = learning_rate(self.learner.config, step=step, total_steps=self.steps)
        update = self.learner.update(batch, rate=rate)
        self.skipped.observe([update.skipped])
        policy = policy_metrics([update])
        return {
            "sft/loss": policy["policy/loss"],
            "sft/entropy": policy["policy/entropy"],
            "sft/grad_norm": policy["policy/grad_norm"],
            "optimizer/learning_rate": rate,
            "optimizer/skipped": policy["optimizer/skipped"],
            "time/step": clock.seconds(),
        }

    def check_due(self, step: int) -> bool:
        """Whether the step is checked: every `sft.check_every` steps where `sft.stop_at` is set."""
        return self.config.stop_at is not None and step % self.config.check_every == 0

    def good_enough(self, step: int) -> bool:
        """Whether a check is due and passes."""
        goal = self.config.stop_at
        if goal is None or not self.check_due(step):
            return False
        own = self.check.evaluate().pass_rate
        return self.recorder.ranks.first(lambda: own) >= goal

    def evaluation_due(self, step: int) -> bool:
        """Whether the step is the last one, or checked."""
        return step == self.steps or self.check_due(step)

    def evaluate(self, step: int) -> bool:
        """Check where it is due, and evaluate at the end; returns whether the step was the last one."""
        if self.recorder.stopped:  # there is time for the checkpoint alone
            return False
        finished = step == self.steps or self.good_enough(step)
        if finished:
            self.recorder.evaluate_after_sft(step)
        self.recorder.evaluated = True
        return finished

    def state(self) -> dict[str, Any]:
        """Whether SFT is over, and counts; the data's order follows from the step."""
        return {"finished": self.finished, **super().state(), SAMPLER_STATE: self.sampler.state()}


def imitated(demonstration: Demonstration) -> int:
    """The number of its tokens that are imitated."""
    return len(demonstration.target_ids) if demonstration.trained is None else sum(demonstration.trained)


def demonstration_batch(
    drawn: Sequence[Demonstration], config: SFTConfig, *, device: torch.device, longest: int | None = None
) -> Batch:
    """Pack demonstrations, each with a prompt of its own.

    `longest` is the token count that `normalization: constant` divides by, which no batch may decide; the other
    normalizations need none.
    """
    lengths_N = torch.tensor([len(d.target_ids) for d in drawn], device=device)
    imitated_N = torch.tensor([imitated(d) for d in drawn], device=device)
    trained = [own for d in drawn for own in d.trained or (True,) * len(d.target_ids)]
    tokens_T = torch.tensor([token for d in drawn for token in d.target_ids], device=device)
    return Batch(
        prompts=tuple(d.prompt_ids for d in drawn),
        prompt_N=torch.arange(len(drawn), device=device),
        lengths_N=lengths_N,
        tokens_T=tokens_T,
        sequence_T=torch.arange(len(drawn), device=device).repeat_interleave(lengths_N),
        advantages_T=torch.ones(len(tokens_T), device=device),
        trained_T=None if all(trained) else torch.tensor(trained, device=device),
        weights_N=completion_weights(imitated_N, config.normalization, max_tokens=longest),
        old_logprobs_T=None,
    )
