"""Credentials that only the engine can verify."""

import asyncio
import contextlib
import hashlib
from typing import Any

import httpx
import pytest

from proxy.errors import ApiError, EngineBroken, EngineTimeout, EngineUnavailable, Unauthorized
from proxy.http import BytesResponse, Request, Response
from proxy.routes import credentials as module
from proxy.routes.credentials import EngineCredentials
from proxy.settings import Settings
from proxy.types import Headers, Scope
from tests.support.fake_vllm import Canned, FakeVllm
from tests.support.utils import run_app, run_proxy, wait_until

_ANNA, _BERT = b"Bearer anna", b"Bearer bert"
_CHAT = "/v1/chat/completions"
_BODY = {"messages": [{"role": "user", "content": "Hi"}]}


def _tenant(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _scope(authorization: bytes | None = None, name: bytes = b"authorization") -> Scope:
    return {"headers": [(b"accept", b"*/*"), *([(name, authorization)] if authorization is not None else [])]}


class Engine:
    """Verifies credentials as vLLM does, and has a clock."""

    def __init__(self, *keys: bytes) -> None:
        self.keys = keys
        self.now = 0.0
        self.status: int | None = None
        self.received: list[Headers] = []
        self.gate: asyncio.Event | None = None
        self.credentials = EngineCredentials(self.send, lambda: self.now)

    async def send(self, request: Request) -> Response:
        assert (request.method, request.path, request.body) == ("GET", "/v1/models", b"")
        self.received.append(request.headers)
        if self.gate is not None:
            await self.gate.wait()
        sent = dict(request.headers).get(b"authorization")
        status = self.status or (200 if not self.keys or sent in self.keys else 401)
        return BytesResponse(status, [], b"{}")

    async def tenant(self, *header: bytes) -> str:
        return await self.credentials.tenant_of(_scope(*header))


@pytest.mark.parametrize("header", [[], [_ANNA], [b"nonsense"]])
async def test_all_clients_are_one_tenant_of_an_engine_without_keys(header: list[bytes]) -> None:
    engine = Engine()
    assert [await engine.tenant(*header) for _ in range(3)] == ["", "", ""]
    assert engine.received == [[]]  # once, and nobody's credential with it
    engine.now = module.OPEN_S
    assert await engine.tenant(*header) == ""
    assert engine.received == [[], []]


async def test_each_accepted_key_is_a_tenant() -> None:
    engine = Engine(_ANNA, _BERT)
    for _ in range(3):
        assert (await engine.tenant(_ANNA), await engine.tenant(_BERT)) == (_tenant("anna"), _tenant("bert"))
    assert engine.received == [[], [(b"authorization", _ANNA)], [(b"authorization", _BERT)]]


async def test_scheme_is_not_part_of_the_tenant() -> None:
    engine = Engine(_ANNA, b"bearer anna", b"anna")
    assert {await engine.tenant(value) for value in engine.keys} == {_tenant("anna")}


async def test_an_engine_that_takes_another_header() -> None:
    engine = Engine(_ANNA)
    with pytest.raises(Unauthorized):
        await engine.tenant(b"anna", b"x-api-key")
    assert engine.received[1:] == [[(b"x-api-key", b"anna")]]


@pytest.mark.parametrize("header", [[], [b""], [b"  "], [b"Bearer eve"]])
async def test_a_missing_or_refused_key(header: list[bytes]) -> None:
    engine = Engine(_ANNA)
    for _ in range(2):
        with pytest.raises(Unauthorized) as refused:
            await engine.tenant(*header)
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
        assert (b"www-authenticate", b"Bearer") in refused.value.headers()
    assert len(engine.received) == (2 if header == [b"Bearer eve"] else 1)


@pytest.mark.parametrize(
    "header, lifetime_s",
    [(_ANNA, module.ACCEPTED_S), (b"Bearer eve", module.REFUSED_S)],
    ids=["accepted", "refused"],
)
async def test_a_verdict_is_remembered_for_a_while(
    monkeypatch: pytest.MonkeyPatch, header: bytes, lifetime_s: float
) -> None:
    monkeypatch.setattr(module, "OPEN_S", 1000.0)
    engine = Engine(_ANNA)

    async def ask() -> int:
        with contextlib.suppress(Unauthorized):
            await engine.tenant(header)
        return len(engine.received)

    assert await ask() == 2
    engine.now = lifetime_s - 0.1
    assert await ask() == 2
    engine.now = lifetime_s
    assert await ask() == 3


async def test_a_revoked_key_is_refused_after_its_verdict_expired() -> None:
    engine = Engine(_ANNA, _BERT)
    await engine.tenant(_ANNA)
    engine.keys = (_BERT,)
    assert await engine.tenant(_ANNA) == _tenant("anna")
    engine.now = module.ACCEPTED_S
    with pytest.raises(Unauthorized):
        await engine.tenant(_ANNA)


async def test_the_least_recently_used_verdicts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 2)
    keys = [b"Bearer %d" % number for number in range(3)]
    engine = Engine(*keys)
    for number in (0, 1, 0, 2, 0):
        await engine.tenant(keys[number])
    assert len(engine.received) == 1 + 3
    await engine.tenant(keys[1])
    assert len(engine.received) == 1 + 4


async def test_concurrent_requests_ask_once() -> None:
    engine = Engine(_ANNA)
    engine.gate = asyncio.Event()
    tasks = [asyncio.create_task(engine.tenant(_ANNA)) for _ in range(10)]
    await asyncio.sleep(0)
    tasks[0].cancel()  # the client that started the verification leaves; the others still get the answer
    await asyncio.sleep(0)
    engine.gate.set()
    assert await asyncio.gather(*tasks[1:]) == [_tenant("anna")] * 9
    assert len(engine.received) == 2


@pytest.mark.parametrize(
    "status, kind",
    [
        (500, EngineBroken),
        (404, EngineBroken),
        (302, EngineBroken),
        (503, EngineUnavailable),
        (429, EngineUnavailable),
    ],
)
async def test_other_status_is_not_a_verdict(status: int, kind: type[ApiError]) -> None:
    engine = Engine(_ANNA)
    engine.status = status
    for _ in range(2):
        with pytest.raises(kind, match=f"answers {status} to GET /v1/models"):
            await engine.tenant(_ANNA)
    assert len(engine.received) == 2  # not remembered
    engine.status = None
    assert await engine.tenant(_ANNA) == _tenant("anna")


async def test_an_engine_that_does_not_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.01)
    engine = Engine()
    engine.gate = asyncio.Event()
    with pytest.raises(EngineTimeout, match="no credential can be verified"):
        await engine.tenant()


async def test_closing_cancels_running_verifications() -> None:
    engine = Engine()
    engine.gate = asyncio.Event()
    task = asyncio.create_task(engine.tenant())
    await asyncio.sleep(0)
    await engine.credentials.aclose()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- in front of an engine


@pytest.fixture
def guarded(mortal: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A proxy in front of an engine that asks for keys since it was found ready."""
    monkeypatch.setattr(module, "OPEN_S", 0.0)
    with run_proxy([mortal], store="memory:", watch_interval_s=60) as client:
        mortal.api_keys = ("anna", "bert")
        mortal.requests.clear()
        yield client
        mortal.api_keys = ()


@pytest.mark.parametrize(
    "method, path, body",
    [
        ("POST", _CHAT, _BODY),
        ("POST", "/chat/completions", _BODY),
        ("POST", "/v1/chat/completions/tokens/", {"prompt_ids": [1, 74]}),
        ("GET", "/v1/sessions", None),
        ("POST", "/sessions", {}),
        ("GET", "/sessions/s", None),
        ("DELETE", "/v1/sessions/s", None),
        ("GET", "/v1/sessions/s/samples", None),
        ("POST", "/v1/sessions/s/reward", {"reward": 1}),
        ("GET", "/sessions/s/v1/sessions", None),
    ],
)
def test_turns_and_sessions_need_a_key_of_the_engine(
    guarded: httpx.Client, mortal: FakeVllm, method: str, path: str, body: Any
) -> None:
    for headers in ({}, {"authorization": "Bearer eve"}):
        refused = guarded.request(method, path, json=body, headers=headers)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert refused.json()["error"]["code"] == "invalid_api_key"
    assert {seen.path for seen in mortal.requests} == {"/v1/models"}
    accepted = guarded.request(method, path, json=body, headers={"authorization": "Bearer anna"})
    assert accepted.status_code in (200, 201, 404), accepted.text
    assert accepted.status_code != 404 or accepted.json()["error"]["code"] == "session_not_found"


def test_the_engine_is_asked_once_for_each_key(guarded: httpx.Client, mortal: FakeVllm) -> None:
    for _ in range(3):
        for key in ("anna", "bert", "eve"):
            guarded.get("/v1/sessions", headers={"authorization": f"Bearer {key}"})
    sent = [seen.header("authorization") for seen in mortal.seen("/v1/models")]
    assert [value for value in sent if value] == [b"Bearer anna", b"Bearer bert", b"Bearer eve"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version"])
def test_other_routes_verify_nothing(guarded: httpx.Client, mortal: FakeVllm, path: str) -> None:
    assert guarded.get(path).status_code == 200
    assert guarded.post("/tokenize", json={"prompt": "hello"}).status_code == 200
    assert mortal.seen("/v1/models") == []


def test_broken_engine_accepts_no_credential(guarded: httpx.Client, mortal: FakeVllm) -> None:
    headers = {"authorization": "Bearer anna"}
    mortal.canned["/v1/models"] = Canned(b"", 500)
    broken = guarded.get("/v1/sessions", headers=headers)
    assert (broken.status_code, broken.json()["error"]["type"]) == (502, "BadGatewayError")
    mortal.kill()
    gone = guarded.get("/v1/sessions", headers=headers)
    assert (gone.status_code, gone.headers["retry-after"]) == (503, "2")


def test_no_engine_no_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.fleet.fleet.FIRST_ANSWER_TIMEOUT_S", 0.1)
    with run_app(Settings(upstreams=["http://127.0.0.1:9"], store="memory:")) as client:
        wait_until(lambda: client.get("/ready").json()["engines"][0]["problem"] != "not checked yet")
        assert client.get("/v1/sessions").status_code == 503


def test_an_open_engine_is_asked_once(mortal: FakeVllm) -> None:
    with run_proxy([mortal], store="memory:", watch_interval_s=60) as client:
        mortal.requests.clear()
        for headers in ({}, {"authorization": "Bearer anna"}):
            assert client.post(_CHAT, json=_BODY, headers=headers).status_code == 200
            assert client.get("/v1/sessions", headers=headers).status_code == 200
        assert mortal.seen("/v1/models") == []
