import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry

from proxy.vllm_plugin import TokenProxyPlugin
from tests.fake_vllm import as_rendered, data_of
from tests.tiny_model import END, TinyModel
from tests.utils import run_server, wait_until

_TOKENS = "/v1/chat/completions/tokens"
_NEXT = [{"role": "user", "content": "And then?"}]


class Server:
    """vLLM's API server as a plugin sees it: routes first, the plugin's behind them, state at the end."""

    def __init__(self, model: TinyModel, *, starts: bool = True, chat_template: str | None = None) -> None:
        self.model = model
        self.template = model.reference.chat_template
        """What the engine renders with."""
        self.aborted = 0
        self.args = Namespace(tokenizer=str(model.folder), chat_template=chat_template)
        self.plugin = TokenProxyPlugin(CollectorRegistry())

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            if starts:
                await self.plugin.init_state(object(), app.state, self.args)
            yield

        self.app = FastAPI(lifespan=lifespan)
        self.app.get("/health")(self.health)
        self.app.get("/v1/models")(self.models)
        self.app.get("/version")(self.version)
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.post("/tokenize")(self.tokenize)
        self.plugin.attach_router(self.app)

    async def health(self) -> Response:
        return Response()

    async def version(self) -> Any:
        return {"version": "inside"}

    async def models(self) -> Any:
        return {"data": [{"id": "tiny", "root": "/not/this", "max_model_len": 4096}]}

    async def tokenize(self, request: Request) -> Any:
        """Never called from outside in vLLM, which lets a plugin's route take the place of its own."""
        messages = (await request.json())["messages"]
        return {"tokens": self.model.render(as_rendered(messages), chat_template=self.template)}

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["kv_transfer_params"]["prompt_token_ids"]
        if body.get("model") == "other":
            raise ValueError("no such model")
        if not body.get("stream"):
            choice = {"index": 0, "token_ids": [74, END], "message": {"role": "assistant", "content": "h"}}
            return JSONResponse({"prompt_token_ids": prompt, "choices": [choice]})

        async def events() -> AsyncIterator[bytes]:
            try:
                yield b'data: {"choices": [], "prompt_token_ids": %s}\n\n' % str(prompt).encode()
                if body.get("user") == "patient":
                    await asyncio.sleep(60)
                yield b"data: [DONE]\n\n"
            except asyncio.CancelledError:
                self.aborted += 1
                raise

        return StreamingResponse(events(), media_type="text/event-stream")


@pytest.fixture
def server(tiny_model: TinyModel) -> Server:
    return Server(tiny_model)


@pytest.fixture
def inside(server: Server) -> Iterator[httpx.Client]:
    with run_server(server.app) as url, httpx.Client(base_url=url, trust_env=False) as client:
        wait_until(lambda: client.get("/ready").status_code == 200)
        yield client


def test_vllm_finds_it() -> None:
    [plugin] = entry_points(group="vllm.endpoint_plugins", name="tokenproxy")
    made = plugin.load()()
    assert isinstance(made, TokenProxyPlugin)
    assert (made.name, made.required_tasks) == ("tokenproxy", ("generate",))


def test_ids_in_and_ids_out(inside: httpx.Client) -> None:
    answer = inside.post(_TOKENS, json={"tokens": [1, 74]})
    assert answer.json()["prompt_token_ids"] == [1, 74]
    assert answer.json()["choices"][0]["token_ids"] == [74, END]
    assert answer.headers["x-prompt-source"] == "given"


def test_a_stream(inside: httpx.Client) -> None:
    answer = inside.post(_TOKENS, json={"tokens": [1, 74], "stream": True})
    assert [chunk["prompt_token_ids"] for chunk in data_of(answer.content)] == [[1, 74]]
    assert answer.content.endswith(b"data: [DONE]\n\n")


def test_a_client_that_leaves(inside: httpx.Client, server: Server) -> None:
    body = {"tokens": [1, 74], "stream": True, "user": "patient"}
    with inside.stream("POST", _TOKENS, json=body) as answer:
        chunks = answer.iter_raw()
        assert next(chunks).startswith(b"data: ")
        assert server.aborted == 0
    wait_until(lambda: server.aborted == 1)


def test_bad_requests_are_refused_before_the_engine(inside: httpx.Client) -> None:
    answer = inside.post(_TOKENS, json={"tokens": [True]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


def test_the_engines_own_routes_stay(inside: httpx.Client) -> None:
    assert inside.get("/version").json() == {"version": "inside"}
    assert inside.get("/health").content == b""
    assert inside.get("/no/such/route").status_code == 404


def test_what_it_can_do_is_reported(inside: httpx.Client) -> None:
    [engine] = inside.get("/ready").json()["engines"]
    assert (engine["engine"], engine["version"], engine["token_in"]) == ("in-process", "inside", "chat")


def test_while_the_engine_starts(tiny_model: TinyModel) -> None:
    server = Server(tiny_model, starts=False)
    with run_server(server.app) as url:
        answer = httpx.post(url + _TOKENS, json={"tokens": [1]}, trust_env=False)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert "vLLM is starting" in answer.json()["error"]["message"]


@pytest.mark.parametrize("as_file", [False, True])
def test_appending_uses_the_template_that_vllm_was_given(
    tiny_model: TinyModel, tmp_path: Path, as_file: bool
) -> None:
    template = tiny_model.reference.chat_template.replace("assistant\n", "assistant: ")
    assert template != tiny_model.reference.chat_template
    path = tmp_path / "template.jinja"
    path.write_text(template)
    server = Server(tiny_model, chat_template=str(path) if as_file else template)
    server.template = template
    with run_server(server.app) as url, httpx.Client(base_url=url, trust_env=False) as client:
        answer = client.post(_TOKENS, json={"tokens": [1, 74, END], "append_messages": _NEXT})
    whole = tiny_model.render([{"role": "assistant", "content": "h"}, *_NEXT], chat_template=template)
    assert answer.json()["prompt_token_ids"] == [1, 74, END, *whole[whole.index(END) + 1 :]]


def test_settings_come_from_a_file(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("body_limit_bytes: 10\n")
    monkeypatch.setenv("TOKENPROXY_CONFIG", str(path))
    with run_server(Server(tiny_model).app) as url:
        answer = httpx.post(url + _TOKENS, json={"tokens": [1, 74]}, trust_env=False)
    assert answer.status_code == 413
