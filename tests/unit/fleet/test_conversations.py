import pytest

from tests.unit.fleet.conftest import Clock
from tokenproxy.fleet.affinity import Conversations


@pytest.fixture
def conversations(clock: Clock) -> Conversations:
    return Conversations(10.0, clock)


def test_loads_are_weighed_by_ids(conversations: Conversations) -> None:
    for key, replica, ids in [("long", "a", 3000), ("short", "b", 500), ("other", "b", 1000)]:
        conversations.begin(key, replica, ids)
    assert conversations.load("a") == pytest.approx(2.0)
    assert conversations.load("b") == pytest.approx(1.0)
    assert conversations.load("b", without="other") == pytest.approx(1 / 3)
    assert conversations.load("c") == 0
    assert (conversations.count("a"), conversations.count("b")) == (1, 2)


def test_the_replica_of_the_last_turn_holds_it_until_it_is_ended(conversations: Conversations) -> None:
    conversations.begin("x", "a", 100)
    conversations.finish("x")
    conversations.begin("x", "b", 200)
    assert conversations.holder("x") == "b"
    assert (conversations.count("a"), conversations.count("b")) == (0, 1)
    conversations.finish("x")
    assert (conversations.end("x"), conversations.end("x")) == (True, False)
    assert (conversations.holder("x"), conversations.load("b"), len(conversations)) == ("", 0, 0)


def test_one_that_is_idle_no_longer_counts(conversations: Conversations, clock: Clock) -> None:
    conversations.begin("idle", "a", 100)
    conversations.finish("idle")
    conversations.begin("running", "a", 100)
    clock.now = 11
    assert conversations.count("a") == 1
    conversations.finish("running")
    clock.now = 21.5
    assert conversations.count("a") == 0


def test_equal_requests_of_one_conversation_count_once(conversations: Conversations, clock: Clock) -> None:
    """Samples of one conversation that run at once."""
    for _ in range(3):
        conversations.begin("x", "a", 100)
    for _ in range(2):
        conversations.finish("x")
    clock.now = 11
    assert conversations.count("a") == 1, "one of them still runs"


def test_idle_conversations_count_as_much_as_requests_continue_one(conversations: Conversations) -> None:
    for number in range(300):
        conversations.begin(f"single {number}", "a", 100)
        conversations.finish(f"single {number}")
    conversations.begin("running", "b", 100)
    assert conversations.count("a") == 300
    assert conversations.load("a") < 1 < conversations.load("b") + 0.01
    for _ in range(300):
        conversations.begin("agent", "a", 100)
        conversations.finish("agent")
    assert conversations.load("a") > 290


def test_loads_are_zero_when_all_is_over(conversations: Conversations, clock: Clock) -> None:
    for number in range(50):
        conversations.begin(str(number), "a", number)
        if number % 3:
            conversations.finish(str(number))
        if number % 7 == 0:
            conversations.begin(str(number), "b", 5)
    for number in range(50):
        for _ in range(2):
            conversations.finish(str(number))
        if number % 2:
            conversations.end(str(number))
    clock.now = 100
    assert (conversations.load("a"), conversations.load("b"), len(conversations)) == (0, 0, 0)
    assert (conversations._sums, conversations._total) == ({}, 0)


def test_conversation_that_pauses_for_far_longer_than_others_does_not_count(clock: Clock) -> None:
    conversations = Conversations(60.0, clock)
    conversations.begin("over", "a", 100)
    conversations.finish("over")
    for _ in range(20):
        conversations.begin("agent", "b", 100)
        conversations.finish("agent")
        clock.now += 0.5
    assert (conversations.count("a"), conversations.count("b")) == (0, 1)
    assert conversations.holder("over") == "a", "it may come back"
    conversations.begin("over", "a", 100)
    assert conversations.count("a") == 1
    conversations.finish("over")
    clock.now = 100
    assert (conversations.count("a"), conversations.holder("over"), len(conversations._quiet)) == (0, "", 0)


def test_a_cleared_cache_holds_only_the_conversations_that_run() -> None:
    conversations = Conversations()
    for key in ("idle", "running"):
        conversations.begin(key, "a", 10)
    conversations.finish("idle")
    conversations.begin("elsewhere", "b", 10)
    conversations.forget_caches("a")
    assert [conversations.holder(key) for key in ("idle", "running", "elsewhere")] == ["", "a", "b"]
    assert conversations.count("a") == 2  # it still counts as load
    conversations.begin("idle", "a", 10)
    assert conversations.holder("idle") == "a"
