import pytest

from proxy.fleet.conversations import Conversations
from tests.unit.fleet.conftest import Clock


def test_loads_are_weighed_by_ids() -> None:
    conversations = Conversations()
    for key, replica, ids in [("long", "a", 3000), ("short", "b", 500), ("other", "b", 1000)]:
        conversations.begin(key, replica, ids)
    assert conversations.load("a") == pytest.approx(2.0)
    assert conversations.load("b") == pytest.approx(1.0)
    assert conversations.load("b", without="other") == pytest.approx(1 / 3)
    assert conversations.load("c") == 0
    assert (conversations.count("a"), conversations.count("b")) == (1, 2)


def test_the_replica_of_the_last_turn_holds_it_until_it_is_ended() -> None:
    conversations = Conversations()
    conversations.begin("x", "a", 100)
    conversations.finish("x")
    conversations.begin("x", "b", 200)
    assert conversations.holder("x") == "b"
    assert (conversations.count("a"), conversations.count("b")) == (0, 1)
    conversations.finish("x")
    assert (conversations.end("x"), conversations.end("x")) == (True, False)
    assert (conversations.holder("x"), conversations.load("b"), len(conversations)) == ("", 0, 0)


def test_equal_requests_of_one_conversation_count_once(clock: Clock) -> None:
    """Samples of one conversation that run at once."""
    conversations = Conversations(10.0, clock)
    for _ in range(3):
        conversations.begin("x", "a", 100)
    for _ in range(2):
        conversations.finish("x")
    clock.now += 11
    assert conversations.count("a") == 1, "one of them still runs"


def test_idle_conversations_count_as_much_as_requests_continue_one() -> None:
    conversations = Conversations()
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
    clock.now += 100
    assert (conversations.count("a"), conversations.holder("over")) == (0, "")


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
