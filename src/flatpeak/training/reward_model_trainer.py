"""Training of a reward model on preference pairs: `train_step` is the algorithm box.

A reward model has one number per text, two texts per pair, and no policy, so that batches, loss and micro-batches are
its own. The loop, the update, the stream of data and the recorder are those of all training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatpeak.evaluation.evaluate import Evaluator
from flatpeak.evaluation.result import Evaluation
from flatpeak.functional.bradley_terry import (
    bradley_terry_loss,
    calibration_error,
    centering_penalty,
    preference_accuracy,
)
from flatpeak.policy.model_settings import marked_layers
from flatpeak.rewards.sequence_classifier import CHAT, Classifier, Spread, Wording, conversation, length_batches
from flatpeak.tasks.preferences import PreferencePair
from flatpeak.training.config import RewardModelConfig
from flatpeak.training.curriculum import Stream
from flatpeak.training.learner import MICRO_BATCH_TOKENS, token_budget
from flatpeak.training.optimizer import BaseLearner, UpdateStatistics, learning_rate
from flatpeak.training.recorder import Recorder
from flatpeak.training.stage import StageTrainer
from flatpeak.training.step_metrics import Clock
from flatpeak.utils.out_of_memory import MemoryBound

if TYPE_CHECKING:
    from flatpeak.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPair:
    """A pair as the model reads it."""

    id: str
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    extra_length: int
    """Characters of the chosen answer minus those of the rejected one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPairs:
    """The pairs that fit, with counts of those that were shortened or dropped."""

    pairs: tuple[EncodedPair, ...]
    truncated: int
    """Number of pairs whose question was shortened."""
    dropped: int
    """Number of pairs with an answer that does not fit."""


def encode_pairs(pairs: Sequence[PreferencePair], wording: Wording) -> EncodedPairs:
    """Encode both answers of every pair as the model reads them."""
    encoded: list[EncodedPair] = []
    truncated = 0
    for pair in pairs:
        question: str | Sequence[Message] = pair.prompt
        if wording.template == CHAT:
            question = conversation(pair.columns) or pair.prompt
        chosen, rejected = (wording.encode(question, answer) for answer in (pair.chosen, pair.rejected))
        if chosen is None or rejected is None:
            continue
        truncated += chosen.truncated or rejected.truncated
        encoded.append(
            EncodedPair(
                id=pair.id,
                chosen_ids=chosen.token_ids,
                rejected_ids=rejected.token_ids,
                extra_length=len(pair.chosen) - len(pair.rejected),
            )
        )
    return EncodedPairs(pairs=tuple(encoded), truncated=truncated, dropped=len(pairs) - len(encoded))


@dataclass(frozen=True, kw_only=True)
class PairEvaluation(Evaluation):
    """An evaluation whose questions are preference pairs."""

    def metrics(self) -> dict[str, float]:
        """Every metric's mean, and how far the model's probabilities are from how often it is right."""
        difference_P = torch.tensor(self.known("difference"), dtype=torch.float64)
        # Which answer is called the first is arbitrary: each pair counts from the side of the answer scored higher.
        confidence_P = torch.sigmoid(difference_P.abs())
        right_P = torch.tensor(self.known("accuracy"), dtype=torch.float64)
        return {**super().metrics(), "calibration_error": float(calibration_error(confidence_P, right_P))}


@dataclass(frozen=True, kw_only=True)
class PairEvaluator(Evaluator):
    """Evaluation of a reward model on held-out preference pairs."""

    classifier: Classifier
    pairs: Sequence[EncodedPair]
    task: str
    batch_tokens: int | None

    def evaluate(self, *, size: int | None = None, robustness: bool = False) -> PairEvaluation:
        """Score both answers of the first `size` pairs (None: all), which have no perturbed copies.

        Scores that are not finite are missing.
        """
        pairs = self.pairs[:size]
        texts = [text for pair in pairs for text in (pair.chosen_ids, pair.rejected_ids)]
        scores_P2 = torch.tensor(
            self.classifier.score_all(texts, batch_tokens=self.batch_tokens), dtype=torch.float64
        ).view(-1, 2)
        scores_P2[~scores_P2.isfinite()] = torch.nan  # infinity would win its pair
        chosen_P, rejected_P = scores_P2.unbind(1)
        accuracy_P = preference_accuracy(chosen_P, rejected_P)
        extra = [pair.extra_length for pair in pairs]
        accuracy = _known(accuracy_P)
        values: dict[str, list[float | None]] = {
            "accuracy": accuracy,
            "loss": _known(bradley_terry_loss(chosen_P, rejected_P)),
            "difference": _known(chosen_P - rejected_P),
            "longer_wins": [0.5 if more == 0 else float(more > 0) for more in extra],
            "prefers_longer": [
                None if right is None or more == 0 else (right if more > 0 else 1 - right)
                for right, more in zip(accuracy, extra, strict=True)
            ],
        }
        sides = {"chosen_longer": 1, "same_length": 0, "chosen_shorter": -1}
        for name, side in sides.items():
            chosen = [right if _sign(more) == side else None for right, more in zip(accuracy, extra, strict=True)]
            if any(right is not None for right in chosen):
                values[f"accuracy/{name}"] = chosen
        rows: list[dict[str, Any]] = [
            {"id": pair.id, "chosen": left, "rejected": right, "extra_length": pair.extra_length}
            for pair, left, right in zip(pairs, _known(chosen_P), _known(rejected_P), strict=True)
        ]
        return PairEvaluation(
            task=self.task, size=len(pairs), values=values, ids=[pair.id for pair in pairs], rows=rows
        )


def _known(values_P: Tensor) -> list[float | None]:
    finite_P = torch.isfinite(values_P).tolist()
    return [value if finite else None for value, finite in zip(values_P.tolist(), finite_P, strict=True)]


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


def spread(scores: Sequence[float]) -> Spread | None:
    """Mean and standard deviation of scores; None where these are not finite, and so nothing can be scaled by them."""
    if not all(math.isfinite(score) for score in scores):
        return None
    return Spread(mean=fmean(scores), std=stdev(scores), count=len(scores))


@dataclass(kw_only=True, slots=True)
class PairStatistics(UpdateStatistics):
    """Statistics of one update of a reward model; the loss is per pair, the centering penalty included."""

    chosen: float = 0.0
    """Mean score of the chosen answers."""
    rejected: float = 0.0
    """Mean score of the rejected answers."""
    accuracy: float = 0.0
    """Share of the pairs whose chosen answer scores higher."""


class PreferenceLearner(BaseLearner[Sequence[EncodedPair], PairStatistics]):
    """Trains a reward model on batches of pairs, by the Bradley-Terry loss."""

    def __init__(
        self,
        classifier: Classifier,
        config: RewardModelConfig,
        *,
        micro_batch_tokens: int | None,
        reference: Sequence[EncodedPair] = (),
    ) -> None:
        """`reference`: the pairs of which a saved model records the spread of its scores."""
        weights = [weight for weight in classifier.model.parameters() if weight.requires_grad]
        super().__init__({w: w if w.dtype == torch.float32 else w.detach().float() for w in weights}, config.optimizer)
        self.classifier = classifier
        self.reference = reference
        self.margin, self.center = config.margin, config.center
        self.layers = marked_layers(classifier.model)
        self.score_tokens = micro_batch_tokens
        self.bound = MemoryBound(MICRO_BATCH_TOKENS, token_budget(micro_batch_tokens, classifier.device))

    def save_model(self, directory: Path) -> None:
        """Write model, tokenizer and the record of its wording and scores, as the weights are at that moment."""
        texts = [text for pair in self.reference for text in (pair.chosen_ids, pair.rejected_ids)]
        scores = self.classifier.score_all(texts, batch_tokens=self.score_tokens)
        self.classifier.save(directory, scores=spread(scores))

    def accumulate_gradients(self, *batches: Sequence[EncodedPair]) -> PairStatistics:
        """Add the gradient of mean_p [-log sigmoid(r_chosen - r_rejected - margin) + center (r_chosen + r_rejected)^2]
        to `.grad`, one micro-batch at a time."""
        statistics, size = PairStatistics(), sum(map(len, batches))
        for micro in chain.from_iterable(map(self.micro_batches, batches)):
            self.before_pass()
            texts = [*(pair.chosen_ids for pair in micro), *(pair.rejected_ids for pair in micro)]
            chosen_P, rejected_P = self.classifier.scores(texts).chunk(2)
            loss_P = bradley_terry_loss(chosen_P, rejected_P, margin=self.margin)
            if self.center:
                loss_P = loss_P + self.center * centering_penalty(chosen_P, rejected_P)
            loss = loss_P.sum() / size
            loss.backward()
            statistics.loss += float(loss.detach())
            statistics.chosen += float(chosen_P.detach().sum()) / size
            statistics.rejected += float(rejected_P.detach().sum()) / size
            statistics.accuracy += float(preference_accuracy(chosen_P, rejected_P).detach().sum()) / size
        return statistics

    def micro_batch_count(self, tokens: int, *batches: Sequence[EncodedPair]) -> int:
        """The number of micro-batches of an update, for micro-batches of at most so many tokens."""
        return sum(len(list(length_batches(pair_lengths(pairs), budget=tokens))) for pairs in batches)

    def micro_batches(self, pairs: Sequence[EncodedPair]) -> Iterator[list[EncodedPair]]:
        """Whole pairs, sorted by length, of at most `micro_batch_tokens` tokens, padding included."""
        for batch in length_batches(pair_lengths(pairs), budget=self.micro_batch_tokens):
            yield [pairs[index] for index in batch]


def pair_lengths(pairs: Sequence[EncodedPair]) -> list[int]:
    """The tokens of both texts of each pair, the shorter one padded to the longer."""
    return [2 * max(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in pairs]


class RewardModelTrainer(StageTrainer):
    """Trainer of a reward model: the preferred one of two answers gets the higher score."""

    title = "reward_model"
    learner: PreferenceLearner

    def __init__(
        self,
        learner: PreferenceLearner,
        stream: Stream[EncodedPair],
        *,
        config: RewardModelConfig,
        max_skipped_updates: int,
        recorder: Recorder,
    ) -> None:
        super().__init__(
            steps=config.steps, seed=stream.seed, recorder=recorder, max_skipped_updates=max_skipped_updates
        )
        self.learner = learner
        self.stream = stream
        self.config = config

    def train_step(self, step: int) -> dict[str, float]:
        """Draw a batch of pairs and raise the chosen answers' scores over the rejected ones'."""
        clock = Clock()
        size = self.config.batch_size
        pairs = [pair for _, pair in self.stream.take((step - 1) * size, size)]
        rate = learning_rate(self.config.optimizer, step=step, total_steps=self.steps)
        update = self.learner.update(pairs, rate=rate)
        self.skipped.observe([update.skipped])
        return {
            "reward_model/loss": update.loss,
            "reward_model/accuracy": update.accuracy,
            "reward_model/difference": update.chosen - update.rejected,
            "reward_model/mean_score": (update.chosen + update.rejected) / 2,
            "reward_model/grad_norm": update.grad_norm,
            "optimizer/learning_rate": rate,
            "optimizer/skipped": float(update.skipped),
            "time/step": clock.seconds(),
        }
