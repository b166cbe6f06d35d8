"""Judge rewards built from a recipe or from any judge object."""

from __future__ import annotations

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
        show=config.show,
        output=config.output,
        request_settings=RequestSettings(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            deadline=config.deadline,
        ),
        cache=cache,
        safety=Safety(
            canaries=config.canaries.enabled,
            max_false_positive_rate=config.canaries.max_false_positive_rate,
        ),
        shadow=config.shadow,
    )


def judge_reward(
    judge: Judge,
    *,
    rubric: Rubric | str = "correctness",
    name: str = "judge",
    mode: Literal["score", "pairwise"] = "score",
    show: Show = "final_answer",
    output: Output = "json",
    request_settings: RequestSettings | None = None,
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
    panel = JudgePanel(judge, verdict_format, cache=cache)
    request_settings = request_settings or RequestSettings()
    scoring: JudgeScoring = RubricScoring(panel, request_settings)
    if mode == "pairwise":
        scoring = PairwiseScoring(panel, request_settings)
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
    """The client of an endpoint, with its rate limits, retries, wait for an endpoint that is down, and budget."""
    from flatpeak.rewards.judge.client import Endpoint, EndpointJudge
    from flatpeak.rewards.judge.rate_limits import FIRST_DELAY, Budget, Outage, RateLimiter, RetryPolicy
    from flatpeak.utils.redaction import Secret

    clock = SystemClock()
    return EndpointJudge(
        Endpoint(
            base_url=backend.base_url,
            model=backend.model,
            key=Secret.from_environment(backend.api_key_env),
            extra_body=backend.extra_body,
            price_input=backend.price_input,
            price_output=backend.price_output,
        ),
        concurrency=config.concurrency,
        timeout=config.timeout,
        retry=RetryPolicy(retries=config.retries, first=FIRST_DELAY),
        limits=RateLimiter(
            requests_per_minute=config.requests_per_minute, tokens_per_minute=config.tokens_per_minute, clock=clock
        ),
        outage=Outage(
            give_up=config.give_up,
            clock=clock,
            what=f"rewards.{name}: the judge {backend.model} at {backend.base_url}",
        ),
        budget=Budget(max_calls=config.budget.max_calls, max_cost=config.budget.max_cost),
        clock=clock,
    )
