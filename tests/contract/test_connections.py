"""The proxy's sockets: slow and large heads, slow bodies, TLS."""

import contextlib
import logging
import re
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.certificates import make_certificate
from tests.support.fake_vllm import Canned, FakeVllm, Reply
from tests.support.sockets import BODY, CHAT, HALF_HEAD, connect, head, status_of, until_closed
from tests.support.utils import run_proxy, run_server, wait_until
from tokenproxy.app.app import create_app
from tokenproxy.app.connections import connection_options
from tokenproxy.settings import Settings

_HEALTH = b"GET /health HTTP/1.1\r\nhost: proxy\r\n\r\n"


@pytest.fixture(scope="module")
def strict(engine: FakeVllm) -> Iterator[httpx.Client]:
    """A proxy with short times and a low limit of bodies."""
    with (
        pytest.MonkeyPatch.context() as patch,
        run_proxy([engine], store="memory:", body_limit_bytes=1000) as client,
    ):
        patch.setattr("tokenproxy.app.connections.HEAD_TIMEOUT_S", 0.1)
        patch.setattr("tokenproxy.web.endpoint.BODY_TIMEOUT_S", 0.1)
        yield client


@pytest.fixture(scope="module")
def usual(engine: FakeVllm) -> Iterator[httpx.Client]:
    """A proxy that asks for a key."""
    with run_proxy([engine], store="memory:", api_key="secret", host="0.0.0.0") as client:
        yield client


def _wait_for_a_late_head(client: httpx.Client) -> None:
    """Wait longer than `HEAD_TIMEOUT_S`: what was sent before would have been closed by now."""
    with connect(client.base_url) as connection:
        connection.sendall(HALF_HEAD)
        assert until_closed(connection).startswith(b"HTTP/1.1 408 ")


def test_a_head_that_comes_a_byte_at_a_time(strict: httpx.Client) -> None:
    """Bytes that come do not extend the time."""
    answer = b""
    with connect(strict.base_url) as connection, contextlib.suppress(ConnectionError):
        connection.settimeout(0.02)
        connection.sendall(HALF_HEAD)
        for _ in range(400):  # fewer bytes than a head may have
            connection.sendall(b"E")
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(100)
                break
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_stays_open_until_it_begins_a_head(strict: httpx.Client) -> None:
    """Only a request that began has a time limit; idle ones end by keep-alive."""
    with connect(strict.base_url) as connection:
        for _ in range(2):
            connection.sendall(_HEALTH)
            assert status_of(connection) == 200
            _wait_for_a_late_head(strict)
        connection.sendall(HALF_HEAD)
        assert until_closed(connection).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_does_not_end(strict: httpx.Client, engine: FakeVllm) -> None:
    for path in (CHAT, "/v1/completions", "/tokenize"):
        with connect(strict.base_url) as connection:
            connection.sendall(head(path, "content-length: 100") + b"{")
            answer = until_closed(connection)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"connection: close" in answer
        assert b"within 0.1 s" in answer and b'"param":"body"' in answer
    assert not [seen for seen in engine.from_clients() if seen.path == "/v1/completions"]


def test_the_engines_time_is_not_the_clients(strict: httpx.Client, engine: FakeVllm) -> None:
    """A long answer is not cut, even if the client began the head of its next request."""
    engine.reset()
    engine.replies.extend([Reply(hold_at=0), Reply(hold_at=2)])
    streamed = BODY[:-1] + b', "stream": true}'
    with connect(strict.base_url) as whole:
        whole.sendall(head(CHAT, f"content-length: {len(BODY)}") + BODY + HALF_HEAD)
        wait_until(lambda: engine.held == 1)
        # not earlier: a connection that sends nothing is closed
        with connect(strict.base_url) as stream:
            stream.sendall(head(CHAT, f"content-length: {len(streamed)}", "connection: close") + streamed)
            wait_until(lambda: engine.held == 2)
            _wait_for_a_late_head(strict)
            engine.release()
            assert whole.recv(1000).startswith(b"HTTP/1.1 200 ")
            assert b"data: [DONE]" in until_closed(stream)


def test_a_head_over_the_limit_that_never_ends(strict: httpx.Client) -> None:
    with connect(strict.base_url) as connection:
        with contextlib.suppress(ConnectionError):
            for line in [HALF_HEAD, *[b"a" * 1000] * 1000]:
                connection.sendall(line)
        assert until_closed(connection).startswith(b"HTTP/1.1 431 ")


def test_a_body_of_a_refused_request_does_not_keep_its_connection(
    usual: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then after the 401 would postpone the end of keep-alive for ever."""
    monkeypatch.setattr("tokenproxy.app.connections.LINGER_S", 0.05)
    with connect(usual.base_url) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(head(CHAT, "content-length: 1000000") + b"{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 401 ")
        connection.settimeout(0.01)
        while True:  # until the server closes: the test's own limit ends it otherwise
            connection.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                if not connection.recv(100):
                    break


def test_a_refused_client_reads_the_answer_although_it_sends_its_whole_body_first(
    usual: httpx.Client, strict: httpx.Client
) -> None:
    """And asks for the connection to be closed: closed at once, it would be reset."""
    body = b" " * 2**23
    for client, status in ((usual, b"401"), (strict, b"413")):
        with connect(client.base_url) as connection:
            connection.sendall(head(CHAT, f"content-length: {len(body)}", "connection: close") + body)
            assert until_closed(connection).startswith(b"HTTP/1.1 " + status)


def test_a_body_that_is_malformed_at_once_gets_one_answer(
    strict: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the request, which begins to run after it, writes nothing to what is closed for writing."""
    raised: list[object] = []
    monkeypatch.setattr(
        logging.getLogger("uvicorn.error"), "error", lambda *args, **kwargs: raised.append(args)
    )
    with connect(strict.base_url) as connection:
        connection.sendall(head("/sessions/%2F/v1", "transfer-encoding: chunked") + b"no size\r\n")
        assert until_closed(connection).startswith(b"HTTP/1.1 400 ")
    assert raised == []


@pytest.mark.parametrize("body", [BODY, b" " * 1_000_000], ids=["small", "larger than a head may be"])
def test_a_connection_is_kept_after_a_refused_request(usual: httpx.Client, body: bytes) -> None:
    with connect(usual.base_url) as kept:
        for _ in range(3):
            kept.sendall(head(CHAT, f"content-length: {len(body)}"))
            assert status_of(kept) == 401
            kept.sendall(body)


@pytest.mark.parametrize(
    "line",
    [
        b"GET http://127.0.0.1:1/v1/models HTTP/1.1",
        b"CONNECT 127.0.0.1:1 HTTP/1.1",
        b"GET //127.0.0.1:1/v1/models HTTP/1.1",
        b"GET /v1/models HTTP/9.9",
    ],
)
def test_odd_request_lines_reach_no_other_host(strict: httpx.Client, line: bytes) -> None:
    with connect(strict.base_url) as connection:
        connection.sendall(line + b"\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        status = re.match(rb"HTTP/1.1 (\d+) ", until_closed(connection))
    assert status is not None and status[1] in (b"200", b"400", b"404", b"405"), status
    # the parser takes the path out of a whole URL
    assert (status[1] == b"200") == (b"http://" in line)


@pytest.mark.parametrize(
    "lines",
    [
        b"content-length: 3\r\ntransfer-encoding: chunked",
        b"content-length: 3\r\ncontent-length: 5",
        b"transfer-encoding : chunked",
        b"content-length: 3\nx: y",
        b"content-length:\r\n 3",
    ],
)
def test_bodies_are_framed_anew_for_the_engine(strict: httpx.Client, engine: FakeVllm, lines: bytes) -> None:
    """However odd the lines are by which two servers could see two requests in one."""
    engine.reset()
    engine.canned["/v1/embeddings"] = Canned(b"[1]")
    hidden = b"GET /v1/hidden HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    with connect(strict.base_url) as sent:
        sent.sendall(
            b"POST /v1/embeddings HTTP/1.1\r\nhost: 127.0.0.1\r\n" + lines + b"\r\n\r\n0\r\n\r\n" + hidden
        )
        status = re.match(rb"HTTP/1.1 (\d+) ", until_closed(sent))
    assert status is not None and status[1] in (b"200", b"400")
    for seen in engine.seen("/v1/embeddings"):
        assert seen.header("transfer-encoding") is None
        assert seen.header("content-length") == str(len(seen.body)).encode()


_HIDDEN = b"GET /v1/hidden HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
"""A request in a body. Whoever answers it takes the body of one client for a request of another."""
_PADDED = b"\r\n" * 200_000 + _HIDDEN
"""So long that the request comes in a later read than the head."""


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.0, odd"])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("body", [b"{}", _HIDDEN, _PADDED], ids=["small", "a request", "later reads"])
def test_an_upgrade_is_ignored_and_its_body_is_served(
    usual: httpx.Client, engine: FakeVllm, protocol: str, chunked: bool, body: bytes
) -> None:
    """As a balancer sends it, which then reuses the connection for another client."""
    engine.reset()
    engine.canned["/v1/embeddings"] = Canned(b"[1]")
    framing = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    lines = "authorization: Bearer secret", "connection: Upgrade, HTTP2-Settings", f"upgrade: {protocol}"
    with connect(usual.base_url) as balancer:
        for _ in range(2):
            balancer.sendall(head("/v1/embeddings", *lines, framing) + framed)
            assert status_of(balancer) == 200
        balancer.sendall(_HEALTH)
        assert status_of(balancer) == 200
    assert [seen.body for seen in engine.seen("/v1/embeddings")] == [body] * 2
    assert engine.seen("/v1/hidden") == []


@pytest.mark.parametrize("length", ["content-length: 400060", "transfer-encoding: chunked"])
def test_a_server_that_reads_no_body_after_an_upgrade_closes(engine: FakeVllm, length: str) -> None:
    """vLLM's and Ray Serve's are uvicorn with its own protocol."""
    engine.reset()
    settings = Settings(upstreams=[engine.url], store="memory:")
    with run_server(create_app(settings)) as url, connect(httpx.URL(url)) as balancer:
        balancer.sendall(head(CHAT, "connection: keep-alive, upgrade", "upgrade: h2c", length) + _PADDED)
        answers = until_closed(balancer)
        assert answers.count(b"HTTP/1.1 ") == 1 and answers.startswith(b"HTTP/1.1 400 ")
        assert b'"param":"upgrade"' in answers
        with connect(httpx.URL(url)) as without_body:
            upgraded = _HEALTH.replace(b"host", b"connection: upgrade\r\nupgrade: h2c\r\nhost")
            for _ in range(2):
                without_body.sendall(upgraded)
                assert status_of(without_body) == 200
    assert engine.seen("/v1/hidden") == []


def test_trailers_are_no_headers(usual: httpx.Client, engine: FakeVllm) -> None:
    engine.reset()
    engine.canned["/v1/embeddings"] = Canned(b"[1]")
    request = head("/v1/embeddings", "authorization: Bearer secret", "transfer-encoding: chunked")
    with connect(usual.base_url) as balancer:
        balancer.sendall(request + b"2\r\n{}\r\n")
        balancer.sendall(b"0\r\nx-session-id: theirs\r\nauthorization: Bearer other\r\n\r\n")
        assert status_of(balancer) == 200
        balancer.sendall(request + b"0\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):  # a trailer that never ends is not kept
                balancer.sendall(b"a" * 1000)
        assert until_closed(balancer).startswith(b"HTTP/1.1 431 ")
    (seen,) = engine.seen("/v1/embeddings")
    assert seen.header("x-session-id") is None


def test_a_request_that_waits_for_100_continue_ends_its_connection(usual: httpx.Client) -> None:
    """A client that gets the response before it sent the body may send its next request in its place."""
    with connect(usual.base_url) as client:
        client.sendall(head(CHAT, f"content-length: {len(BODY)}", "expect: 100-continue"))
        answers = until_closed(client)
    assert answers.startswith(b"HTTP/1.1 401 ") and b"connection: close" in answers


@pytest.mark.parametrize(
    "second",
    [b"NONSENSE\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", b"GET /" + b"a" * 100_000],
    ids=["malformed", "connect", "endless"],
)
def test_a_pipelined_request_is_never_answered_in_place_of_the_first(
    strict: httpx.Client, engine: FakeVllm, second: bytes
) -> None:
    engine.reset()
    engine.replies.append(Reply(hold_at=0))
    with connect(strict.base_url) as client:
        client.sendall(head(CHAT, f"content-length: {len(BODY)}") + BODY)
        wait_until(lambda: engine.held == 1)
        client.sendall(second)
        assert until_closed(client) == b""
    engine.release()


def test_what_is_pipelined_is_not_read_while_a_request_runs(strict: httpx.Client, engine: FakeVllm) -> None:
    """Or one client that waits for a stream could fill the memory."""
    engine.reset()
    engine.replies.append(Reply(hold_at=0))
    with connect(strict.base_url) as client:
        client.sendall(head(CHAT, f"content-length: {len(BODY)}") + BODY)
        wait_until(lambda: engine.held == 1)
        client.settimeout(0.5)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 2**26:
                sent += client.send(_HEALTH * 1000)
        assert sent < 2**26
        client.settimeout(20)
        engine.release()
        answers = b""
        while answers.count(b"HTTP/1.1 200 ") < 3:
            answers += client.recv(65_536)


def test_tls(engine: FakeVllm, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    settings = Settings(upstreams=[engine.url], store="memory:", tls_cert=cert, tls_key=key)
    with run_server(create_app(settings), **connection_options(settings)) as url:
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=url, verify=context, trust_env=False, timeout=20) as client:
            assert client.get("/health").status_code == 200
        with connect(httpx.URL(url)) as plain:
            plain.sendall(_HEALTH)
            assert b"HTTP/1.1 200" not in until_closed(plain)
