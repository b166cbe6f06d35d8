"""Held-out evaluation: one fixed set, greedy and sampled, every figure with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.functional.estimators import bootstrap_interval, maj_at_k, pass_at_k
from flatpeak.protocols import Reward, Sampler
from flatpeak.types import Completion, Group, Prompt, SamplingParams, Scores


class Grader(Protocol):
    """A reward that can also say which answer a completion gives, for majority votes."""

    def __call__(self, groups: Sequence[Group]) -> Scores:
        """Score every completion."""
        ...

    def answer(self, name: str, completion: Completion, prompt: Prompt) -> str | None:
        """The answer that reward part `name` reads in a completion."""
        ...


@dataclass(frozen=True)
class TextAnswers:
    """A reward of the caller's that cannot read answers: completions with the same text give the same answer."""

    reward: Reward

    def __call__(self, groups: Sequence[Group]) -> Scores:
        """Score every completion."""
        return self.reward(groups)

    def answer(self, name: str, completion: Completion, prompt: Prompt) -> str | None:
        """The stripped text."""
        return completion.text.strip()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What one policy did on one fixed set of questions."""

    task: str
    size: int
    values: Mapping[str, Sequence[float | None]]
    """Per question, for each metric; None where a grader failed. The same questions in the same order every time."""
    ids: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    """Per question: id, gold, the greedy text and its finish reason, scores, the samples' correctness."""

    def mean(self, metric: str) -> float:
        """The metric over the questions that have it; NaN if none does."""
        known = self.known(metric)
        return float(np.mean(known)) if known else float("nan")

    def known(self, metric: str) -> list[float]:
        """The values that are not missing."""
        return [value for value in self.values[metric] if value is not None]

    def metrics(self) -> dict[str, float]:
        """Every metric's mean."""
        return {metric: self.mean(metric) for metric in self.values}

    def first(self, size: int | None) -> Evaluation:
        """The evaluation of only the first so many questions: what periodic evaluations see too."""
        if size is None or size >= self.size:
            return self
        values = {metric: values[:size] for metric, values in self.values.items()}
        return replace(self, size=size, values=values, ids=self.ids[:size], rows=self.rows[:size])

    def as_dict(self) -> dict[str, Any]:
        """Means and 95% bootstrap intervals, for summaries."""
        intervals = {
            metric: list(bootstrap_interval(known)) for metric in self.values if len(known := self.known(metric)) > 1
        }
        return {"task": self.task, "size": self.size, "metrics": self.metrics(), "intervals": intervals}


def evaluate(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    reward: Grader,
    config: EvaluationConfig,
    *,
    task: str,
    max_new_tokens: int,
    stop: tuple[str, ...] = (),
) -> Evaluation:
    """Greedy decoding once per question, and `config.samples` sampled completions beside it."""
    limit = config.max_new_tokens or max_new_tokens
    greedy = SamplingParams(temperature=0.0, max_new_tokens=limit, stop=stop)
    groups = sampler.generate(prompts, group_size=1, sampling=greedy, seed=config.seed)
    scores = reward(groups)
    values: dict[str, list[float | None]] = {"accuracy": [_right(row[0]) for row in scores.parts[config.accuracy]]}
    values["reward"] = [row[0] for row in scores.total]
    values |= {name: [row[0] for row in part] for name, part in scores.parts.items()}
    values["length"] = [float(len(group.completions[0].token_ids)) for group in groups]
    values["truncated"] = [float(group.completions[0].finish_reason == "length") for group in groups]
    rows = [_row(group, scores, index) for index, group in enumerate(groups)]
    if config.samples:
        values |= _sampled(sampler, prompts, reward, config, rows, limit=limit, stop=stop)
    _add_subsets(values, prompts)
    ids = [prompt.id for prompt in prompts]
    return Evaluation(task=task, size=len(prompts), values=values, ids=ids, rows=rows)


def _sampled(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    reward: Grader,
    config: EvaluationConfig,
    rows: Sequence[dict[str, Any]],
    *,
    limit: int,
    stop: tuple[str, ...],
) -> dict[str, list[float | None]]:
    sampling = SamplingParams(
        temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, max_new_tokens=limit, stop=stop
    )
    groups = sampler.generate(prompts, group_size=config.samples, sampling=sampling, seed=config.seed)
    scores = reward(groups)
    correct = [[_right(score) for score in row] for row in scores.parts[config.accuracy]]
    answers = [[reward.answer(config.accuracy, c, group.prompt) for c in group.completions] for group in groups]
    values: dict[str, list[float | None]] = {"sampled/reward": [_mean(row) for row in scores.total]}
    values |= {f"sampled/{name}": [_mean(row) for row in part] for name, part in scores.parts.items()}
    values["sampled/accuracy"] = [_mean(row) for row in correct]
    values["sampled/length"] = [_mean([float(len(c.token_ids)) for c in group.completions]) for group in groups]
    values["sampled/truncated"] = [
        _mean([float(c.finish_reason == "length") for c in group.completions]) for group in groups
    ]
    for k in config.k:
        values[f"pass@{k}"] = [_pass_at(row, k) for row in correct]
        values[f"maj@{k}"] = [_maj_at(answer, row, k) for answer, row in zip(answers, correct, strict=True)]
    for row, right in zip(rows, correct, strict=True):
        row["samples_correct"] = right
    return values


def _add_subsets(values: dict[str, list[float | None]], prompts: Sequence[Prompt]) -> None:
    """Where the task marks questions with near neighbours in the training set, accuracy without them too."""
    if any("near_train" in prompt.example.columns for prompt in prompts):
        near = [bool(prompt.example.columns.get("near_train")) for prompt in prompts]
        values["accuracy/not_near_train"] = [
            None if is_near else value for value, is_near in zip(values["accuracy"], near, strict=True)
        ]


def _row(group: Group, scores: Scores, index: int) -> dict[str, Any]:
    completion = group.completions[0]
    return {
        "id": group.prompt.id,
        "gold": group.prompt.example.gold,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "scores": {name: part[index][0] for name, part in scores.parts.items()},
    }


def _right(score: float | None) -> float | None:
    """A completion is right when the accuracy part is 1, not merely positive: a wrong but well-formed answer fails."""
    return None if score is None else float(score >= 1.0)


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return float(np.mean(known)) if known else None


def _pass_at(correct: Sequence[float | None], k: int) -> float | None:
    """Missing verdicts leave the sample; with fewer than k left the question has no estimate."""
    known = [value for value in correct if value is not None]
    return pass_at_k(len(known), int(sum(known)), k) if len(known) >= k else None


def _maj_at(answers: Sequence[str | None], correct: Sequence[float | None], k: int) -> float | None:
    known = [(answer, value == 1.0) for answer, value in zip(answers, correct, strict=True) if value is not None]
    if len(known) < k:
        return None
    return float(maj_at_k([answer for answer, _ in known], [right for _, right in known], k))
