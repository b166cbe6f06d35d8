"""The scores of a reward model as a component of the reward."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flatpeak.errors import UserError
from flatpeak.rewards.base import ComponentScores, Scorer, by_group
from flatpeak.rewards.sequence_classifier import (
    CHAT,
    Classifier,
    Record,
    Spread,
    conversation,
    load_model,
    locate,
    make_wording,
)
from flatpeak.types import Group, Message, Prompt, Score
from flatpeak.utils.huggingface import pick_device


class ModelScorer(Scorer):
    """Scores with a sequence-classification model, which reads completions with its own template and tokenizer.

    It reads the prompt's chat messages if there are any, else the example's question, and the completion's text: the
    policy's token ids mean nothing to another tokenizer. A score that is not finite is missing.
    """

    def __init__(
        self,
        classifier: Classifier,
        *,
        name: str = "preference",
        batch_tokens: int | None = None,
        spread: Spread | None = None,
        clip: tuple[float, float] | None = None,
    ) -> None:
        self.classifier = classifier
        self.name = name
        self.batch_tokens = batch_tokens
        self.spread = spread
        """Mean and standard deviation for standardizing scores; None: scores stay as they are."""
        self.clip = clip
        self.truncated = 0
        """Questions shortened since the last call of `metrics`."""

    def score(self, groups: Sequence[Group]) -> ComponentScores:
        """The score of every completion, micro-batched over all groups."""
        wording = self.classifier.wording
        asked = [
            (_asked(group.prompt, wording.template), completion) for group in groups for completion in group.completions
        ]
        encoded = [wording.encode(question, completion.text) for question, completion in asked]
        self.truncated += sum(text.truncated for text in encoded if text is not None)
        texts = [text.token_ids for text in encoded if text is not None]
        raw = iter(self.classifier.score_all(texts, batch_tokens=self.batch_tokens))
        flat = [None if text is None else self._finish(next(raw)) for text in encoded]
        error: Exception | None = None
        if flat.count(None) > len(encoded) - len(texts):
            error = ValueError("the reward model's score is not finite")
        elif len(texts) < len(encoded):
            error = ValueError(f"a completion alone is longer than the reward model's max_tokens={wording.max_tokens}")
        return ComponentScores(scores=by_group(flat, groups), failed=flat.count(None), first_error=error)

    def _finish(self, score: float) -> Score:
        if not math.isfinite(score):
            return None
        if self.spread is not None:
            score = (score - self.spread.mean) / self.spread.std
        return score if self.clip is None else min(max(score, self.clip[0]), self.clip[1])

    def metrics(self) -> dict[str, float]:
        """`reward/NAME/shortened`: completions since the last call whose question was cut at its beginning; if any."""
        shortened, self.truncated = self.truncated, 0
        return {f"reward/{self.name}/shortened": float(shortened)} if shortened else {}


def _asked(prompt: Prompt, template: str) -> str | Sequence[Message]:
    """The question for the model's template: its text; for a chat template its messages, if there are any."""
    if template != CHAT:
        return prompt.example.question
    return prompt.messages or conversation(prompt.example.columns) or prompt.example.question


def load_scorer(
    *,
    where: str,
    path: str,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
    template: str = "auto",
    max_tokens: int | None = None,
    batch_tokens: int | None = None,
    label: int | None = None,
    normalization: str = "none",
    mean: float | None = None,
    std: float | None = None,
    clip: tuple[float, float] | None = None,
) -> ModelScorer:
    """The scorer for the settings of a `SequenceClassifierConfig`.

    `where` is the name of the section in messages, such as `rewards.preference`. UserError for a model that does not
    load, or does not fit the settings.
    """
    target = pick_device(device, where=f"{where}.device")
    model, tokenizer, record = load_model(
        locate(path, where=f"{where}.path"),
        where=f"{where}.path",
        device=target,
        revision=revision,
        dtype=getattr(torch, dtype),
    )
    model.requires_grad_(False)
    wording = make_wording(model, tokenizer, record, template=template, max_tokens=max_tokens, where=where)
    spread = _spread(mean, std, record, where=where) if normalization == "standardize" else None
    output = _output(label, model.config.num_labels, path, where=where)
    return ModelScorer(
        Classifier(model, wording, label=output),
        name=where.rpartition(".")[2],
        batch_tokens=batch_tokens,
        spread=spread,
        clip=clip,
    )


def _output(label: int | None, outputs: int, path: str, *, where: str) -> int:
    if label is None and outputs > 1:
        raise UserError(f"{where}.path={path} has {outputs} outputs: set {where}.label to the one that scores")
    if label is not None and label >= outputs:
        raise UserError(f"{where}.label={label}: the model has outputs 0 to {outputs - 1}")
    return label or 0


def _spread(mean: float | None, std: float | None, record: Record | None, *, where: str) -> Spread:
    if mean is not None and std is not None:
        return Spread(mean=mean, std=std, count=0)
    if record is None or record.scores is None:
        raise UserError(
            f"{where}.normalization=standardize: no mean and std are recorded with this model; set {where}.mean and "
            f"{where}.std, or {where}.normalization=none"
        )
    if record.scores.std == 0:
        raise UserError(f"{where}.normalization=standardize: the model's recorded scores are all equal; use another")
    return record.scores
