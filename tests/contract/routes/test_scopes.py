"""What each key may do, and what who has none may."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from proxy.dialects.error_formats import is_anthropic
from proxy.key_command import add_key
from proxy.routes.routes import all_routes
from proxy.routes.scopes import KeyScope, scope_of_engine_route
from tests.support.fake_vllm import Canned, FakeVllm
from tests.support.talk import user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy

_SCOPES = ("inference", "read", "admin")
_BACKGROUND = {"/health", "/tokenize"}
"""What the proxy asks an engine at any time, for itself."""
_BODY = {"messages": [user("Hi")]}
_PLAIN_BODIES = {"/tokenize": {"prompt": "Hi"}, "/v1/chat/completions/tokens": {"prompt_ids": [1, 74]}}

INFERENCE = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/chat/completions/"),
    ("POST", "/sessions/s/v1/chat/completions"),
    ("POST", "/v1/chat/completions/tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/models"),
    ("GET", "/models"),
    ("GET", "/"),
    ("POST", "/v1/embeddings"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/score"),
    ("POST", "/v1/sessions"),
    ("DELETE", "/v1/sessions/s"),
    ("POST", "/v1/sessions/s/reward"),
]
READ = [
    ("GET", "/v1/sessions"),
    ("GET", "/sessions/"),
    ("GET", "/v1/sessions/s"),
    ("GET", "/v1/sessions/s/samples"),
    ("GET", "/sessions/s/samples"),
    ("GET", "/v1/samples"),
    ("GET", "/v1/samples/consumers"),
    ("POST", "/v1/samples/ack"),
    ("DELETE", "/v1/samples/consumers/c"),
    ("GET", "/version"),
    ("GET", "/load"),
]
ADMIN = [
    *(
        ("POST", path)
        for path in (
            *("/pause", "/pause/", "/resume", "/abort_requests", "/init_weight_transfer_engine"),
            *("/shutdown_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update"),
            *("/update_weights", "/finish_weight_update", "/update_weight_version", "/weight_checker"),
            *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/sleep", "/wake_up"),
            *("/release_kv_cache_memory", "/collective_rpc", "/v1/load_lora_adapter"),
            *("/v1/unload_lora_adapter", "/start_profile", "/stop_profile", "/scale_elastic_ep"),
            *("/fault_tolerance/apply", "/inference/v1/abort_requests", "/admin/replicas"),
            *("/sessions/s/v1/load_lora_adapter", "/%70ause", "//pause", "/v1/pause", "/api/pause"),
        )
    ),
    *(
        ("GET", path)
        for path in (
            *("/is_paused", "/weight_info", "/get_world_size", "/is_sleeping", "/server_info"),
            *("/kv_event_sources", "/fault_tolerance/status", "/what/a/new/vllm/adds", "/v1", "/v1/modelsx"),
        )
    ),
]


@pytest.fixture(scope="module")
def keyed(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[FakeVllm, httpx.Client, dict[str, str]]]:
    """A proxy with a key for each scope, all of one tenant, and keys of the other settings."""
    file = Path(tmp_path_factory.mktemp("keys")) / "keys.yaml"
    keys = {scope: add_key(file, scope, [scope], "all") for scope in _SCOPES}
    keys |= {"plain": "plain-key", "everything": "admin-key"}
    with (
        FakeVllm(tiny_model) as engine,
        run_proxy(
            [engine], api_key_file=file, api_key=["plain-key"], admin_key=["admin-key"], store="memory:"
        ) as client,
    ):
        engine.canned["/inference/v1/generate"] = Canned(b"{}")
        yield engine, client, keys


def _body(path: str) -> object:
    return _ADMIN_BODIES.get(path) or _PLAIN_BODIES.get(path.removeprefix("/v1"), _BODY)


def _status(keyed: tuple[FakeVllm, httpx.Client, dict[str, str]], key: str, method: str, path: str) -> int:
    _, client, keys = keyed
    sent = client.build_request(
        method,
        "/",
        json=_body(path) if method == "POST" else None,
        headers={"x-api-key": keys[key]},
    )
    sent.extensions["target"] = path.encode()
    answer = client.send(sent)
    if answer.status_code == 403:
        error = answer.json()["error"]
        if is_anthropic(path):
            assert error["type"] == "permission_error"
        else:
            assert (error["code"], error["type"]) == ("insufficient_scope", "PermissionDeniedError")
        assert "`admin_key`" in error["message"] and "`api_key_file`" in error["message"]
    return answer.status_code


@pytest.mark.parametrize(
    "method, path, needed",
    [
        *((*route, "inference") for route in INFERENCE),
        *((*route, "read") for route in READ),
        *((*route, "admin") for route in ADMIN),
    ],
)
def test_a_route_needs_its_scope_and_no_other(
    keyed: tuple[FakeVllm, httpx.Client, dict[str, str]], method: str, path: str, needed: str
) -> None:
    engine = keyed[0]
    for scope in _SCOPES:
        if scope != needed:
            before = len(engine.requests)
            assert _status(keyed, scope, method, path) == 403
            assert {seen.path for seen in engine.requests[before:]} <= _BACKGROUND - {path}
    assert _status(keyed, needed, method, path) not in (401, 403)
    assert _status(keyed, "everything", method, path) not in (401, 403)
    assert (_status(keyed, "plain", method, path) == 403) == (needed == "admin")


def test_every_scope_is_in_a_table() -> None:
    assert {str(scope) for scope in KeyScope} == set(_SCOPES)


def test_scopes_of_the_proxys_own_routes() -> None:
    needed = {route.path: route.needed_scope("GET", route.path) for route in all_routes()}
    assert needed["/health"] is needed["/ready"] is None
    assert needed["/metrics"] is needed["/v1/sessions"] is KeyScope.READ


def test_routes_of_ours_that_administrate_need_admin() -> None:
    """Also where the proxy serves an engine's admin route itself, to send it to every replica."""
    admin = {path for _, path in ADMIN}
    for route in all_routes():
        if route.path in admin or route.path.startswith("/admin/"):
            needed = {route.needed_scope(method, route.path) for method in route.methods}
            assert needed == {KeyScope.ADMIN}, route.path


@pytest.mark.parametrize("path", ["/V1/models", "/v1//models", "/pause", "/Tokenize", "/v1/loads", ""])
def test_unlisted_routes_need_admin(path: str) -> None:
    assert scope_of_engine_route(path) is KeyScope.ADMIN


_FORWARDED = [
    path for method, path in ADMIN if method == "POST" and "%" not in path and not path.startswith("/admin/")
]
_ADMIN_BODIES = {
    "/init_weight_transfer_engine": {"init_info": {}},
    "/update_weights": {"update_info": {}},
    "/update_weight_version": {"new_version": "default"},
}


@pytest.mark.parametrize("path", _FORWARDED)
def test_an_admin_route_reaches_the_engine_with_the_scope(
    keyed: tuple[FakeVllm, httpx.Client, dict[str, str]], path: str
) -> None:
    engine = keyed[0]
    forwarded = path.removeprefix("/sessions/s")
    forwarded = "/pause" if path == "/pause/" else forwarded
    engine.canned[forwarded] = Canned(b'{"status": "awake"}')
    assert _status(keyed, "admin", "POST", path) == 200
    assert engine.last(forwarded).header("x-api-key") is None


# --- open paths, and the details of /ready


@pytest.mark.parametrize("path", ["/health", "/ready", "/ready/", "/metrics", "/metrics/"])
def test_open_paths_are_open_to_get_and_head_only(
    keyed: tuple[FakeVllm, httpx.Client, dict[str, str]], path: str
) -> None:
    engine, client, _ = keyed
    before = len(engine.requests)
    for method in ("GET", "HEAD"):
        assert client.request(method, path).status_code == 200
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert client.request(method, path).status_code == 401
    assert {seen.path for seen in engine.requests[before:]} <= _BACKGROUND


def test_the_details_of_ready_need_the_scope_read(
    keyed: tuple[FakeVllm, httpx.Client, dict[str, str]],
) -> None:
    _, client, keys = keyed
    assert client.get("/ready").json() == {"ready": True}
    for name, details in (("inference", False), ("admin", False), ("read", True), ("plain", True)):
        answer = client.get("/ready", headers={"x-api-key": keys[name]})
        assert ("engines" in answer.json()) == details
    assert client.get("/ready", headers={"x-api-key": "wrong"}).json() == {"ready": True}


def test_metrics_may_need_a_key(mortal: FakeVllm, tmp_path: Path) -> None:
    inference = add_key(tmp_path / "keys.yaml", "a", ["inference"], None)
    with run_proxy(
        [mortal], api_key=["reads"], api_key_file=tmp_path / "keys.yaml", metrics_need_key=True
    ) as client:
        keys = ("", inference, "reads")
        found = [client.get("/metrics", headers={"x-api-key": key}).status_code for key in keys]
        assert found == [401, 403, 200]
        assert client.get("/health").status_code == 200


# --- without keys


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "proxy.example.com"])
def test_without_keys_admin_routes_are_closed_beyond_loopback(mortal: FakeVllm, host: str) -> None:
    with run_proxy([mortal], host=host, store="memory:") as client:
        before = len(mortal.requests)
        for method, path in ADMIN:
            answer = client.request(method, client.base_url.copy_with(raw_path=path.encode()))
            assert answer.status_code == 403, path
            error = answer.json()["error"]
            assert error["code"] == "admin_needs_key"
            assert all(f"`{name}`" in error["message"] for name in ("admin_key", "api_key_file", "host"))
        assert {seen.path for seen in mortal.requests[before:]} <= _BACKGROUND
        assert client.post("/v1/chat/completions", json=_BODY).status_code == 200
        assert client.get("/v1/sessions").status_code == 200
        assert "engines" in client.get("/ready").json()


def test_without_keys_this_machine_may_administrate(fake: FakeVllm, client: httpx.Client) -> None:
    fake.canned["/reset_mm_cache"] = Canned(b"{}")
    assert client.post("/reset_mm_cache").status_code == 200
    assert client.post("/reset_mm_cache", headers={"host": "localhost:1"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"host": "evil.example"},
        {"x-forwarded-for": "10.0.0.1"},
        {"forwarded": "for=10.0.0.1"},
        {"x-real-ip": "10.0.0.1"},
    ],
)
def test_without_keys_a_web_page_and_another_proxy_may_not(
    fake: FakeVllm, client: httpx.Client, headers: dict[str, str]
) -> None:
    fake.canned["/pause"] = Canned(b"{}")
    before = len(fake.seen("/pause"))
    for path in ("/pause", "/admin/replicas"):
        assert client.post(path, headers=headers).status_code == 403
    assert client.post("/v1/chat/completions", json=_BODY, headers=headers).status_code == 200
    assert len(fake.seen("/pause")) == before
