"""Held-out evaluation of a policy: fixed questions, answered greedily and by sampling, graded by the run's rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from flatpeak.errors import UserError
from flatpeak.evaluation.choice_ranking import Ranked, Ranker
from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.evaluation.result import Evaluation, first_of_each
from flatpeak.evaluation.robustness import Judged, measure
from flatpeak.evaluation.sharpness import Sharpness, SharpnessProbe
from flatpeak.functional.estimators import maj_at_k, pass_at_k
from flatpeak.protocols import Sampler, Tokenizer
from flatpeak.rewards.reward_set import RewardSet
from flatpeak.tasks.prompts import PromptConfig, build_prompts
from flatpeak.types import Example, Group, Prompt, SamplingParams, Scores

Values = dict[str, list[float | None]]


class Evaluator(ABC):
    """Evaluation of a model in its current state, on a fixed sequence of held-out questions."""

    @abstractmethod
    def evaluate(self, *, size: int | None = None, robustness: bool = False) -> Evaluation:
        """Evaluate on the first `size` questions (None: all), with `robustness` also on perturbed copies of them."""


@dataclass(frozen=True, kw_only=True)
class PolicyEvaluator(Evaluator):
    """Evaluation of the policy that a sampler draws from.

    Each prompt is decoded greedily once (`config.greedy`) and sampled `config.samples` times. With
    `config.choices=rank`, the greedy answer is the letter that `ranker` finds most probable.
    """

    config: EvaluationConfig
    task: str
    prompts: Sequence[Prompt]
    sampler: Sampler
    reward: RewardSet
    max_new_tokens: int
    """The limit if `config.max_new_tokens` is not set."""
    stop: tuple[str, ...] = ()
    """Stop strings if `config.stop` is not set."""
    tokenizer: Tokenizer
    prompt: PromptConfig
    """The wording of perturbed questions."""
    longest_prompt: int
    """The most tokens of a perturbed question; longer questions are left out, which the coverage shows."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """By task of a mixture, its share in every mean; empty without a mixture."""
    sets: Sequence[PolicyEvaluator] = ()
    """The evaluators of further sets, each called by its name."""
    ranker: Ranker | None = None
    sharpness: SharpnessProbe | None = None
    """Measures the sampler's policy under perturbed weights, at every evaluation."""
    may_lack_accuracy: bool = False
    """Whether to record that a function gives scores other than 0 and 1, because no setting says which are right."""

    def __post_init__(self) -> None:
        """ValueError if answers are ranked letters and there is no ranker."""
        if self.config.choices == "rank" and self.ranker is None:
            raise ValueError("evaluation.choices=rank needs a ranker of letters")

    def evaluate(self, *, size: int | None = None, robustness: bool = False) -> Evaluation:
        """Evaluate on the first `size` prompts; torch's random state is unchanged afterwards.

        The size is that of each task of a mixture and of each further set. With `robustness`, also measure accuracy on
        the perturbed copies that `config.robustness` names. Sharpness uses its own prompts, for any `size`.
        """
        self.reward.check()
        prompts = self._first(size)
        with torch.random.fork_rng():
            evaluation = self._evaluate(prompts)
            if self.sets:
                evaluation = replace(evaluation, sets={one.task: one._evaluate(one._first(size)) for one in self.sets})
            if robustness and self.config.robustness:
                evaluation = self._with_robustness(evaluation, prompts)
            return (
                evaluation if self.sharpness is None else replace(evaluation, sharpness=self._sharpness(self.sharpness))
            )

    def _first(self, size: int | None) -> list[Prompt]:
        return [self.prompts[index] for index in first_of_each([one.example.task for one in self.prompts], size)]

    def _evaluate(self, prompts: Sequence[Prompt]) -> Evaluation:
        rows: list[dict[str, Any]] = [_row(prompt) for prompt in prompts]
        values: Values = {}
        graded = False
        if self.config.greedy:
            answers = self._greedy(prompts)
            values |= _greedy_values(answers)
            graded |= answers.graded
            for row, answer_columns in zip(rows, _greedy_rows(answers), strict=True):
                row.update(answer_columns)
        if self.config.samples:
            answers = self._sampled(prompts)
            values |= _sampled_values(answers, self.config.k)
            graded |= answers.graded
            for row, answer_columns in zip(rows, _sampled_rows(answers, texts=not self.config.greedy), strict=True):
                row.update(answer_columns)
        _add_far_from_training(values, prompts)
        return Evaluation(
            task=self.task,
            size=len(prompts),
            values=values,
            ids=[prompt.id for prompt in prompts],
            rows=rows,
            subsets=[prompt.example.subsets for prompt in prompts],
            tasks=[prompt.example.task for prompt in prompts] if self.shares else (),
            shares=self.shares,
            choices=self.config.choices if any("options" in prompt.example.columns for prompt in prompts) else None,
            graded_by=self.config.accuracy_part if graded and self.may_lack_accuracy else None,
        )

    def _with_robustness(self, evaluation: Evaluation, prompts: Sequence[Prompt]) -> Evaluation:
        size = self.config.robustness_size or len(prompts)
        robustness = measure(
            self.config.robustness,
            prompts[:size],
            evaluation.values[evaluation.headline][:size],
            seed=self.config.seed,
            prompts_of=self._perturbed_prompts,
            ask=self._judge_perturbed,
        )
        return replace(evaluation, robustness=robustness)

    def _sharpness(self, probe: SharpnessProbe) -> Sharpness:
        return probe.measure(
            self.prompts,
            sampler=self.sampler,
            reward=self.reward,
            sampling=self._random_sampling,
            seed=self.config.seed,
        )

    def _perturbed_prompts(self, examples: Sequence[Example]) -> tuple[Prompt, ...]:
        overlong = "truncate_left" if self.prompt.overlong == "truncate_left" else "drop"
        wording = self.prompt.model_copy(update={"overlong": overlong})
        return build_prompts(examples, self.tokenizer, wording, max_tokens=self.longest_prompt).prompts

    def _judge_perturbed(self, prompts: Sequence[Prompt]) -> Judged:
        """Answer greedily; by sampling if the recipe has no greedy answers."""
        greedy = self.config.greedy
        answers = self._greedy(prompts) if greedy else self._sampled(prompts)
        answer_columns = _greedy_rows(answers) if greedy else _sampled_rows(answers, texts=True)
        return Judged(
            correct=[_mean(row) for row in answers.correct or ()],
            extraction_failed=[float(np.mean(row)) for row in answers.failed],
            rows=[_row(prompt) | row for prompt, row in zip(prompts, answer_columns, strict=True)],
        )

    def _greedy(self, prompts: Sequence[Prompt]) -> _Answers:
        """One greedy completion per prompt, or its most probable letter."""
        if self.config.choices == "rank" and self.ranker is not None:
            return self._ranked(prompts, self.ranker)
        return self._generate(prompts, 1, self._sampling(temperature=0.0, top_p=1.0, top_k=0))

    def _sampled(self, prompts: Sequence[Prompt]) -> _Answers:
        """`config.samples` sampled completions per prompt."""
        return self._generate(prompts, self.config.samples, self._random_sampling)

    @property
    def _random_sampling(self) -> SamplingParams:
        config = self.config
        return self._sampling(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k)

    def _sampling(self, *, temperature: float, top_p: float, top_k: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_new_tokens=self.config.max_new_tokens or self.max_new_tokens,
            stop=self.stop if self.config.stop is None else self.config.stop,
        )

    def _generate(self, prompts: Sequence[Prompt], group_size: int, sampling: SamplingParams) -> _Answers:
        seed = self.config.seed
        return self._grade(self.sampler.generate(prompts, group_size=group_size, sampling=sampling, seed=seed))

    def _ranked(self, prompts: Sequence[Prompt], ranker: Ranker) -> _Answers:
        ranked = ranker(prompts)
        answers = self._grade([ranking.group for ranking in ranked])
        for ranking, (answer,) in zip(ranked, answers.texts or (), strict=True):
            if answer != ranking.letter:
                accuracy = self.config.accuracy_part
                raise UserError(
                    f"evaluation.choices=rank: the reward {accuracy} reads {answer!r} where the answer is "
                    f"the letter {ranking.letter}; set rewards.{accuracy}.type=choice with extraction=letter"
                )
        return replace(answers, ranked=ranked)

    def _grade(self, groups: Sequence[Group]) -> _Answers:
        scores = self.reward(groups)
        name = self.config.accuracy_part
        if name is None:
            return _Answers(groups=groups, scores=scores, correct=None, texts=None)
        if name not in scores.parts:
            raise UserError(
                f"evaluation.accuracy={name} is not a part of the reward: choose one of {', '.join(scores.parts)}, or "
                "null if none says right or wrong"
            )
        correct = [[_is_right(score) for score in row] for row in scores.parts[name]]
        texts = [[self.reward.answer(name, c, group.prompt) for c in group.completions] for group in groups]
        by_function = self.reward.is_function(name)
        return _Answers(
            groups=groups,
            scores=scores,
            correct=correct,
            texts=texts,
            by_function=by_function,
            graded=by_function and any(score not in (None, 0, 1) for row in scores.parts[name] for score in row),
        )


@dataclass(frozen=True, kw_only=True)
class _Answers:
    """Completions, their scores and verdicts; [p][g] is completion g of question p."""

    groups: Sequence[Group]
    scores: Scores
    correct: list[list[float | None]] | None
    """1 or 0; None if the grader failed. The whole field is None if no reward part says right or wrong."""
    texts: list[list[str | None]] | None
    """The extracted answers; None if none was extracted."""
    by_function: bool = False
    """Whether a user's function grades whole texts, without extracting answers."""
    graded: bool = False
    """Whether that function gives scores other than 0 and 1."""
    ranked: Sequence[Ranked] = ()
    """The letters' log-probabilities, if answers are ranked letters."""

    @property
    def failed(self) -> list[list[float]]:
        """1 if no answer could be extracted."""
        return [[float(answer is None) for answer in row] for row in self.texts or ()]

    @property
    def missing(self) -> list[list[float]]:
        """1 if the reward or the verdict is missing."""
        judged = zip(self.scores.total, self.correct or self.scores.total, strict=True)
        return [[float(a is None or b is None) for a, b in zip(*rows, strict=True)] for rows in judged]

    @property
    def timed_out(self) -> list[list[float]]:
        """1 if a part of the reward could not grade the answer within its limits."""
        flags = [
            [[False] * len(group.completions) for group in self.groups],
            *self.scores.timed_out.values(),
        ]
        return [[float(any(marks)) for marks in zip(*rows, strict=True)] for rows in zip(*flags, strict=True)]


def _greedy_values(answers: _Answers) -> Values:
    scores = answers.scores
    values: Values = {} if answers.correct is None else {"accuracy": [row[0] for row in answers.correct]}
    values["reward"] = [row[0] for row in scores.total]
    values |= {name: [row[0] for row in rows_PG] for name, rows_PG in scores.parts.items()}
    values["length"] = [float(len(group.completions[0].sampled_ids)) for group in answers.groups]
    values["truncated"] = [float(group.completions[0].finish_reason == "length") for group in answers.groups]
    if answers.texts is not None and not answers.by_function:
        values["extraction_failed"] = [row[0] for row in answers.failed]
    values["missing"] = [row[0] for row in answers.missing]
    values["timeouts"] = [row[0] for row in answers.timed_out]
    return values


def _sampled_values(answers: _Answers, ks: Sequence[int]) -> Values:
    scores, groups = answers.scores, answers.groups
    values: Values = {"sampled/reward": [_mean(row) for row in scores.total]}
    values |= {f"sampled/{name}": [_mean(row) for row in rows_PG] for name, rows_PG in scores.parts.items()}
    values["sampled/length"] = [_mean([float(len(c.sampled_ids)) for c in group.completions]) for group in groups]
    values["sampled/truncated"] = [
        _mean([float(c.finish_reason == "length") for c in group.completions]) for group in groups
    ]
    values["sampled/missing"] = [_mean(row) for row in answers.missing]
    values["sampled/timeouts"] = [_mean(row) for row in answers.timed_out]
    if answers.correct is None or answers.texts is None:
        return values
    values["sampled/accuracy"] = [_mean(row) for row in answers.correct]
    if not answers.by_function:
        values["sampled/extraction_failed"] = [_mean(row) for row in answers.failed]
    for k in ks:
        values[f"pass@{k}"] = [_pass_at(row, k) for row in answers.correct]
        values[f"maj@{k}"] = [_maj_at(*row, k) for row in zip(answers.texts, answers.correct, strict=True)]
    return values


def _add_far_from_training(values: Values, prompts: Sequence[Prompt]) -> None:
    """Add the accuracy on questions that the task does not mark as near to a training question."""
    if "accuracy" in values and any("near_train" in prompt.example.columns for prompt in prompts):
        near = [bool(prompt.example.columns.get("near_train")) for prompt in prompts]
        values["accuracy/not_near_train"] = [
            None if is_near else value for value, is_near in zip(values["accuracy"], near, strict=True)
        ]


def _row(prompt: Prompt) -> dict[str, Any]:
    row: dict[str, Any] = {"id": prompt.id, "question": prompt.example.question, "gold": prompt.example.gold}
    return row | ({"subsets": dict(prompt.example.subsets)} if prompt.example.subsets else {})


def _greedy_rows(answers: _Answers) -> list[dict[str, Any]]:
    rows = []
    for index, group in enumerate(answers.groups):
        completion = group.completions[0]
        row = {
            "text": completion.transcript,
            "finish_reason": completion.finish_reason,
            "length": len(completion.sampled_ids),
        }
        if answers.texts is not None:
            row["answer"] = answers.texts[index][0]
        if answers.ranked:
            row["letter_logprobs"] = dict(answers.ranked[index].logprobs)
        rows.append(row | {"scores": {name: rows_PG[index][0] for name, rows_PG in answers.scores.parts.items()}})
    return rows


def _sampled_rows(answers: _Answers, *, texts: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{} for _ in answers.groups]
    for index, (row, group) in enumerate(zip(rows, answers.groups, strict=True)):
        if texts:
            row["samples"] = [completion.text for completion in group.completions]
        if answers.correct is not None and answers.texts is not None:
            row["samples_correct"] = answers.correct[index]
            row["samples_answers"] = answers.texts[index]
    return rows


def _is_right(score: float | None) -> float | None:
    """1 if the accuracy part is at least 1; a positive score is not enough, as for a wrong but well-formed answer."""
    return None if score is None else float(score >= 1.0)


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return float(np.mean(known)) if known else None


def _pass_at(correct: Sequence[float | None], k: int) -> float | None:
    """pass@k over the verdicts that are not missing; None if fewer than k remain."""
    known = [value for value in correct if value is not None]
    return pass_at_k(len(known), int(sum(known)), k) if len(known) >= k else None


def _maj_at(answers: Sequence[str | None], correct: Sequence[float | None], k: int) -> float | None:
    known = [(answer, value == 1.0) for answer, value in zip(answers, correct, strict=True) if value is not None]
    if len(known) < k:
        return None
    return float(maj_at_k([answer for answer, _ in known], [right for _, right in known], k))
