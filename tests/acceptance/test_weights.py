"""A weight update while a stream runs: each turn tells which weights sampled its ids.

A CPU engine transfers no weights. The routes around the transfer are vLLM's own.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any
from uuid import uuid4

from tests.acceptance.conftest import Server
from tests.acceptance.formats import MODEL, Fields, stream_of
from tests.support.recorded import record_of
from tests.support.talk import CHAT, user
from tests.support.utils import wait_until

_PATIENCE_S = 60.0


def _stream(server: Server, session: str, tokens: int, events: list[Fields], enough: Event) -> int:
    """Read a stream to its end, or to the first event after `enough`. Returns the status."""
    body = {
        **{"model": MODEL, "messages": [user(f"Count. {session}")], "max_tokens": tokens},
        **{"ignore_eos": True, "stream": True},
    }
    with server.http.stream("POST", CHAT, json=body, headers={"x-session-id": session}) as response:
        for event in stream_of(response):
            events.append(event)
            if enough.is_set():
                break
        return response.status_code


def _turn(server: Server, session: str) -> dict[str, Any]:
    [turn] = record_of(server.http, session, 1).samples["samples"][0]["turns"]
    found: dict[str, Any] = turn
    return found


def test_turns_tell_which_weights_sampled_them(server: Server) -> None:
    http, version = server.http, uuid4().hex
    before = http.get("/weight_info").json()["weight_version"]
    frozen, late = uuid4().hex, uuid4().hex
    events, enough = list[Fields](), Event()
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(_stream, server, frozen, 3000, events, enough)
        try:
            wait_until(lambda: len(events) > 3, _PATIENCE_S)
            assert http.post("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
            waiting = threads.submit(_stream, server, late, 4, [], Event())
            named = http.post("/update_weight_version", json={"new_version": version})
            assert named.json() == {"success": True, "new_version": version}
            assert http.get("/is_paused").json() == {"is_paused": True}
            assert not running.done() and not waiting.done()
            count = len(events)
            assert http.post("/resume").json() == {"status": "resumed"}
            assert waiting.result() == 200
            wait_until(lambda: len(events) > count + 8, _PATIENCE_S)
        finally:
            http.post("/resume")
            enough.set()
        assert running.result() == 200
    # the other API server process learns of it a moment later
    wait_until(lambda: http.get("/ready").json()["engines"][0]["weight_version"] == version, _PATIENCE_S)
    turn = _turn(server, frozen)
    (first, start, end), (second, resumed, last) = turn["weight_versions"]
    assert (first, second, start) == (before, version, 0) and last > 8
    # where an event loop was too busy to see when the last id arrived before the update, each is uncertain
    assert (end, resumed) == (last, 0) if turn["weights_uncertain"] else end == resumed
    assert version in {span[0] for span in _turn(server, late)["weight_versions"]}
