"""Admin and development routes of a real vLLM (VLLM_SERVER_DEV_MODE=1), with the scope admin and without."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from proxy.key_command import add_key
from proxy.routes.scopes import KeyScope, scope_of_engine_route
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, run_proxy
from tests.campaign.real_vllm.plain import CHAT, user

_NEEDS_ADMIN = [
    ("POST", "/pause?mode=keep&clear_cache=false", 200),
    ("GET", "/is_paused", 200),
    ("POST", "/resume", 200),
    ("POST", "/reset_prefix_cache", 200),
    ("GET", "/server_info?config_format=json", 200),
    ("GET", "/get_world_size", 200),
    ("GET", "/is_sleeping", 200),
    ("POST", "/collective_rpc", 400),  # it wants a method
]


@dataclass(frozen=True)
class Guarded:
    """A proxy with keys in front of an engine whose development routes are on."""

    url: str
    engine: EngineProcess
    keys: dict[str, str]

    def ask(self, method: str, path: str, key: str | None, body: object = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys[key]}"} if key else {}
        return httpx.request(method, self.url + path, headers=headers, json=body, timeout=120)


@pytest.fixture(scope="module")
def guarded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    file = folder / "keys.yaml"
    keys = {scope: add_key(file, scope, [scope], "all") for scope in ("inference", "read", "admin")}
    flags = ("--api-key-file", str(file), "--store", f"sqlite:///{folder}/turns.db")
    with EngineProcess(
        model,
        plugin=False,
        extra_environment={"VLLM_SERVER_DEV_MODE": "1"},
        log_file=folder / "vllm.log",
    ) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        with run_proxy(engine.url, *flags, client_key=keys["read"]) as url:
            yield Guarded(url, engine, keys)


@pytest.mark.parametrize("method, path, status", _NEEDS_ADMIN, ids=lambda value: str(value).partition("?")[0])
def test_an_admin_route_needs_the_scope(guarded: Guarded, method: str, path: str, status: int) -> None:
    assert guarded.ask(method, path, None).status_code == 401
    for key in ("inference", "read"):
        refused = guarded.ask(method, path, key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
    # the engine itself requires no key
    assert guarded.ask(method, path, "admin", {}).status_code == status


def test_a_pause_that_was_refused_did_not_happen(guarded: Guarded) -> None:
    assert guarded.ask("POST", "/pause", "inference").status_code == 403
    assert guarded.ask("GET", "/is_paused", "admin").json() == {"is_paused": False}
    assert guarded.ask("POST", "/pause?mode=keep&clear_cache=false", "admin").status_code == 200
    assert guarded.ask("GET", "/is_paused", "admin").json() == {"is_paused": True}
    assert guarded.ask("POST", "/resume", "admin").status_code == 200
    turn = {"messages": [user("Name a colour.")], "max_tokens": 4}
    assert guarded.ask("POST", CHAT, "inference", turn).status_code == 200
    for key in ("read", "admin"):
        assert guarded.ask("POST", CHAT, key, turn).status_code == 403


def test_every_route_of_the_engine_has_a_scope(guarded: Guarded) -> None:
    """What vLLM serves today: the development routes are all among those that need `admin`."""
    paths = httpx.get(f"{guarded.engine.url}/openapi.json", timeout=60).json()["paths"]
    admin = {path for path in paths if scope_of_engine_route(path) is KeyScope.ADMIN}
    assert {"/pause", "/resume", "/collective_rpc", "/update_weights", "/server_info", "/sleep"} <= admin
    inference = {path for path in paths if scope_of_engine_route(path) is KeyScope.INFERENCE}
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/v1/models"} <= inference
    assert all(
        path.startswith(("/v1/", "/v2/", "/cohere/", "/inference/"))
        or path
        in (
            *("/tokenize", "/detokenize", "/invocations", "/pooling", "/score", "/rerank", "/classify"),
            *("/generative_scoring", "/tokenizer_info"),
        )
        for path in inference
    ), inference
