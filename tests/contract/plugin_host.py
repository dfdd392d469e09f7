"""What vLLM's API server is for its endpoint plugins: it serves the routes of a fake engine."""

from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry

from tests.support.fake_vllm import FakeVllm
from tests.support.tiny_model import TinyModel
from tokenproxy.app.vllm_plugin import TokenProxyPlugin
from tokenproxy.base.types import ASGIApp, Receive, Scope, Send


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


class Server(FakeVllm):
    """vLLM's API server as a plugin sees it: its own routes first, then the plugin's, state at the end."""

    def __init__(self, model: TinyModel, *, starts: bool = True, api_keys: Sequence[str] = ()) -> None:
        super().__init__(model)
        self.args = Namespace(tokenizer=str(model.folder), chat_template=None)
        self.plugin = TokenProxyPlugin(CollectorRegistry())

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with httpx.AsyncClient(base_url=self.url, timeout=20, trust_env=False) as self._engine:
                if starts:
                    await self.plugin.init_state(object(), app.state, self.args)
                yield

        self.app = FastAPI(lifespan=lifespan)
        for path in ("/health", "/version", "/v1/models"):
            self.app.get(path)(self.forward)
        for path in ("/tokenize", "/v1/chat/completions"):
            self.app.post(path)(self.forward)
        self.plugin.attach_router(self.app)
        if api_keys:  # vLLM adds its middleware after the plugins' routes
            self.app.add_middleware(Guard, keys=api_keys)

    async def forward(self, request: Request) -> Response:
        """Send a request on to the fake engine, and its answer back as it comes."""
        content, headers = await request.body(), {"authorization": request.headers.get("authorization", "")}
        sent = self._engine.build_request(request.method, request.url.path, content=content, headers=headers)
        answer = await self._engine.send(sent, stream=True)
        media_type = answer.headers.get("content-type")
        return StreamingResponse(answer.aiter_raw(), answer.status_code, media_type=media_type)
