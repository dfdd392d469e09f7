import asyncio
import random
from collections import Counter

import pytest

from tokenproxy.fleet.choosing import Candidate, sticky_least_loaded
from tokenproxy.fleet.load import Load


@pytest.mark.parametrize(
    ("candidates", "holder", "chosen"),
    [
        ([Candidate("a")], "", "a"),
        ([Candidate("a", 0, 3.0), Candidate("b", 9, 2.0)], "", "b"),
        ([Candidate("a", 0, 2.0, 0.1), Candidate("b", 0, 2.0, 0.05)], "", "b"),
        # not measured yet: as fast as the fastest
        ([Candidate("a", 0, 1.0, 0.1), Candidate("b")], "", "b"),
        # equal loads: the one with fewer requests
        ([Candidate("a", 3, 1.0), Candidate("b", 2, 1.0)], "", "b"),
        # it moves beyond 1.5 times the time
        ([Candidate("a", 0, 2.8, work=206), Candidate("b", 0, 1.0, work=262)], "a", "a"),
        ([Candidate("a", 0, 2.9, work=206), Candidate("b", 0, 1.0, work=262)], "a", "b"),
        # a long prefix is worth more
        ([Candidate("a", 0, 6.0, work=206), Candidate("b", 0, 1.0, work=2200)], "a", "a"),
        ([Candidate("b", 0, 9.0), Candidate("c")], "a", "c"),
    ],
)
def test_the_holder_is_chosen_unless_another_is_much_sooner(
    candidates: list[Candidate], holder: str, chosen: str
) -> None:
    assert sticky_least_loaded(candidates, holder).name == chosen


def test_conversations_spread_as_fast_as_replicas_are() -> None:
    """Eight replicas, three of them three times slower: no replica has more than its share of the work."""
    random.seed(1)
    paces = {str(n): 3.0 if n < 3 else 1.0 for n in range(8)}
    counts = Counter(dict.fromkeys(paces, 0))
    for _ in range(400):
        replicas = [Candidate(name, 0, counts[name], pace) for name, pace in paces.items()]
        counts[sticky_least_loaded(replicas, "").name] += 1
    seconds = [counts[name] * pace for name, pace in paces.items()]
    assert max(seconds) < 1.15 * min(seconds)


@pytest.mark.parametrize(("age_s", "chosen"), [(0.0, "fast"), (300.0, "slow")])
def test_a_replica_that_was_slow_long_ago_is_tried_again(age_s: float, chosen: str) -> None:
    replicas = [Candidate("fast", 0, 2.0, 1.0), Candidate("slow", 0, 0.0, 10.0, age_s)]
    assert sticky_least_loaded(replicas, "").name == chosen


def test_a_load_counts_and_times_requests() -> None:
    time = [100.0]
    load = Load(lambda: time[0])
    first, second = load.begin(60), load.begin(1)
    assert load.requests == 2
    load.end(second)
    load.end(second)
    assert load.requests == 1
    first.to_read = 32
    time[0] += 30
    load.shift(10)  # a pause does not count
    load.answered(first)
    assert load.pace_s is None
    load.completed(first, 8)
    assert load.pace_s is not None and load.pace_s == pytest.approx(20 / (8 + 32 / 16))
    assert load.silent_s() == 0
    for _ in range(30):
        load.completed(load.begin(60), 8)
    assert load.pace_s < 0.01, "it is the mean of recent turns"
    time[0] += 7
    assert load.pace_age_s == 7


def test_a_silence_is_usual_as_long_as_prompts_take_to_read() -> None:
    time = [0.0]
    load = Load(lambda: time[0])
    lease = load.begin(100)
    time[0] += 2
    load.answered(lease)
    load.end(lease)
    assert load.usual_silence_s() == 2
    load.begin(1000).deadline = asyncio.Timeout(None)
    assert load.usual_silence_s() == pytest.approx(20)
