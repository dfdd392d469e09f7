from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.fleet.conftest import Clock
from tokenproxy.fleet.admission import CacheUse, Conversations
from tokenproxy.fleet.choosing import Routing


@pytest.fixture
def conversations(clock: Clock) -> Conversations:
    return Conversations(10.0, clock)


def begin(conversations: Conversations, key: str, replica: str) -> None:
    chosen: Any = SimpleNamespace(name=replica, cache=CacheUse())
    conversations.begin(Routing(conversation=key, completion=True), chosen)


def test_the_replica_of_the_last_turn_holds_it_until_it_is_ended(conversations: Conversations) -> None:
    begin(conversations, "x", "a")
    conversations.finish("x")
    begin(conversations, "x", "b")
    active = conversations.find("x")
    assert active is not None and active.replica == "b"
    assert (conversations.count("a"), conversations.count("b")) == (0, 1)
    conversations.finish("x")
    assert (conversations.end("x"), conversations.end("x")) == (True, False)
    assert (conversations.find("x"), conversations.count("b")) == (None, 0)


def test_one_that_is_idle_no_longer_counts(conversations: Conversations, clock: Clock) -> None:
    begin(conversations, "idle", "a")
    conversations.finish("idle")
    begin(conversations, "running", "a")
    clock.now = 11
    assert conversations.count("a") == 1
    conversations.finish("running")
    clock.now = 21.5
    assert conversations.count("a") == 0


def test_equal_requests_of_one_conversation_count_once(conversations: Conversations, clock: Clock) -> None:
    """Samples of one conversation that run at once."""
    for _ in range(3):
        begin(conversations, "x", "a")
    for _ in range(2):
        conversations.finish("x")
    clock.now = 11
    assert conversations.count("a") == 1, "one of them still runs"
