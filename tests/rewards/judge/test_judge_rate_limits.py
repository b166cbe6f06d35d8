from __future__ import annotations

import asyncio
import email.utils
import random
import time

import pytest

from flatpeak.errors import UserError
from flatpeak.rewards.judge.protocol import JudgeDownError
from flatpeak.rewards.judge.rate_limits import (
    RETRIED_STATUSES,
    Budget,
    BudgetSpentError,
    Outage,
    PauseTooLongError,
    RateLimiter,
    RetryPolicy,
    read_retry_after,
)
from support.judges import VirtualClock


def sent_at(limits, clock, tokens):
    async def send():
        times = []
        for each in tokens:
            limits.settle(await limits.acquire(each), each)
            times.append(clock.now())
        return times

    return asyncio.run(send())


def test_no_minute_has_more_requests_than_allowed():
    clock = VirtualClock()
    limits = RateLimiter(requests_per_minute=3, tokens_per_minute=None, clock=clock)
    times = sent_at(limits, clock, [1] * 10)
    assert [round(moment - times[0]) for moment in times] == [0, 0, 0, 60, 60, 60, 120, 120, 120, 180]
    for first, fourth in zip(times, times[3:], strict=False):
        assert fourth - first > 60.0


def test_no_minute_has_more_tokens_than_allowed():
    clock = VirtualClock()
    limits = RateLimiter(requests_per_minute=None, tokens_per_minute=100, clock=clock)
    times = sent_at(limits, clock, [60, 40, 1, 99, 100])
    assert [round(moment - times[0]) for moment in times] == [0, 0, 60, 60, 120]


def test_a_request_larger_than_the_limit_goes_alone():
    clock = VirtualClock()
    limits = RateLimiter(requests_per_minute=None, tokens_per_minute=100, clock=clock)
    times = sent_at(limits, clock, [10, 500, 10])
    assert [round(moment - times[0]) for moment in times] == [0, 60, 120]


def test_what_a_request_really_used_counts_once_it_is_known():
    clock = VirtualClock()
    limits = RateLimiter(requests_per_minute=None, tokens_per_minute=100, clock=clock)

    async def send():
        limits.settle(await limits.acquire(90), 20)
        await limits.acquire(80)
        return clock.now()

    assert asyncio.run(send()) == 1000.0


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


class LoopClock:
    def now(self):
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)


def calls(limits, requests, *, at_once):
    """(sent, answered, tokens used) of each (reserved, used, seconds), so many side by side."""
    done = []

    async def call(slots, reserved, used, seconds):
        async with slots:
            reservation = await limits.acquire(reserved)
            sent = limits._clock.now()
            await asyncio.sleep(seconds)
            limits.settle(reservation, used)
            done.append((sent, limits._clock.now(), used))

    async def run():
        slots = asyncio.Semaphore(at_once)
        await asyncio.gather(*(call(slots, *request) for request in requests))

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(run())
    return done


def test_short_replies_wait_for_nobody_although_each_reserves_a_long_one():
    limits = RateLimiter(requests_per_minute=None, tokens_per_minute=20_000, clock=LoopClock())
    done = calls(limits, [(1_100, 15, 0.5)] * 200, at_once=16)
    assert max(answered for _, answered, _ in done) - 1000.0 == pytest.approx(0.5 * 200 / 16, abs=0.5)


@pytest.mark.parametrize("seed", range(5))
def test_whenever_a_server_counts_no_minute_has_more_tokens_than_allowed(seed):
    generator = random.Random(seed)
    limits = RateLimiter(requests_per_minute=None, tokens_per_minute=5_000, clock=LoopClock())
    requests = [(1_100, generator.choice([15, 15, 200, 1_100]), generator.choice([0.1, 2.0, 90.0])) for _ in range(120)]
    done = calls(limits, requests, at_once=16)
    for counted in (lambda call: call[0], lambda call: call[1], lambda call: generator.uniform(*call[:2])):
        moments = sorted((counted(call), call[2]) for call in done)
        for start, _ in moments:
            assert sum(used for moment, used in moments if start <= moment < start + 60.0) <= 5_000


def test_a_pause_beyond_the_deadline_is_refused_at_once_also_to_those_who_wait():
    limits = RateLimiter(requests_per_minute=1, tokens_per_minute=None, clock=LoopClock())

    async def run():
        limits.settle(await limits.acquire(1), 1)
        waiting = asyncio.ensure_future(limits.acquire(1, left=50.0))
        await asyncio.sleep(1.0)
        limits.pause(100.0)
        with pytest.raises(PauseTooLongError, match="pause of 100 s"):
            await waiting
        assert limits._clock.now() == 1001.0
        limits.end_long_pause(200.0)  # a pause that ends in time is kept
        with pytest.raises(PauseTooLongError):
            await limits.acquire(1, left=50.0)
        limits.end_long_pause(50.0)
        await limits.acquire(1, left=500.0)
        return limits._clock.now()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        assert runner.run(run()) == pytest.approx(1060.0)


def test_nothing_is_sent_while_the_server_asked_for_a_pause():
    clock = VirtualClock()
    limits = RateLimiter(requests_per_minute=None, tokens_per_minute=None, clock=clock)
    limits.pause(7.0)
    limits.pause(2.0)
    assert sent_at(limits, clock, [1, 1]) == [1007.0, 1007.0]


def test_waits_are_uniform_below_a_doubling_bound():
    policy = RetryPolicy(retries=9, first=2.0, longest=10.0)
    generator = random.Random(0)
    for attempt, bound in enumerate([2, 4, 8, 10, 10, 10]):
        delays = [policy.delay(attempt, retry_after=None, generator=generator) for _ in range(2000)]
        assert 0 <= min(delays) < 0.01 * bound
        assert 0.99 * bound < max(delays) <= bound
        assert sum(delays) / 2000 == pytest.approx(bound / 2, rel=0.05)


def test_a_wait_is_never_shorter_than_the_server_asked_for():
    policy = RetryPolicy(retries=1, first=1.0)
    delays = [policy.delay(5, retry_after=30.0, generator=random.Random(seed)) for seed in range(200)]
    assert 30.0 <= min(delays) < 30.1
    assert max(delays) <= 31.0


def test_retry_after_is_seconds_or_a_date():
    assert [read_retry_after(value) for value in ("2", "0.5", "-1")] == [2.0, 0.5, 0.0]
    later = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert read_retry_after(later) == pytest.approx(100, abs=2)
    assert [read_retry_after(value) for value in (None, "", "soon", "nan", "inf")] == [None] * 5


def test_only_too_many_requests_and_broken_servers_are_tried_again():
    assert {408, 409, 429, 500, 502, 503, 504, 529} == RETRIED_STATUSES


def test_a_server_that_asks_for_an_hour_is_waited_for_two_minutes():
    policy = RetryPolicy(retries=1, first=1.0)
    assert 120.0 <= policy.delay(0, retry_after=3600.0, generator=random.Random(0)) <= 121.0


def test_an_endpoint_is_down_after_failures_in_a_row_and_then_tried_once_a_pause(endpoint_limits):
    endpoint_limits(failures=3, pause=10.0)
    clock = VirtualClock()
    outage = Outage(give_up=100.0, clock=clock)
    waits = []

    async def call(outcome):
        started = clock.now()
        await outage.admit()
        waits.append(clock.now() - started)
        if outcome == "answer":
            outage.record_answer()
        elif outcome == "failure":
            outage.record_failure("500")

    async def run():
        for outcome in ("failure", "failure", "answer", "failure", "failure", "failure"):
            await call(outcome)
        assert waits == [0.0] * 6
        started = clock.now()
        await asyncio.gather(*(call("cancelled") for _ in range(3)))
        assert clock.now() - started == pytest.approx(30.0)  # also side by side
        await call("answer")
        assert waits[-1] == pytest.approx(10.0)
        await call("answer")
        assert waits[-1] == 0.0

    asyncio.run(run())


def test_an_endpoint_is_given_up_at_the_limit_with_an_error_that_says_what_to_do(endpoint_limits):
    endpoint_limits(failures=3, pause=10.0)
    clock = VirtualClock()
    outage = Outage(give_up=100.0, clock=clock, what="the judge at http://x")

    async def run():
        while True:
            await outage.admit()
            outage.record_failure("503: overloaded")

    with pytest.raises(
        JudgeDownError, match=r"the judge at http://x has not answered for 1\d\d s .*503: overloaded.*resume"
    ) as error:
        asyncio.run(run())
    assert isinstance(error.value, UserError)
    assert 100 <= clock.now() - 1000.0 <= 111


def test_the_budget_counts_calls_and_gives_back_those_that_were_not_sent():
    budget = Budget(max_calls=2, max_cost=None)

    async def run():
        await budget.reserve(0.0)
        budget.settle(0.0, 0.0, sent=False)
        await budget.reserve(0.0)
        await budget.reserve(0.0)
        with pytest.raises(BudgetSpentError):
            await budget.reserve(0.0)

    asyncio.run(run())
    assert budget.calls == 2


def test_the_cost_never_passes_the_cap_and_what_reservations_leave_is_used():
    budget = Budget(max_calls=None, max_cost=10.0)

    async def call():
        await budget.reserve(4.0)
        await asyncio.sleep(0)
        budget.settle(4.0, 1.0)

    async def run():
        results = await asyncio.gather(*(call() for _ in range(12)), return_exceptions=True)
        return [result for result in results if result is not None]

    refused = asyncio.run(run())
    # After seven calls 7 is spent, and an eighth could cost 4.
    assert budget.calls == 7
    assert budget.cost == 7.0
    assert [type(error) for error in refused] == [BudgetSpentError] * 5
