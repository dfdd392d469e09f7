"""Admin calls of a fleet: each reaches all replicas at once, and a replica that fails leaves service."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from proxy.app import create_app
from proxy.fleet.admin_calls import ADMIN_CALLS
from proxy.fleet.admin_requests import cleared_by
from proxy.fleet.weight_state import Failure, FleetState, StateError
from proxy.history.store import Limits
from proxy.http import Request
from proxy.settings import Settings
from proxy.stores.fleet_state import StoredState
from proxy.stores.memory import MemoryStore
from tests.support.fake_trained import FakeTrained, Rendezvous
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, send_and_keep, wait_until

_CHAT = "/v1/chat/completions"
_HI = {"messages": [{"role": "user", "content": "Hi"}]}

Start = Callable[..., list[FakeTrained]]


@pytest.fixture
def start(tiny_model: TinyModel) -> Iterator[Start]:
    """Starts engines that meet in one place; the argument is the number of workers of each."""
    with ExitStack() as stack:

        def start(*workers: int) -> list[FakeTrained]:
            meeting = Rendezvous(len(workers))
            return [stack.enter_context(FakeTrained(tiny_model, meeting, each)) for each in workers]

        yield start


def _generations(engine: FakeTrained) -> int:
    return sum(seen.json.get("max_tokens") != 1 for seen in engine.seen(_CHAT))


def _states(client: httpx.Client) -> list[bool]:
    return [engine["ready"] for engine in client.get("/ready").json()["engines"]]


def _problem(client: httpx.Client, number: int) -> str:
    return str(client.get("/ready").json()["engines"][number].get("problem", ""))


def _update(client: httpx.Client, version: str | None, weights: str = "new") -> list[int]:
    """Update as trainers do; the statuses of the steps."""
    last = {} if version is None else {"weight_version": version}
    steps = [
        ("/pause?mode=keep", None),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"weights": weights}}),
        ("/finish_weight_update", last),
        ("/resume", None),
    ]
    return [client.post(path, json=body).status_code for path, body in steps]


def test_a_rendezvous_gets_all_replicas_at_once_and_each_its_ranks(start: Start) -> None:
    engines = start(2, 1, 4, 1)
    with run_proxy(engines) as client:
        assert client.get("/get_world_size").json() == {"world_size": 8}
        info = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 9}
        answer = client.post("/init_weight_transfer_engine", json={"init_info": info})
        assert (answer.status_code, answer.json()) == (200, {"message": "Weight transfer initialized"})
        assert [engine.init_info["rank_offset"] for engine in engines] == [1, 3, 4, 8]
        assert sorted(engines[0].rendezvous.ranks) == list(range(1, 9))
        assert {engine.init_info["world_size"] for engine in engines} == {9}
        assert _update(client, "7") == [200] * 5
        assert [engine.version for engine in engines] == ["7"] * 4
        assert client.get("/weight_info").json() == {"weight_version": "7"}
        assert all(len(engine.seen("/update_weights")) == 1 for engine in engines)


def test_a_list_of_updates_is_cut_into_the_parts_of_the_replicas(start: Start) -> None:
    engines = start(2, 1)
    with run_proxy(engines) as client:
        client.post("/start_weight_update")
        assert client.post("/update_weights", json={"update_info": [{"n": 0}, {"n": 1}, {"n": 2}]}).is_success
        assert [engine.update_info for engine in engines] == [[{"n": 0}, {"n": 1}], [{"n": 2}]]
        refused = client.post("/update_weights", json={"update_info": [{"n": 0}]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "update_info")


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/init_weight_transfer_engine", {}, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": {"rank_offset": "x"}}, "init_info.rank_offset"),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"rank_offset": 1, "world_size": 2}},
            "init_info.world_size",
        ),
        ("/update_weights", {}, "update_info"),
        ("/update_weight_version", {}, "new_version"),
        ("/update_weight_version", {"new_version": 7}, "new_version"),
        ("/finish_weight_update", {"weight_version": 7}, "weight_version"),
        ("/update_weights", [1], "body"),
    ],
)
def test_a_call_that_cannot_be_right_reaches_nobody(start: Start, path: str, body: Any, param: str) -> None:
    engines = start(1, 1)
    with run_proxy(engines) as client:
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert [engine.seen(path) for engine in engines] == [[], []]
        assert client.post(_CHAT, json=_HI).status_code == 200  # no update has begun


def test_answers_are_joined(start: Start) -> None:
    engines = start(2, 1)
    with run_proxy(engines) as client:
        assert client.post("/pause?mode=keep").json() == {"status": "paused"}
        assert engines[0].last("/pause").target == "/pause?mode=keep&clear_cache=false"
        assert client.get("/is_paused").json() == {"is_paused": True}
        client.post("/resume")
        engines[1].paused = "keep"
        each = client.get("/is_paused").json()
        assert each["succeeded"] == "all"
        assert each["replicas"][engines[1].url] == {
            "succeeded": True,
            "status": 200,
            "answer": {"is_paused": True},
        }
        engines[1].paused = ""
        rpc = client.post("/collective_rpc", json={"method": "ping"}).json()
        assert rpc == {"results": [f"{engines[0].port}/0", f"{engines[0].port}/1", f"{engines[1].port}/0"]}
        assert client.post("/abort_requests", json={}).json() == {"status": "aborted", "aborted": 0}
        assert client.post("/reset_prefix_cache").json() == {"success": True}
        engines[0].running += 1
        partial = client.post("/reset_prefix_cache")
        engines[0].running -= 1
        assert (partial.status_code, partial.json()["succeeded"]) == (424, "some")
        assert engines[0].url in partial.json()["error"]["message"]
        assert _states(client) == [True, True]  # its weights are right
        for engine in engines:
            engine.refuses["/sleep"] = 400
        refused = client.post("/sleep")
        assert (refused.status_code, refused.json()) == (400, {"error": "refused"})
        assert "paused" not in client.get("/ready").json()


@pytest.mark.parametrize("how", ["refuses", "hangs", "dies"])
@pytest.mark.parametrize("step", ["/start_weight_update", "/finish_weight_update"])
def test_a_replica_that_fails_an_update_leaves_and_returns(
    start: Start, tiny_model: TinyModel, step: str, how: str
) -> None:
    _, bad = engines = start(1, 1)
    for engine in engines:
        engine.rendezvous = Rendezvous(1)  # weights that are loaded from a disk: nobody waits for others
    with run_proxy(engines, weight_update_timeout_s=2.0) as client:
        assert _update(client, "6") == [200] * 5
        if how == "refuses":
            bad.refuses[step] = 500
        elif how == "hangs":
            bad.hangs.add(step)
        else:
            bad.dies_at = step
        statuses = _update(client, "7")
        assert 424 in statuses and statuses[-1] in (200, 424)
        wait_until(lambda: _states(client) == [True, False])
        if how != "dies":
            assert f"{step} failed on it" in _problem(client, 1)
        before = _generations(bad)
        turns = [client.post(_CHAT, json=_HI).status_code for _ in range(6)]
        assert (turns, _generations(bad)) == ([200] * 6, before)
        assert client.get("/weight_info").status_code in (200, 424)

        bad.refuses.clear()
        bad.hangs.clear()
        bad.dies_at = ""
        if how == "dies":
            with FakeTrained(tiny_model, Rendezvous(1), port=bad.port):
                wait_until(
                    lambda: "default" in _problem(client, 1)
                )  # it was restarted with its first weights
                assert _states(client) == [True, False]
                assert _update(client, "8") == [200] * 5
                assert _states(client) == [True, True]
            return
        assert _update(client, "8") == [200] * 5
        assert _states(client) == [True, True]
        assert [engine.version for engine in engines] == ["8", "8"]


def test_a_failed_replica_does_not_get_the_name_of_weights_that_it_lacks(start: Start) -> None:
    """Trainers end an update also after one of its steps failed."""
    good, bad = engines = start(1, 1)
    for engine in engines:
        engine.rendezvous = Rendezvous(1)
    with run_proxy(engines) as client:
        client.post("/start_weight_update")
        bad.refuses["/update_weights"] = 500
        partial = client.post("/update_weights", json={"update_info": {"weights": "new"}})
        assert partial.status_code == 424
        assert partial.json()["error"]["code"] == "replicas_failed"
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
        named = client.post(
            "/update_weight_version", json={"new_version": "8"}, headers={"X-Replica": bad.url}
        )
        assert named.status_code == 200
        wait_until(lambda: _states(client) == [True, True])


def test_an_update_that_fails_everywhere_before_it_began_changes_nothing(start: Start) -> None:
    engines = start(1, 1)
    with run_proxy(engines) as client:
        for engine in engines:
            engine.refuses["/start_weight_update"] = 500
        assert client.post("/start_weight_update").json() == {"error": "refused"}
        assert client.post("/update_weights", json={"update_info": {"weights": "x"}}).status_code == 500
        assert _states(client) == [True, True]
        assert client.post(_CHAT, json=_HI).status_code == 200


@pytest.mark.parametrize("path", ["/finish_weight_update", "/update_weight_version"])
def test_a_version_that_no_replica_takes_changes_nothing(start: Start, path: str) -> None:
    """For example, a trainer ends an update twice because the first answer was lost."""
    engines = start(1, 1)
    with run_proxy(engines, watch_interval_s=30.0) as client:
        assert client.post("/update_weight_version", json={"new_version": "7"}).status_code == 200
        for engine in engines:
            engine.refuses[path] = 500
        name = {"weight_version": "7", "new_version": "7"}
        assert client.post(path, json=name).status_code == 500
        assert client.post(_CHAT, json=_HI).status_code == 200
        versions = [engine["weight_version"] for engine in client.get("/ready").json()["engines"]]
        assert versions == ["7", "7"]


def test_no_replica_gets_a_name_if_the_update_failed_on_all(start: Start) -> None:
    engines = start(1, 1)
    with run_proxy(engines) as client:
        client.post("/start_weight_update")
        for engine in engines:
            engine.refuses["/update_weights"] = 500
        assert client.post("/update_weights", json={"update_info": {"weights": "7"}}).status_code == 500
        assert client.post("/finish_weight_update", json={"weight_version": "7"}).status_code == 200
        named = client.post("/update_weight_version", json={"new_version": "7"})
        assert (named.status_code, named.json()["error"]["param"]) == (400, "new_version")
        assert [engine.version for engine in engines] == ["default"] * 2
        assert client.get("/ready").status_code == 503
        for engine in engines:
            engine.refuses.clear()
            engine.rendezvous = Rendezvous(1)
        assert _update(client, "8") == [200] * 5
        assert client.get("/ready").status_code == 200


def test_a_version_that_is_set_during_an_update_does_not_end_it(start: Start) -> None:
    [engine] = start(1)
    with run_proxy([engine]) as client, ThreadPoolExecutor(1) as pool:
        client.post("/start_weight_update")
        client.post("/update_weight_version", json={"new_version": "7"})
        waiting = pool.submit(client.post, _CHAT, json=_HI)
        time.sleep(0.3)
        assert not waiting.done()
        client.post("/finish_weight_update", json={"weight_version": "7"})
        assert waiting.result().status_code == 200


def test_an_update_that_does_not_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer died: requests wait no longer, and weights that nobody knows are not served."""
    monkeypatch.setattr("proxy.fleet.weights._MARGIN_S", 0.2)
    engines = start(1)
    with run_proxy(engines, weight_update_timeout_s=0.3) as client:
        assert client.post("/start_weight_update").status_code == 200
        answer = client.post(_CHAT, json=_HI)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ServiceUnavailableError")
        assert "did not end" in _problem(client, 0)
        assert client.post("/start_weight_update").status_code == 200
        assert client.post("/finish_weight_update").status_code == 200
        assert client.post(_CHAT, json=_HI).status_code == 200


def test_a_replica_that_joins_must_have_the_version(start: Start) -> None:
    first, second = start(1, 1)
    for engine in (first, second):
        engine.rendezvous = Rendezvous(1)
    with run_proxy([first]) as client:
        assert _update(client, "7") == [200] * 5
        client.post("/admin/replicas", json={"url": second.url})
        wait_until(lambda: "version default" in _problem(client, 1))
        assert all(client.post(_CHAT, json=_HI).status_code == 200 for _ in range(4))
        assert _generations(second) == 0
        second.version = "7"  # loaded by somebody else
        wait_until(lambda: _states(client) == [True, True])


def test_unnamed_updates_get_a_name(start: Start) -> None:
    """So that a replica that restarts does not look updated."""
    [engine] = start(1)
    with run_proxy([engine]) as client:
        client.post("/start_weight_update", json={})
        assert client.post("/finish_weight_update", json={}).json() == {"message": "Weight update finished"}
        first = engine.version
        assert first.startswith("update-2")
        client.post("/start_weight_update")
        client.post("/finish_weight_update")
        assert engine.version not in (first, "default")


def test_requests_wait_while_the_fleet_is_paused_whatever_the_limits_of_the_queue(start: Start) -> None:
    engines = start(1, 1)
    with run_proxy(engines, queue_requests=0, queue_timeout_s=0.2) as client, ThreadPoolExecutor(32) as pool:
        client.post("/pause?mode=keep")
        assert client.get("/ready").json()["paused"] == "keep"
        waiting = [pool.submit(client.post, _CHAT, json=_HI) for _ in range(24)]
        others = [pool.submit(client.post, "/v1/completions", json={"prompt": "x"}) for _ in range(2)]
        time.sleep(1.0)
        assert not any(each.done() for each in (*waiting, *others))
        assert all(_generations(engine) == 0 for engine in engines)
        # what does not sample is served
        assert client.get("/v1/models").status_code == 200
        assert client.post("/tokenize", json={"prompt": "hi"}).status_code == 200
        client.post("/resume")
        assert [each.result().status_code for each in waiting] == [200] * 24
        assert [each.result().status_code for each in others] == [200] * 2


def test_a_paused_replica_is_not_taken_for_a_silent_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when somebody else paused it, and with requests that wait in it."""
    monkeypatch.setattr("proxy.fleet.silence.SILENT_S", 0.2)
    monkeypatch.setattr("proxy.fleet.silence.PROBE_S", 0.2)
    engines = start(1, 1)
    with run_proxy(engines) as client, ThreadPoolExecutor(8) as pool:
        assert all(client.post(_CHAT, json=_HI).status_code == 200 for _ in range(4))
        for engine in engines:
            engine.paused = "keep"
        waiting = [pool.submit(client.post, _CHAT, json=_HI) for _ in range(8)]
        time.sleep(3.0)
        assert 'reason="silent"' not in client.get("/metrics").text
        assert [engine["breaker"] for engine in client.get("/ready").json()["engines"]] == ["closed"] * 2
        for engine in engines:
            engine.paused = ""
        assert [each.result().status_code for each in waiting] == [200] * 8


def test_streams_that_are_paused_for_longer_than_their_timeout_continue(start: Start) -> None:
    [engine] = start(1)
    engine.usual.pause_s = 0.05
    with run_proxy([engine], idle_timeout_s=0.4) as client:
        received: list[bytes] = []

        def read() -> None:
            with client.stream("POST", _CHAT, json={**_HI, "stream": True}) as answer:
                received.append(answer.read())

        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: engine.running)
        client.post("/pause?mode=keep")
        time.sleep(1.5)
        client.post("/resume")
        thread.join()
        assert received[0].endswith(b"data: [DONE]\n\n")


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


def test_sleep_and_wake_up(start: Start) -> None:
    engines = start(1, 1)
    with run_proxy(engines) as client, ThreadPoolExecutor(4) as pool:
        assert client.post("/sleep?level=1").json() == {"status": "sleeping", "level": 1}
        waiting = pool.submit(client.post, _CHAT, json=_HI)
        assert client.post("/wake_up?tags=weights").json()["status"] == "sleeping"
        time.sleep(0.3)
        assert not waiting.done()
        assert client.post("/wake_up").json()["status"] == "awake"
        assert waiting.result().status_code == 200


def test_a_pause_that_somebody_else_ended(start: Start) -> None:
    engines = start(1, 1)
    with run_proxy(engines) as client, ThreadPoolExecutor(4) as pool:
        client.post("/pause?mode=keep")
        waiting = pool.submit(client.post, _CHAT, json=_HI)
        for engine in engines:
            engine.paused = ""
        assert waiting.result().status_code == 200


def test_a_client_that_leaves_does_not_stop_a_call(start: Start) -> None:
    [engine] = start(1)
    with run_proxy([engine]) as client:
        engine.rendezvous = Rendezvous(2)
        client.post("/start_weight_update")
        with pytest.raises(httpx.ReadTimeout):
            client.post("/update_weights", json={"update_info": {"weights": "7"}}, timeout=0.3)
        engine.rendezvous.come([])
        wait_until(lambda: engine.weights == "7")
        assert client.post("/finish_weight_update", json={"weight_version": "7"}).status_code == 200
        assert client.get("/ready").json()["weight_version"] == "7"


def test_a_call_whose_client_closes_at_once_is_sent_or_logged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    [engine] = start(1)
    calls = 40
    with run_proxy([engine]) as client:
        for number in range(calls):
            body = json.dumps({"new_version": str(number)}).encode()
            with send_and_keep(client.base_url, "/update_weight_version", body):
                time.sleep(number % 4 / 1000)

        def sent_or_logged() -> int:
            logged = sum("is not done" in record.message for record in caplog.records)
            return logged + len(engine.seen("/update_weight_version"))

        wait_until(lambda: sent_or_logged() == calls)


@pytest.mark.parametrize(
    "path, is_logged", [("/pause", True), ("/collective_rpc", True), ("/tokenize", False)]
)
async def test_only_admin_calls_that_were_not_read_are_logged(
    caplog: pytest.LogCaptureFixture, path: str, is_logged: bool
) -> None:
    async def left() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        raise AssertionError("nobody is there")

    scope = {
        **{"type": "http", "method": "POST", "path": path, "raw_path": path.encode()},
        **{"query_string": b"", "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1)},
    }
    app = create_app(Settings(upstreams=["http://127.0.0.1:9"], store="memory:"))
    async with app.router.lifespan_context(app):
        await app(scope, left, send)
    assert any(f"POST {path} is not done" in record.message for record in caplog.records) is is_logged


def test_the_version_as_cache_salt(start: Start) -> None:
    [engine] = start(1)
    with run_proxy([engine], cache_salt_by_version=True) as client:
        client.post(_CHAT, json=_HI)
        assert engine.last(_CHAT).json["cache_salt"] == "default"
        client.post("/update_weight_version", json={"new_version": "7"})
        client.post(_CHAT, json=_HI)
        assert engine.last(_CHAT).json["cache_salt"] == "7"
        client.post(_CHAT, json={**_HI, "cache_salt": "own"})
        assert engine.last(_CHAT).json["cache_salt"] == "own"
        client.post("/v1/completions", json={"prompt": [1, 74], "n": 2})
        assert engine.last("/v1/completions").json.items() >= {"n": 2, "cache_salt": "7"}.items()
        for path, body in (
            ("responses", {"input": "Hi"}),
            ("messages", {**_HI, "max_tokens": 9}),
        ):
            assert client.post(f"/v1/{path}", json={"model": "tiny", **body}).status_code == 200
            assert engine.last(_CHAT).json["cache_salt"] == "7"


@pytest.mark.parametrize(
    "call, clears",
    [
        ("/reset_prefix_cache", True),
        ("/pause?mode=abort", True),
        ("/pause?mode=keep", False),
        ("/pause?mode=keep&clear_cache=true", True),
        ("/pause?mode=abort&clear_cache=false", False),
        ("/sleep?level=1", True),
        ("/sleep?level=0", False),
        ("/reset_mm_cache", False),
    ],
)
def test_a_call_that_clears_the_prefix_cache_is_known(call: str, clears: bool) -> None:
    path = call.partition("?")[0]
    [rule] = [each for each in ADMIN_CALLS if each.path == path]
    assert cleared_by(rule, Request("POST", call)) is clears


# --- the state


def test_the_state_in_a_store() -> None:
    async def run() -> None:
        store = MemoryStore(Limits())
        stored = StoredState(store, "fleet", shared=True)
        assert await stored.read() == FleetState()
        state = FleetState(failures={"a": Failure("/resume", "why", 3)}, group=("a", "b")).with_version("7")
        await stored.write(state)
        assert await stored.read() == state
        assert await StoredState(store, "another", shared=True).read() == FleetState()
        await store.change_replica("fleet/weights", "weights", "{")
        with pytest.raises(StateError):
            await stored.read()

    asyncio.run(run())


def test_only_a_version_that_was_set_later_proves_that_weights_were_loaded() -> None:
    failed = FleetState(version="7", revision=1, failures={"a": Failure("/update_weights", "why", 1)})
    assert not failed.recovered("a", "7")  # it may have loaded a part of the next ones
    assert failed.with_version("8").recovered("a", "8")
    assert not failed.with_version("8").recovered("a", "7")
    assert "why; its weights are version 7" in failed.with_version("8").problem("a", "7")
