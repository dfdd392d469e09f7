"""What is checked before a request is routed: OPTIONS, CORS, the Host header, the size of the head."""

from collections.abc import Iterator

import httpx
import pytest

from proxy.routes.auth import OPEN_PATHS
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, send_and_keep, wait_until

_PAGE = "https://app.example.com"
_BODY = {"messages": [user("Hi")]}
_PREFLIGHT = {
    "origin": _PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-session-id",
}


@pytest.fixture(scope="module")
def cors(tiny_model: TinyModel) -> Iterator[httpx.Client]:
    """A client of a proxy with keys, whose pages may be of one origin."""
    with (
        FakeVllm(tiny_model) as engine,
        run_proxy([engine], api_key="secret", cors_origins=_PAGE, store="memory:") as client,
    ):
        yield client


# --- OPTIONS


@pytest.mark.parametrize(
    "path, allowed",
    [
        ("/v1/chat/completions", "POST, OPTIONS"),
        ("/sessions/s/v1/chat/completions", "POST, OPTIONS"),
        ("/v1/sessions", "POST, GET, OPTIONS"),
        ("/sessions/a", "GET, DELETE, OPTIONS"),
        ("/health", "GET, HEAD, OPTIONS"),
        ("/v1/models", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
        ("/pause", "POST, OPTIONS"),
        ("/some/where", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
    ],
)
def test_options_is_answered_here(client: httpx.Client, fake: FakeVllm, path: str, allowed: str) -> None:
    answer = client.options(path, headers=_PREFLIGHT)
    assert (answer.status_code, answer.headers["allow"], answer.content) == (204, allowed, b"")
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert [seen.path for seen in fake.requests if seen.method == "OPTIONS"] == []


def test_options_with_keys_reaches_no_engine(mortal: FakeVllm) -> None:
    with run_proxy([mortal], api_key="secret") as client:
        before = len(mortal.requests)
        for path in ("/pause", "/v1/models", "/v1/load_lora_adapter", "/anything"):
            assert client.options(path).status_code == 204
        assert "OPTIONS" not in {seen.method for seen in mortal.requests[before:]}


# --- CORS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/sessions/s/v1/models"])
def test_a_preflight_of_an_allowed_page(cors: httpx.Client, path: str) -> None:
    answer = cors.options(path, headers=_PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == _PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,x-session-id"


def test_a_preflight_of_another_page(cors: httpx.Client) -> None:
    answer = cors.options("/v1/models", headers={**_PREFLIGHT, "origin": "https://evil.example"})
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("key, status", [("secret", 200), ("wrong", 401)])
def test_answers_to_an_allowed_page_can_be_read(cors: httpx.Client, key: str, status: int) -> None:
    """Its errors too: a page that cannot read a 401 shows a network error."""
    for path in ("/v1/chat/completions", "/sessions/s/v1/chat/completions"):
        headers = {"origin": _PAGE, "authorization": f"Bearer {key}"}
        answer = cors.post(path, json=_BODY, headers=headers)
        assert answer.status_code == status
        assert answer.headers.get_list("access-control-allow-origin") == [_PAGE]
        assert answer.headers["access-control-expose-headers"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


def test_a_client_that_leaves_aborts_the_engine_with_every_door(mortal: FakeVllm) -> None:
    """No middleware hides the disconnect."""
    settings = {"cors_origins": "*", "allowed_hosts": "proxy,127.0.0.1"}
    with run_proxy([mortal], **settings) as client:
        mortal.replies.append(Reply(hold_at=1))
        body = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true}'
        with send_and_keep(client.base_url, "/v1/chat/completions", body):
            wait_until(lambda: mortal.running)
        wait_until(lambda: mortal.aborted)


# --- the Host header


@pytest.fixture(scope="module")
def hosts(tiny_model: TinyModel) -> Iterator[httpx.Client]:
    with (
        FakeVllm(tiny_model) as engine,
        run_proxy(
            [engine], allowed_hosts="Proxy.example.com,*.internal,::1,127.0.0.1", store="memory:"
        ) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "host", ["proxy.example.com", "PROXY.example.com:8100", "a.internal", "a.b.internal:1", "[::1]:8100"]
)
def test_hosts_that_are_allowed(hosts: httpx.Client, host: str) -> None:
    assert hosts.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "internal", "proxy.example.com.evil", "xinternal", "", "::1", "proxy.example.com."],
)
def test_hosts_that_are_not(hosts: httpx.Client, host: str) -> None:
    for method in ("GET", "OPTIONS"):
        answer = hosts.request(method, "/v1/models", headers={"host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "host_not_allowed")


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_health_checks_may_ask_by_address(hosts: httpx.Client, path: str) -> None:
    assert hosts.get(path, headers={"host": "10.1.2.3:8100"}).status_code == 200
    assert hosts.post(path, headers={"host": "10.1.2.3:8100"}).status_code == 400


# --- the head


@pytest.mark.parametrize("where", ["header", "path", "query"])
def test_a_head_over_the_limit(mortal: FakeVllm, where: str) -> None:
    with run_proxy([mortal], head_limit_bytes=2048) as client:
        for size, status in ((1000, 200), (3000, 431)):
            filler = "a" * size
            path = {"header": "/health", "path": f"/{filler}", "query": f"/health?{filler}"}[where]
            answer = client.get(path, headers={"x-filler": filler} if where == "header" else {})
            assert answer.status_code in ((404,) if (where, status) == ("path", 200) else (status,))
            if status == 431:
                assert answer.json()["error"]["type"] == "RequestHeaderFieldsTooLargeError"
