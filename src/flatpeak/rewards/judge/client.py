"""A judge behind an OpenAI-compatible endpoint, with deadlines, retries, rate limits and a budget."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from flatpeak.errors import UserError
from flatpeak.rewards.background_loop import gather
from flatpeak.rewards.judge.config import EndpointConfig, JudgeConfig
from flatpeak.rewards.judge.protocol import JudgeReply, JudgeRequest
from flatpeak.rewards.judge.rate_limits import (
    LONGEST_PAUSE,
    RETRIED_STATUSES,
    Budget,
    BudgetSpentError,
    Outage,
    PauseTooLongError,
    RateLimiter,
    now,
    read_retry_after,
    retry_delay,
)
from flatpeak.utils.redaction import Secret

_MESSAGE_TOKENS: Final = 8
_BYTES_PER_TOKEN: Final = 3
_MOST_TOKENS: Final = 10**7
_FATAL: Final = {
    401: "the endpoint refused the key (401): check the variable that backend.api_key_env names",
    403: "the endpoint forbids this (403): check what the key is allowed to do",
    404: "the endpoint does not know this address or model (404): check backend.base_url and backend.model",
}


class _AttemptError(Exception):
    """A failed attempt to get a reply."""

    def __init__(
        self, text: str, *, retried: bool, retry_after: float | None = None, from_endpoint: bool = False
    ) -> None:
        super().__init__(text)
        self.retried = retried
        self.retry_after = retry_after
        self.from_endpoint = from_endpoint
        """Whether the endpoint reported the error, and so has used no tokens."""


@dataclass(kw_only=True, slots=True)
class _Attempts:
    """The attempts at one request until now; kept outside of them, since a deadline may end any of them."""

    sent: int = 0
    errors: list[str] = field(default_factory=list)


class EndpointJudge:
    """A judge that calls an endpoint; every request gets a reply, or one without text and with a reason.

    One attempt takes at most `timeout` seconds. Only RETRIED_STATUSES, broken connections and timeouts are retried; a
    refused key and an unknown model are UserErrors at once. To be used on one event loop.
    """

    batch_size = 1

    def __init__(self, name: str, config: JudgeConfig, backend: EndpointConfig) -> None:
        """`name` is the component's in error messages."""
        try:
            from openai import AsyncOpenAI
        except ImportError:
            raise UserError('an endpoint as judge needs the openai package: pip install "flatpeak[judge]"') from None
        self._key = Secret.from_environment(backend.api_key_env)
        self._client = AsyncOpenAI(
            api_key=self._key.reveal(), base_url=backend.base_url, max_retries=0, timeout=config.timeout
        )
        self._backend = backend
        self._timeout = config.timeout
        self._retries = config.retries
        self._concurrency = asyncio.Semaphore(config.concurrency)
        self._limits = RateLimiter(
            requests_per_minute=config.requests_per_minute, tokens_per_minute=config.tokens_per_minute
        )
        self._outage = Outage(
            give_up=config.give_up,
            what=f"rewards.{name}: the judge {backend.model} at {backend.base_url}",
            notice=lambda text: self._notices.append(text.removeprefix(f"rewards.{name}: ")),
        )
        self._budget = Budget(max_calls=config.budget.max_calls, max_cost=config.budget.max_cost)
        # A generator of its own: retries must not change any other random numbers.
        self._jitter = random.Random()
        # Highest ratio of the endpoint's count of prompt tokens to the estimate, so that reservations suffice.
        self._prompt_ratio = 1.0
        self._notices: list[str] = []
        self._budget_notified = False
        self._active = 0
        self._fatal: UserError | None = None

    @property
    def identity(self) -> str:
        """Model, address and settings that change replies, without the key."""
        extra = f" {sorted(self._backend.extra_body.items())}" if self._backend.extra_body else ""
        return f"{self._backend.model} at {self._backend.base_url.rstrip('/')}{extra}"

    def __repr__(self) -> str:
        return f"EndpointJudge({self.identity})"

    def scrub(self, text: str) -> str:
        """The text with the key redacted."""
        return self._key.scrub(text)

    def take_notices(self) -> list[str]:
        """Messages for the user since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def spent(self) -> tuple[int, float]:
        """(calls, cost) that count against the budget until now."""
        return self._budget.calls, self._budget.cost

    def add_spent(self, calls: int, cost: float) -> None:
        """Count the calls and cost of earlier processes of the run against the budget."""
        self._budget.calls += calls
        self._budget.cost += cost

    async def ask(self, requests: Sequence[JudgeRequest]) -> list[JudgeReply]:
        """Replies to all requests in their order, asked in parallel as far as concurrency and limits allow."""
        deadlines = [request.deadline for request in requests if request.deadline is not None]
        if deadlines and not self._active:
            self._limits.end_long_pause(min(deadlines))
        return await gather(self._reply(request) for request in requests)

    async def close(self) -> None:
        """Close the client's open connections."""
        await self._client.close()

    async def _reply(self, request: JudgeRequest) -> JudgeReply:
        attempts = _Attempts()
        self._active += 1
        try:
            async with asyncio.timeout_at(request.deadline):
                reply = await self._ask_with_retries(request, attempts)
        except BudgetSpentError:
            self._notify_budget_spent()
            reply = JudgeReply(text=None, reason="the budget is spent")
        except TimeoutError:
            reply = JudgeReply(text=None, reason="no reply before the deadline")
        except _AttemptError as failure:
            reply = JudgeReply(text=None, reason=str(failure))
        except UserError as error:
            self._fatal = error  # for the requests that still wait: the endpoint would refuse them too
            raise
        finally:
            self._active -= 1
            self._fatal = self._fatal if self._active else None
        return replace(reply, attempts=attempts.sent, errors=tuple(attempts.errors))

    async def _ask_with_retries(self, request: JudgeRequest, attempts: _Attempts) -> JudgeReply:
        for attempt in range(self._retries + 1):
            try:
                return await self._attempt(request, attempts)
            except _AttemptError as failure:
                attempts.errors.append(str(failure))
                if not failure.retried or attempt == self._retries:
                    raise
                await self._back_off(attempt, failure, request)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _back_off(self, attempt: int, failure: _AttemptError, request: JudgeRequest) -> None:
        if failure.retry_after is not None:
            # Other requests would get the same reply now.
            self._limits.pause(min(failure.retry_after, LONGEST_PAUSE))
        delay = retry_delay(attempt, retry_after=failure.retry_after, generator=self._jitter)
        if request.deadline is not None and now() + delay > request.deadline:
            raise _AttemptError(f"{failure}; no time left to wait {delay:.0f} s", retried=False)
        await asyncio.sleep(delay)

    async def _attempt(self, request: JudgeRequest, attempts: _Attempts) -> JudgeReply:
        """One request, after its wait for a slot, an endpoint that is down, the budget and the rate limits."""
        expected = estimate_prompt_tokens(request)
        most = self._cost(expected, request.max_tokens)
        async with self._concurrency:
            if self._fatal is not None:
                raise UserError(str(self._fatal))
            await self._outage.admit()
            await self._budget.reserve(most)
            cost, before = 0.0, attempts.sent
            try:
                reply = await self._send_within_limits(request, expected, attempts)
                self._outage.record_answer()
                used = reply.prompt_tokens + reply.completion_tokens
                # An endpoint that does not count tokens is charged the estimate.
                cost = self._cost(reply.prompt_tokens, reply.completion_tokens) if used else most
                return replace(reply, cost=cost)
            except _AttemptError as failure:
                if failure.retried and not str(failure).startswith("429"):
                    self._outage.record_failure(str(failure))
                else:
                    self._outage.record_answer()
                raise
            finally:
                self._budget.settle(most, cost, sent=attempts.sent > before)

    async def _send_within_limits(self, request: JudgeRequest, expected: int, attempts: _Attempts) -> JudgeReply:
        """The reply to a request of about `expected` tokens; the unused rest of its reservation is given back."""
        most = math.ceil(expected * self._prompt_ratio) + request.max_tokens
        try:
            reservation = await self._limits.acquire(most, deadline=request.deadline)
        except PauseTooLongError as error:
            raise _AttemptError(str(error), retried=False) from None
        counted = reservation.tokens  # without a count, or a reply
        attempts.sent += 1
        try:
            reply = await self._send(request)
            counted = reply.prompt_tokens + reply.completion_tokens or counted
            self._prompt_ratio = max(self._prompt_ratio, reply.prompt_tokens / max(1, expected))
            return reply
        except _AttemptError as failure:
            counted = 0.0 if failure.from_endpoint else counted
            raise
        finally:
            self._limits.settle(reservation, counted)

    async def _send(self, request: JudgeRequest) -> JudgeReply:
        """The endpoint's reply; _AttemptError, or UserError for errors that every call would have."""
        import openai

        started = now()
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._client.chat.completions.create(**self._arguments(request))
        except (TimeoutError, openai.APITimeoutError):
            raise _AttemptError(f"no reply within {self._timeout:g} s", retried=True) from None
        except openai.APIStatusError as error:
            raise self._status_failure(error) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__
            address = self._backend.base_url
            text = f"connection failed: {type(cause).__name__ if cause else ''} {cause or error} ({address})"
            raise _AttemptError(self.scrub(" ".join(text.split()))[:200], retried=True) from None
        except (openai.OpenAIError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            text = f"{type(error).__name__}: {error}"
            return JudgeReply(text="", reason=f"unreadable reply ({self.scrub(' '.join(text.split()))[:120]})")
        if (embedded := embedded_error(response)) is not None:
            raise self._failure(*embedded)
        return parse_reply(response, latency=now() - started)

    def _cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self._backend.price_input + completion_tokens * self._backend.price_output) / 1e6

    def _arguments(self, request: JudgeRequest) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": self._backend.model,
            "messages": [dict(message) for message in request.messages],
        }
        if "max_completion_tokens" not in self._backend.extra_body:
            arguments["max_tokens"] = request.max_tokens
        if request.temperature is not None:
            arguments["temperature"] = request.temperature
        if request.schema is not None:
            schema = {"name": "verdict", "strict": True, "schema": request.schema}
            arguments["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self._backend.extra_body:
            arguments["extra_body"] = dict(self._backend.extra_body)
        return arguments

    def _status_failure(self, error: Any) -> Exception:
        """The exception for an HTTP status, without the key, which the endpoint's message may quote."""
        if int(error.status_code) == 429 and getattr(error, "code", None) == "insufficient_quota":
            return UserError(
                f"judge {self.identity}: the account's quota is used up (429): raise it, then resume the run"
            )
        retry_after = read_retry_after(error.response.headers.get("retry-after"))
        return self._failure(int(error.status_code), error_message(error), retry_after=retry_after)

    def _failure(self, status: int | None, text: str, *, retry_after: float | None = None) -> Exception:
        """The exception for an endpoint's error; one without a status is retried."""
        message = " ".join(self.scrub(text).split())[:200]
        if status in _FATAL:
            # Without the endpoint's message, even scrubbed: with a refused key it often quotes part of it.
            return UserError(f"judge {self.identity}: {_FATAL[status]}")
        retried = status is None or status in RETRIED_STATUSES
        text = f"{status or 'error'}: {message}"
        return _AttemptError(text, retried=retried, retry_after=retry_after, from_endpoint=True)

    def _notify_budget_spent(self) -> None:
        if not self._budget_notified:
            self._budget_notified = True
            self._notices.append(
                f"the judge's budget is spent ({self._budget.calls} calls, cost {self._budget.cost:.4g}): nothing more "
                "is asked, and what it would have graded has no score; raise budget.max_calls or budget.max_cost"
            )


def estimate_prompt_tokens(request: JudgeRequest) -> int:
    """An estimate of the prompt's tokens, too high for English and about right for most other languages."""
    content = sum(len(message["content"].encode()) for message in request.messages)
    return content // _BYTES_PER_TOKEN + _MESSAGE_TOKENS * len(request.messages)


def encodable(text: str) -> str:
    """The text with lone surrogates replaced: JSON can spell them, and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _token_count(value: Any) -> int | None:
    """A count of tokens; None for any other value."""
    counted = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS
    return value if counted else None


def error_message(error: Any) -> str:
    """The endpoint's message, in OpenAI's form, in FastAPI's (`detail`), or the body as it is."""
    body = error.body
    if isinstance(body, Mapping):
        return str(next((body[name] for name in ("message", "detail", "error") if body.get(name)), body))
    return str(body or error.response.text)


def embedded_error(response: Any) -> tuple[int | None, str] | None:
    """(status, message) of an error inside a response with HTTP status 200, as OpenRouter sends it; else None."""
    choices = getattr(response, "choices", None)
    first = choices[0] if isinstance(choices, list) and choices else None
    error = getattr(first, "error", None) or (getattr(response, "error", None) if first is None else None)
    if not error and getattr(first, "finish_reason", None) != "error":
        return None
    fields = error if isinstance(error, Mapping) else {}
    code = fields.get("code")
    text = str(fields.get("message") or error or "it says only that something went wrong")
    return code if isinstance(code, int) and not isinstance(code, bool) else None, text


def parse_reply(response: Any, *, latency: float) -> JudgeReply:
    """The reply in a response, whose fields may be absent: some servers are only nearly compatible."""
    try:
        choice = response.choices[0]
        content, finish = choice.message.content, choice.finish_reason
        refusal = getattr(choice.message, "refusal", None)
    except (AttributeError, IndexError, KeyError, TypeError):
        return JudgeReply(text="", reason="the endpoint's reply holds no message", latency=latency)
    usage = getattr(response, "usage", None)
    used = [_token_count(getattr(usage, name, None)) for name in ("prompt_tokens", "completion_tokens")]
    # Half a count would make a call look cheaper than it was.
    prompt_tokens, completion_tokens = (0, 0) if None in used else (used[0] or 0, used[1] or 0)
    reason = f"the judge refused: {' '.join(str(refusal).split())[:100]}" if refusal else None
    if reason or not isinstance(content, str) or finish == "content_filter":
        content, reason = None if reason else "", reason or f"no text (finish_reason {finish})"
    return JudgeReply(
        text=content,
        reason=reason,
        cut=finish == "length",
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        latency=latency,
    )
