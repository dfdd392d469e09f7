"""A fake vLLM on a real socket: the wire formats of the real one, and every way in which it can fail.

It samples the ids it is told to, records all requests, and knows which of them were aborted. It renders with
plain transformers, so that nothing under test checks itself.
"""

import asyncio
import json
import socket
import struct
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from aiohttp import web

from tests.fake_completions import completed_chunks_of, completed_of, prompts_of
from tests.fake_scale_out import (
    derendered_chunk_of,
    derendered_of,
    generated_chunks_of,
    generated_of,
    refused_by_derender,
    sampling_of,
)
from tests.fake_wire import (
    Canned,
    Reply,
    as_rendered,
    choice_of,
    chunks_of,
    completion_of,
    data_of,
    echoed,
    error_body,
    event_of,
    tools_as_rendered,
)
from tests.tiny_model import HI, VOCAB_SIZE, TinyModel

__all__ = [
    "MAX_MODEL_LEN",
    "Canned",
    "FakeVllm",
    "Reply",
    "Seen",
    "Variant",
    "as_rendered",
    "data_of",
    "error_body",
    "tools_as_rendered",
]


T = TypeVar("T")
MAX_MODEL_LEN = 4096
_PATIENCE_S = 10.0
_TOO_LONG = (
    f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, your prompt contains {{0}} "
    "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
    "input prompt. (parameter=input_tokens, value={0})"
)
_TOO_LONG_TO_GENERATE = (
    f"The decoder prompt (length {{0}}) is longer than the maximum model length of {MAX_MODEL_LEN}. Make "
    "sure that `max_model_len` is no smaller than the number of text tokens."
)
_SCALE_OUT_PATHS = ("/v1/chat/completions/render", "/inference/v1/generate", "/v1/chat/completions/derender")


class Variant(StrEnum):
    """How this engine takes exact prompts."""

    CHAT = "chat"
    """In `kv_transfer_params.prompt_token_ids` of the chat route."""
    SCALE_OUT = "generate"
    """By the scale-out routes; the chat route ignores the ids."""
    NEITHER = "none"
    """Not at all: scale-out routes answer 403, as vLLM does without --enable-scale-out."""


@dataclass
class Seen:
    """A request as it arrived."""

    method: str
    target: str
    """Path and query, as on the wire."""
    headers: list[tuple[bytes, bytes]]
    body: bytes
    reused: bool
    """Whether its connection had carried a request before."""

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def json(self) -> Any:
        """The parsed body."""
        return json.loads(self.body)

    def header(self, name: str) -> bytes | None:
        """The value of a header, or None."""
        return next((value for key, value in self.headers if key.lower() == name.encode()), None)


class FakeVllm:
    """An engine in a thread of its own. It can be killed, and another started on its port."""

    def __init__(
        self,
        model: TinyModel,
        variant: Variant = Variant.CHAT,
        *,
        port: int = 0,
        api_keys: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.variant = variant
        self.port = port
        self.api_keys = tuple(api_keys)
        """Empty where it asks for none."""
        self.running = 0
        self.reset()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._generations: dict[str, Reply] = {}
        self._connections: set[object] = set()
        self._rendering = threading.Lock()

    def reset(self) -> None:
        """Forget what was seen, and go well again."""
        self.root = str(self.model.folder)
        """What /v1/models says was loaded."""
        self.chat_template: str | None = None
        """What it was started with; None for the model's own."""
        self.names = ["tiny", "adapter"]
        self.rendered_fields: tuple[str, ...] = ()
        """Request fields that its rendering prints, as some of vLLM's renderers do."""
        self.healthy = True
        self.slow_s: dict[str, float] = {}
        """How long answers of a path take."""
        self.requests: list[Seen] = []
        self.aborted = 0
        self.replies: deque[Reply] = deque()
        """Scripts for the next generations, which then go as `usual`."""
        self.usual = Reply()
        self.canned: dict[str, Canned] = {}
        self.endless: dict[str, bytes] = {}
        """Paths that stream this event again and again after `release`."""
        self.endless_pause_s = 0.01
        self.hang_up: Callable[[Seen], bool] = lambda seen: False
        """Requests whose connection is closed without an answer."""
        self._released = asyncio.Event()

    def __enter__(self) -> "FakeVllm":
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """Its root."""
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """End it at once, like SIGKILL: all connections break, nothing listens any more."""
        if self._thread.is_alive():
            self._call(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_PATIENCE_S)
            self._loop.close()

    def join(self) -> None:
        """Wait until it ends."""
        self._thread.join()

    def release(self) -> None:
        """Let everything that is held go on."""
        self._loop.call_soon_threadsafe(self._released.set)

    def close_idle(self) -> None:
        """Close all connections, as vLLM closes those that were idle for 5 s."""
        self._call(self._close_connections())

    def seen(self, path: str) -> list[Seen]:
        """The requests for a path, oldest first."""
        return [request for request in self.requests if request.path == path]

    def last(self, path: str = "/v1/chat/completions") -> Seen:
        """The newest request for a path."""
        return self.seen(path)[-1]

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_S)

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=0.0,
            auto_decompress=False,
            max_line_size=2**20,  # like vLLM, which takes long lines and headers
            max_field_size=2**20,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        await self._close_connections()
        await self._runner.cleanup()

    async def _close_connections(self) -> None:
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        peer = (request.transport or asyncio.Transport()).get_extra_info("peername")
        seen = Seen(
            request.method,
            request.raw_path,
            list(request.raw_headers),
            await request.read(),
            peer in self._connections,
        )
        self._connections.add(peer)
        self.requests.append(seen)
        await asyncio.sleep(self.slow_s.get(seen.path, 0))
        if self.hang_up(seen):
            raise _break(request, "reset")
        if not self._allowed(seen):
            return _respond(Canned(b'{"error":"Unauthorized"}', 401, {"content-type": "application/json"}))
        if seen.path in self.canned:
            return _respond(self.canned[seen.path])
        if seen.path in self.endless:
            return await self._stream_endlessly(request, self.endless[seen.path])
        if seen.path in _SCALE_OUT_PATHS and self.variant is not Variant.SCALE_OUT:
            message = (
                "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            )
            return _error(403, message, "PermissionDeniedError")
        route = _ROUTES.get((seen.method, seen.path))
        if route is None:
            return _respond(Canned(b'{"detail":"Not Found"}', 404, {"content-type": "application/json"}))
        respond: Callable[[web.Request, Seen], Awaitable[web.StreamResponse]] = getattr(self, route)
        return await respond(request, seen)

    def _allowed(self, seen: Seen) -> bool:
        """vLLM guards these prefixes only."""
        guarded = self.api_keys and seen.path.startswith(("/v1", "/inference"))
        return not guarded or seen.header("authorization") in [
            f"Bearer {key}".encode() for key in self.api_keys
        ]

    async def _health(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.Response(status=200 if self.healthy else 503)

    async def _version(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        return _json({"version": "0.32.0+fake"})

    async def _models(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        base, *adapters = self.names
        first = {"id": base, "root": self.root, "parent": None, "max_model_len": MAX_MODEL_LEN}
        others = [{"id": name, "root": "/lora", "parent": base, "max_model_len": None} for name in adapters]
        # the base model last: whoever wants it must look at `parent`
        return _json({"object": "list", "data": [*others, first]})

    async def _tokenize(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.json
        ids = self._render(body) if "messages" in body else self.model.encode(body["prompt"])
        strings = self.model.reference.convert_ids_to_tokens(ids) if body.get("return_token_strs") else None
        return _json(
            {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": strings}
        )

    def _render(self, body: dict[str, Any]) -> list[int]:
        rendered = {name: body[name] for name in self.rendered_fields if body.get(name) not in (None, "none")}
        with self._rendering:
            return (self.model.encode(json.dumps(rendered)) if rendered else []) + self.model.render(
                as_rendered(body["messages"]),
                **{
                    **(body.get("chat_template_kwargs") or {}),
                    "add_generation_prompt": body.get("add_generation_prompt", True),
                    "tools": tools_as_rendered(body.get("tools")),
                    "chat_template": self.chat_template,
                },
            )

    async def _chat(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.json
        given: list[int] | None = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        prompt = given if given is not None and self.variant is Variant.CHAT else self._render(body)
        refusal = self._refusal(body, prompt, "kv_transfer_params.prompt_token_ids")
        if refusal is not None:
            return refusal
        reply = self._next_reply(body.get("max_tokens"))
        if reply.error is not None:
            return _respond(reply.error)
        with_ids = bool(body.get("return_token_ids"))
        logprobs = bool(body.get("logprobs"))
        n = body.get("n") or 1
        if not body.get("stream"):
            scripts = enumerate(reply.choices(n))
            choices = [choice_of(self.model, i, one, with_ids, logprobs) for i, one in scripts]
            completion = completion_of(choices, len(prompt), reply, body.get("model") or self.names[0])
            completion["prompt_token_ids"] = echoed(reply, prompt) if with_ids else None
            return await self._finish(request, reply, [json.dumps(completion).encode()], "application/json")
        chunks = chunks_of(self.model, reply, prompt, body)
        return await self._finish(request, reply, [*map(event_of, chunks), b"data: [DONE]\n\n"])

    def _refusal(self, body: dict[str, Any], prompt: list[int], param: str) -> web.Response | None:
        model = body.get("model")
        if model is not None and model not in self.names:
            return _error(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
        if any(token >= VOCAB_SIZE for token in prompt):
            message = f"Token id {max(prompt)} is out of vocabulary (parameter={param})"
            return _error(400, message, "BadRequestError", param)
        if len(prompt) > MAX_MODEL_LEN:
            if param == "token_ids":
                return _error(400, _TOO_LONG_TO_GENERATE.format(len(prompt)), "BadRequestError")
            return _error(400, _TOO_LONG.format(len(prompt)), "BadRequestError", "input_tokens")
        return None

    def _next_reply(self, max_tokens: int | None) -> Reply:
        if max_tokens == 1:  # a probe: scripts are for the requests of tests
            return Reply(ids=HI[:1])
        return self.replies.popleft() if self.replies else self.usual

    async def _render_chat(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.json
        refusal = self._refusal(body, [], "")
        if refusal is not None:
            return refusal
        prompt = self._render(body)
        passed = ("stream", "stream_options", "model", "cache_salt", "priority", "kv_transfer_params")
        return _json(
            {
                "request_id": f"chatcmpl-{len(self.requests)}",
                "token_ids": prompt,
                "sampling_params": sampling_of(body, MAX_MODEL_LEN - len(prompt)),
                "reasoning_ended": True,
                "output_mode": "tokens",
                **{name: body[name] for name in passed if name in body},
            }
        )

    async def _generate(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.json
        prompt, sampling = body["token_ids"], body["sampling_params"]
        refusal = self._refusal(body, prompt, "token_ids")
        if refusal is not None:
            return refusal
        reply = self._next_reply(sampling.get("max_tokens"))
        if reply.error is not None:
            return _respond(reply.error)
        name = f"generate-tokens-{body.get('request_id', 'none')}"
        self._generations[name] = reply
        if not body.get("stream"):
            generated = generated_of(self.model, reply, name, len(prompt), body)
            return await self._finish(request, reply, [json.dumps(generated).encode()], "application/json")
        chunks = generated_chunks_of(self.model, reply, name, len(prompt), body)
        return await self._finish(request, reply, [*map(event_of, chunks), b"data: [DONE]\n\n"])

    async def _complete(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.json
        prompts = prompts_of(self.model, body["prompt"])
        for prompt in prompts:
            if (refusal := self._refusal(body, prompt, "prompt")) is not None:
                return refusal
        replies = [self._next_reply(body.get("max_tokens")) for _ in prompts]
        if (error := replies[0].error) is not None:
            return _respond(error)
        if not body.get("stream"):
            whole = completed_of(self.model, prompts, replies, body)
            return await self._finish(request, replies[0], [json.dumps(whole).encode()], "application/json")
        chunks = completed_chunks_of(self.model, prompts, replies, body)
        return await self._finish(request, replies[0], [*map(event_of, chunks), b"data: [DONE]\n\n"])

    async def _derender(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.json
        if refusal := refused_by_derender(body):
            return _error(400, refusal, "BadRequestError")
        made = derendered_chunk_of if body.get("stream") else derendered_of
        name = (body.get("generate_response") or body.get("generate_chunk"))["request_id"]
        return _json(made(self.model, self._generations[name], body.get("model") or self.names[0], body))

    async def _finish(
        self, request: web.Request, reply: Reply, events: list[bytes], kind: str = "text/event-stream"
    ) -> web.StreamResponse:
        """Send an answer as its script says, and notice when the client leaves."""
        response = web.StreamResponse(headers={"content-type": kind})
        stream = kind == "text/event-stream"
        async with self._counted() as settle:
            if stream:
                await response.prepare(request)
            for position, event in enumerate(events):
                if stream and reply.pause_s:
                    await asyncio.sleep(reply.pause_s)
                if position == reply.hold_at:
                    await self._released.wait()
                breaks = position == reply.break_at
                if not stream and (not breaks or reply.how in ("head", "inside", "chunked")):
                    if reply.how != "chunked":
                        response.content_length = len(event)
                    await response.prepare(request)
                if breaks:
                    settle()
                    if reply.how in ("inside", "chunked"):
                        await response.write(event[: len(event) // 2])
                    raise _break(request, reply.how)
                for piece in _pieces(event, reply):
                    await asyncio.sleep(reply.drip_s)
                    await response.write(piece)
            await response.write_eof()
            settle()
        return response

    async def _stream_endlessly(self, request: web.Request, event: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        async with self._counted():
            await response.prepare(request)
            await self._released.wait()
            while True:  # until the client leaves, which cancels it
                await response.write(event)
                await asyncio.sleep(self.endless_pause_s)

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[Callable[[], None]]:
        """Counts a running generation, and an aborted one unless it was settled before."""
        settled = False

        def settle() -> None:
            nonlocal settled
            settled = True

        self.running += 1
        try:
            yield settle
        finally:
            self.running -= 1
            self.aborted += not settled


_ROUTES = {  # by name, so that a subclass may replace one
    ("GET", "/health"): "_health",
    ("GET", "/version"): "_version",
    ("GET", "/v1/models"): "_models",
    ("POST", "/tokenize"): "_tokenize",
    ("POST", "/v1/chat/completions"): "_chat",
    ("POST", "/v1/chat/completions/render"): "_render_chat",
    ("POST", "/inference/v1/generate"): "_generate",
    ("POST", "/v1/completions"): "_complete",
    ("POST", "/v1/chat/completions/derender"): "_derender",
}


def _pieces(event: bytes, reply: Reply) -> list[bytes]:
    """What is written at once: the event, or each of its bytes."""
    return [event[at : at + 1] for at in range(len(event))] if reply.drip_s else [event]


def _break(request: web.Request, how: str) -> BaseException:
    """Break a connection; the result ends its handler without another word."""
    transport = request.transport
    assert transport is not None
    if how == "reset":
        # SO_LINGER of zero seconds makes the close a reset
        linger = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        assert isinstance(transport, asyncio.WriteTransport)
        transport.abort()
    else:
        transport.close()
    return asyncio.CancelledError()


def _json(value: object) -> web.Response:
    return web.json_response(value)


def _error(status: int, message: str, kind: str, param: str | None = None) -> web.Response:
    headers = {"content-type": "application/json"}
    return _respond(Canned(error_body(message, kind, param, status), status, headers))


def _respond(canned: Canned) -> web.Response:
    return web.Response(body=canned.body, status=canned.status, headers=canned.headers)
