"""The plugin inside vLLM, on a host that stands for vLLM's API server."""

import asyncio
import hashlib
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry

from tests.contract.plugin_host import Server
from tests.support.fake_vllm import Reply, data_of
from tests.support.tiny_model import CHATML, END, HI, TinyModel
from tests.support.utils import run_server, wait_until
from tokenproxy.app.vllm_plugin import TokenProxyPlugin
from tokenproxy.base.errors import EngineUnavailable
from tokenproxy.base.http import BytesResponse, json_response
from tokenproxy.base.http import Request as ProxyRequest
from tokenproxy.engine.versions import RouteTaken
from tokenproxy.record.store import StoreError

_TOKENS = "/v1/chat/completions/tokens"
_NEXT = [{"role": "user", "content": "And then?"}]


@pytest.fixture
def server(tiny_model: TinyModel) -> Iterator[Server]:
    with Server(tiny_model) as server:
        yield server


@pytest.fixture
def inside(server: Server) -> Iterator[httpx.Client]:
    with run_server(server.app) as url, httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        wait_until(lambda: client.get("/ready").status_code == 200)
        yield client


@pytest.mark.parametrize("resolved", [True, False])
def test_appending_renders_with_vllms_flags(server: Server, tiny_model: TinyModel, resolved: bool) -> None:
    """The renderer's resolved values come first; the arguments stand in for a vLLM without this attribute."""
    template = CHATML.replace("message.content", "(message.content | string)") + "{{ suffix }}"
    values: dict[str, Any] = {
        "chat_template": template,
        "chat_template_content_format": "string",
        "default_chat_template_kwargs": {"suffix": "hi"},
    }
    server.chat_template = template.replace("{{ suffix }}", "hi")
    if resolved:
        server.app.state.online_renderer = Namespace(**values)
    else:
        server.args = Namespace(tokenizer=str(tiny_model.folder), **values)
    with run_server(server.app) as url, httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        wait_until(lambda: client.get("/ready").json()["engines"][0].get("template"))
        answer = client.post(_TOKENS, json={"tokens": [1, 74, END], "append_messages": _NEXT})
    assert answer.status_code == 200, answer.text
    assert answer.json()["prompt_token_ids"][-len(HI) :] == list(HI)


def test_vllm_finds_it() -> None:
    [plugin] = entry_points(group="vllm.endpoint_plugins", name="tokenproxy")
    made = plugin.load()()
    assert (made.name, made.required_tasks) == ("tokenproxy", ("generate",))


def test_turns_and_the_engines_own_routes(inside: httpx.Client) -> None:
    answer = inside.post(_TOKENS, json={"tokens": [1, 74]})
    assert answer.json()["prompt_token_ids"] == [1, 74]
    assert answer.json()["choices"][0]["token_ids"] == [*HI, END]
    assert answer.headers["x-prompt-source"] == "given"
    stream = inside.post(_TOKENS, json={"tokens": [1, 74], "stream": True})
    assert next(data_of(stream.content))["prompt_token_ids"] == [1, 74]
    assert stream.content.endswith(b"data: [DONE]\n\n")
    refused = inside.post(_TOKENS, json={"tokens": [True]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    [engine] = inside.get("/ready").json()["engines"]
    assert (engine["engine"], engine["version"], engine["token_in"]) == ("in-process", "0.32.0+fake", "chat")
    assert inside.get("/version").json() == {"version": "0.32.0+fake"}
    assert inside.get("/version/", follow_redirects=False).status_code == 307
    assert inside.get("/no/such/route").status_code == 404
    assert inside.post("/finish_session?session_id=a").json()["ended"] is False
    paths = inside.get("/openapi.json").json()["paths"]
    assert not [path for path in paths if path[1:].endswith("/") or path.startswith(("/chat/", "/sessions"))]


def test_pages_of_other_origins_reach_no_recorded_data(inside: httpx.Client) -> None:
    headers = {"origin": "https://evil.example", "content-type": "text/plain"}
    for path, status in (("/v1/sessions", 403), ("/v1/chat/completions", 200)):
        body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
        assert inside.post(path, content=body, headers=headers).status_code == status


def test_its_routes_answer_before_those_of_vllm_on_every_release(inside: httpx.Client) -> None:
    """The host appends them behind its own, as vLLM did up to 0.31."""
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = inside.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.headers["x-prompt-source"]) == (200, "rendered")


async def test_it_refuses_to_start_where_another_plugin_takes_a_route(server: Server) -> None:
    async def chat() -> None: ...

    server.app.add_api_route("/v1/chat/completions", chat, methods=["POST"])
    server.app.router.routes.insert(0, server.app.router.routes.pop())
    with pytest.raises(RouteTaken, match="POST /v1/chat/completions"):
        await server.plugin.init_state(object(), server.app.state, server.args)


def test_while_the_engine_starts(tiny_model: TinyModel) -> None:
    server = Server(tiny_model, starts=False)
    with run_server(server.app) as url:
        answer = httpx.post(url + _TOKENS, json={"tokens": [1]}, trust_env=False)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert "vLLM is starting" in answer.json()["error"]["message"]


# --- credentials


_TURN = {"tokens": [1, 74]}
_ROUTES: list[tuple[str, str, Any]] = [
    ("POST", _TOKENS, _TURN),
    ("POST", "/sessions/s/chat/completions/tokens/", _TURN),
    ("GET", "/v1/sessions", None),
    ("POST", "/sessions/", {"id": "s"}),
]


@pytest.fixture
def guarded(tiny_model: TinyModel) -> Iterator[tuple[Server, httpx.Client]]:
    server = Server(tiny_model, api_keys=["anna", "bert"])
    with (
        server,
        run_server(server.app) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=20) as client,
    ):
        wait_until(lambda: client.get("/ready").status_code == 200)
        yield server, client


@pytest.mark.parametrize("method, path, body", _ROUTES)
def test_turns_and_sessions_are_guarded_under_all_their_paths(
    guarded: tuple[Server, httpx.Client], method: str, path: str, body: Any
) -> None:
    _, client = guarded
    for headers in ({}, {"authorization": "Bearer eve"}, {"x-api-key": "anna"}):
        assert client.request(method, path, json=body, headers=headers).status_code == 401
    answer = client.request(method, path, json=body, headers={"authorization": "Bearer bert"})
    assert answer.status_code in (200, 201), answer.text
    for status in ("/ready/", "/health", "/version"):
        assert client.get(status).status_code == 200
    assert client.post("/tokenize", json={"messages": _NEXT}).status_code == 200


def test_each_key_that_vllm_accepts_is_a_tenant(
    guarded: tuple[Server, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = guarded
    tenants: list[str] = []

    async def answer(self: object, request: ProxyRequest, services: object) -> BytesResponse:
        tenants.append(request.tenant)
        return json_response({})

    monkeypatch.setattr("tokenproxy.web.sessions.Sessions.answer", answer)
    server.requests.clear()
    for _ in range(2):
        for key in ("anna", "bert"):
            for path in ("/v1/sessions", "/sessions", "/sessions/s/v1/sessions"):
                client.get(path, headers={"authorization": f"Bearer {key}"})
    anna, bert = (hashlib.blake2b(key, digest_size=16).hexdigest() for key in (b"anna", b"bert"))
    assert tenants == [*[anna] * 3, *[bert] * 3] * 2
    # each once; those without a key are the proxy's own
    keys = [seen.header("authorization") for seen in server.seen("/v1/models")]
    assert [key for key in keys if key] == [b"Bearer anna", b"Bearer bert"]


# --- aliases next to vLLM's own routes


def test_aliases_do_not_replace_vllms_own_routes(tiny_model: TinyModel) -> None:
    app = FastAPI()

    @app.post("/chat/completions")
    @app.get("/sessions/{name}")
    @app.post("/v1/chat/completions")
    async def own() -> Any:
        return "own"

    TokenProxyPlugin(CollectorRegistry()).attach_router(app)
    paths = [route.path for route in app.routes if isinstance(route, APIRoute)]
    assert paths.count("/v1/chat/completions") == 1  # of one path, the plugin's wins
    with run_server(app) as url, httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        assert client.post("/chat/completions").json() == client.get("/sessions/s").json() == "own"
        assert client.get("/sessions/s/reward").json() != "own"


# --- the end


async def test_services_are_closed_at_shutdown(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENPROXY_STORE", f"sqlite:///{tmp_path / 'history.db'}")
    tasks = asyncio.all_tasks()
    async with server.app.router.lifespan_context(server.app):
        services = server.plugin._services_or_unavailable({})
        await services.encoders.run(lambda: None)
        assert asyncio.all_tasks() > tasks
    while asyncio.all_tasks() != tasks:  # noqa: ASYNC110 - a thread ends its task last
        await asyncio.sleep(0.001)
    with pytest.raises(StoreError):
        await services.history.store.sessions(limit=1)
    with pytest.raises(EngineUnavailable, match="stopping"):
        server.plugin._services_or_unavailable({})
    await server.plugin.aclose()  # a second time does nothing


def test_streams_are_cut_when_vllms_server_ends(
    server: Server, inside: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM waits for open connections, and its engine, which has ended, sends no more events."""
    monkeypatch.setattr("tokenproxy.app.vllm_plugin._CUT_AFTER_S", 0.2)
    server.replies.append(Reply(hold_at=1))
    body = {"tokens": [1, 74], "stream": True}
    with inside.stream("POST", _TOKENS, json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        assert inside.get("/ready").status_code == 200
        server.app.state.server = Namespace(should_exit=True)
        wait_until(lambda: inside.get("/ready").json().get("stopping"))
        *_, last = [line for line in lines if line]
    assert '"code":"stopping"' in last
    wait_until(lambda: server.aborted)


@pytest.mark.parametrize(
    "args, served",
    [
        (Namespace(enable_scale_out=False, tokens_only=False), False),
        (Namespace(enable_scale_out=True, tokens_only=False), True),
        (Namespace(enable_scale_out=False, tokens_only=True), True),
        (Namespace(), True),
        (None, False),
    ],
    ids=["off", "on", "tokens only", "a version without the flag", "unknown"],
)
def test_generate_is_served_only_where_vllm_serves_it(args: Namespace | None, served: bool) -> None:
    """The proxy itself reaches the route in any case, which must not open it to clients."""
    app = FastAPI()
    if args is not None:
        app.state.args = args
    TokenProxyPlugin(CollectorRegistry()).attach_router(app)
    paths = {route.path for route in app.router.routes if isinstance(route, APIRoute)}
    assert ("/inference/v1/generate" in paths) is served
    assert "/v1/completions" in paths
