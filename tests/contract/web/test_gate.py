"""What is checked before a request is routed: OPTIONS, CORS, the Host header, the sizes of head and body."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, user
from tests.support.utils import run_proxy, send_and_keep, wait_until
from tokenproxy.web.gate import HEAD_LIMIT_BYTES, OPEN_PATHS

_PAGE = "https://app.example.com"
_BODY = {"messages": [user("Hi")]}
_PREFLIGHT = {
    "origin": _PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-session-id",
}
_HOSTS = "Proxy.example.com,*.internal,::1,127.0.0.1"
_LIMIT = 1000
_EVERY_METHOD = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"


@pytest.fixture(scope="module")
def closed(engine: FakeVllm) -> Iterator[httpx.Client]:
    """A client of a proxy with a key, a page, hosts and a small limit of bodies."""
    doors: dict[str, Any] = {"cors_origins": _PAGE, "allowed_hosts": _HOSTS, "body_limit_bytes": _LIMIT}
    with run_proxy([engine], api_key="secret", store="memory:", **doors) as client:
        yield client


def _bearer(key: str = "secret") -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_options_is_answered_here(client: httpx.Client, fake: FakeVllm) -> None:
    for path, allowed in ((CHAT, "POST, OPTIONS"), ("/v1/models", _EVERY_METHOD)):
        answer = client.options(path, headers=_PREFLIGHT)
        assert (answer.status_code, answer.headers["allow"], answer.content) == (204, allowed, b"")
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert [seen.path for seen in fake.requests if seen.method == "OPTIONS"] == []


def test_pages_of_allowed_origins(closed: httpx.Client) -> None:
    """They read errors too: a page that cannot read a 401 shows a network error."""
    for path in (CHAT, "/sessions/s/v1/models"):
        answer = closed.options(path, headers=_PREFLIGHT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == _PAGE
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization,x-session-id"
    assert closed.options("/pause").status_code == 204  # without a key
    refused = closed.options("/v1/models", headers={**_PREFLIGHT, "origin": "https://evil.example"})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers

    for key, status in (("secret", 200), ("wrong", 401)):
        answer = closed.post(CHAT, json=_BODY, headers={"origin": _PAGE, **_bearer(key)})
        assert answer.status_code == status
        assert answer.headers.get_list("access-control-allow-origin") == [_PAGE]
        assert answer.headers["access-control-expose-headers"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


def test_a_client_that_leaves_aborts_the_engine(mortal: FakeVllm) -> None:
    """No middleware hides the disconnect."""
    with run_proxy([mortal], cors_origins="*", allowed_hosts="proxy,127.0.0.1") as client:
        mortal.replies.append(Reply(hold_at=1))
        with send_and_keep(client.base_url, CHAT, json.dumps({**_BODY, "stream": True}).encode()):
            wait_until(lambda: mortal.running)
        wait_until(lambda: mortal.aborted)


def test_hosts(closed: httpx.Client) -> None:
    """Health checks may ask by any address."""
    for host in ("PROXY.example.com:8100", "a.b.internal:1", "a.internal", "[::1]:8100"):
        assert closed.get("/v1/models", headers={"host": host, **_bearer()}).status_code == 200
    for host in ("evil.example", "internal", "xinternal", "proxy.example.com.evil", ""):
        answer = closed.get("/v1/models", headers={"host": host, **_bearer()})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "host_not_allowed")
    for path in sorted(OPEN_PATHS):
        headers = {"host": "10.1.2.3:8100"}
        assert closed.get(path, headers=headers).status_code == 200
        assert closed.post(path, headers=headers).status_code == 400


@pytest.mark.parametrize("host", ["evil.example", "10.1.2.3:8100", "[fd00::1]:8100", ""])
def test_details_without_a_key_are_for_addresses_and_expected_names(client: httpx.Client, host: str) -> None:
    """A page whose own name resolves to this machine must not read them; health checks may ask."""
    headers = {"host": host}
    is_address = host[:1] in ("1", "[")
    assert client.get("/health", headers=headers).status_code == 200
    ready = client.get("/ready", headers=headers)
    assert (ready.status_code, "engines" in ready.json()) == (200, is_address)
    metrics = client.get("/metrics", headers=headers)
    assert metrics.status_code == (200 if is_address else 400)
    assert is_address or metrics.json()["error"]["code"] == "host_not_allowed"


def test_a_head_over_the_limit(closed: httpx.Client) -> None:
    """Header, path and query count together."""
    headers = {"x-filler": "a" * (HEAD_LIMIT_BYTES - 2000), **_bearer()}
    assert closed.get("/health", headers=headers).status_code == 200
    for path in (f"/{'a' * 3000}", f"/health?{'a' * 3000}"):
        answer = closed.get(path, headers=headers)
        assert answer.status_code == 431
        assert answer.json()["error"]["type"] == "RequestHeaderFieldsTooLargeError"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings"])
def test_a_body_over_the_limit(closed: httpx.Client, engine: FakeVllm, path: str, chunked: bool) -> None:
    before = len(engine.seen(path))
    for size, refused in [(_LIMIT, False), (_LIMIT + 1, True), (_LIMIT * 50, True)]:
        body = json.dumps(_BODY).encode().ljust(size)
        pieces = (body[start : start + 100] for start in range(0, size, 100))
        answer = closed.post(path, content=pieces if chunked else body, headers=_bearer())
        assert (answer.status_code == 413) == refused
        assert not refused or "body_limit_bytes" in answer.json()["error"]["message"]
    assert len(engine.seen(path)) - before <= 1


def test_an_announced_body_is_refused_before_it_is_sent(engine: FakeVllm) -> None:
    with (
        run_proxy([engine], body_limit_bytes=_LIMIT) as client,
        send_and_keep(client.base_url, "/tokenize", b"", announced=_LIMIT + 1) as connection,
    ):
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
