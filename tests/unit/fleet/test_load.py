import asyncio

import pytest

from tests.unit.fleet.conftest import Clock
from tokenproxy.fleet.load import (
    FIRST_OPEN_S,
    FORGIVEN_AFTER_S,
    LONGEST_OPEN_S,
    Breaker,
    BreakerState,
    Lease,
    Load,
)


def _wait(clock: Clock, breaker: Breaker) -> None:
    """Let the time pass for which it stays open, and more than a sum of floats may lack."""
    clock.now += breaker.opens_for_s() + 1e-6


def _opened(breaker: Breaker) -> int:
    """How many failures it takes to open it."""
    count = 1
    while not breaker.failed("no", may_open=True):
        count += 1
    return count


def test_failures_in_a_row_open_it(clock: Clock) -> None:
    breaker = Breaker(clock)
    for _ in range(2):
        breaker.failed("no", may_open=True)
    breaker.succeeded()
    assert _opened(breaker) == 3
    assert (breaker.state, breaker.allows) == (BreakerState.OPEN, False)
    assert breaker.reason == "no"


def test_a_trial_whose_client_left_is_no_trial(clock: Clock) -> None:
    breaker = Breaker(clock)
    _opened(breaker)
    _wait(clock, breaker)
    trial, earlier = object(), object()
    breaker.started(trial)
    breaker.started(earlier)
    breaker.ended(earlier)
    assert not breaker.allows, "the end of another request does not end the trial"
    breaker.ended(trial)
    assert (breaker.state, breaker.allows) == (BreakerState.HALF_OPEN, True)


def test_each_time_it_stays_open_for_longer(clock: Clock) -> None:
    breaker = Breaker(clock)
    _opened(breaker)
    times = []
    for _ in range(10):
        times.append(breaker.opens_for_s())
        _wait(clock, breaker)
        breaker.started(object())
        assert breaker.failed("again", may_open=True), "one failed trial is enough"
    expected = [min(FIRST_OPEN_S * 2**k, LONGEST_OPEN_S) for k in range(10)]
    assert all(want <= time <= 1.1 * want for want, time in zip(expected, times, strict=True))


def test_what_was_long_ago_is_forgiven(clock: Clock) -> None:
    breaker = Breaker(clock)
    _opened(breaker)
    _wait(clock, breaker)
    breaker.succeeded()
    clock.now += FORGIVEN_AFTER_S + 1
    _opened(breaker)
    assert breaker.opens_for_s() <= 1.1 * FIRST_OPEN_S


def test_what_was_sent_before_it_opened_changes_nothing(clock: Clock) -> None:
    """It opened by failures, or by hand; the requests that waited for an answer end afterwards."""
    for by_hand in (False, True):
        breaker = Breaker(clock)
        breaker.open("silent") if by_hand else _opened(breaker)
        until = breaker.opens_for_s()
        assert not breaker.failed("late", may_open=True)
        breaker.succeeded()
        assert (breaker.opens_for_s(), breaker.allows) == (until, False)
        assert until >= FIRST_OPEN_S
        breaker.reset()
        assert breaker.allows


def test_a_load_counts_requests_and_a_pause_is_no_silence() -> None:
    time = [100.0]
    load = Load(lambda: time[0])
    first, second = Lease(60, samples=True), Lease(1)
    load.begin(first)
    load.begin(second)
    assert load.requests == 2
    load.running.remove(second)
    assert load.requests == 1
    time[0] += 30
    assert load.silent_s() == 30
    load.shift(10)
    assert load.silent_s() == 0
    load.answered(first)
    assert load.usual_silence_s() == 0


def test_a_silence_is_usual_as_long_as_prompts_take_to_read() -> None:
    time = [0.0]
    load = Load(lambda: time[0])
    load.begin(lease := Lease(100))
    time[0] += 2
    load.answered(lease)
    load.running.remove(lease)
    assert load.usual_silence_s() == 2
    load.begin(Lease(1000, deadline=asyncio.Timeout(None)))
    assert load.usual_silence_s() == pytest.approx(20)
