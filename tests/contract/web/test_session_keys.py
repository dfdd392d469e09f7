"""Keys for one session each: what an agent that has one, and a shell, can and cannot do."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from chat_tokenizer.cache import BoundedCache
from tests.support.fake_vllm import Canned, FakeVllm
from tests.support.talk import CHAT, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy
from tokenproxy.base.errors import EngineUnavailable, Unauthorized
from tokenproxy.base.http import Request
from tokenproxy.cli.key import add_key
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.echo import Signer
from tokenproxy.record.session_keys import LEEWAY_S, SessionKeys
from tokenproxy.record.store import Limits, Session, Store, StoreError, session_id
from tokenproxy.store.urls import make_store
from tokenproxy.web import turns
from tokenproxy.web.parameters import named_session
from tokenproxy.web.routes import all_routes

_BODY: dict[str, Any] = {"messages": [user("Hi")], "max_tokens": 4}
_TRAINER = {"x-api-key": "trainer"}
_TURNS, _OPEN, _INFERENCE, _READ, _ADMIN = "turns", "open", "inference", "read", "admin"
_TABLE = {
    _OPEN: "GET,HEAD /health; GET,HEAD /ready; GET,HEAD /viewer; GET,HEAD /viewer/; "
    "GET,HEAD /viewer/static/x",
    _TURNS: "POST /v1/chat/completions; POST /v1/chat/completions/tokens; POST /v1/completions; "
    "POST /inference/v1/generate; POST /v1/messages; POST /v1/messages/count_tokens; POST /v1/responses; "
    "POST /v1/responses/compact; GET,DELETE /v1/responses/x; POST /tokenize; GET,HEAD /; POST /generate; "
    "POST /chat",
    _INFERENCE: "POST /v1/sessions; DELETE /v1/sessions/x; POST /v1/sessions/x/reward; "
    "POST /v1/sessions/x/end; POST /finish_session",
    _READ: "GET /v1/sessions; GET /v1/sessions/x; GET /v1/sessions/x/samples; GET /v1/sessions/x/traces; "
    "GET /v1/samples; POST /v1/samples/ack; GET /v1/samples/consumers; DELETE /v1/samples/consumers/x; "
    "GET /viewer/sessions; GET /viewer/sessions/x; GET /viewer/sessions/x/tokens; "
    "GET /viewer/sessions/x/drift; GET,HEAD /metrics",
    _ADMIN: "GET,POST,DELETE /admin/replicas; POST /admin/replicas/drain; POST /admin/flush",
}
"""Which scope each route of the proxy needs, besides the engine's admin routes. A new route stands here."""
_OF_THE_ENGINE = {
    _TURNS: "GET /v1/models",
    _INFERENCE: "POST /v1/embeddings; POST /detokenize; POST /v1/chat/completions/render; POST /score",
    _READ: "GET /version; GET /load",
    _ADMIN: "POST /pause; POST /collective_rpc; GET /server_info; POST /what/a/new/vllm/adds",
}
_MAY = {
    "": {_OPEN},
    "of a session": {_OPEN, _TURNS},
    "turns": {_OPEN, _TURNS},
    "inference": {_OPEN, _TURNS, _INFERENCE},
    "everything": {_OPEN, _TURNS, _INFERENCE, _READ, _ADMIN},
}


def _listed(table: dict[str, str]) -> dict[tuple[str, str], str]:
    return {
        (method, path): scope
        for scope, routes in table.items()
        for methods, path in (route.split() for route in routes.split("; "))
        for method in methods.split(",")
    }


@dataclass
class Proxy:
    """A proxy with keys of each kind."""

    client: httpx.Client
    engine: FakeVllm
    keys: dict[str, str]

    def create(self, session: str, **fields: Any) -> str:
        """Create a session as the trainer; returns its key."""
        created = self.client.post("/v1/sessions", json={"id": session, **fields}, headers=_TRAINER)
        return str(created.raise_for_status().json()["key"])

    def ask(self, method: str, path: str, key: str, **headers: str) -> httpx.Response:
        """Send a request with a key."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        sent |= {"authorization": f"Bearer {key}"} if key else {}
        body = _BODY if method == "POST" else None
        request = self.client.build_request(method, "/", json=body, headers=sent)
        request.extensions["target"] = path.encode()
        return self.client.send(request)

    def turns(self, session: str) -> int:
        """How many turns a session of the trainer has."""
        found = self.client.get(f"/v1/sessions/{session}", headers=_TRAINER)
        return len(found.json().get("turns", ()))


@pytest.fixture(scope="module")
def proxy(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys = {scope: add_key(file, scope, [scope], "shared") for scope in ("turns", "inference")}
    settings: dict[str, Any] = {"api_key": ["trainer"], "admin_key": "operator", "api_key_file": file}
    with (
        FakeVllm(tiny_model) as engine,
        run_proxy([engine], **settings, store="memory:") as client,
    ):
        made = Proxy(client, engine, {"": "", "everything": "operator", **keys})
        made.keys["of a session"] = made.create("run-7")
        yield made


def test_the_table_holds_every_route() -> None:
    own = [route for route in all_routes() if not route.catches_all]
    needed = {
        (method, "/".join("x" if "{" in part else part for part in route.path.split("/"))): str(
            route.needed_scope(method, route.path) or _OPEN
        )
        for route in own
        if not route.replaces_engine_route
        for method in route.methods
    }
    assert needed == _listed(_TABLE)
    replaced = [route for route in own if route.replaces_engine_route]
    assert {route.needed_scope("POST", route.path) for route in replaced} == {_ADMIN}


@pytest.mark.parametrize("key", _MAY)
def test_each_key_reaches_what_the_table_says(proxy: Proxy, key: str) -> None:
    for (method, path), scope in (_listed(_TABLE) | _listed(_OF_THE_ENGINE)).items():
        before = len(proxy.engine.requests)
        answer = proxy.ask(method, path, proxy.keys[key])
        allowed = scope in _MAY[key] or path == "/metrics"
        # the viewer's page is there to ask for a key; an engine may refuse a request too
        refused = answer.status_code in (401, 403) and path != "/viewer"
        refused = refused and "--enable-scale-out" not in answer.text
        assert refused is not allowed, (method, path, answer.status_code)
        assert allowed or not proxy.engine.from_clients(before)


@pytest.mark.parametrize(
    "path",
    ["/invocations", "/v1/chat/completions/batch", "/cohere/v2/chat", "/v1/systemone", "/%69nvocations/"],
)
def test_no_route_samples_without_a_record_where_there_are_keys(
    proxy: Proxy, client: httpx.Client, fake: FakeVllm, path: str
) -> None:
    before = len(proxy.engine.requests)
    for key in ("of a session", "turns", "inference", "everything"):
        refused = proxy.ask("POST", path, proxy.keys[key])
        assert refused.status_code == 403, key
        expected = "route_not_recorded" if key in ("inference", "everything") else "insufficient_scope"
        assert refused.json()["error"]["code"] == expected
    assert not proxy.engine.from_clients(before)
    if "%" not in path:
        fake.canned[path] = Canned(b"{}")
        assert client.post(path, json=_BODY).status_code == 200  # of a proxy without keys


def test_the_key_names_the_session(proxy: Proxy, name: str) -> None:
    """In whatever way the request names it too; a program's own session is not another one."""
    key, other = proxy.create(name), f"{name}-other"
    proxy.create(other)
    for path, headers in (
        (CHAT, {}),
        (CHAT, {"x_session_id": name}),
        (f"/sessions/{name}{CHAT}", {}),
        (CHAT, {"session_id": "own", "x_claude_code_session_id": "own"}),
    ):
        assert proxy.ask("POST", path, key, **headers).status_code == 200
    assert proxy.turns(name) == 4
    for path, headers in (
        (CHAT, {"x_session_id": other}),
        (f"/sessions/{other}{CHAT}", {}),
        ("/v1/messages", {"x_session_id": other}),
        ("/v1/models", {"x_session_id": other}),
    ):
        refused = proxy.ask("POST" if "models" not in path else "GET", path, key, **headers)
        assert refused.status_code == 403, path
        assert repr(name) in refused.json()["error"]["message"]
    assert proxy.turns(other) == 0
    assert not any(b"tps-" in value for seen in proxy.engine.requests for _, value in seen.headers)


def test_what_completions_do_not_record_is_refused(proxy: Proxy, name: str, client: httpx.Client) -> None:
    key, before = proxy.create(name), len(proxy.engine.generations())
    headers = {"authorization": f"Bearer {key}"}
    for field in ({"echo": True}, {"suffix": ""}, {"use_beam_search": True}):
        asked = {"prompt": "Hi", "max_tokens": 4, **field}
        refused = proxy.client.post("/v1/completions", json=asked, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "route_not_recorded"), field
        assert client.post("/v1/completions", json=asked).status_code == 200
    assert len(proxy.engine.generations()) == before


_HI = b'{"role": "user", "content": "Hi"'
_ODD: dict[str, tuple[bytes, dict[str, str]]] = {
    "a probe": (b'{"messages": [%b}]}' % _HI, {"user-agent": "x-probe/1.0"}),
    "a header that is nested": (
        b'{"messages": [%b}]}' % _HI,
        {"x-codex-turn-metadata": '{"a":' + "[" * 3000},
    ),
    "a number in a message": (b'{"messages": [%b, "x": 1e999}]}' % _HI, {}),
    "a content of another kind": (b'{"messages": [{"role": "user", "content": {"a": 1}}]}', {}),
    "a bias": (b'{"messages": [%b}], "logit_bias": {"5": 1e999}}' % _HI, {}),
    "beam search": (b'{"messages": [%b}], "use_beam_search": true}' % _HI, {}),
    "the engine's own field for ids": (
        b'{"messages": [%b, "x": 1e999}], "kv_transfer_params": {"prompt_token_ids": [74]}}' % _HI,
        {},
    ),
}


_PATHS = {
    CHAT: b'{"max_tokens": 4, "stream": %b, ',
    "/v1/messages": b'{"model": "tiny", "max_tokens": 4, "stream": %b, ',
    "/v1/responses": b'{"max_output_tokens": 16, "stream": %b, ',
    "/v1/completions": b'{"prompt": [74], "max_tokens": 4, "stream": %b, ',
    f"{CHAT}/tokens": b'{"prompt_ids": [74], "max_tokens": 4, "stream": %b, ',
}
"""The beginnings of requests that sample."""


@pytest.mark.parametrize("odd", _ODD)
def test_what_is_sampled_is_recorded(proxy: Proxy, name: str, odd: str) -> None:
    """With a key that takes turns alone a request is refused, or its turn counts."""
    body, headers = _ODD[odd]
    key = proxy.create(name)
    for path, fields in _PATHS.items():
        for stream in (b"false", b"true"):
            before, recorded = len(proxy.engine.generations()), proxy.turns(name)
            sent = {"authorization": f"Bearer {key}", "content-type": "application/json", **headers}
            content = fields % stream + body[1:]
            if path == "/v1/responses":
                content = content.replace(b"messages", b"input")
            proxy.client.post(path, content=content, headers=sent)
            sampled = len(proxy.engine.generations()) - before
            assert proxy.turns(name) - recorded == sampled, (path, stream)
            assert sampled == 1 or odd != "a probe", (path, stream)
    assert not any(seen.json.get("use_beam_search") for seen in proxy.engine.generations())


def test_large_responses_are_read_one_at_a_time_and_bounded(
    proxy: Proxy, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"authorization": f"Bearer {proxy.create(name)}"}
    monkeypatch.setattr(turns, "_LARGE_BYTES", 100)
    asked = {"input": "Hi", "max_output_tokens": 16}
    first = proxy.client.post("/v1/responses", json=asked, headers=headers).raise_for_status().json()["id"]
    follows = {"input": "Hi", "max_output_tokens": 16, "previous_response_id": first}
    assert proxy.client.get(f"/v1/responses/{first}", headers=headers).json()["id"] == first
    assert proxy.client.post("/v1/responses", json=follows, headers=headers).status_code == 200
    monkeypatch.setattr(turns, "_MOST_RECALLED_BYTES", 100)
    refused = proxy.client.post("/v1/responses", json=follows, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    monkeypatch.undo()
    assert proxy.client.delete(f"/v1/responses/{first}", headers=headers).status_code == 200
    assert proxy.client.post("/v1/responses", json=follows, headers=headers).status_code == 400


async def test_rules_hold_while_the_store_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a session that this process read before; for a key that takes turns alone."""

    async def gone(*args: Any) -> Any:
        raise StoreError("it does not respond")

    store = make_store("memory:", Limits())
    await store.open()
    saved = Session(
        id=session_id("", "run"), created=1.0, turns=2, limits=b'{"turns":4}', overrides=b'{"n":1}'
    )
    history = SimpleNamespace(store=store, metrics=Metrics())
    services: Any = SimpleNamespace(
        settings=SimpleNamespace(session_from_key=False), history=history, last_sessions=BoundedCache(10)
    )
    headers = [(b"x-session-id", b"run")]
    agent, trainer = (Request("POST", CHAT, headers, turns_only=only) for only in (True, False))
    monkeypatch.setattr(store, "session", gone)
    with pytest.raises(StoreError):
        await named_session(agent, services)
    services.last_sessions.put(saved.id, saved)
    named = [await named_session(agent, services) for _ in range(3)]
    assert [each and (each.limit, dict(each.overrides) != {}) for each in named] == [
        ("", True), ("turns", True), ("turns", True)
    ]  # fmt: skip
    unknown = await named_session(trainer, services)
    assert unknown is not None and not unknown.overrides
    await store.aclose()


async def test_keys_end_although_the_store_was_lost() -> None:
    first, second = (make_store("memory:", Limits()) for _ in range(2))
    for store in (first, second):
        await store.open()
    keys, again = SessionKeys(first, _signer), SessionKeys(second, _signer)
    await keys.end(session_id("t", "s"))
    key = (await keys.issue("t", "s")).encode()
    await again.refresh()
    assert again.read(key)
    await again.end(session_id("t", "s"))
    with pytest.raises(Unauthorized):
        again.read(key)
    assert again.read((await again.issue("t", "s")).encode())
    for store in (first, second):
        await store.aclose()


def test_a_key_that_ends_while_the_body_arrives_takes_no_turn(proxy: Proxy, name: str) -> None:
    key = proxy.create(name)

    def body() -> Iterator[bytes]:
        yield b'{"messages": '
        proxy.client.post(f"/v1/sessions/{name}/end", headers=_TRAINER).raise_for_status()
        yield b'[{"role": "user", "content": "Hi"}]}'

    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    late = proxy.client.post(CHAT, content=body(), headers=headers)
    assert (late.status_code, late.json()["error"]["code"]) == (401, "session_ended")
    assert proxy.turns(name) == 0


@pytest.mark.parametrize("end", ["reward", "end", "delete"])
def test_a_key_ends_with_its_session(proxy: Proxy, name: str, end: str) -> None:
    path = f"/v1/sessions/{name}"
    ends: dict[str, Callable[[], httpx.Response]] = {
        "reward": lambda: proxy.client.post(f"{path}/reward", json={"reward": 1.0}, headers=_TRAINER),
        "end": lambda: proxy.client.post(f"{path}/end", headers=_TRAINER),
        "delete": lambda: proxy.client.delete(path, headers=_TRAINER),
    }
    key, neighbour = proxy.create(name), proxy.create(f"{name}-2")
    assert proxy.ask("POST", CHAT, key).status_code == 200
    ends[end]().raise_for_status()
    ended = proxy.ask("POST", CHAT, key)
    assert (ended.status_code, ended.json()["error"]["code"]) == (401, "session_ended")
    assert proxy.ask("GET", "/health", key).status_code == 200
    assert proxy.ask("POST", CHAT, neighbour).status_code == 200
    again = proxy.create(name)
    assert [proxy.ask("POST", CHAT, each).status_code for each in (again, key)] == [200, 401]


def test_the_limits_and_overrides_of_a_session_hold_for_its_key(proxy: Proxy, name: str) -> None:
    key = proxy.create(name, limits={"turns": 1}, overrides={"temperature": 0.5, "max_tokens": 3})
    asked = {**_BODY, "temperature": 1.0, "max_completion_tokens": 5000}
    proxy.client.post(CHAT, json=asked, headers={"authorization": f"Bearer {key}"})
    sent = proxy.engine.generations()[-1].json
    assert (sent["temperature"], sent["max_tokens"], sent.get("max_completion_tokens")) == (0.5, 3, None)
    before = len(proxy.engine.generations())
    for path in (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/invocations"):
        proxy.ask("POST", path, key)
    assert len(proxy.engine.generations()) == before
    assert proxy.turns(name) == 1


def test_stored_responses_are_read_with_the_key_of_their_session(proxy: Proxy, name: str) -> None:
    own, other = ({"authorization": f"Bearer {proxy.create(f'{name}-{number}')}"} for number in range(2))
    asked = {"input": "Hi", "max_output_tokens": 16}
    first = proxy.client.post("/v1/responses", json=asked, headers=own).json()["id"]

    def statuses(headers: dict[str, str]) -> list[int]:
        follows = {**asked, "previous_response_id": first}
        following = proxy.client.post("/v1/responses", json=follows, headers=headers)
        return [
            following.status_code,
            proxy.client.get(f"/v1/responses/{first}", headers=headers).status_code,
        ]

    assert [statuses(other), statuses(own), statuses(_TRAINER)] == [[400, 404], [200, 200], [200, 200]]
    deleted = [proxy.client.delete(f"/v1/responses/{first}", headers=key) for key in (other, own)]
    assert [each.status_code for each in deleted] == [404, 200]


def test_an_idempotency_key_belongs_to_its_session(proxy: Proxy, name: str) -> None:
    """A neighbour that guesses it neither gets the response nor takes the name."""
    keys = [proxy.create(f"{name}-{number}") for number in range(2)]
    answers = [proxy.ask("POST", CHAT, key, idempotency_key=name) for key in keys]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len({answer.headers["x-turn-id"] for answer in answers}) == 2


@pytest.mark.parametrize("seconds", [0, -1, 1e9, "1"])
def test_a_key_lives_for_a_bounded_time(proxy: Proxy, seconds: Any) -> None:
    refused = proxy.client.post("/v1/sessions", json={"key_expires_s": seconds}, headers=_TRAINER)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "key_expires_s")


def test_without_keys_there_is_none(client: httpx.Client) -> None:
    assert "key" not in client.post("/v1/sessions", json={}).json()


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = 1e9) -> None:
        self.now = now

    def __call__(self) -> float:
        """Seconds since the epoch."""
        return self.now


async def _signer() -> Signer:
    return Signer(b"secret of the store")


@pytest.fixture(params=["sqlite", "redis"])
def shared_store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        return str(request.getfixturevalue("redis_url"))
    return f"sqlite://{tmp_path}/keys.db"


def test_processes_read_and_end_the_keys_of_each_other(shared_store: str) -> None:
    """Their clocks differ by five minutes."""

    async def run() -> None:
        stores: list[Store] = [make_store(shared_store, Limits()) for _ in range(2)]
        clocks = Clock(), Clock(1e9 + LEEWAY_S)
        first, second = (
            SessionKeys(store, _signer, clock) for store, clock in zip(stores, clocks, strict=True)
        )
        for store, keys in zip(stores, (first, second), strict=True):
            await store.open()
            await keys.refresh()
        key = (await first.issue("t", "s", seconds=60.0)).encode()
        found = second.read(key)
        assert found is not None
        assert (found.tenant, found.session) == ("t", "s")
        await first.end(session_id("t", "s"))
        with pytest.raises(Unauthorized):
            first.read(key)
        assert second.read(key)  # until it looks
        await second.refresh()
        with pytest.raises(Unauthorized, match="finished or deleted"):
            second.read(key)
        again = (await second.issue("t", "s", seconds=60.0)).encode()
        assert first.read(again)
        clocks[1].now += 60.0 + LEEWAY_S
        assert second.read(again)
        clocks[1].now += 1.0
        with pytest.raises(Unauthorized, match="expired"):
            second.read(again)
        await asyncio.gather(*(store.aclose() for store in stores))

    asyncio.run(run())


def test_keys_are_read_while_the_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """But by a process that never read the secret."""

    async def gone(*args: Any, **named: Any) -> Any:
        raise StoreError("it does not respond")

    async def run() -> None:
        store = make_store("memory:", Limits())
        await store.open()
        keys, late = SessionKeys(store, _signer), SessionKeys(store, _signer)
        key = (await keys.issue("t", "s")).encode()
        with monkeypatch.context() as patch:
            patch.setattr(store, "get", gone)
            assert keys.read(key)
            with pytest.raises(StoreError):
                await keys.refresh()
            assert keys.read(key)
            with pytest.raises(EngineUnavailable):
                late.read(key)
        await late.refresh()
        assert late.read(key)
        await store.aclose()

    asyncio.run(run())


def test_a_key_that_was_changed_is_none() -> None:
    async def run() -> None:
        store = make_store("memory:", Limits())
        await store.open()
        keys = SessionKeys(store, _signer)
        key = (await keys.issue("t" * 32, "session-0123456789")).encode()
        assert keys.read(key)
        changed = [
            key[:place] + (b"B" if key[place : place + 1] == b"A" else b"A") + key[place + 1 :]
            for place in range(len(key) - 1)
        ]
        for wrong in (*changed, key[:-4], key + b"AAAA", b"tps-", b"tps-!", b"sk-" + key):
            assert keys.read(wrong) is None
        await store.aclose()

    asyncio.run(run())
