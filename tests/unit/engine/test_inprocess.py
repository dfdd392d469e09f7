import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI, HTTPException
from fastapi import Request as FastapiRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tokenproxy.base.errors import EngineBroken
from tokenproxy.base.http import Request
from tokenproxy.base.types import Receive, Scope, Send
from tokenproxy.engine.inprocess import InProcessEngine, inner_app


class App:
    """An application like vLLM's that records how its streams ended."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.state.secret = "shared"
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.ended = asyncio.Event()
        self.aborted = False
        self.app.post("/echo")(self.echo)
        self.app.get("/stream")(self.stream)
        self.app.get("/wait")(self.wait)

    async def echo(self, request: FastapiRequest) -> Response:
        seen = {
            "secret": request.app.state.secret,
            "path": request.url.path,
            "query": request.url.query,
            "headers": [[name.decode(), value.decode()] for name, value in request.headers.raw],
            "body": (await request.body()).decode(),
        }
        return JSONResponse(seen, status_code=201, headers={"X-Answer": "yes"})

    async def stream(self) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                yield b"one"
                await self.go.wait()
                yield b"two"
            except (asyncio.CancelledError, GeneratorExit):
                self.aborted = True
                raise
            finally:
                self.ended.set()

        return StreamingResponse(chunks())

    async def wait(self, request: FastapiRequest) -> Response:
        """Wait as vLLM does for a completion: until it is complete or the client disconnects."""
        self.begun.set()
        while not self.go.is_set():
            if await request.is_disconnected():
                self.aborted = True
                self.ended.set()
                break
            await asyncio.sleep(0.01)
        return Response()


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def engine(app: App) -> InProcessEngine:
    return InProcessEngine(inner_app(app.app))


async def _read(engine: InProcessEngine, path: str) -> tuple[int, bytes]:
    response = await engine.send(Request("GET", path))
    body = await response.read()
    await response.aclose()
    return response.status, body


async def test_application_gets_the_request_as_from_a_socket(engine: InProcessEngine) -> None:
    headers = [(b"x-one", b"1"), (b"x-one", b"2"), (b"content-length", b"999")]
    assert (await _read(engine, "/echo"))[0] == 405
    await engine.send(Request("POST", "/echo"))  # from now on its route is known
    response = await engine.send(Request("POST", "/echo?a=%2F&b=+", headers, b"{}"))
    body = json.loads(await response.read())
    assert response.status == 201
    assert (b"x-answer", b"yes") in response.headers
    assert body == {
        "secret": "shared",
        "path": "/echo",
        "query": "a=%2F&b=+",
        "headers": [["x-one", "1"], ["x-one", "2"], ["content-length", "2"]],
        "body": "{}",
    }


async def test_chunks_are_yielded_as_they_are_sent(engine: InProcessEngine, app: App) -> None:
    response = await engine.send(Request("GET", "/stream"))
    chunks = response.chunks()
    assert await anext(chunks) == b"one"
    assert not app.ended.is_set()
    app.go.set()
    assert [chunk async for chunk in chunks] == [b"two"]
    await response.aclose()
    assert app.ended.is_set()
    assert not app.aborted


async def test_closing_early_is_a_client_disconnect(engine: InProcessEngine, app: App) -> None:
    response = await engine.send(Request("GET", "/stream"))
    await anext(response.chunks())
    await response.aclose()
    assert (app.ended.is_set(), app.aborted) == (True, True)


async def test_cancelling_before_a_response_is_a_client_disconnect(engine: InProcessEngine, app: App) -> None:
    sending = asyncio.create_task(engine.send(Request("GET", "/wait")))
    await app.begun.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert app.ended.is_set()
    assert app.aborted


async def test_exception_handlers_are_the_applications_also_those_registered_later() -> None:
    app = FastAPI()

    @app.get("/{name}")
    async def fail(name: str) -> None:
        raise HTTPException(404) if name == "missing" else RuntimeError("unexpected")

    @app.exception_handler(Exception)
    async def handle(request: FastapiRequest, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 500)

    engine = InProcessEngine(inner_app(app))

    @app.exception_handler(HTTPException)
    async def handle_missing(request: FastapiRequest, error: Exception) -> Response:
        return Response("handled", 404)

    assert await _read(engine, "/missing") == (404, b"handled")
    assert await _read(engine, "/other") == (500, b'{"error":"unexpected"}')


@pytest.mark.parametrize("raises", [True, False])
async def test_application_that_fails_or_breaks_off_is_an_error(raises: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/before":
            raise RuntimeError("dead")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        if raises:
            raise RuntimeError("dead")

    engine = InProcessEngine(app)
    with pytest.raises(EngineBroken):
        await engine.send(Request("GET", "/before"))
    response = await engine.send(Request("GET", "/"))
    chunks = response.chunks()
    assert await anext(chunks) == b"one"
    with pytest.raises(EngineBroken, match="middle of its response"):
        await anext(chunks)
    await response.aclose()
