"""Who may use which route with which key, and what the engine sees of keys."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import Canned, FakeVllm
from tests.support.talk import CHAT, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, wait_until
from tokenproxy.app.start import try_store
from tokenproxy.base.errors import is_anthropic
from tokenproxy.cli.key import add_key
from tokenproxy.settings import Settings
from tokenproxy.web.gate import OPEN_PATHS
from tokenproxy.web.keys import KeyScope, scope_of_engine_route

_BODY: dict[str, Any] = {"messages": [user("Hi")]}
_BODIES: dict[str, Any] = {
    "/tokenize": {"prompt": "Hi"},
    "/sessions/s/v1/chat/completions/tokens": {"prompt_ids": [1, 74]},
    "/update_weights": {"update_info": {}},
}

_ROUTES = [
    ("turns", "POST", "/v1/chat/completions /sessions/s/v1/chat/completions /tokenize /v1/messages"),
    ("turns", "POST", "/sessions/s/v1/chat/completions/tokens"),
    ("turns", "GET", "/models /"),
    ("inference", "POST", "/v1/embeddings /v1/sessions /v1/sessions/s/reward"),
    ("inference", "DELETE", "/v1/sessions/s"),
    ("read", "GET", "/v1/sessions /sessions/s/v1/sessions /sessions/s/samples /v1/samples /version"),
    ("read", "POST", "/v1/samples/ack"),
    ("read", "DELETE", "/v1/samples/consumers/c"),
    ("admin", "POST", "/pause/ /update_weights /admin/replicas /sessions/s/v1/load_lora_adapter"),
    ("admin", "POST", "/%70ause //pause"),
    ("admin", "GET", "/server_info /what/a/new/vllm/adds"),
]


def including(scope: str) -> set[str]:
    """A scope, and those that include it."""
    return {scope, "inference"} if scope == "turns" else {scope}


ROUTES = {(method, path): scope for scope, method, paths in _ROUTES for path in paths.split()}


class Keyed:
    """A proxy with a key for each scope, all of one tenant, and with keys of the other settings."""

    def __init__(self, engine: FakeVllm, client: httpx.Client, keys: dict[str, str]) -> None:
        self.engine, self.client, self.keys = engine, client, keys

    def ask(self, method: str, path: str, key: str) -> httpx.Response:
        """Send a request with the path as it is."""
        body = _BODIES.get(path, _BODY) if method == "POST" else None
        headers = {"authorization": f"Bearer {self.keys[key]}"} if key else {}
        request = self.client.build_request(method, "/", json=body, headers=headers)
        request.extensions["target"] = path.encode()
        return self.client.send(request)


@pytest.fixture(scope="module")
def keyed(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    file: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys = {str(scope): add_key(file, scope, [scope], "all") for scope in KeyScope}
    keys |= {"plain": "plain-key", "everything": "admin-key", "wrong": "nobody's"}
    settings: dict[str, Any] = {"api_key_file": file, "api_key": ["plain-key"], "admin_key": ["admin-key"]}
    with (
        FakeVllm(tiny_model) as engine,
        run_proxy([engine], **settings, upstream_api_key="engine", store="memory:") as client,
    ):
        yield Keyed(engine, client, keys)


def test_what_was_recorded_without_keys_is_reached_by_a_key_with_an_empty_tenant(
    mortal: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The start says so while there is no such key."""
    file, store = tmp_path / "keys.yaml", f"sqlite://{tmp_path}/x.db"
    other = add_key(file, "other", ["read"], None)

    def warnings(**keys: Any) -> int:
        caplog.clear()
        asyncio.run(try_store(Settings(store=store, **keys)))
        return sum("--tenant ''" in each for each in caplog.messages)

    assert warnings(api_key_file=file) == 0  # nothing was recorded
    with run_proxy([mortal], store=store) as client:
        client.post(CHAT, json=_BODY, headers={"x-session-id": "s"})
    assert [warnings(), warnings(api_key_file=file), warnings(api_key=["k"])] == [0, 1, 1]
    adopting = add_key(file, "before", ["read"], "")
    assert warnings(api_key_file=file) == 0
    with run_proxy([mortal], store=store, api_key_file=file, reader=other) as client:
        listed = [
            client.get("/v1/sessions", headers={"x-api-key": key}).json()["data"] for key in (adopting, other)
        ]
    assert [[session["id"] for session in sessions] for sessions in listed] == [["s"], []]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_route_needs_a_key_with_its_scope_and_no_other(keyed: Keyed, method: str, path: str) -> None:
    needed = ROUTES[method, path]
    before = len(keyed.engine.requests)
    for key in ("", "wrong"):
        refused = keyed.ask(method, path, key)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    lacking = {*KeyScope, *(["plain"] if needed == "admin" else [])} - including(needed)
    for key in lacking:
        refused = keyed.ask(method, path, key)
        assert refused.status_code == 403
        error = refused.json()["error"]
        assert is_anthropic(path) or error["code"] == "insufficient_scope"
        assert "`admin_key`" in error["message"] and "`api_key_file`" in error["message"]
    assert not keyed.engine.from_clients(before)
    for key in {*including(needed), "everything", "plain"} - lacking:
        assert keyed.ask(method, path, key).status_code not in (401, 403)
    # no key of the proxy reaches the engine
    assert {seen.header("authorization") for seen in keyed.engine.requests[before:]} <= {b"Bearer engine"}
    assert {seen.header("x-api-key") for seen in keyed.engine.requests[before:]} <= {None}


@pytest.mark.parametrize(
    ("scope", "paths"),
    [
        ("turns", "/ /v1/models /v1/models/a"),
        ("inference", "/v1/completions /detokenize /score"),
        ("read", "/load /version /ping"),
        ("admin", "/V1/models /v1//models /Tokenize /v1 /v1/modelsx /v1/pause /pause /collective_rpc"),
        ("admin", "/server_info /inference/v1/abort_requests /v1/unload_lora_adapter /update_weights"),
    ],
)
def test_routes_of_vllm_that_are_on_no_list_need_admin(scope: str, paths: str) -> None:
    assert {scope_of_engine_route(path) for path in paths.split()} == {scope}


@pytest.mark.parametrize(("first", "owner"), [("none", "everything"), ("plain-key", "plain")])
def test_each_key_is_a_tenant_in_either_header(keyed: Keyed, name: str, first: str, owner: str) -> None:
    headers = {"authorization": f"Bearer {first}", "x-api-key": "admin-key"}
    assert keyed.client.post("/v1/sessions", json={"id": name}, headers=headers).status_code == 201
    for key in ("plain", "everything"):
        found = keyed.ask("GET", f"/v1/sessions/{name}", key).status_code == 200
        assert found == (key == owner)
    assert keyed.client.get("/v1/sessions", headers={"authorization": "plain-key"}).status_code == 401


def test_open_paths_are_open_to_get_and_head_only(keyed: Keyed) -> None:
    """The details of /ready need the scope `read`."""
    for path in sorted(OPEN_PATHS):
        statuses = [keyed.client.request(method, path).status_code for method in ("GET", "HEAD", "POST")]
        assert statuses == [200, 200, 401], path
    for path in ("//health", "/v1/health", "/openapi.json", "/anything"):
        assert keyed.ask("GET", path, "").status_code == 401, path
    for key in ("", "wrong", "inference", "admin", "read"):
        assert ("engines" in keyed.ask("GET", "/ready", key).json()) is (key == "read")


def test_metrics_may_need_a_key(mortal: FakeVllm, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    inference = add_key(file, "a", ["inference"], None)
    with run_proxy([mortal], api_key=["reads"], api_key_file=file, metrics_need_key=True) as client:
        for key, status in (("", 401), (inference, 403), ("reads", 200)):
            assert client.get("/metrics", headers={"x-api-key": key}).status_code == status
        assert client.get("/health").status_code == 200


def test_a_new_key_works_without_a_restart_and_a_deleted_one_ends(
    mortal: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenproxy.web.keys.CHECK_S", 0.01)
    file = tmp_path / "keys.yaml"
    first = add_key(file, "first", ["read"], None)
    with run_proxy([mortal], reader=first, api_key_file=file, store="memory:") as client:

        def status(key: str) -> int:
            return client.get("/v1/sessions", headers={"authorization": f"Bearer {key}"}).status_code

        second = add_key(file, "second", ["read"], None)
        wait_until(lambda: status(second) == 200)
        file.write_text(file.read_text().partition("- name: second")[0])
        wait_until(lambda: status(second) == 401)
        assert status(first) == 200


def test_a_credential_that_is_not_ours_passes_through(
    mortal: FakeVllm, fake: FakeVllm, client: httpx.Client
) -> None:
    """A client may send the proxy's key in one header and the engine's in the other."""
    with run_proxy([mortal], api_key="secret") as keyed_client:
        headers = {"x-api-key": "secret", "authorization": "Bearer engine"}
        assert keyed_client.get("/v1/models", headers=headers).status_code == 200
    assert mortal.last("/v1/models").header("authorization") == b"Bearer engine"
    assert mortal.last("/v1/models").header("x-api-key") is None
    client.post(CHAT, json=_BODY, headers=headers)  # of a proxy without keys
    assert fake.last().header("authorization") == b"Bearer engine"


@pytest.mark.parametrize("host", ["0.0.0.0", "proxy.example.com"])
def test_without_keys_admin_routes_are_closed_beyond_loopback(mortal: FakeVllm, host: str) -> None:
    with run_proxy([mortal], host=host, store="memory:") as client:
        keyed, before = Keyed(mortal, client, {}), len(mortal.requests)
        for method, path in [route for route, scope in ROUTES.items() if scope == "admin"]:
            answer = keyed.ask(method, path, "")
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_needs_key"), path
        assert not mortal.from_clients(before)
        assert client.post(CHAT, json=_BODY).status_code == 200
        assert client.get("/v1/sessions").status_code == 200
        assert "engines" in client.get("/ready").json()


def test_without_keys_only_programs_on_this_machine_may_administrate(
    fake: FakeVllm, client: httpx.Client
) -> None:
    fake.canned["/reset_mm_cache"] = Canned(b"{}")
    assert client.post("/reset_mm_cache").status_code == 200
    for name, value in {"x-forwarded-for": "10.0.0.1", "forwarded": "for=10.0.0.1"}.items():
        for path in ("/reset_mm_cache", "/admin/replicas"):
            assert client.post(path, headers={name: value}).status_code == 403
        assert client.post(CHAT, json=_BODY, headers={name: value}).status_code == 200
    assert len(fake.seen("/reset_mm_cache")) == 1


_OF_PAGES: list[tuple[dict[str, str], str]] = [
    ({"origin": "https://evil.example"}, "origin_not_allowed"),
    ({"origin": "null"}, "origin_not_allowed"),
    ({"origin": "http://127.0.0.1:1"}, "origin_not_allowed"),
    ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, "origin_not_allowed"),
    ({"host": "evil.example"}, "host_not_allowed"),  # its name resolves to 127.0.0.1 now
    ({"host": "evil.example", "origin": "http://evil.example"}, "host_not_allowed"),
]


@pytest.mark.parametrize(("sent", "code"), _OF_PAGES)
def test_without_keys_pages_of_other_origins_are_refused(
    fake: FakeVllm, client: httpx.Client, name: str, sent: dict[str, str], code: str
) -> None:
    """Also the requests that a browser sends without asking first: their type is text/plain."""
    client.post(f"/sessions/{name}{CHAT}", json=_BODY)
    headers = {"content-type": "text/plain", **sent}

    def done() -> object:
        return len(fake.generations()), client.get("/v1/samples/consumers").json()

    before = done()
    for method, path, body in (
        ("POST", f"/v1/sessions/{name}/reward", b'{"reward": 9}'),
        ("POST", "/v1/sessions", b'{"id": "%b", "overrides": {"n": 9}}' % name.encode()),
        ("POST", "/v1/samples/ack", b'{"consumer": "a", "cursor": "9"}'),
        ("POST", f"/sessions/{name}{CHAT}", b'{"messages": [{"role": "user", "content": "Hi"}]}'),
        ("GET", f"/v1/sessions/{name}", b""),
        ("GET", f"/viewer/sessions/{name}", b""),
        ("GET", "/v1/samples?consumer=a", b""),
        ("DELETE", f"/v1/sessions/{name}", b""),
        ("GET", "/version", b""),
    ):
        refused = client.request(method, path, content=body, headers=headers)
        assert refused.json()["error"]["code"] == code, path
    session = client.get(f"/v1/sessions/{name}").json()
    assert (session["reward"], session["overrides"], len(session["turns"])) == (None, {}, 1)
    assert done() == before
    for own in ({"origin": str(client.base_url).rstrip("/")}, {"sec-fetch-site": "same-origin"}):
        assert client.post(f"/v1/sessions/{name}/reward", json={"reward": 1}, headers=own).status_code == 200
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    for path, status in (("/viewer", 200), ("/v1/samples", 200), ("/v1/samples?consumer=a", 403)):
        assert client.get(path, headers=link).status_code == status, path
    assert done() == before


def test_pages_may_be_allowed_without_keys(mortal: FakeVllm) -> None:
    page, names = "https://app.example", {"host": "proxy.example", "origin": "https://app.example"}
    with run_proxy([mortal], store="memory:", cors_origins=[page], allowed_hosts="proxy.example") as client:
        assert client.get("/v1/sessions", headers=names).status_code == 200
        assert client.get("/v1/sessions", headers={**names, "origin": "https://evil"}).status_code == 403
        assert client.post("/pause", headers=names).status_code == 403
        assert client.get("/v1/sessions").status_code == 400
