"""The proxy's sockets: slow and large heads, slow bodies, connections per address, TLS. With both parsers."""

import contextlib
import re
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from proxy.app import create_app
from proxy.connections import connection_options
from proxy.server import run
from proxy.settings import Settings
from tests.support.fake_vllm import Canned, FakeVllm, Reply
from tests.support.sockets import BODY, CHAT, HALF_HEAD, PATIENCE_S, both_parsers, connect, head, until_closed
from tests.support.utils import run_proxy, run_server, wait_until


@pytest.fixture(params=["httptools", "h11"])
def slow(request: pytest.FixtureRequest, mortal: FakeVllm) -> Iterator[httpx.Client]:
    """A client of a proxy that is not waited for."""
    settings: dict[str, Any] = {"head_timeout_s": 0.3, "body_timeout_s": 0.3, "http_parser": request.param}
    with run_proxy([mortal], store="memory:", **settings) as client:
        yield client


def test_a_head_that_does_not_end(slow: httpx.Client) -> None:
    with connect(slow.base_url) as connection:
        connection.sendall(HALF_HEAD)
        assert until_closed(connection).startswith(b"HTTP/1.1 408 ")


def test_a_head_that_comes_a_byte_at_a_time(slow: httpx.Client) -> None:
    """Bytes that come do not extend the time."""
    start = time.monotonic()
    with connect(slow.base_url) as connection, contextlib.suppress(ConnectionError):
        while time.monotonic() - start < PATIENCE_S:
            connection.sendall(b"G" if time.monotonic() == start else b"E")
            connection.settimeout(0.02)
            with contextlib.suppress(TimeoutError):
                if connection.recv(100):
                    break
    assert time.monotonic() - start < PATIENCE_S


def test_a_connection_that_sends_nothing(slow: httpx.Client) -> None:
    with connect(slow.base_url) as connection:
        assert until_closed(connection) == b""


def test_the_second_head_of_a_connection(slow: httpx.Client) -> None:
    with connect(slow.base_url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: proxy\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        connection.sendall(HALF_HEAD)
        assert until_closed(connection).startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_stays_open(slow: httpx.Client) -> None:
    """Only a request that began has a time limit; idle ones end by keep-alive."""
    with connect(slow.base_url) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: proxy\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
            time.sleep(0.8)


def test_a_body_that_does_not_end(slow: httpx.Client, mortal: FakeVllm) -> None:
    for path in (CHAT, "/v1/completions", "/tokenize"):
        with connect(slow.base_url) as connection:
            connection.sendall(head(path, "content-length: 100") + b"{")
            answer = until_closed(connection)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"connection: close" in answer
        assert b"`body_timeout_s`" in answer and b'"param":"body"' in answer
    assert not [seen for seen in mortal.requests if seen.path == "/v1/completions"]


def test_a_long_answer_is_not_cut(slow: httpx.Client, mortal: FakeVllm) -> None:
    """The times are those of the request: what the engine needs is not counted."""
    mortal.slow_s[CHAT] = 1.0
    assert slow.post(CHAT, content=BODY).status_code == 200
    mortal.replies.append(Reply(hold_at=2))
    with slow.stream("POST", CHAT, content=BODY[:-1] + b', "stream": true}') as answer:
        time.sleep(1.0)
        mortal.release()
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_a_client_that_pipelines_half_a_head_gets_its_answer(slow: httpx.Client, mortal: FakeVllm) -> None:
    mortal.slow_s[CHAT] = 1.0
    with connect(slow.base_url) as connection:
        connection.sendall(head(CHAT, f"content-length: {len(BODY)}") + BODY + HALF_HEAD)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


@both_parsers
def test_a_slow_body_that_is_fast_enough(
    mortal: FakeVllm, monkeypatch: pytest.MonkeyPatch, parser: str
) -> None:
    monkeypatch.setattr("proxy.routes.endpoint.BODY_BYTES_PER_S", 100)
    with run_proxy([mortal], body_timeout_s=0.5, http_parser=parser) as client:
        body = BODY.ljust(400)

        def pieces() -> Iterator[bytes]:
            for start in range(0, 400, 40):
                time.sleep(0.1)  # 1 s in all, and never 0.5 s late at 100 bytes a second
                yield body[start : start + 40]

        assert client.post(CHAT, content=pieces()).status_code == 200


@both_parsers
def test_a_head_over_the_limit_that_never_ends(mortal: FakeVllm, parser: str) -> None:
    with (
        run_proxy([mortal], head_limit_bytes=4096, http_parser=parser) as client,
        connect(client.base_url) as connection,
    ):
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(HALF_HEAD if _ == 0 else b"a" * 1000)
        answer = until_closed(connection)
        # h11 refuses such a head itself
        assert answer.startswith(
            (b"HTTP/1.1 431 ", b"HTTP/1.1 400 ") if parser == "h11" else b"HTTP/1.1 431 "
        )


@both_parsers
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused_before_it_is_read(
    mortal: FakeVllm, monkeypatch: pytest.MonkeyPatch, parser: str, chunked: bool
) -> None:
    monkeypatch.setattr("proxy.connections.LINGER_S", 0.3)
    with run_proxy([mortal], body_limit_bytes=1000, http_parser=parser) as client:
        length = "transfer-encoding: chunked" if chunked else "content-length: 1000000000"
        with connect(client.base_url) as connection:
            connection.sendall(head(CHAT, length) + (b"800\r\n" + b" " * 2048 if chunked else b" "))
            assert until_closed(connection).startswith(b"HTTP/1.1 413 ")  # and closed soon


@both_parsers
def test_a_body_of_a_refused_request_does_not_keep_its_connection(
    mortal: FakeVllm, monkeypatch: pytest.MonkeyPatch, parser: str
) -> None:
    """A byte now and then after the 401 would postpone the end of keep-alive for ever."""
    monkeypatch.setattr("proxy.connections.LINGER_S", 0.5)
    with (
        run_proxy([mortal], api_key="secret", http_parser=parser) as client,
        connect(client.base_url) as connection,
    ):
        connection.sendall(head(CHAT, "content-length: 1000000") + b"{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 401 ")
        deadline = time.monotonic() + PATIENCE_S
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                connection.sendall(b" ")
                time.sleep(0.02)
        assert time.monotonic() < deadline


@both_parsers
def test_a_connection_is_kept_after_a_refused_request(mortal: FakeVllm, parser: str) -> None:
    with (
        run_proxy([mortal], api_key="secret", http_parser=parser) as client,
        connect(client.base_url) as kept,
    ):
        for _ in range(3):
            kept.sendall(head(CHAT, f"content-length: {len(BODY)}"))
            assert kept.recv(1000).startswith(b"HTTP/1.1 401 ")
            kept.sendall(BODY)


@both_parsers
def test_connections_per_address(mortal: FakeVllm, parser: str) -> None:
    with run_proxy([mortal], connections_per_address=5, http_parser=parser) as client, ExitStack() as stack:
        opened = [stack.enter_context(connect(client.base_url)) for _ in range(5)]
        for connection in opened:  # so that all are accepted before the sixth
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: proxy\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        with connect(client.base_url) as sixth:
            answer = until_closed(sixth)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in answer
        opened[0].close()
        wait_until(lambda: client.get("/health").status_code == 200)


@both_parsers
def test_websocket_does_not_bypass_the_limits(mortal: FakeVllm, parser: str) -> None:
    with run_proxy([mortal], http_parser=parser) as client:
        upgrade = {"upgrade": "websocket", "connection": "upgrade", "sec-websocket-version": "13"}
        upgrade["sec-websocket-key"] = "dGhlIHNhbXBsZSBub25jZQ=="
        assert client.get("/health", headers=upgrade).status_code == 200


@pytest.mark.parametrize(
    "line",
    [
        b"GET @127.0.0.1:1/v1/models HTTP/1.1",
        b"GET http://127.0.0.1:1/v1/models HTTP/1.1",
        b"GET 127.0.0.1:1 HTTP/1.1",
        b"GET * HTTP/1.1",
        b"CONNECT 127.0.0.1:1 HTTP/1.1",
        b"TRACE / HTTP/1.1",
        b"GET /\xff HTTP/1.1",
        b"GET /%ff%fe HTTP/1.1",
        b"GET //127.0.0.1:1/v1/models HTTP/1.1",
        b"GET /v1/models HTTP/9.9",
        b"GET",
    ],
)
@both_parsers
def test_odd_request_lines_reach_no_other_host(mortal: FakeVllm, parser: str, line: bytes) -> None:
    with run_proxy([mortal], http_parser=parser) as client, connect(client.base_url) as connection:
        connection.sendall(line + b"\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        status = re.match(rb"HTTP/1.1 (\d+) ", until_closed(connection))
        assert status is not None and status[1] in (b"200", b"400", b"404", b"405"), status
        # httptools takes the path out of a whole URL; h11 does not look at the version
        served = b"http://" in line if parser == "httptools" else b"HTTP/9.9" in line
        assert (status[1] == b"200") == served


@pytest.mark.parametrize(
    "lines",
    [
        b"content-length: 3\r\ntransfer-encoding: chunked",
        b"content-length: 3\r\ncontent-length: 5",
        b"transfer-encoding: chunked, identity",
        b"transfer-encoding : chunked",
        b"content-length: +3",
        b"content-length: 3\nx: y",
        b"content-length:\r\n 3",
        b"host: other\r\ncontent-length: 3",
    ],
)
@both_parsers
def test_no_second_request_hides_in_a_body(mortal: FakeVllm, parser: str, lines: bytes) -> None:
    mortal.canned["/v1/embeddings"] = Canned(b"[1]")
    hidden = b"POST /pause HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    with run_proxy([mortal], http_parser=parser, host="0.0.0.0") as client, connect(client.base_url) as sent:
        sent.sendall(
            b"POST /v1/embeddings HTTP/1.1\r\nhost: 127.0.0.1\r\n" + lines + b"\r\n\r\n0\r\n\r\n" + hidden
        )
        status = re.match(rb"HTTP/1.1 (\d+) ", until_closed(sent))
    assert status is not None and status[1] in (b"200", b"400")
    assert mortal.seen("/pause") == []
    for seen in mortal.seen("/v1/embeddings"):
        assert seen.header("transfer-encoding") is None
        assert seen.header("content-length") == str(len(seen.body)).encode()


# --- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for this machine, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


@both_parsers
def test_tls(mortal: FakeVllm, certificate: tuple[Path, Path], parser: str) -> None:
    cert, key = certificate
    settings = Settings(
        upstreams=[mortal.url],
        store="memory:",
        tls_cert=cert,
        tls_key=key,
        http_parser=parser,
    )
    with run_server(create_app(settings), **connection_options(settings)) as url:
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=url, verify=context, trust_env=False) as client:
            assert client.get("/health").status_code == 200
        with connect(httpx.URL(url)) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: proxy\r\n\r\n")
            assert b"HTTP/1.1 200" not in until_closed(plain)


def test_the_server_uses_the_options(mortal: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[uvicorn.Config] = []

    def serve(server: uvicorn.Server) -> None:
        configs.append(server.config)

    monkeypatch.setattr("uvicorn.Server.run", serve)
    run(Settings(upstreams=[mortal.url], port=0, store="memory:", head_limit_bytes=4096))
    [config] = configs
    assert config.h11_max_incomplete_event_size == 4096 and config.ws == "none"
    assert getattr(config.http, "limits").head_bytes == 4096  # noqa: B009 - made at run time
