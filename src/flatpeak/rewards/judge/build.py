"""From configuration to a judge, and from any judge to a reward."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from flatpeak.errors import UserError
from flatpeak.rewards.functions import load_function
from flatpeak.rewards.judge.cache import ReplyCache
from flatpeak.rewards.judge.config import CustomJudgeConfig, EndpointConfig, JudgeConfig, LocalConfig
from flatpeak.rewards.judge.examiner import Examiner
from flatpeak.rewards.judge.forms import Form, PairForm, RubricForm
from flatpeak.rewards.judge.grade import Asking, Grader, RubricGrader
from flatpeak.rewards.judge.pairwise import PairGrader
from flatpeak.rewards.judge.protocol import Judge, RealClock
from flatpeak.rewards.judge.reward import JudgeReward, Safety
from flatpeak.rewards.judge.rubric import Rubric, load_rubric

if TYPE_CHECKING:
    from flatpeak.rewards.judge.shown import Show
    from flatpeak.rewards.judge.verdict import Output


def build_judge_reward(name: str, config: JudgeConfig) -> JudgeReward:
    """The reward of a recipe; UserError where the rubric, the key or the judge is not there."""
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
        asking=Asking(
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
    asking: Asking | None = None,
    repair: bool = True,
    cache: ReplyCache | Path | None = None,
    safety: Safety | None = None,
    shadow: str | None = None,
) -> JudgeReward:
    """A reward from any judge: an object with `identity` and `async ask(requests)`."""
    rubric = load_rubric(rubric) if isinstance(rubric, str) else rubric
    cache = ReplyCache(cache) if isinstance(cache, Path) else cache
    form: Form = RubricForm(rubric=rubric, output=output)
    if mode == "pairwise":
        form = PairForm(rubric=rubric, output=output)
    examiner = Examiner(judge, form, cache=cache, repair=repair)
    asking = asking or Asking()
    grader: Grader = RubricGrader(examiner, asking)
    if mode == "pairwise":
        grader = PairGrader(examiner, asking, opponents=opponents)
    return JudgeReward(grader, name=name, show=show, safety=safety, cache=cache, shadow=shadow)


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
    """The client of an endpoint, with everything that keeps it within its limits."""
    from flatpeak.rewards.judge.breaker import CircuitBreaker
    from flatpeak.rewards.judge.client import Endpoint, EndpointJudge
    from flatpeak.rewards.judge.limits import Budget, RateLimits
    from flatpeak.rewards.judge.retry import RetryPolicy
    from flatpeak.utils.redaction import Secret

    clock = RealClock()
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
        limits=RateLimits(
            requests_per_minute=config.requests_per_minute, tokens_per_minute=config.tokens_per_minute, clock=clock
        ),
        breaker=CircuitBreaker(
            failures=config.breaker.failures,
            pause=config.breaker.pause,
            give_up=config.breaker.give_up,
            clock=clock,
            what=f"rewards.{name}: the judge {backend.model} at {backend.base_url}",
        ),
        budget=Budget(max_calls=config.budget.max_calls, max_cost=config.budget.max_cost),
        clock=clock,
    )
