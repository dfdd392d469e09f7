from proxy.fleet.health import FIRST_OPEN_S, Breaker, BreakerState
from tests.unit.fleet.conftest import Clock


def _opened(breaker: Breaker) -> int:
    """How many failures it takes to open it."""
    count = 1
    while not breaker.failed("no", may_open=True):
        count += 1
    return count


def test_a_trial_whose_client_left_is_no_trial(clock: Clock) -> None:
    breaker = Breaker(3, clock)
    _opened(breaker)
    clock.now += breaker.opens_for_s()
    trial, earlier = object(), object()
    breaker.started(trial)
    breaker.started(earlier)
    breaker.ended(earlier)
    assert not breaker.allows, "the end of another request does not end the trial"
    breaker.ended(trial)
    assert (breaker.state, breaker.allows) == (BreakerState.HALF_OPEN, True)


def test_what_was_sent_before_it_opened_changes_nothing(clock: Clock) -> None:
    """It opened by failures, or by hand; the requests that waited for an answer end afterwards."""
    for by_hand in (False, True):
        breaker = Breaker(3, clock)
        breaker.open("silent") if by_hand else _opened(breaker)
        until = breaker.opens_for_s()
        assert not breaker.failed("late", may_open=True)
        breaker.succeeded()
        assert (breaker.opens_for_s(), breaker.allows) == (until, False)
        assert until >= FIRST_OPEN_S
        breaker.reset()
        assert breaker.allows
