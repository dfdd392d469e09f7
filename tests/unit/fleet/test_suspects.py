import pytest

from tests.unit.fleet.conftest import Clock
from tokenproxy.fleet.choosing import request_digest
from tokenproxy.fleet.dispatch import ALONE, AMONG_OTHERS, GOES_ON, REFUSED_S, Suspects


@pytest.mark.parametrize(("suspicion", "engines"), [(ALONE, 1), (AMONG_OTHERS, 2), (GOES_ON, 4)])
def test_a_request_is_refused_after_engines_that_died_one_after_the_other(
    suspicion: int, engines: int
) -> None:
    suspects = Suspects(Clock())
    for left in reversed(range(engines)):
        assert not suspects.refuses(b"a")
        assert suspects.engine_died(b"a", suspects.total, suspicion) is bool(left)
    assert suspects.refuses(b"a")


def test_engines_that_die_at_once_under_equal_requests_count_once() -> None:
    """The samples of a group are equal requests, four on each of four engines."""
    suspects = Suspects(Clock())
    for suspicion in (AMONG_OTHERS, GOES_ON):
        digest, total = b"%d" % suspicion, suspects.total
        assert all(suspects.engine_died(digest, total, suspicion) for _ in range(16))
        assert not suspects.refuses(digest)
    # those that ran again see the next death together too
    total = suspects.total
    assert not any(suspects.engine_died(b"%d" % AMONG_OTHERS, total, AMONG_OTHERS) for _ in range(16))


def test_deaths_that_are_far_apart_are_not_added() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    assert suspects.engine_died(b"a", suspects.total, AMONG_OTHERS)
    clock.now = REFUSED_S
    assert suspects.engine_died(b"a", suspects.total, AMONG_OTHERS)


def test_equal_requests_of_others_are_told_apart() -> None:
    requests = [(path, body, owner) for path in "pq" for body in (b"b", b"c") for owner in "st"]
    assert len({request_digest(*each) for each in requests}) == len(requests)
    assert request_digest("p", b"b", "s") == request_digest("p", b"b", "s")
