"""Preference pairs as tokens, and what a reward model makes of held-out ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatpeak.evaluation.result import Evaluation
from flatpeak.functional.bradley_terry import bradley_terry_loss, calibration_error, preference_accuracy
from flatpeak.rewards.classifier import CHAT, Classifier, Wording, conversation
from flatpeak.tasks.preferences import PreferencePair

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
    """The pairs that fit, and what was done to those that did not."""

    pairs: tuple[EncodedPair, ...]
    truncated: int
    """How many had their question shortened."""
    dropped: int
    """How many have an answer that does not fit."""


def encode_pairs(pairs: Sequence[PreferencePair], wording: Wording) -> EncodedPairs:
    """Word both answers of every pair."""
    found: list[EncodedPair] = []
    truncated = 0
    for pair in pairs:
        asked: str | Sequence[Message] = pair.prompt
        if wording.template == CHAT:
            asked = conversation(pair.columns) or pair.prompt
        chosen, rejected = (wording.encode(asked, answer) for answer in (pair.chosen, pair.rejected))
        if chosen is None or rejected is None:
            continue
        truncated += chosen.truncated or rejected.truncated
        found.append(
            EncodedPair(
                id=pair.id,
                chosen_ids=chosen.token_ids,
                rejected_ids=rejected.token_ids,
                extra_length=len(pair.chosen) - len(pair.rejected),
            )
        )
    return EncodedPairs(pairs=tuple(found), truncated=truncated, dropped=len(pairs) - len(found))


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


def evaluate_pairs(
    classifier: Classifier, pairs: Sequence[EncodedPair], *, task: str, batch_tokens: int | None
) -> PairEvaluation:
    """Score both answers of every pair. Scores that are not finite are missing."""
    texts = [text for pair in pairs for text in (pair.chosen_ids, pair.rejected_ids)]
    scores_P2 = torch.tensor(classifier.score_all(texts, batch_tokens=batch_tokens), dtype=torch.float64).view(-1, 2)
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
    return PairEvaluation(task=task, size=len(pairs), values=values, ids=[pair.id for pair in pairs], rows=rows)


def _known(values_P: Tensor) -> list[float | None]:
    finite_P = torch.isfinite(values_P).tolist()
    return [value if finite else None for value, finite in zip(values_P.tolist(), finite_P, strict=True)]


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)
