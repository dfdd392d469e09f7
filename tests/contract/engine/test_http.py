import json
import socket
from contextlib import ExitStack

import pytest

from tests.support.fake_vllm import Canned, FakeVllm
from tokenproxy.base.errors import EngineBroken, EngineTimeout
from tokenproxy.base.http import Request, Response
from tokenproxy.base.urls import normalise_base_url
from tokenproxy.engine.http import HttpEngine

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


def test_base_url_is_normalised() -> None:
    assert normalise_base_url("https://host/models/a/v1/") == "https://host/models/a"
    assert normalise_base_url("http://[::1]:8000/v1?key=1#part") == "http://[::1]:8000"


async def test_end_to_end_headers_are_forwarded_unchanged(engine: HttpEngine, fake: FakeVllm) -> None:
    sent = [
        (b"x-one", b"1"),
        (b"x-one", b"2"),
        (b"x-latin1", "Zoë".encode("latin-1")),
        (b"authorization", b"Bearer client"),
        (b"content-type", b"application/json"),
        (b"user-agent", b"client/1"),
    ]
    hop_by_hop = [(b"connection", b"close"), (b"expect", b"100-continue"), (b"host", b"me")]
    hop_by_hop += [(b"x-hop", b"1"), (b"connection", b"X-Hop , x-two"), (b"x-two", b"2")]
    await _ask(engine, Request("POST", "/anything", sent + hop_by_hop, b"{}"))
    names = {name for name, _ in sent}
    arrived = [(name.lower(), value) for name, value in fake.last("/anything").headers]
    assert [pair for pair in arrived if pair[0] in names] == sent
    assert {name for name, _ in arrived} == names | {b"host", b"content-length"}


async def test_hop_by_hop_response_headers_are_dropped(engine: HttpEngine, fake: FakeVllm) -> None:
    own = {"keep-alive": "timeout=5", "proxy-authenticate": "Basic", "trailer": "x", "server": "s"}
    own |= {"connection": "keep-alive, X-Hop", "x-hop": "1"}
    others = {"x-other": "1", "content-type": "text/plain"}
    fake.canned["/anything"] = Canned(b"", 200, {**own, **others})
    response, _ = await _ask(engine, Request("GET", "/anything"))
    assert {name for name, _ in response.headers} == {b"x-other", b"content-length", b"content-type"}


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
    answered, _ = await _ask(engine, _chat(repeatable=True))
    assert answered.status == 200
    assert [seen.reused for seen in fake.requests] == [True, False], "not over another pooled connection"
    fake.requests.clear()
    with pytest.raises(EngineBroken, match="before it responded"):
        await _ask(engine, _chat())
    assert [seen.reused for seen in fake.requests] == [True]
    fake.requests.clear()
    fake.hang_up = lambda seen: True
    with pytest.raises(EngineBroken, match="before it responded"):
        await _ask(engine, _chat(repeatable=True))
    assert [seen.reused for seen in fake.requests] == [True, False], "twice at most"


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
