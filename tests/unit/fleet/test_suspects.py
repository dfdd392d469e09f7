from tests.unit.fleet.conftest import Clock
from tokenproxy.fleet.dispatch import REFUSED_S, Suspects


def test_one_of_several_runs_once_more() -> None:
    suspects = Suspects(Clock())
    assert suspects.engine_died(b"a", "first", alone=False)
    assert not suspects.refuses(b"a")
    assert not suspects.engine_died(b"a", "second", alone=False)
    assert suspects.refuses(b"a")


def test_equal_requests_see_one_death_once() -> None:
    """The samples of a group are equal requests."""
    suspects = Suspects(Clock())
    assert all(suspects.engine_died(b"a", "first", alone=False) for _ in range(16))
    assert not suspects.refuses(b"a")


def test_deaths_that_are_far_apart_are_not_added() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    assert suspects.engine_died(b"a", "first", alone=False)
    clock.now = REFUSED_S
    assert suspects.engine_died(b"a", "second", alone=False)
