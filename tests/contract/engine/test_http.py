import gzip
import json
import socket
from contextlib import ExitStack

import pytest

from proxy.engine.http import HttpEngine, normalise_base_url
from proxy.errors import EngineBroken, EngineTimeout
from proxy.http import Request, Response
from tests.support.fake_vllm import Canned, FakeVllm

_CHAT = "/v1/chat/completions"
_HI = {"messages": [{"role": "user", "content": "Hi"}]}


def _chat(*, stream: bool = True, repeatable: bool = False, more: str = "") -> Request:
    body = json.dumps({**_HI, "stream": stream, "user": more}).encode()
    return Request("POST", _CHAT, [], body, repeatable)


async def _ask(engine: HttpEngine, request: Request) -> tuple[Response, bytes]:
    response = await engine.send(request)
    try:
        return response, await response.read()
    finally:
        await response.aclose()


@pytest.mark.parametrize(
    "url, root",
    [
        ("http://host:8000/v1/", "http://host:8000"),
        ("https://host/models/a/v1", "https://host/models/a"),
        ("http://host:8000/v1?key=1#part", "http://host:8000"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_base_url_is_normalised(url: str, root: str) -> None:
    assert normalise_base_url(url) == root


async def test_end_to_end_headers_are_forwarded_unchanged(engine: HttpEngine, fake: FakeVllm) -> None:
    sent = [
        (b"x-one", b"1"),
        (b"x-one", b"2"),
        (b"x-utf8", "Zoë".encode()),
        (b"x-latin1", "Zoë".encode("latin-1")),
        (b"authorization", b"Bearer client"),
        (b"content-type", b"application/json"),
        (b"user-agent", b"client/1"),
    ]
    hop_by_hop = [
        (b"connection", b"close"),
        (b"te", b"trailers"),
        (b"expect", b"100-continue"),
        (b"host", b"me"),
    ]
    await _ask(engine, Request("POST", "/anything", sent + hop_by_hop, b"{}"))
    names = {name for name, _ in sent}
    arrived = [(name.lower(), value) for name, value in fake.last("/anything").headers]
    assert [pair for pair in arrived if pair[0] in names] == sent
    assert {name for name, _ in arrived} == names | {b"host", b"content-length"}


@pytest.mark.parametrize(
    "canned",
    [
        Canned(gzip.compress(b"{}"), 200, {"content-encoding": "gzip", "content-type": "application/json"}),
        Canned(b"", 307, {"location": "/elsewhere"}),
        Canned(b"\x00\xff", 418, {"x-odd": "yes", "set-cookie": "a=1"}),
    ],
)
async def test_responses_are_returned_unchanged(engine: HttpEngine, fake: FakeVllm, canned: Canned) -> None:
    fake.canned["/anything"] = canned
    response, body = await _ask(engine, Request("GET", "/anything"))
    assert (response.status, body) == (canned.status, canned.body)
    assert {(k.encode(), v.encode()) for k, v in canned.headers.items()} <= set(response.headers)


async def test_hop_by_hop_response_headers_are_dropped(engine: HttpEngine, fake: FakeVllm) -> None:
    own = {"keep-alive": "timeout=5", "proxy-authenticate": "Basic", "trailer": "x", "server": "s"}
    others = {"x-other": "1", "content-type": "text/plain"}
    fake.canned["/anything"] = Canned(b"", 200, {**own, **others})
    response, _ = await _ask(engine, Request("GET", "/anything"))
    assert {name for name, _ in response.headers} == {b"x-other", b"content-length", b"content-type"}
    stream, _ = await _ask(engine, _chat())
    assert {name for name, _ in stream.headers} == {b"content-type"}


async def test_a_request_over_a_connection_that_was_closed_is_sent_again_if_it_may_be(
    engine: HttpEngine, fake: FakeVllm
) -> None:
    for response in [await engine.send(_chat()) for _ in range(3)]:
        await response.read()
        await response.aclose()
    await _ask(engine, _chat())
    assert [seen.reused for seen in fake.requests] == [False, False, False, True]
    fake.requests.clear()
    fake.hang_up = lambda seen: seen.reused
    response, _ = await _ask(engine, _chat(repeatable=True))
    assert response.status == 200
    assert [seen.reused for seen in fake.requests] == [True, False], "not over another pooled connection"
    fake.requests.clear()
    with pytest.raises(EngineBroken, match="before it responded"):
        await _ask(engine, _chat())
    assert [seen.reused for seen in fake.requests] == [True]
    fake.requests.clear()
    fake.hang_up = lambda seen: True
    for attempts in ([True, False], [False]):
        with pytest.raises(EngineBroken, match="before it responded"):
            await _ask(engine, _chat(repeatable=True))
        while engine._pool._idle and attempts == [True, False]:
            engine._pool._idle.pop().abort()
        assert [seen.reused for seen in fake.requests] == attempts, "twice at most, once over a new one"
        fake.requests.clear()


async def test_connection_that_is_not_accepted_times_out() -> None:
    """A port with a full backlog accepts no connections."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        engine = HttpEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=0.2)
        with pytest.raises(EngineTimeout, match="did not accept a connection"):
            await engine.send(_chat())
