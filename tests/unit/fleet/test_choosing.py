import random
from collections import Counter

import pytest

from proxy.fleet.choosing import Candidate, Choose, Policy, Preference, make_choice

_NEW = Preference(ids=1000, completion_ids=200)


def _sticky(overload_ratio: float = 2.0) -> Choose:
    return make_choice(Policy.STICKY_LEAST_LOADED, overload_ratio)


def _held(reused: int = 1000) -> Preference:
    """A turn of a conversation that replica `a` holds, with 1,100 ids."""
    return Preference("a", 1100, reused, 200)


@pytest.mark.parametrize("policy", Policy)
def test_one_replica_is_chosen(policy: Policy) -> None:
    only = Candidate("a", 100, 100.0, 1.0)
    assert make_choice(policy, 2.0)([only], _NEW) is only


def test_round_robin_takes_turns() -> None:
    choose = make_choice(Policy.ROUND_ROBIN, 2.0)
    replicas = [Candidate(name) for name in "abc"]
    assert [choose(replicas, _NEW).name for _ in range(6)] == list("abcabc")


def test_least_loaded_takes_the_one_with_the_fewest_requests() -> None:
    choose = make_choice(Policy.LEAST_LOADED, 2.0)
    replicas = [Candidate("a", 3), Candidate("b", 1), Candidate("c", 1)]
    chosen = Counter(choose(replicas, _NEW).name for _ in range(200))
    assert chosen.keys() == {"b", "c"}
    assert min(chosen.values()) > 50, "ties are broken at random"


def test_two_choices_never_takes_the_worst_of_many() -> None:
    choose = make_choice(Policy.TWO_CHOICES, 2.0)
    replicas = [Candidate(str(load), load) for load in range(8)]
    chosen = Counter(choose(replicas, _NEW).requests for _ in range(500))
    assert 7 not in chosen
    assert len(chosen) > 4, "it does not always take the best"


def test_a_new_conversation_goes_where_the_fewest_are() -> None:
    replicas = [Candidate("a", 0, 4.0), Candidate("b", 9, 1.5), Candidate("c", 0, 2.0)]
    assert _sticky()(replicas, _NEW).name == "b"


def test_ties_are_broken_at_random() -> None:
    replicas = [Candidate(name) for name in "abcd"]
    chosen = Counter(_sticky()(replicas, _NEW).name for _ in range(400))
    assert len(chosen) == 4 and min(chosen.values()) > 50


@pytest.mark.parametrize("count, chosen", [(0, "fast"), (4, "fast"), (6, "slow")])
def test_a_slow_replica_gets_fewer(count: int, chosen: str) -> None:
    """Three times slower with one conversation: as long as fast with five."""
    replicas = [Candidate("slow", 0, 1.0, 3.0), Candidate("fast", 0, count, 1.0)]
    assert _sticky()(replicas, _NEW).name == chosen


def test_one_that_was_not_measured_counts_as_fast() -> None:
    replicas = [Candidate("measured", 0, 1.0, 0.5), Candidate("new", 0, 0.5)]
    assert _sticky()(replicas, _NEW).name == "new"


def test_a_conversation_stays_where_its_prefix_is() -> None:
    replicas = [Candidate("a", 0, 2.5, 1.0), Candidate("b", 0, 1.0, 1.0)]
    assert _sticky()(replicas, _held()).name == "a"


@pytest.mark.parametrize("load, chosen", [(4.0, "a"), (5.0, "b")])
def test_it_moves_when_its_replica_is_overloaded(load: float, chosen: str) -> None:
    """To stay: (load + 1) * (200 + 100/16); to move: 2 * (200 + 1100/16)."""
    replicas = [Candidate("a", 0, load, 1.0), Candidate("b", 0, 1.0, 1.0)]
    assert (load + 1) * 206.25 > 2 * 268.75
    assert _sticky()(replicas, _held()).name == chosen


def test_a_long_prefix_holds_longer() -> None:
    replicas = [Candidate("a", 0, 5.0, 1.0), Candidate("b", 0, 1.0, 1.0)]
    assert _sticky()(replicas, Preference("a", 32_000, 31_900, 200)).name == "a"


def test_a_holder_that_is_gone_is_forgotten() -> None:
    replicas = [Candidate("b", 0, 9.0), Candidate("c")]
    assert _sticky()(replicas, _held()).name == "c"


def test_conversations_spread_as_fast_as_replicas_are() -> None:
    """Eight replicas, three of them three times slower: no replica has more than its share of the work."""
    random.seed(1)
    paces = {str(n): 3.0 if n < 3 else 1.0 for n in range(8)}
    counts = Counter(dict.fromkeys(paces, 0))
    for _ in range(400):
        replicas = [Candidate(name, 0, counts[name], pace) for name, pace in paces.items()]
        counts[_sticky()(replicas, _NEW).name] += 1
    seconds = [counts[name] * pace for name, pace in paces.items()]
    assert max(seconds) < 1.15 * min(seconds)
