"""Judge rewards built from a recipe or from any judge object, and the measurement of a judge's noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from flatpeak.errors import UserError
from flatpeak.rewards.judge.config import CustomJudgeConfig, EndpointConfig, JudgeConfig, LocalConfig
from flatpeak.rewards.judge.panel import JudgePanel, ReplyCache
from flatpeak.rewards.judge.protocol import Judge, SystemClock
from flatpeak.rewards.judge.reward import JudgeReward, Safety
from flatpeak.rewards.judge.rubrics import PairwiseFormat, Rubric, RubricFormat, VerdictFormat, load_rubric
from flatpeak.rewards.judge.scoring import JudgeScoring, PairwiseScoring, RequestSettings, RubricScoring
from flatpeak.utils.user_code import load_function

if TYPE_CHECKING:
    from flatpeak.rewards.judge.prompt import Show
    from flatpeak.rewards.judge.protocol import Output
    from flatpeak.types import Group


def build_judge_reward(name: str, config: JudgeConfig) -> JudgeReward:
    """The judge reward of a recipe; UserError where the rubric, the key or the judge is missing."""
    try:
        rubric, judge = load_rubric(config.rubric), _judge(name, config)
        cache = ReplyCache(config.cache.expanduser()) if config.cache is not None else None
    except UserError as error:
        raise UserError(f"rewards.{name}: {error}") from None
    return judge_reward(
        judge,
        rubric=rubric,
        name=name,
        mode=config.mode,
        opponents=config.opponents,
        show=config.show,
        output=config.output,
        request_settings=RequestSettings(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            deadline=config.deadline,
            max_characters=config.max_characters,
        ),
        repair=config.repair,
        cache=cache,
        safety=Safety(
            canaries=config.canaries.enabled,
            canary_examples=config.canaries.examples,
            threshold=config.canaries.threshold,
            max_false_positive_rate=config.canaries.max_false_positive_rate,
            min_valid_fraction=config.min_valid_fraction,
        ),
        shadow=config.shadow,
    )


def judge_reward(
    judge: Judge,
    *,
    rubric: Rubric | str = "correctness",
    name: str = "judge",
    mode: Literal["score", "pairwise"] = "score",
    opponents: int = 0,
    show: Show = "final_answer",
    output: Output = "json",
    request_settings: RequestSettings | None = None,
    repair: bool = True,
    cache: ReplyCache | Path | None = None,
    safety: Safety | None = None,
    shadow: str | None = None,
) -> JudgeReward:
    """A reward from any judge: an object with `identity` and `async ask(requests)`."""
    rubric = load_rubric(rubric) if isinstance(rubric, str) else rubric
    cache = ReplyCache(cache) if isinstance(cache, Path) else cache
    verdict_format: VerdictFormat = RubricFormat(rubric=rubric, output=output)
    if mode == "pairwise":
        verdict_format = PairwiseFormat(rubric=rubric, output=output)
    panel = JudgePanel(judge, verdict_format, cache=cache, repair=repair)
    request_settings = request_settings or RequestSettings()
    scoring: JudgeScoring = RubricScoring(panel, request_settings)
    if mode == "pairwise":
        scoring = PairwiseScoring(panel, request_settings, opponents=opponents)
    return JudgeReward(scoring, name=name, show=show, safety=safety, cache=cache, shadow=shadow)


def _judge(name: str, config: JudgeConfig) -> Judge:
    match config.backend:
        case EndpointConfig():
            return endpoint_judge(name, config, config.backend)
        case LocalConfig() as local:
            from flatpeak.rewards.judge.local import LocalJudge

            return LocalJudge(
                local.path, dtype=local.dtype, device=local.device, batch_size=local.batch_size, revision=local.revision
            )
        case CustomJudgeConfig() as custom:
            judge = load_function(custom.factory)(**custom.arguments)
            if not callable(getattr(judge, "ask", None)) or not isinstance(getattr(judge, "identity", None), str):
                raise UserError(
                    f"backend.factory={custom.factory} must return an object with `identity`, a text, and "
                    "`async ask(requests)`"
                )
            return cast("Judge", judge)


def endpoint_judge(name: str, config: JudgeConfig, backend: EndpointConfig) -> Judge:
    """The client of an endpoint, with its rate limits, retries, circuit breaker and budget."""
    from flatpeak.rewards.judge.client import Endpoint, EndpointJudge
    from flatpeak.rewards.judge.rate_limits import Budget, CircuitBreaker, RateLimiter, RetryPolicy
    from flatpeak.utils.redaction import Secret

    clock = SystemClock()
    return EndpointJudge(
        Endpoint(
            base_url=backend.base_url,
            model=backend.model,
            key=Secret.from_environment(backend.api_key_env),
            token_limit_name=backend.token_limit_name,
            extra_body=backend.extra_body,
            price_input=backend.price_input,
            price_output=backend.price_output,
        ),
        concurrency=config.concurrency,
        timeout=config.timeout,
        retry=RetryPolicy(retries=config.retries, first=config.retry_delay),
        limits=RateLimiter(
            requests_per_minute=config.requests_per_minute, tokens_per_minute=config.tokens_per_minute, clock=clock
        ),
        circuit=CircuitBreaker(
            failures=config.breaker.failures,
            pause=config.breaker.pause,
            give_up=config.breaker.give_up,
            clock=clock,
            what=f"rewards.{name}: the judge {backend.model} at {backend.base_url}",
        ),
        budget=Budget(max_calls=config.budget.max_calls, max_cost=config.budget.max_cost),
        clock=clock,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeNoise:
    """The spread of repeated marks, within answers and between them."""

    within: float
    """Standard deviation of one answer's marks, with n - 1, as the root of its mean square over answers."""
    between: float
    """Standard deviation of the answers' mean marks, with n - 1: the differences to be measured. 0 for one answer."""
    answers: int
    """Answers with at least two marks; the others are left out."""
    missing: int
    """Marks that the judge did not give."""


def judge_noise(judge: JudgeReward, groups: Sequence[Group], *, repeats: int = 5) -> JudgeNoise:
    """Mark every completion `repeats` times without the cache: that many calls for each, twice as many for pairs.

    Advantages are differences of marks within a group, so what `within` adds to them is noise. Answers that score 0 by
    rule are left out. UserError where no answer has two marks.
    """
    if repeats < 2:
        raise UserError(f"repeats={repeats}: a spread needs at least 2 marks of each answer")
    marks: list[list[float]] = []
    missing = 0
    repeated = [judge.verdicts(groups, fresh=True) for _ in range(repeats)]
    for group_index, group in enumerate(repeated[0]):
        for index, first in enumerate(group):
            if first.score is not None and first.reason is not None:
                continue  # by rule
            scores = [verdicts[group_index][index].score for verdicts in repeated]
            missing += scores.count(None)
            marks.append([score for score in scores if score is not None])
    marked = [row for row in marks if len(row) >= 2]
    if not marked:
        raise UserError("no answer was marked twice: give answers that do not score 0 by rule, or repair the judge")
    means = [statistics.fmean(row) for row in marked]
    return JudgeNoise(
        within=statistics.fmean([statistics.variance(row) for row in marked]) ** 0.5,
        between=statistics.stdev(means) if len(means) > 1 else 0.0,
        answers=len(marked),
        missing=missing,
    )
