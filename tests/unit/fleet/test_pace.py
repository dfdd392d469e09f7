import random
from collections.abc import Callable

import pytest

from proxy.fleet.choosing import Candidate, Policy, Preference, make_choice
from proxy.fleet.pace import Crowding, Pace

_IDS = 100.0


def _fit(seconds: Callable[[float], float], loads: list[float]) -> tuple[Pace, Crowding]:
    pace, crowding = Pace(), Crowding()
    for load in loads:
        pace.measure(seconds(load) * _IDS, _IDS, load, crowding)
    return pace, crowding


@pytest.mark.parametrize("exponent", [0.0, 0.3, 0.7, 1.0])
def test_pace_and_crowding_are_found(exponent: float) -> None:
    random.seed(7)
    loads = [random.uniform(0, 40) for _ in range(500)]
    pace, crowding = _fit(lambda load: 0.02 * (1 + load) ** exponent * random.lognormvariate(0, 0.2), loads)
    assert crowding.exponent == pytest.approx(exponent, abs=0.1)
    assert pace.seconds(crowding) == pytest.approx(0.02, rel=0.4)


def test_replicas_of_different_pace_share_their_crowding() -> None:
    """The slow one has the smaller load, which alone would look like negative crowding."""
    random.seed(7)
    slow, fast, crowding = Pace(), Pace(), Crowding()
    for _ in range(500):
        for pace, seconds, most in [(slow, 0.06, 10), (fast, 0.02, 40)]:
            load = random.uniform(0, most)
            pace.measure(seconds * (1 + load) ** 0.5 * _IDS, _IDS, load, crowding)
    assert crowding.exponent == pytest.approx(0.5, abs=0.05)
    assert slow.seconds(crowding) == pytest.approx(0.06, rel=0.1)
    assert fast.seconds(crowding) == pytest.approx(0.02, rel=0.1)


def test_one_response_that_took_very_long_changes_little() -> None:
    pace, crowding = _fit(lambda load: 0.02, [0.0] * 20)
    pace.measure(1000.0, _IDS, 0.0, crowding)
    assert pace.seconds(crowding) == pytest.approx(0.02, rel=0.3)


def test_replicas_that_nothing_slows_are_used_evenly_again_after_one_of_them_had_all() -> None:
    """Each turn takes a second under any load: a loaded replica is not the faster one."""
    choose, crowding = make_choice(Policy.STICKY_LEAST_LOADED, 1.5), Crowding()
    paces, counts = {"a": Pace(), "b": Pace()}, {"a": 0, "b": 0}
    paces["b"].measure(1.0, 1.0, 0.0, crowding)
    for _ in range(3):
        for load in range(200):
            paces["a"].measure(1.0, 1.0, float(load), crowding)
    preference = Preference(ids=1, completion_ids=1, crowding=crowding.for_choice)
    for _ in range(200):
        replicas = [Candidate(name, 0, counts[name], paces[name].seconds(crowding)) for name in paces]
        counts[choose(replicas, preference).name] += 1
    assert min(counts.values()) > 80


def test_a_replica_that_was_slow_long_ago_is_tried_again() -> None:
    choose = make_choice(Policy.STICKY_LEAST_LOADED, 1.5)
    fast = Candidate("fast", 0, 2.0, 1.0)
    for age_s, chosen in [(0.0, "fast"), (300.0, "slow")]:
        slow = Candidate("slow", 0, 0.0, 10.0, age_s)
        assert choose([fast, slow], Preference(ids=100, completion_ids=100)).name == chosen
