"""The contexts in the cache of a replica: which have room, and how many ids they use."""

import random

import pytest

from tests.unit.fleet.conftest import Clock
from tests.unit.fleet.test_conversations import begin
from tokenproxy.fleet.admission import ActiveConversation, CacheUse, Conversations


def _never() -> float:
    return float("-inf")


def test_ids_that_several_contexts_begin_with_count_once() -> None:
    cache, prompt = CacheUse(10_000), b"a" * 8192
    group = [ActiveConversation(2_000, [prompt]) for _ in range(4)]
    for context in group:
        assert cache.fits(context, _never)
        cache.hold(context, 2_000)
    assert cache.ids == 2_000
    other = ActiveConversation(2_000, [prompt[:4096] + b"b" * 4096])
    cache.hold(other, 2_000)
    assert cache.ids == 3_000
    cache.remove(other)
    for context in group:
        context.measure(1_500, 100)
    assert cache.ids == 1_900, "one prompt, of which the engine counts 1,500 ids, and what each samples"
    for context in group:
        cache.remove(context)
    assert (cache.ids, cache.contexts) == (0, 0)


def test_use_is_that_of_the_contexts_with_room_whatever_happened_before() -> None:
    draw, cache = random.Random(1), CacheUse(50_000)
    texts = [bytes([97 + draw.randrange(2)]) * draw.choice([100, 5_000, 9_000]) for _ in range(6)]
    contexts = [ActiveConversation(len(text) // 4, [text]) for text in texts for _ in range(4)]
    for step in range(2_000):
        context = draw.choice(contexts)
        match draw.randrange(4):
            case 0:
                cache.hold(context, context.ids + draw.randrange(100))
            case 1 if context.cache is cache:
                context.used = float(step)
                cache.pause(context)
            case 2 if context.cache is cache:
                context.measure(max(1, context.ids - 50), draw.randrange(90))
            case 3 if context.cache is cache:
                cache.remove(context)
    held = [context for context in contexts if context.cache is cache]
    assert cache.contexts == len(held) > 0
    for context in held:
        cache.remove(context)
    assert (cache.ids, cache.contexts) == (0, 0)


def test_a_context_that_outgrows_the_cache_takes_the_room_of_the_one_idle_for_longest() -> None:
    cache = CacheUse(1_000)
    running, first, second = (ActiveConversation(300) for _ in range(3))
    for context in (running, second, first):
        cache.hold(context, 300)
    cache.pause(first)
    cache.pause(second)
    cache.hold(running, 500)
    assert [context.has_room for context in (running, first, second)] == [True, False, True]
    cache.hold(running, 1_001)
    assert (running.has_room, second.has_room, cache.ids) == (False, True, 300), "larger than the cache"


def test_each_context_takes_a_block_more_than_it_has_ids() -> None:
    cache = CacheUse(1_000, 100)
    cache.hold(ActiveConversation(), 400)
    assert cache.fits(ActiveConversation(400), _never)
    assert not cache.fits(ActiveConversation(401), _never)
    assert (cache.ids, cache.can_hold(900), cache.can_hold(901)) == (500, True, False)


def test_idle_contexts_make_room_only_after_a_while() -> None:
    cache, idle, new = CacheUse(1_000), ActiveConversation(600), ActiveConversation(600)
    cache.hold(idle, 600)
    assert not cache.fits(new, lambda: 9.0), "its request runs"
    idle.used = 5.0
    cache.pause(idle)
    assert not cache.fits(new, lambda: 4.9)
    assert idle.has_room
    assert cache.fits(new, lambda: 5.0)
    assert not idle.has_room


def test_nobody_has_room_in_the_cache_of_an_engine_that_is_gone() -> None:
    cache, context = CacheUse(1_000), ActiveConversation(600)
    cache.hold(context, 600)
    cache.size = 0
    assert not context.has_room
    restarted = CacheUse(1_000)
    restarted.hold(context, 600)
    assert (context.has_room, restarted.ids) == (True, 600)


def test_an_idle_conversation_keeps_its_room_for_four_times_the_usual_pause(clock: Clock) -> None:
    conversations = Conversations(60.0, clock)

    def turn(key: str, pause_s: float) -> None:
        clock.now += pause_s
        begin(conversations, key, "a")
        conversations.finish(key)

    assert conversations.idle_before() == float("-inf")
    turn("first", 0.0)
    clock.now += 4.9
    assert conversations.idle_before() == float("-inf"), "its next turn may still come"
    clock.now += 0.2
    assert conversations.idle_before() == clock.now
    turn("first", 0.0)
    for _ in range(3):
        turn("first", 2.0)
    assert conversations.idle_before() == pytest.approx(clock.now - 8.0)
    for number in range(5):
        turn(f"single {number}", 0.0)
    clock.now += 61.0
    conversations.count("a")
    assert conversations.idle_before() == clock.now, "most had no second turn"


def test_a_wait_for_room_is_no_pause(clock: Clock) -> None:
    conversations = Conversations(60.0, clock)
    begin(conversations, "x", "a")
    conversations.finish("x")
    clock.now += 2.0
    with conversations.waiting("x"):
        clock.now += 70.0
        assert conversations.count("a") == 1
        begin(conversations, "x", "a")
    assert conversations.idle_before() == clock.now - 8.0
    active = conversations.find("x")
    assert active is not None and active.waited_s == 70.0
    clock.now += 100.0
    assert conversations.count("a") == 1, "its request runs"
