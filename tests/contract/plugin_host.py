"""What vLLM's API server is for its endpoint plugins, with an engine that echoes."""

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry

from proxy.types import ASGIApp, Receive, Scope, Send
from proxy.vllm_plugin import TokenProxyPlugin
from tests.support.fake_vllm import as_rendered, tools_as_rendered
from tests.support.tiny_model import END, TinyModel


class Guard:
    """vLLM's AuthenticationMiddleware: it looks at some paths only."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.keys = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"].startswith(
            ("/v1", "/v2", "/inference", "/cohere")
        )
        if guarded and dict(scope["headers"]).get(b"authorization") not in self.keys:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class Server:
    """vLLM's API server as a plugin sees it: its own routes first, then the plugin's, state at the end."""

    def __init__(
        self,
        model: TinyModel,
        *,
        starts: bool = True,
        chat_template: str | None = None,
        api_keys: Sequence[str] = (),
    ) -> None:
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
        self.credentials: list[str | None] = []
        """The credentials of requests to /v1/models."""
        if api_keys:  # vLLM adds its middleware after the plugins' routes
            self.app.add_middleware(Guard, keys=api_keys)

    async def health(self) -> Response:
        return Response()

    async def version(self) -> Any:
        return {"version": "inside"}

    async def models(self, request: Request) -> Any:
        self.credentials.append(request.headers.get("authorization"))
        return {"data": [{"id": "tiny", "root": "/not/this", "max_model_len": 4096}]}

    async def tokenize(self, request: Request) -> Any:
        """Never called from outside in vLLM, which lets a plugin's route take the place of its own."""
        body = await request.json()
        tools = tools_as_rendered(body.get("tools"))
        messages = as_rendered(body["messages"])
        return {"tokens": self.model.render(messages, chat_template=self.template, tools=tools)}

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["kv_transfer_params"]["prompt_token_ids"]
        if not body.get("stream"):
            choice = {"index": 0, "token_ids": [74, END], "message": {"role": "assistant", "content": "h"}}
            return JSONResponse({"prompt_token_ids": prompt, "choices": [choice]})

        async def events() -> AsyncIterator[bytes]:
            try:
                yield b'data: {"choices": [], "prompt_token_ids": %s}\n\n' % str(prompt).encode()
                if body.get("user") == "patient":
                    await asyncio.Event().wait()
                yield b"data: [DONE]\n\n"
            except asyncio.CancelledError:
                self.aborted += 1
                raise

        return StreamingResponse(events(), media_type="text/event-stream")
