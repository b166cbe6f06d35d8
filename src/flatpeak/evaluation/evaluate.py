"""Held-out evaluation: one fixed set, greedy and sampled, every figure with its interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from flatpeak.errors import UserError
from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.evaluation.ranking import LetterRanker, Ranked, Scorer
from flatpeak.evaluation.result import Evaluation
from flatpeak.evaluation.robustness import Judged, measure
from flatpeak.functional.estimators import maj_at_k, pass_at_k
from flatpeak.protocols import Sampler, Tokenizer
from flatpeak.rewards.reward_set import RewardSet
from flatpeak.rollout.config import RolloutConfig
from flatpeak.tasks.config import PromptConfig
from flatpeak.tasks.prompts import build_prompts
from flatpeak.types import Example, Group, Prompt, SamplingParams, Scores

Values = dict[str, list[float | None]]


class Evaluator(Protocol):
    """Evaluates the policy as it is now."""

    def __call__(self, prompts: Sequence[Prompt], *, robustness: bool = False) -> Evaluation:
        """On these prompts; with `robustness`, on their perturbed copies too, where the recipe asks for them."""
        ...


def evaluate(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    reward: RewardSet,
    config: EvaluationConfig,
    *,
    task: str,
    max_new_tokens: int,
    stop: tuple[str, ...] = (),
    prompts_of: Callable[[Sequence[Example]], Sequence[Prompt]] | None = None,
    rank: LetterRanker | None = None,
) -> Evaluation:
    """Greedy decoding once per question (`config.greedy`), and `config.samples` sampled completions beside it.

    With `config.choices=rank`, the greedy answer is the letter that `rank` finds most probable. With `prompts_of`,
    which words changed questions as prompts, `config.robustness` is measured too.
    """
    ask = _Asking(sampler, reward, config, max_new_tokens=max_new_tokens, stop=stop, rank=rank)
    rows: list[dict[str, Any]] = [_row(prompt) for prompt in prompts]
    values: Values = {}
    if config.greedy:
        asked = ask.greedy(prompts)
        values |= _greedy_values(asked)
        for row, answered in zip(rows, _greedy_rows(asked), strict=True):
            row.update(answered)
    if config.samples:
        asked = ask.sampled(prompts)
        values |= _sampled_values(asked, config.k)
        for row, answered in zip(rows, _sampled_rows(asked, texts=not config.greedy), strict=True):
            row.update(answered)
    _add_far_from_training(values, prompts)
    subsets = [prompt.example.subsets for prompt in prompts]
    ids = [prompt.id for prompt in prompts]
    choices = config.choices if any("options" in prompt.example.columns for prompt in prompts) else None
    found = Evaluation(
        task=task, size=len(prompts), values=values, ids=ids, rows=rows, subsets=subsets, choices=choices
    )
    if prompts_of is None or not config.robustness:
        return found
    size = config.robustness_size or len(prompts)
    robustness = measure(
        config.robustness,
        prompts[:size],
        found.values[found.headline][:size],
        seed=config.seed,
        prompts_of=prompts_of,
        ask=ask.once,
    )
    return replace(found, robustness=robustness)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Completions and what was made of them; [p][g] is completion g of question p."""

    groups: Sequence[Group]
    scores: Scores
    correct: list[list[float | None]] | None
    """1 or 0, None where the grader failed. The whole is None where no part says right or wrong."""
    answers: list[list[str | None]] | None
    ranked: Sequence[Ranked] = ()
    """Of answers by rank: what each letter got."""

    @property
    def failed(self) -> list[list[float]]:
        """1 where no answer was found."""
        return [[float(answer is None) for answer in row] for row in self.answers or ()]

    @property
    def missing(self) -> list[list[float]]:
        """1 where the reward, or the verdict, is missing."""
        judged = zip(self.scores.total, self.correct or self.scores.total, strict=True)
        return [[float(a is None or b is None) for a, b in zip(*rows, strict=True)] for rows in judged]

    @property
    def timed_out(self) -> list[list[float]]:
        """1 where a part of the reward could not grade the answer within its limits."""
        flags = [
            [[False] * len(group.completions) for group in self.groups],
            *self.scores.timed_out.values(),
        ]
        return [[float(any(marks)) for marks in zip(*rows, strict=True)] for rows in zip(*flags, strict=True)]


class _Asking:
    """Asks questions as a recipe says, and judges the answers."""

    def __init__(
        self,
        sampler: Sampler,
        reward: RewardSet,
        config: EvaluationConfig,
        *,
        max_new_tokens: int,
        stop: tuple[str, ...],
        rank: LetterRanker | None,
    ) -> None:
        self._sampler, self._reward, self._config = sampler, reward, config
        if config.choices == "rank" and rank is None:
            raise ValueError("evaluation.choices=rank needs a ranker of letters")
        self._ranker = rank if config.choices == "rank" else None
        limit = config.max_new_tokens or max_new_tokens
        stop = stop if config.stop is None else config.stop
        self._greedy = SamplingParams(temperature=0.0, max_new_tokens=limit, stop=stop)
        self._sampling = SamplingParams(
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, max_new_tokens=limit, stop=stop
        )

    def greedy(self, prompts: Sequence[Prompt]) -> _Asked:
        """One greedy completion each, or the most probable letter."""
        return self._sample(prompts, 1, self._greedy) if self._ranker is None else self._rank(prompts, self._ranker)

    def sampled(self, prompts: Sequence[Prompt]) -> _Asked:
        """`samples` completions each."""
        return self._sample(prompts, self._config.samples, self._sampling)

    def once(self, prompts: Sequence[Prompt]) -> Judged:
        """Greedily, or by sampling where the recipe has no greedy answers."""
        greedy = self._config.greedy
        asked = self.greedy(prompts) if greedy else self.sampled(prompts)
        answered = _greedy_rows(asked) if greedy else _sampled_rows(asked, texts=True)
        return Judged(
            correct=[_mean(row) for row in asked.correct or ()],
            extraction_failed=[float(np.mean(row)) for row in asked.failed],
            rows=[_row(prompt) | row for prompt, row in zip(prompts, answered, strict=True)],
        )

    def _sample(self, prompts: Sequence[Prompt], size: int, sampling: SamplingParams) -> _Asked:
        return self._judge(self._sampler.generate(prompts, group_size=size, sampling=sampling, seed=self._config.seed))

    def _rank(self, prompts: Sequence[Prompt], ranker: LetterRanker) -> _Asked:
        ranked = ranker(prompts)
        asked = self._judge([one.group for one in ranked])
        for one, (answer,) in zip(ranked, asked.answers or (), strict=True):
            if answer != one.letter:
                raise UserError(
                    f"evaluation.choices=rank: the reward {self._config.accuracy} reads {answer!r} where the answer is "
                    f"the letter {one.letter}; set rewards.{self._config.accuracy}.type=choice with extraction=letter"
                )
        return replace(asked, ranked=ranked)

    def _judge(self, groups: Sequence[Group]) -> _Asked:
        scores = self._reward(groups)
        part = self._config.accuracy
        if part is None:
            return _Asked(groups=groups, scores=scores, correct=None, answers=None)
        if part not in scores.parts:
            raise UserError(
                f"evaluation.accuracy={part} is no part of the reward: choose one of {', '.join(scores.parts)}, or "
                "null where none says right or wrong"
            )
        correct = [[_right(score) for score in row] for row in scores.parts[part]]
        answers = [[self._reward.answer(part, c, group.prompt) for c in group.completions] for group in groups]
        return _Asked(groups=groups, scores=scores, correct=correct, answers=answers)


def _greedy_values(asked: _Asked) -> Values:
    scores = asked.scores
    values: Values = {} if asked.correct is None else {"accuracy": [row[0] for row in asked.correct]}
    values["reward"] = [row[0] for row in scores.total]
    values |= {name: [row[0] for row in part] for name, part in scores.parts.items()}
    values["length"] = [float(len(group.completions[0].token_ids)) for group in asked.groups]
    values["truncated"] = [float(group.completions[0].finish_reason == "length") for group in asked.groups]
    if asked.answers is not None:
        values["extraction_failed"] = [row[0] for row in asked.failed]
    values["missing"] = [row[0] for row in asked.missing]
    values["timeouts"] = [row[0] for row in asked.timed_out]
    return values


def _sampled_values(asked: _Asked, ks: Sequence[int]) -> Values:
    scores, groups = asked.scores, asked.groups
    values: Values = {"sampled/reward": [_mean(row) for row in scores.total]}
    values |= {f"sampled/{name}": [_mean(row) for row in part] for name, part in scores.parts.items()}
    values["sampled/length"] = [_mean([float(len(c.token_ids)) for c in group.completions]) for group in groups]
    values["sampled/truncated"] = [
        _mean([float(c.finish_reason == "length") for c in group.completions]) for group in groups
    ]
    values["sampled/missing"] = [_mean(row) for row in asked.missing]
    values["sampled/timeouts"] = [_mean(row) for row in asked.timed_out]
    if asked.correct is None or asked.answers is None:
        return values
    values["sampled/accuracy"] = [_mean(row) for row in asked.correct]
    values["sampled/extraction_failed"] = [_mean(row) for row in asked.failed]
    for k in ks:
        values[f"pass@{k}"] = [_pass_at(row, k) for row in asked.correct]
        values[f"maj@{k}"] = [_maj_at(*row, k) for row in zip(asked.answers, asked.correct, strict=True)]
    return values


def _add_far_from_training(values: Values, prompts: Sequence[Prompt]) -> None:
    """Where the task marks questions with near neighbours in the training set, accuracy without them too."""
    if "accuracy" in values and any("near_train" in prompt.example.columns for prompt in prompts):
        near = [bool(prompt.example.columns.get("near_train")) for prompt in prompts]
        values["accuracy/not_near_train"] = [
            None if is_near else value for value, is_near in zip(values["accuracy"], near, strict=True)
        ]


def _row(prompt: Prompt) -> dict[str, Any]:
    row: dict[str, Any] = {"id": prompt.id, "gold": prompt.example.gold}
    return row | ({"subsets": dict(prompt.example.subsets)} if prompt.example.subsets else {})


def _greedy_rows(asked: _Asked) -> list[dict[str, Any]]:
    rows = []
    for index, group in enumerate(asked.groups):
        completion = group.completions[0]
        row = {"text": completion.text, "finish_reason": completion.finish_reason, "length": len(completion.token_ids)}
        if asked.answers is not None:
            row["answer"] = asked.answers[index][0]
        if asked.ranked:
            row["letter_logprobs"] = dict(asked.ranked[index].logprobs)
        rows.append(row | {"scores": {name: part[index][0] for name, part in asked.scores.parts.items()}})
    return rows


def _sampled_rows(asked: _Asked, *, texts: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{} for _ in asked.groups]
    for index, (row, group) in enumerate(zip(rows, asked.groups, strict=True)):
        if texts:
            row["samples"] = [completion.text for completion in group.completions]
        if asked.correct is not None and asked.answers is not None:
            row["samples_correct"] = asked.correct[index]
            row["samples_answers"] = asked.answers[index]
    return rows


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


def make_evaluator(
    config: EvaluationConfig,
    *,
    task: str,
    sampler: Sampler,
    reward: RewardSet,
    tokenizer: Tokenizer,
    prompt: PromptConfig,
    rollout: RolloutConfig,
    longest_prompt: int,
    policy: Scorer,
) -> Evaluator:
    """Evaluates on prompts, with `config` and what it leaves to `rollout`; the random state stays as it was.

    `policy` scores letters where `config.choices` is `rank`; all else is asked of the sampler.
    A perturbed question may be longer than `longest_prompt` tokens: it is left out, and the coverage says so.
    """
    wording = prompt if prompt.overlong == "truncate_left" else prompt.model_copy(update={"overlong": "drop"})

    rank = LetterRanker(policy=policy, tokenizer=tokenizer) if config.choices == "rank" else None

    def prompts_of(examples: Sequence[Example]) -> tuple[Prompt, ...]:
        return build_prompts(examples, tokenizer, wording, max_tokens=longest_prompt).prompts

    def run(prompts: Sequence[Prompt], *, robustness: bool = False) -> Evaluation:
        reward.check()
        with torch.random.fork_rng():
            return evaluate(
                sampler,
                prompts,
                reward,
                config,
                task=task,
                max_new_tokens=rollout.max_new_tokens,
                stop=rollout.stop,
                prompts_of=prompts_of if robustness else None,
                rank=rank,
            )

    return run
