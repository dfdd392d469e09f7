"""Conversations whose ids do not fit into the caches of the engines: who waits, and for how long."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.contract.fleet.memory_engine import MemoryEngine, ask, engines, fleet_of, gone, waits
from tests.contract.fleet.replicas import Start
from tests.support.fake_vllm import Canned, Reply
from tests.support.scraping import Scrape
from tests.support.stepped import elapse, settled, stepped
from tests.support.talk import CHAT, user
from tests.support.tiny_model import END, HI
from tests.support.utils import run_proxy, wait_until
from tokenproxy.base.http import BytesResponse
from tokenproxy.fleet.choosing import sticky_least_loaded
from tokenproxy.fleet.fleet import Fleet

_WAIT_S = 100.0


def _info(ids: int) -> bytes:
    labels = b'hash_block_size="7",block_size="10",num_gpu_blocks="%d"' % (ids // 10)
    return b"vllm:cache_config_info{%s} 1.0\n" % labels


def _holding(ids: int, count: int = 1) -> list[MemoryEngine]:
    """Engines whose caches hold so many ids in blocks of 10, and which take 10 s for a completion.

    A context takes a block more than it has ids.
    """
    made = engines(count)
    for engine in made:
        engine.describes = lambda path: BytesResponse(200, [], _info(ids)) if path == "/metrics" else None
        engine.usual = waits(10.0)
    return made


def _turn(fleet: Fleet, key: str, ids: int = 90, **routing: Any) -> "asyncio.Task[tuple[int, bytes]]":
    return asyncio.create_task(ask(fleet, key, conversation=key, context_ids=ids, **routing))


async def _converse(fleet: Fleet, *keys: str) -> None:
    """Let the first turns of conversations run at once, and second ones after 1 s."""
    for _ in range(2):
        await asyncio.gather(*(_turn(fleet, key) for key in keys))
        await elapse(1.0)


@stepped
async def test_first_turns_wait_in_their_order_until_a_conversation_ends_and_others_go_on() -> None:
    async with fleet_of(*_holding(200), admission_wait_s=_WAIT_S) as fleet:
        await _converse(fleet, "a", "b")
        third, fourth = _turn(fleet, "c"), _turn(fleet, "d", 40)
        await elapse(2.0)
        again = _turn(fleet, "a", 80)
        await elapse(10.5)
        assert (again.done(), third.done(), fourth.done()) == (True, False, False)
        assert fleet.conversations.end("b")
        await elapse(11.0)
        assert (third.done(), fourth.done()) == (True, False), "110 of 200 ids are free, and c came first"
        fleet.conversations.end("a")
        await elapse(11.0)
        assert fourth.done()


@stepped
async def test_tenants_take_turns_when_room_becomes_free() -> None:
    async with fleet_of(*_holding(100), admission_wait_s=_WAIT_S) as fleet:
        await _converse(fleet, "a")
        many = [_turn(fleet, f"many {number}", tenant="many") for number in range(3)]
        await settled()
        single = _turn(fleet, "single", tenant="single")
        await settled()
        for ended in ("a", "many 0"):
            fleet.conversations.end(ended)
            await elapse(11.0)
        assert [task.done() for task in (*many, single)] == [True, False, False, True]
        for task in many:
            task.cancel()


@stepped
async def test_a_conversation_waits_no_longer_than_it_may_in_all_its_turns_together() -> None:
    async with fleet_of(*_holding(100), admission_wait_s=30.0) as fleet:
        await _converse(fleet, "a")
        fleet.replicas[0].engine.usual = waits(1000.0)  # type: ignore[attr-defined]
        running = _turn(fleet, "a")
        await settled()
        fleet.replicas[0].engine.usual = waits(1.0)  # type: ignore[attr-defined]
        new = _turn(fleet, "b")
        await elapse(29.0)
        assert fleet.queue.waiting == 1
        await elapse(2.5)
        assert new.done()
        other = _turn(fleet, "c")
        await elapse(20.0)
        again = _turn(fleet, "b")
        await elapse(1.5)
        assert (again.done(), other.done()) == (True, False), "it has waited for as long as it may"
        running.cancel()
        other.cancel()


@pytest.mark.parametrize("tenant", ["large", "small"])
@stepped
async def test_a_large_conversation_that_waits_stops_none_that_fits_and_runs_within_its_bound(
    tenant: str,
) -> None:
    async with fleet_of(*_holding(20_000), admission_wait_s=120.0) as fleet:
        fleet.replicas[0].engine.replies = [waits(1000.0)]  # type: ignore[attr-defined]
        running = _turn(fleet, "runs", 9_990)
        await settled()
        large = _turn(fleet, "large", 15_000, tenant="large")
        await settled()
        for number in range(10):
            small = _turn(fleet, f"small {number}", 20, tenant=tenant)
            await elapse(10.01)
            assert (small.done(), large.done()) == (True, False)
        steady = [_turn(fleet, f"steady {number}", 2_500, tenant=tenant) for number in range(12)]
        await elapse(10.0)
        assert not large.done()
        await elapse(20.5)
        assert large.done(), "after 120 s, and the 10 s that it takes"
        running.cancel()
        await asyncio.wait(steady)


@pytest.mark.parametrize("shared", [16_384, 8_192])
@stepped
async def test_conversations_with_equal_beginnings_that_wait_run_together(shared: int) -> None:
    """All of a group, or a system prompt: once it has room, each needs little more."""
    async with fleet_of(*_holding(6_400), admission_wait_s=_WAIT_S) as fleet:
        await _converse(fleet, "a", "b")
        held = _turn(fleet, "held", 3_000)
        await settled()
        group = [
            _turn(fleet, f"g{number}", 4_096, beginning=(b"a" * shared, b"%x" % number * (16_384 - shared)))
            for number in range(16 if shared == 16_384 else 2)
        ]
        other = _turn(fleet, "other", 4_096, beginning=(b"b" * 16_384,))
        await elapse(5.0)
        assert not any(task.done() for task in (*group, other))
        await elapse(6.0)
        fleet.conversations.end("held")
        await elapse(10.5)
        done = [task.done() for task in (*group, other)]
        assert done == [*[True] * len(group), False]
        for task in (held, *group, other):
            task.cancel()


@stepped
async def test_an_idle_conversation_loses_its_room_and_its_next_turn_goes_before_first_turns() -> None:
    async with fleet_of(*_holding(200), admission_wait_s=_WAIT_S) as fleet:
        await _converse(fleet, "a", "b")
        await elapse(1.0)
        grown = _turn(fleet, "a", 140)
        await elapse(1.0)
        new, returned = _turn(fleet, "c", 90), _turn(fleet, "b", 100)
        await elapse(10.0)
        assert (grown.done(), new.done(), returned.done()) == (True, False, False)
        fleet.conversations.end("a")
        await elapse(11.0)
        assert (new.done(), returned.done()) == (False, True)
        fleet.conversations.end("b")
        await elapse(11.0)
        assert new.done()


@stepped
async def test_who_leaves_while_it_waits_takes_no_room_from_the_next() -> None:
    async with fleet_of(*_holding(100), admission_wait_s=_WAIT_S) as fleet:
        await _converse(fleet, "a")
        first, second = _turn(fleet, "b"), _turn(fleet, "c")
        await settled()
        first.cancel()
        fleet.conversations.end("a")
        await elapse(11.0)
        assert second.done()
        assert fleet.replicas[0].cache.ids == 100


@stepped
async def test_what_needs_no_room_does_not_wait() -> None:
    async with fleet_of(*_holding(100), admission_wait_s=_WAIT_S) as fleet:
        await _converse(fleet, "a")
        waiting = _turn(fleet, "b")
        await settled()
        passing = [
            _turn(fleet, "", 90),
            _turn(fleet, "larger than the cache", 91),
            asyncio.create_task(ask(fleet, conversation="not sampled", completion=False)),
        ]
        await elapse(10.5)
        assert all(task.done() for task in passing)
        assert not waiting.done()
        assert fleet.replicas[0].cache.ids == 100
        waiting.cancel()


@stepped
async def test_conversations_of_an_engine_that_died_wait_for_room_on_another() -> None:
    first, second = _holding(200, 2)
    async with fleet_of(first, second, admission_wait_s=_WAIT_S, choose=sticky_least_loaded) as fleet:
        await _converse(fleet, "a", "b", "c", "d")
        active = {key: fleet.conversations.find(key) for key in "abcd"}
        moved = [key for key, each in active.items() if each is not None and each.replica == first.name]
        assert len(moved) == 2
        gone(first)
        stayed = [_turn(fleet, key) for key in "abcd" if key not in moved]
        await elapse(0.6)
        fleet.replicas[0].mark_down(first.gone)  # type: ignore[arg-type]
        new, *returned = _turn(fleet, "e"), *(_turn(fleet, key) for key in moved)
        await elapse(10.0)
        assert all(task.done() for task in stayed)
        assert not any(task.done() for task in (new, *returned))
        for key in set("abcd") - set(moved):
            fleet.conversations.end(key)
        await elapse(10.8)
        assert (new.done(), all(task.done() for task in returned)) == (False, True)
        new.cancel()


@stepped
async def test_a_pause_for_weights_costs_no_room_and_does_not_count_as_waiting() -> None:
    async with fleet_of(*_holding(100), admission_wait_s=_WAIT_S) as fleet:
        await _converse(fleet, "a")
        new = _turn(fleet, "b")
        await settled()
        fleet.weights.suspension.begin()
        again = _turn(fleet, "a")
        await elapse(2 * _WAIT_S)
        fleet.weights.suspension.end()
        fleet.queue.wake()
        await elapse(10.5)
        assert (again.done(), new.done()) == (True, False)
        new.cancel()


@stepped
async def test_a_full_queue_lets_conversations_run_without_room() -> None:
    async with fleet_of(*_holding(100), admission_wait_s=_WAIT_S, queue_requests=1) as fleet:
        await _converse(fleet, "a")
        tasks = [_turn(fleet, key) for key in "bc"]
        await elapse(10.5)
        assert (tasks[0].done(), (await tasks[1])[0]) == (False, 200)
        tasks[0].cancel()


def test_a_first_turn_waits_on_the_wire_and_one_with_an_equal_prompt_does_not(start: Start) -> None:
    engine = start()
    engine.canned["/metrics"] = Canned(_info(1_200))
    with run_proxy([engine], store="memory:") as client, ThreadPoolExecutor() as pool:

        def send(letter: str, session: str) -> "Future[httpx.Response]":
            body, headers = {"messages": [user(letter * 4_000)]}, {"x-session-id": session}
            return pool.submit(client.post, CHAT, json=body, headers=headers)

        engine.replies.extend([Reply(hold_at=0), Reply(hold_at=0)])
        equal = [send("a", "first"), send("a", "second")]
        wait_until(lambda: engine.running == 2)
        other = send("b", "other")
        wait_until(lambda: Scrape(client).value("requests_queued_for_room") == 1)
        wait_until(lambda: Scrape(client).value("replica_admitted_conversations", replica=engine.url) == 2)
        assert Scrape(client).value("requests_queued") == 1
        assert not other.done()
        engine.release()
        assert [each.result().status_code for each in equal] == [200, 200]
        for session in ("first", "second"):
            client.post(f"/v1/sessions/{session}/end")
        assert other.result().status_code == 200
        wait_until(lambda: Scrape(client).value("requests_queued_for_room") == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_turn_samples_takes_room(start: Start, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenproxy.fleet.admission._FIRST_PAUSE_S", 60.0)  # its next turn may still come
    engine = start()
    engine.canned["/metrics"] = Canned(_info(1_200))
    with run_proxy([engine], store="memory:") as client, ThreadPoolExecutor() as pool:
        engine.replies.append(Reply(ids=(*HI * 500, END)))
        body = {"messages": [user("Hi")], "stream": stream}
        assert client.post(CHAT, json=body, headers={"x-session-id": "long"}).status_code == 200
        waiting = pool.submit(client.post, CHAT, json={"messages": [user("a" * 1_600)]})
        wait_until(lambda: Scrape(client).value("requests_queued_for_room") == 1)
        client.post("/v1/sessions/long/end")
        assert waiting.result().status_code == 200


@pytest.mark.parametrize(
    ("page", "cache"),
    [
        (_info(1_200), (1_200, 10)),
        (_info(1_200) * 2, (2_400, 10)),
        (_info(1_200).replace(b"{", b'{kv_cache_size_tokens="800",'), (800, 10)),
        (_info(1_200).replace(b"{", b'{kv_cache_size_tokens="None",kv_offloading_size="None",'), (1_200, 10)),
        (_info(1_200).replace(b"{", b'{kv_offloading_size="4.0",'), (0, 0)),
        (_info(1_200).replace(b'"120"', b'"None"'), (0, 10)),
        (b"vllm:num_requests_running 1.0\n", (0, 0)),
    ],
)
@stepped
async def test_the_size_of_a_cache_is_read_from_the_metrics(page: bytes, cache: tuple[int, int]) -> None:
    [engine] = engines(1)
    engine.describes = lambda path: BytesResponse(200, [], page) if path == "/metrics" else None
    async with fleet_of(engine) as fleet:
        assert fleet.replicas[0].require_capabilities().cache == cache
