"""The proxy's own API keys: who is let through, as which tenant, and what the engine sees."""

import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from proxy.http import Request
from proxy.routes.auth import OPEN_PATHS
from proxy.settings import Settings
from tests.support.fake_vllm import FakeVllm
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_app, run_proxy, wait_until

_BODY = {"messages": [{"role": "user", "content": "Hi"}]}
_BEARER = {"authorization": "Bearer secret"}
_CHAT, _TOKENS = "/v1/chat/completions", "/v1/chat/completions/tokens"
_ROUTES = [
    _CHAT,
    _TOKENS,
    "/tokenize",
    "/chat/completions/",
    "/v1/tokenize",
    "/sessions/s/v1/chat/completions",
]
_WRONG: list[dict[str, str]] = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "secret"},
    {"authorization": "Basic secret"},
    {"authorization": "Bearer"},
    {"x-api-key": ""},
    {"x-api-key": "Bearer secret"},
]


def _tenant(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


@pytest.fixture
def tenants(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tenants of requests to `GET /v1/sessions`, in their order."""
    seen: list[str] = []

    async def reply(self: object, request: Request, services: object) -> tuple[int, object]:
        seen.append(request.tenant)
        return 200, {}

    monkeypatch.setattr("proxy.routes.sessions.Sessions.reply", reply)
    return seen


@pytest.fixture(scope="module")
def keyed(tiny_model: TinyModel) -> Iterator[tuple[FakeVllm, httpx.Client]]:
    """An engine, and a client of a proxy with two keys in front of it."""
    with FakeVllm(tiny_model) as engine:
        keys: Any = ["secret", "other"]
        with run_proxy([engine], api_key=keys, upstream_api_key="engine", store="memory:") as client:
            yield engine, client


@pytest.mark.parametrize("path", _ROUTES)
def test_a_key_is_required_and_never_reaches_the_engine(
    keyed: tuple[FakeVllm, httpx.Client], path: str
) -> None:
    engine, client = keyed
    engine.requests.clear()
    for headers in _WRONG:
        refused = client.post(path, json=_BODY, headers=headers)
        assert refused.status_code == 401, headers
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["code"] == "invalid_api_key"
    assert not any(seen.method == "POST" for seen in engine.requests)
    for headers in (_BEARER, {"authorization": "bearer other"}, {"x-api-key": "secret"}):
        assert client.post(path, json=_BODY, headers=headers).status_code == 200
    assert sum(seen.method == "POST" for seen in engine.requests) == 3
    for seen in engine.requests:
        assert seen.header("authorization") == b"Bearer engine"
        assert seen.header("x-api-key") is None


@pytest.mark.parametrize(
    "headers, key",
    [
        ({"authorization": "Bearer secret"}, "secret"),
        ({"authorization": "BEARER  secret"}, "secret"),
        ({"authorization": "Bearer other"}, "other"),
        ({"x-api-key": "other"}, "other"),
        ({"authorization": "Bearer none", "x-api-key": "other"}, "other"),
        ({"authorization": "Bearer secret", "x-api-key": "other"}, "secret"),
    ],
)
def test_each_key_is_a_tenant(
    keyed: tuple[FakeVllm, httpx.Client], tenants: list[str], headers: dict[str, str], key: str
) -> None:
    for path in ("/v1/sessions", "/sessions/any/v1/sessions"):
        assert keyed[1].get(path, headers=headers).status_code == 200
    assert tenants == [_tenant(key)] * 2


def test_a_credential_that_is_not_ours_passes_through(mortal: FakeVllm) -> None:
    """A client may send the proxy's key in one header and the engine's in the other."""
    with run_proxy([mortal], api_key="secret") as client:
        headers = {"x-api-key": "secret", "authorization": "Bearer engine"}
        assert client.get("/v1/models", headers=headers).status_code == 200
    assert mortal.last("/v1/models").header("authorization") == b"Bearer engine"
    assert mortal.last("/v1/models").header("x-api-key") is None


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_health_checks_and_scrapers_need_no_key(keyed: tuple[FakeVllm, httpx.Client], path: str) -> None:
    assert keyed[1].get(path).status_code == 200


@pytest.mark.parametrize(
    "method, path",
    [
        ("GET", "/v1/models"),
        ("GET", "/models/"),
        ("GET", "/openapi.json"),
        ("POST", "/anything"),
        ("GET", "/health//"),
        ("GET", "//health"),
        ("GET", "/v1/health"),
    ],
)
def test_everything_else_is_closed(keyed: tuple[FakeVllm, httpx.Client], method: str, path: str) -> None:
    assert keyed[1].request(method, path).status_code == 401


def test_all_clients_are_one_tenant_with_only_the_engines_key(mortal: FakeVllm, tenants: list[str]) -> None:
    mortal.api_keys = ("engine",)
    with run_proxy([mortal], upstream_api_key="engine") as client:
        tenants.clear()
        for headers in ({}, _BEARER):
            assert client.get("/v1/sessions", headers=headers).status_code == 200
        assert client.post(_TOKENS, json=_BODY, headers=_BEARER).status_code == 200
    assert tenants == ["", ""]
    assert {seen.header("authorization") for seen in mortal.requests} == {b"Bearer engine"}


def test_engine_gets_the_clients_key_if_the_proxy_has_none(fake: FakeVllm, client: httpx.Client) -> None:
    client.post(_TOKENS, json=_BODY, headers=_BEARER)
    assert fake.last().header("authorization") == b"Bearer secret"


def test_an_engine_that_wants_a_key_is_reported(mortal: FakeVllm) -> None:
    mortal.api_keys = ("engine",)
    with run_app(Settings(upstreams=[mortal.url])) as client:
        wait_until(lambda: mortal.seen("/v1/models"))
        wait_until(lambda: "not checked" not in client.get("/ready").text)
        [engine] = client.get("/ready").json()["engines"]
    assert engine["ready"] is False
    assert "set `upstream_api_key`" in engine["problem"]
