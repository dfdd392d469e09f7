"""Admin calls of a fleet: each reaches all replicas at once, and a replica that fails leaves service."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import httpx
import pytest

from tests.contract.fleet.memory_engine import ask, engines, fleet_of, waits
from tests.support.fake_trained import FakeTrained, Rendezvous, update
from tests.support.scraping import Scrape
from tests.support.stepped import elapse, settled, stepped
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, send_and_keep, wait_until
from tokenproxy.base.http import BytesResponse, Request
from tokenproxy.fleet.admin_calls import ADMIN_CALLS
from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.weight_calls import WeightCalls
from tokenproxy.fleet.weight_state import Failure, FleetState, SharedError, read_state, write_state
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.store import Limits
from tokenproxy.record.store_time import StoreTime
from tokenproxy.store.fleet_words import StoredWords
from tokenproxy.store.guarded import GuardedStore
from tokenproxy.store.sqlite import SqliteStore

_CHAT = "/v1/chat/completions"
_HI = {"messages": [{"role": "user", "content": "Hi"}]}

Start = Callable[..., list[FakeTrained]]


@pytest.fixture
def start(tiny_model: TinyModel) -> Iterator[Start]:
    """Starts engines that meet in one place; the argument is the number of workers of each."""
    with ExitStack() as stack:

        def start(*workers: int, alone: bool = False) -> list[FakeTrained]:
            """`alone`: weights are loaded from a disk, and nobody waits for others."""
            meeting = Rendezvous(1 if alone else len(workers))
            return [stack.enter_context(FakeTrained(tiny_model, meeting, each)) for each in workers]

        yield start


def _states(client: httpx.Client) -> list[bool]:
    return [engine["ready"] for engine in client.get("/ready").json()["engines"]]


def _problem(client: httpx.Client, number: int) -> str:
    return str(client.get("/ready").json()["engines"][number].get("problem", ""))


def _chat(client: httpx.Client) -> int:
    return client.post(_CHAT, json=_HI).status_code


def test_a_rendezvous_gets_all_replicas_at_once_and_each_its_ranks(start: Start) -> None:
    replicas = start(2, 1, 4, 1)
    with run_proxy(replicas) as client:
        assert client.get("/get_world_size").json() == {"world_size": 8}
        info = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 9}
        answer = client.post("/init_weight_transfer_engine", json={"init_info": info})
        assert (answer.status_code, answer.json()) == (200, {"message": "Weight transfer initialized"})
        assert [engine.init_info["rank_offset"] for engine in replicas] == [1, 3, 4, 8]
        assert sorted(replicas[0].rendezvous.ranks) == list(range(1, 9))
        assert {engine.init_info["world_size"] for engine in replicas} == {9}
        assert update(client, "7") == [200] * 5
        assert [engine.version for engine in replicas] == ["7"] * 4
        assert client.get("/weight_info").json() == {"weight_version": "7"}
        assert all(len(engine.seen("/update_weights")) == 1 for engine in replicas)


def test_a_call_that_cannot_be_right_reaches_nobody(start: Start) -> None:
    replicas = start(1, 1)
    wrong: list[tuple[str, Any, str]] = [
        ("/init_weight_transfer_engine", {"init_info": {"rank_offset": "x"}}, "init_info.rank_offset"),
        ("/finish_weight_update", {"weight_version": 7}, "weight_version"),
    ]
    with run_proxy(replicas) as client:
        for path, body, param in wrong:
            answer = client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert [engine.seen(path) for engine in replicas] == [[], []]
        assert _chat(client) == 200, "no update has begun"


def test_answers_are_joined(start: Start) -> None:
    first, second = replicas = start(2, 1)
    with run_proxy(replicas) as client:
        assert client.post("/pause?mode=keep").json() == {"status": "paused"}
        assert first.last("/pause").target == "/pause?mode=keep&clear_cache=false"
        assert client.get("/is_paused").json() == {"is_paused": True}
        client.post("/resume")
        second.paused = "keep"
        each = client.get("/is_paused").json()
        assert each["succeeded"] == "all"
        paused = {"succeeded": True, "status": 200, "answer": {"is_paused": True}}
        assert each["replicas"][second.url] == paused
        second.paused = ""
        rpc = client.post("/collective_rpc", json={"method": "ping"}).json()
        assert rpc == {"results": [f"{first.port}/0", f"{first.port}/1", f"{second.port}/0"]}
        assert client.post("/abort_requests", json={}).json() == {"status": "aborted", "aborted": 0}
        assert client.post("/reset_prefix_cache").json() == {"success": True}
        first.running += 1
        partial = client.post("/reset_prefix_cache")
        first.running -= 1
        assert (partial.status_code, partial.json()["succeeded"]) == (424, "some")
        assert first.url in partial.json()["error"]["message"]
        assert _states(client) == [True, True], "its weights are right"
        for engine in replicas:
            engine.refuses["/sleep"] = 400
        refused = client.post("/sleep")
        assert (refused.status_code, refused.json()) == (400, {"error": "refused"})
        assert "paused" not in client.get("/ready").json()


def test_a_replica_that_dies_in_an_update_leaves_and_returns(start: Start, tiny_model: TinyModel) -> None:
    good, bad = start(1, 1, alone=True)
    with run_proxy([good, bad]) as client:
        assert update(client, "6") == [200] * 5
        bad.deadly = lambda seen: seen.path == "/finish_weight_update"
        assert 424 in update(client, "7")
        wait_until(lambda: _states(client) == [True, False])
        with FakeTrained(tiny_model, Rendezvous(1), port=bad.port) as again:
            # it was restarted with its first weights
            wait_until(lambda: "default" in _problem(client, 1))
            assert _states(client) == [True, False]
            assert update(client, "8") == [200] * 5
            assert (_states(client), again.version) == ([True, True], "8")


def test_a_failed_replica_does_not_get_the_name_of_weights_that_it_lacks(start: Start) -> None:
    """Trainers end an update also after one of its steps failed."""
    good, bad = start(1, 1, alone=True)
    with run_proxy([good, bad]) as client:
        client.post("/start_weight_update")
        bad.refuses["/update_weights"] = 500
        partial = client.post("/update_weights", json={"update_info": {"weights": "new"}})
        assert (partial.status_code, partial.json()["error"]["code"]) == (424, "replicas_failed")
        assert partial.json()["replicas"][good.url]["succeeded"] is True
        assert partial.json()["replicas"][bad.url]["status"] == 500
        assert client.post("/finish_weight_update", json={"weight_version": "7"}).status_code == 200
        assert (good.version, bad.version) == ("7", "default")
        assert client.post("/update_weight_version", json={"new_version": "8"}).status_code == 200
        assert (good.version, bad.version) == ("8", "default")
        assert _states(client) == [True, False]
        assert "/update_weights failed on it" in _problem(client, 1)
        metrics = client.get("/metrics").text
        assert f'tokenproxy_replica_state{{replica="{bad.url}",state="stale"}} 1.0' in metrics
        assert 'tokenproxy_admin_calls_total{result="some",route="/update_weights"} 1.0' in metrics
        # an operator who knows better states the version of this one
        only = {"X-Replica": bad.url}
        named = client.post("/update_weight_version", json={"new_version": "8"}, headers=only)
        assert named.status_code == 200
        wait_until(lambda: _states(client) == [True, True])
        bad.refuses = {"/start_weight_update": 500}
        assert 424 in update(client, "9")
        assert _states(client) == [True, False]
        before = len(bad.generations())
        assert ([_chat(client) for _ in range(4)], len(bad.generations())) == ([200] * 4, before)
        bad.refuses.clear()
        assert update(client, "10") == [200] * 5
        assert _states(client) == [True, True]


def test_what_fails_on_all_replicas(start: Start) -> None:
    """Before an update began nothing changes; in one, no replica gets the name of weights that it lacks."""
    replicas = start(1, 1, alone=True)

    def refuse(*paths: str) -> None:
        for engine in replicas:
            engine.refuses = dict.fromkeys(paths, 500)

    with run_proxy(replicas, watch_interval_s=30.0) as client:
        refuse("/start_weight_update", "/finish_weight_update", "/update_weight_version")
        assert client.post("/start_weight_update").json() == {"error": "refused"}
        assert client.post("/update_weights", json={"update_info": {"weights": "x"}}).status_code == 500
        for path in ("/finish_weight_update", "/update_weight_version"):
            name = {"weight_version": "7", "new_version": "7"}
            assert client.post(path, json=name).status_code == 500
        assert (_chat(client), _states(client)) == (200, [True, True])
        refuse("/update_weights")
        client.post("/start_weight_update")
        assert client.post("/update_weights", json={"update_info": {"weights": "7"}}).status_code == 500
        assert client.post("/finish_weight_update", json={"weight_version": "7"}).status_code == 200
        named = client.post("/update_weight_version", json={"new_version": "7"})
        assert (named.status_code, named.json()["error"]["param"]) == (400, "new_version")
        assert [engine.version for engine in replicas] == ["default"] * 2
        assert client.get("/ready").status_code == 503
        refuse()
        assert update(client, "8") == [200] * 5
        assert client.get("/ready").status_code == 200


def test_requests_wait_while_the_fleet_is_held_whatever_the_limits_of_the_queue(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pause, an update or a sleep. An unnamed update gets a name: a restarted replica is not updated."""
    replicas = start(1, 1)
    monkeypatch.setattr("tokenproxy.app.app.Fleet", partial(Fleet, queue_requests=0, queue_timeout_s=0.05))
    with run_proxy(replicas) as client, ThreadPoolExecutor(32) as pool:
        for begin, within, end in (
            ("/pause?mode=keep", "/is_paused", "/resume"),
            ("/start_weight_update", "/update_weight_version", "/finish_weight_update"),
            ("/sleep?level=1", "/wake_up?tags=weights", "/wake_up"),
        ):
            before = sum(len(each.generations()) for each in replicas)
            assert client.post(begin).status_code == 200
            waiting = [pool.submit(_chat, client) for _ in range(6)]
            wait_until(lambda: "tokenproxy_requests_queued 6.0" in client.get("/metrics").text)
            client.request("GET" if within == "/is_paused" else "POST", within, json={"new_version": "7"})
            # what does not sample is served
            assert client.get("/v1/models").status_code == 200
            assert client.post("/tokenize", json={"prompt": "hi"}).status_code == 200
            assert not any(each.done() for each in waiting)
            assert sum(len(each.generations()) for each in replicas) == before
            assert client.post(end).status_code == 200
            assert [each.result() for each in waiting] == [200] * 6
        assert all(engine.version.startswith("update-2") for engine in replicas)
        client.post("/pause?mode=keep")
        waiting = [pool.submit(_chat, client)]
        for engine in replicas:
            engine.paused = ""  # somebody else ends the pause
        assert waiting[0].result() == 200


@stepped
async def test_a_call_fails_on_a_replica_that_does_not_answer_it_in_time() -> None:
    first, second = engines(2)
    async with fleet_of(first, second, weight_update_timeout_s=600.0) as fleet:
        second.hangs = {"/finish_weight_update"}
        await fleet.weights.change(FleetState(updating="/start_weight_update"))
        calls = WeightCalls(fleet, Metrics())
        [rule] = [each for each in ADMIN_CALLS if each.path == "/finish_weight_update"]
        first.describes = lambda path: BytesResponse(200, [], b"{}") if path == rule.path else None
        answer = await calls.run(rule, Request("POST", rule.path, [], b"{}"))
        assert answer.status == 424
        assert b"no answer within 600 s" in await answer.read()
        assert [bool(fleet.weights.problem(replica)) for replica in fleet.replicas] == [False, True]
        assert "failed on it" in fleet.report()[1]["problem"]
        await elapse(3.0)
        assert not fleet.weights.suspension.active
        await calls.stop()


@stepped
async def test_an_update_that_does_not_end() -> None:
    """The trainer died: requests wait no longer, and weights that nobody knows are not served."""
    [only] = engines(1)
    async with fleet_of(only, weight_update_timeout_s=600.0) as fleet:
        await fleet.weights.change(FleetState(updating="/start_weight_update"))
        request = asyncio.create_task(ask(fleet))
        await elapse(629.0)
        assert (request.done(), only.started) == (False, 0)
        await elapse(2.0)
        assert "did not end" in fleet.report()[0]["problem"]
        assert "did not end" in str(request.exception())
        await fleet.weights.change(FleetState())
        assert (await ask(fleet))[0] == 200


@stepped
async def test_a_pause_of_the_fleet_excuses_its_silence() -> None:
    """Requests that run are paused with it, and none of them is taken for lost."""
    first, second = engines(2)
    async with fleet_of(first, second) as fleet:
        release = asyncio.Event()
        first.usual = waits(release)
        request = asyncio.create_task(ask(fleet))
        await settled()
        await fleet.weights.change(FleetState(paused="keep"))
        await elapse(100.0)
        await fleet.weights.change(FleetState())
        release.set()
        assert (await request)[0] == 200
        assert (first.started, second.started) == (1, 0)


def test_an_adapter_is_on_all_replicas_or_on_none(start: Start) -> None:
    first, second = start(1, 1)
    with run_proxy([first, second]) as client:
        body = {"lora_name": "a", "lora_path": "/a"}
        second.refuses["/v1/load_lora_adapter"] = 404
        partial = client.post("/v1/load_lora_adapter", json=body)
        assert (partial.status_code, partial.json()["succeeded"]) == (424, "some")
        assert "No replica has the adapter" in partial.json()["error"]["message"]
        assert (first.adapters, second.adapters) == (set(), set())
        second.refuses.clear()
        assert client.post("/v1/load_lora_adapter", json=body).text.startswith("Success")
        assert (first.adapters, second.adapters) == ({"a"}, {"a"})
        assert client.post("/v1/unload_lora_adapter", json=body).status_code == 200
        assert (first.adapters, second.adapters) == (set(), set())


def test_one_replica_by_its_name(start: Start) -> None:
    first, second = start(1, 1)
    with run_proxy([first, second]) as client:
        one = {"X-Replica": second.url}
        assert client.post("/pause?mode=keep", headers=one).json() == {"status": "paused"}
        assert (first.paused, second.paused) == ("", "keep")
        assert "paused" not in client.get("/ready").json()
        client.post("/resume", headers=one)
        assert second.paused == ""
        assert client.get("/some/page", headers=one).status_code == 404
        assert (len(first.seen("/some/page")), len(second.seen("/some/page"))) == (0, 1)
        unknown = client.post("/pause", headers={"X-Replica": "http://127.0.0.1:1"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "x-replica")
        assert client.post("/pause", headers={"X-Replica": "second"}).status_code == 400


def test_a_client_that_leaves_does_not_stop_a_call(start: Start) -> None:
    [engine] = start(1)
    with run_proxy([engine]) as client:
        engine.rendezvous = Rendezvous(2)
        client.post("/start_weight_update")
        with send_and_keep(client.base_url, "/update_weights", b'{"update_info": {"weights": "7"}}'):
            wait_until(lambda: engine.rendezvous.arrived)
        wait_until(lambda: Scrape(client).value("client_disconnects_total"))
        engine.rendezvous.come([])
        wait_until(lambda: engine.weights == "7")
        assert client.post("/finish_weight_update", json={"weight_version": "7"}).status_code == 200
        assert client.get("/ready").json()["weight_version"] == "7"


def test_the_version_as_cache_salt(start: Start) -> None:
    [engine] = start(1)
    with run_proxy([engine], cache_salt_by_version=True) as client:
        _chat(client)
        assert engine.last(_CHAT).json["cache_salt"] == "default"
        client.post("/update_weight_version", json={"new_version": "7"})
        for path, body, salt in (
            ("chat/completions", {**_HI, "cache_salt": "own"}, "own"),
            ("responses", {"input": "Hi"}, "7"),
        ):
            assert client.post(f"/v1/{path}", json={"model": "tiny", **body}).status_code == 200
            assert engine.last(_CHAT).json["cache_salt"] == salt
        client.post("/v1/completions", json={"prompt": [1, 74], "n": 2})
        assert engine.last("/v1/completions").json.items() >= {"n": 2, "cache_salt": "7"}.items()


@stepped
async def test_an_idle_process_reads_the_state_before_its_next_request() -> None:
    [only] = engines(1)
    words = StoredWords(SqliteStore(None, Limits()), "fleet/weights")
    async with fleet_of(only) as fleet:
        fleet.weights.words = words
        await elapse(1.0)
        await write_state(words, FleetState(paused="keep"))
        request = asyncio.create_task(ask(fleet))
        await settled()
        assert (request.done(), only.started) == (False, 0)
        await write_state(words, FleetState())
        await elapse(1.0)
        assert (await request)[0] == 200


@stepped
async def test_what_others_set_while_a_call_ends_a_pause_is_kept() -> None:
    """Also right before the call ends. New requests wait until then."""
    first, second = engines(2)
    words = StoredWords(SqliteStore(None, Limits()), "fleet/weights")
    async with fleet_of(first, second, weight_update_timeout_s=5.0) as fleet:
        weights, calls = fleet.weights, WeightCalls(fleet, Metrics())
        weights.words = words
        await weights.change(FleetState(paused="sleep"))
        [rule] = [each for each in ADMIN_CALLS if each.path == "/wake_up"]
        first.describes = lambda path: BytesResponse(200, [], b'{"status": "awake"}')
        second.hangs = {rule.path}
        await elapse(0.02)
        call = asyncio.create_task(calls.run(rule, Request("POST", rule.path, [])))
        await elapse(1.0)
        assert (await read_state(words)).paused == ""
        await write_state(words, FleetState(1, "7"))
        await elapse(1.0)
        assert (weights.state.version, weights.state.paused) == ("7", "sleep")
        await elapse(3.14)
        assert not call.done()
        await write_state(words, FleetState(1, "7", aborts=1))
        assert (await call).status == 424
        state = await read_state(words)
        assert (state.version, state.aborts, state.paused, [*state.failures]) == ("7", 1, "", [second.name])
        assert weights.state == state
        await calls.stop()


async def test_the_state_in_a_store() -> None:
    store = SqliteStore(None, Limits())
    words = StoredWords(store, "fleet/weights")
    assert await read_state(words) == FleetState()
    state = FleetState(1, "7", failures={"a": Failure("/resume", "why")}, group=("a", "b"))
    await write_state(words, state)
    assert await read_state(words) == state
    assert await read_state(StoredWords(store, "another/weights")) == FleetState()
    await store.put("fleets/fleet/weights", "weights", b"{")
    with pytest.raises(SharedError):
        await read_state(words)


async def test_a_request_waits_no_longer_for_a_store_that_hangs_because_another_read_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, hangs = SqliteStore(None, Limits()), asyncio.Event()

    async def get(*args: Any, **options: Any) -> dict[str, bytes]:
        await hangs.wait()
        return {}

    monkeypatch.setattr(store, "get", get)
    guarded = GuardedStore(store, Metrics())
    await guarded.open()
    async with fleet_of(*engines(1)) as fleet:
        fleet.weights.words = words = StoredWords(guarded, "fleet/weights")
        other = asyncio.create_task(fleet.weights.refresh())
        await settled()
        for wait in (fleet.weights.refresh, words.read):
            limit = StoreTime(0.01)
            with limit, suppress(SharedError):
                assert not await wait()
            assert limit.left <= 0 and not other.done()
        other.cancel()
        fleet.weights.words = None
    hangs.set()
    await guarded.aclose()


async def test_reads_that_a_store_answers_take_nothing_of_the_time_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A turn that updates break off again and again reads the weights at each break, for minutes."""
    store = SqliteStore(None, Limits())

    async def get(*args: Any, **options: Any) -> dict[str, bytes]:
        await asyncio.sleep(0.01)
        return {}

    monkeypatch.setattr(store, "get", get)
    guarded = GuardedStore(store, Metrics())
    await guarded.open()
    async with fleet_of(*engines(1)) as fleet:
        fleet.weights.words = StoredWords(guarded, "fleet/weights")
        limit = StoreTime(1.0)
        with limit:
            for _ in range(4):
                assert await asyncio.gather(*(fleet.weights.refresh() for _ in range(3))) == [True] * 3
        fleet.weights.words = None
    assert limit.left == 1.0
    await guarded.aclose()
