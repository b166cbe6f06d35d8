from __future__ import annotations

import asyncio
import email.utils
import random
import time

import pytest

from flatpeak.errors import UserError
from flatpeak.rewards.judge.rate_limits import (
    RETRIED_STATUSES,
    Budget,
    BudgetSpentError,
    JudgeDownError,
    Outage,
    PauseTooLongError,
    RateLimiter,
    now,
    read_retry_after,
    retry_delay,
)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Time passes only while every task sleeps, and then at once."""

    def __init__(self):
        super().__init__()
        self.moment = 1000.0
        select = self._selector.select
        self._selector.select = lambda timeout=None: self.pass_time(timeout) or select(0)

    def pass_time(self, timeout):
        self.moment += timeout or 0.0

    def time(self):
        return self.moment


def run(coroutine):
    """The coroutine's result, on a loop whose time jumps and begins at 1000."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(coroutine)


def sent_at(limits, tokens):
    async def send():
        times = []
        for each in tokens:
            limits.settle(await limits.acquire(each), each)
            times.append(now())
        return times

    return run(send())


def test_no_minute_has_more_requests_than_allowed():
    limits = RateLimiter(requests_per_minute=3, tokens_per_minute=None)
    times = sent_at(limits, [1] * 10)
    assert [round(moment - times[0]) for moment in times] == [0, 0, 0, 60, 60, 60, 120, 120, 120, 180]
    for first, fourth in zip(times, times[3:], strict=False):
        assert fourth - first > 60.0


def test_no_minute_has_more_tokens_than_allowed():
    limits = RateLimiter(requests_per_minute=None, tokens_per_minute=100)
    times = sent_at(limits, [60, 40, 1, 99, 100])
    assert [round(moment - times[0]) for moment in times] == [0, 0, 60, 60, 120]


def test_a_request_larger_than_the_limit_goes_alone():
    limits = RateLimiter(requests_per_minute=None, tokens_per_minute=100)
    times = sent_at(limits, [10, 500, 10])
    assert [round(moment - times[0]) for moment in times] == [0, 60, 120]


def test_what_a_request_really_used_counts_once_it_is_known():
    limits = RateLimiter(requests_per_minute=None, tokens_per_minute=100)

    async def send():
        limits.settle(await limits.acquire(90), 20)
        await limits.acquire(80)
        return now()

    assert run(send()) == 1000.0


def calls(limits, requests, *, at_once):
    """(sent, answered, tokens used) of each (reserved, used, seconds), so many side by side."""
    done = []

    async def call(slots, reserved, used, seconds):
        async with slots:
            reservation = await limits.acquire(reserved)
            sent = now()
            await asyncio.sleep(seconds)
            limits.settle(reservation, used)
            done.append((sent, now(), used))

    async def all_of_them():
        slots = asyncio.Semaphore(at_once)
        await asyncio.gather(*(call(slots, *request) for request in requests))

    run(all_of_them())
    return done


def test_short_replies_wait_for_nobody_although_each_reserves_a_long_one():
    limits = RateLimiter(requests_per_minute=None, tokens_per_minute=20_000)
    done = calls(limits, [(1_100, 15, 0.5)] * 200, at_once=16)
    assert max(answered for _, answered, _ in done) - 1000.0 == pytest.approx(0.5 * 200 / 16, abs=0.5)


@pytest.mark.parametrize("seed", range(5))
def test_whenever_a_server_counts_no_minute_has_more_tokens_than_allowed(seed):
    generator = random.Random(seed)
    limits = RateLimiter(requests_per_minute=None, tokens_per_minute=5_000)
    requests = [(1_100, generator.choice([15, 15, 200, 1_100]), generator.choice([0.1, 2.0, 90.0])) for _ in range(120)]
    done = calls(limits, requests, at_once=16)
    for counted in (lambda call: call[0], lambda call: call[1], lambda call: generator.uniform(*call[:2])):
        moments = sorted((counted(call), call[2]) for call in done)
        for start, _ in moments:
            assert sum(used for moment, used in moments if start <= moment < start + 60.0) <= 5_000


def test_a_pause_beyond_the_deadline_is_refused_at_once_also_to_those_who_wait():
    limits = RateLimiter(requests_per_minute=1, tokens_per_minute=None)

    async def pause():
        limits.settle(await limits.acquire(1), 1)
        waiting = asyncio.ensure_future(limits.acquire(1, deadline=1050.0))
        await asyncio.sleep(1.0)
        limits.pause(100.0)
        with pytest.raises(PauseTooLongError, match="pause of 100 s"):
            await waiting
        assert now() == 1001.0
        limits.end_long_pause(1201.0)  # a pause that ends in time is kept
        with pytest.raises(PauseTooLongError):
            await limits.acquire(1, deadline=1051.0)
        limits.end_long_pause(1051.0)
        await limits.acquire(1, deadline=1501.0)
        return now()

    assert run(pause()) == pytest.approx(1060.0)


def test_nothing_is_sent_while_the_server_asked_for_a_pause():
    limits = RateLimiter(requests_per_minute=None, tokens_per_minute=None)

    async def pause():
        limits.pause(7.0)
        limits.pause(2.0)
        times = []
        for _ in range(2):
            await limits.acquire(1)
            times.append(now())
        return times

    assert run(pause()) == pytest.approx([1007.0, 1007.0])


def delays(attempt, *, retry_after=None, count=2000):
    generator = random.Random(0)
    return [retry_delay(attempt, retry_after=retry_after, generator=generator) for _ in range(count)]


def test_waits_are_uniform_below_a_doubling_bound(endpoint_limits):
    endpoint_limits(first_delay=1.0)
    for attempt, bound in enumerate([1, 2, 4, 8, 16, 32, 60, 60]):
        drawn = delays(attempt)
        assert 0 <= min(drawn) < 0.01 * bound
        assert 0.99 * bound < max(drawn) <= bound
        assert sum(drawn) / len(drawn) == pytest.approx(bound / 2, rel=0.05)


def test_a_wait_is_never_shorter_than_the_server_asked_for(endpoint_limits):
    endpoint_limits(first_delay=1.0)
    drawn = delays(5, retry_after=30.0)
    assert 30.0 <= min(drawn) < 30.1
    assert max(drawn) <= 31.0


def test_retry_after_is_seconds_or_a_date():
    assert [read_retry_after(value) for value in ("2", "0.5", "-1")] == [2.0, 0.5, 0.0]
    later = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert read_retry_after(later) == pytest.approx(100, abs=2)
    assert [read_retry_after(value) for value in (None, "", "soon", "nan", "inf")] == [None] * 5


def test_only_too_many_requests_and_broken_servers_are_tried_again():
    assert {408, 409, 429, 500, 502, 503, 504, 529} == RETRIED_STATUSES


def test_a_server_that_asks_for_an_hour_is_waited_for_two_minutes():
    assert 120.0 <= delays(0, retry_after=3600.0, count=1)[0] <= 121.0


def test_an_endpoint_is_down_after_failures_in_a_row_and_then_tried_once_a_pause(endpoint_limits):
    endpoint_limits(failures=3, pause=10.0)
    outage = Outage(give_up=100.0)
    waits = []

    async def call(outcome):
        started = now()
        await outage.admit()
        waits.append(now() - started)
        if outcome == "answer":
            outage.record_answer()
        elif outcome == "failure":
            outage.record_failure("500")

    async def call_all():
        for outcome in ("failure", "failure", "answer", "failure", "failure", "failure"):
            await call(outcome)
        assert waits == [0.0] * 6
        started = now()
        await asyncio.gather(*(call("cancelled") for _ in range(3)))
        assert now() - started == pytest.approx(30.0)  # also side by side
        await call("answer")
        assert waits[-1] == pytest.approx(10.0)
        await call("answer")
        assert waits[-1] == 0.0

    run(call_all())


def test_an_endpoint_is_given_up_at_the_limit_with_an_error_that_says_what_to_do(endpoint_limits):
    endpoint_limits(failures=3, pause=10.0)
    outage = Outage(give_up=100.0, what="the judge at http://x")

    async def fail():
        while now() < 2000.0:
            await outage.admit()
            outage.record_failure("503: overloaded")

    with pytest.raises(
        JudgeDownError, match=r"the judge at http://x has not answered for 1(?:0\d|1[01]) s .*503: overloaded.*resume"
    ) as error:
        run(fail())
    assert isinstance(error.value, UserError)


def test_the_budget_counts_calls_and_gives_back_those_that_were_not_sent():
    budget = Budget(max_calls=2, max_cost=None)

    async def spend():
        await budget.reserve(0.0)
        budget.settle(0.0, 0.0, sent=False)
        await budget.reserve(0.0)
        await budget.reserve(0.0)
        with pytest.raises(BudgetSpentError):
            await budget.reserve(0.0)

    run(spend())
    assert budget.calls == 2


def test_the_cost_never_passes_the_cap_and_what_reservations_leave_is_used():
    budget = Budget(max_calls=None, max_cost=10.0)

    async def call():
        await budget.reserve(4.0)
        await asyncio.sleep(0)
        budget.settle(4.0, 1.0)

    async def spend():
        results = await asyncio.gather(*(call() for _ in range(12)), return_exceptions=True)
        return [result for result in results if result is not None]

    refused = run(spend())
    # After seven calls 7 is spent, and an eighth could cost 4.
    assert budget.calls == 7
    assert budget.cost == 7.0
    assert [type(error) for error in refused] == [BudgetSpentError] * 5
