from tests.unit.fleet.conftest import Clock
from tokenproxy.fleet.dispatch import ALONE, AMONG_OTHERS, GOES_ON, REFUSED_S, Suspects


def test_one_of_several_runs_once_more() -> None:
    suspects = Suspects(Clock())
    assert suspects.engine_died(b"a", "first", AMONG_OTHERS)
    assert not suspects.refuses(b"a")
    assert not suspects.engine_died(b"a", "second", AMONG_OTHERS)
    assert suspects.refuses(b"a")


def test_equal_requests_see_one_death_once() -> None:
    """The samples of a group are equal requests."""
    suspects = Suspects(Clock())
    assert all(suspects.engine_died(b"a", "first", AMONG_OTHERS) for _ in range(16))
    assert not suspects.refuses(b"a")


def test_deaths_that_are_far_apart_are_not_added() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    assert suspects.engine_died(b"a", "first", AMONG_OTHERS)
    clock.now = REFUSED_S
    assert suspects.engine_died(b"a", "second", AMONG_OTHERS)


def test_one_that_ran_alone_is_the_suspect_and_one_that_goes_on_only_after_four() -> None:
    suspects = Suspects(Clock())
    assert not suspects.engine_died(b"a", "first", ALONE)
    assert [suspects.engine_died(b"b", death, GOES_ON) for death in range(4)] == [True, True, True, False]
