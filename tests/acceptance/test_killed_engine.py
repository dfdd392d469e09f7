"""What all requests before left behind; then the engine is killed under its requests: they get the documented
errors, and the record survives."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import httpx

from tests.acceptance.conftest import Server, running
from tests.acceptance.formats import MODEL, Fields, stream_of
from tests.support.recorded import record_of
from tests.support.talk import CHAT, user
from tests.support.utils import wait_until

_LONG: Fields = {"model": MODEL, "max_tokens": 3000, "ignore_eos": True}
_CANNOT_GO_ON: Fields = {"stop": ["\u2603\u2603"]}
"""A stop string may lie across a break. Other streams wait for the engine to start again."""


def test_all_that_the_engine_answered_was_known(server: Server) -> None:
    """What is not declared in `turn/wire.py` is read slowly."""
    counts = re.findall(r"(?m)^tokenproxy_odd_chunks_total (\S+)$", server.http.get("/metrics").text)
    assert counts and not any(map(float, counts))


def test_requests_of_a_killed_engine_end_with_an_error(front: Server) -> None:
    http = front.http
    session = {"x-session-id": f"killed-{uuid4().hex}"}
    short = {**_LONG, "messages": [user("Hi.")], "max_tokens": 2}
    assert http.post(CHAT, json=short, headers=session).status_code == 200
    before = record_of(http, session["x-session-id"], 1)
    events: list[Fields] = []

    def read() -> None:
        body = {**_LONG, "messages": [user(f"Count, {session}.")], "stream": True, **_CANNOT_GO_ON}
        with http.stream("POST", CHAT, json=body, headers=session) as response:
            events.extend(stream_of(response))

    with ThreadPoolExecutor(2) as threads:
        streamed = threads.submit(read)
        whole = threads.submit(http.post, CHAT, json={**_LONG, "messages": [user("Count on.")]})
        wait_until(lambda: len(events) > 3 and running(front.engine) == 2, 90)
        assert front.engine.pid is not None
        os.killpg(front.engine.pid, signal.SIGKILL)
        streamed.result()
        answer: httpx.Response = whole.result()
    assert events[-1]["error"]["message"]
    assert answer.status_code in (502, 503), answer.text
    assert answer.json()["error"]["type"] in ("BadGatewayError", "ServiceUnavailableError")

    wait_until(lambda: http.get("/ready").status_code == 503, 60)
    refused = http.post(CHAT, json=short)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    assert int(refused.headers["retry-after"]) > 0
    assert http.get("/health").status_code == 200
    after = record_of(http, session["x-session-id"], 1)
    assert after.turns[0] == before.turns[0]
