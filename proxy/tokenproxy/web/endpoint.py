"""Connects ASGI to a route: bodies, credentials, broken streams, clients that leave.

A request is served by one task. A second task listens for the client's disconnect and cancels the first,
which closes the engine's response, so that vLLM aborts.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from urllib.parse import unquote

from tokenproxy.base.errors import (
    ApiError,
    BodyTimeout,
    BodyTooLarge,
    EngineBroken,
    EngineTimeout,
    EngineUnavailable,
    Forbidden,
    Stopping,
    error_event,
    send_error,
)
from tokenproxy.base.http import BytesResponse, Request, Response, is_event_stream
from tokenproxy.base.types import Message, Receive, Scope, Send
from tokenproxy.engine.sse import whole_events
from tokenproxy.formats.translated import TranslatedStream
from tokenproxy.monitoring.exchange import EXCHANGE_KEY, Exchange
from tokenproxy.record.store import StoreError
from tokenproxy.record.store_time import store_time, within
from tokenproxy.turn.services import RunningRequests, Services
from tokenproxy.web.base import Route, StoreRoute
from tokenproxy.web.credentials import SCOPE_KEY, TenantOf, recorded_tenant, tenant_in_scope
from tokenproxy.web.gate import check_page, is_loopback
from tokenproxy.web.keys import SCOPES_KEY, KeyScope
from tokenproxy.web.paths import check_path, raw_path

log = logging.getLogger("tokenproxy")

BODY_TIMEOUT_S = 30.0
"""How long a request's body may take that arrives slower than `BODY_BYTES_PER_S`."""
BODY_BYTES_PER_S = 65_536
"""A body that arrives at least as fast as this never times out."""

WATCH_AFTER_S = 0.1
"""Seconds after which a request is cancelled if its client disconnects, or disconnected before."""


class ClientGone(Exception):
    """The client left before its request was complete."""


class Endpoint:
    """A route as an ASGI application."""

    def __init__(
        self,
        route: Route,
        services: Callable[[Scope], Services],
        tenant_of: TenantOf,
        *,
        inside_vllm: bool = False,
    ) -> None:
        """`inside_vllm`: whether nothing before it checked the path, and determined the client's scopes."""
        self.route = route
        self._label = route.label
        self._path = "" if "{" in route.path else route.path
        """The path of all its requests; empty if their paths differ."""
        self._services = services
        self._tenant_of = tenant_of
        self._inside_vllm = inside_vllm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange: Exchange = scope[EXCHANGE_KEY]
        exchange.route, exchange.observed = self._label, self.route.observed
        with exchange.metrics.in_flight if exchange.observed else nullcontext():
            try:
                services = self._services(scope)
                with services.running.cuttable():
                    request = await self._read(scope, receive, services)
            except ClientGone:
                exchange.leave()
            except ApiError as error:
                await send_error(send, error, scope["path"])
            else:
                store_s = self.route.store_seconds or services.settings.store_timeout_s
                with _ClientWatch(receive, exchange), store_time(store_s):
                    await self._serve(request, services, send)

    async def _read(self, scope: Scope, receive: Receive, services: Services) -> Request:
        """The request, once its client may send it. Raises ApiError or ClientGone."""
        path = self._path or raw_path(scope)
        if self._inside_vllm:
            check_path(scope)
        else:
            _check_scope(scope, self.route.needed_scope(scope["method"], self._path or unquote(path)))
        # Before the body is read: a client without a valid credential must not fill the memory
        tenant, settings = await self._tenant(scope, services), services.settings
        # in front of vLLM a middleware does; which pages may use its own routes, vLLM's settings tell
        if self._inside_vllm and not tenant and isinstance(self.route, StoreRoute):
            check_page(dict(scope["headers"]), [origin.encode() for origin in settings.cors_origins])
        query: bytes = scope.get("query_string", b"")
        limit = min(settings.body_limit_bytes, self.route.body_limit_bytes or settings.body_limit_bytes)
        return Request(
            scope["method"],
            f"{path}?{query.decode('latin-1')}" if query else path,
            list(scope["headers"]),
            await read_body(scope, receive, limit, BODY_TIMEOUT_S),
            tenant=tenant,
            may_read=self._inside_vllm or KeyScope.READ in scope.get(SCOPES_KEY, ()),
            parameters=scope.get("path_params", {}),
        )

    async def _tenant(self, scope: Scope, services: Services) -> str:
        """The tenant of a request. What is recorded can be reached although no engine responds."""
        try:
            return await (self._tenant_of if self.route.needs_tenant else tenant_in_scope)(scope)
        except (EngineUnavailable, EngineTimeout, EngineBroken) as error:
            if self._inside_vllm or not isinstance(self.route, StoreRoute):
                raise
            settings = services.settings
            try:
                with store_time(settings.store_timeout_s):
                    trusted = is_loopback(settings.host)
                    tenant = await recorded_tenant(scope["headers"], services.store, trusted=trusted)
            except StoreError:
                raise error from None
            if tenant is None:
                raise
            return tenant

    async def _serve(self, request: Request, services: Services, send: Send) -> None:
        running = services.running
        try:
            with running.cuttable():
                response = await self.route.answer(request, services)
        except ApiError as error:
            await send_error(send, error, request.path)
            return
        except StoreError as error:
            problem = f"the store does not respond, try again later: {error}"
            await send_error(send, EngineUnavailable(problem), request.path)
            return
        try:
            if is_event_stream(response.headers):
                await send_events(response, request.path, send, running)
            else:
                await send_body(response, request.path, send, running)
        finally:
            await response.aclose()


def _check_scope(scope: Scope, needed: KeyScope | None) -> None:
    """Refuse a request whose client lacks a scope. Raises Forbidden."""
    held: frozenset[KeyScope] = scope.get(SCOPES_KEY, frozenset())
    if needed is None or needed in held:
        return
    request = f"{scope['method']} {scope['path']}"
    if SCOPE_KEY in scope:
        raise Forbidden(
            f"{request} needs an API key with the scope `{needed}`; this one has {', '.join(sorted(held))}. "
            "Keys with it are in `admin_key`, or in `api_key_file` with that scope",
            code="insufficient_scope",
        )
    raise Forbidden(
        f"{request} needs an API key with the scope `{needed}`, and this proxy has no keys: set `admin_key` "
        "or `api_key_file`. Without keys such routes answer only to programs of the same machine, while "
        "`host` is a loopback address",
        code="admin_needs_key",
    )


async def read_body(
    scope: Scope,
    receive: Receive,
    limit: int,
    timeout_s: float = BODY_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """The request's body.

    Args:
        limit: in bytes.
        timeout_s: how long a body may take that comes slower than `BODY_BYTES_PER_S`.
        clock: returns seconds.

    Raises:
        BodyTooLarge: its announced or its actual size is over the limit.
        BodyTimeout: it was too slow.
        ClientGone: the client left before it was complete.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    start = clock()
    while True:
        left_s = timeout_s + size / BODY_BYTES_PER_S - (clock() - start)
        try:
            message = await within(max(0.0, left_s), receive())
        except TimeoutError as error:
            problem = f"the request body did not arrive within {timeout_s:g} s"
            raise BodyTimeout(problem, param="body") from error
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the request body is over the limit of {limit} bytes (`body_limit_bytes`, or that of the route)",
        param="body",
    )


class _ClientWatch:
    """Cancels the task inside its `with` when the client disconnects before the response is complete.

    A request that is served within `WATCH_AFTER_S` costs no task.
    """

    def __init__(self, receive: Receive, exchange: Exchange) -> None:
        self._receive = receive
        self._exchange = exchange
        self._gone = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        self._watcher: asyncio.Task[None] | None = None
        self._start = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._start_watching)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        self._start.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._gone and kind is asyncio.CancelledError:
            self._task.uncancel()
            return True
        return False

    def _start_watching(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # servers report the end of a complete response as a disconnect too; the clean-up after it must finish
        if self._exchange.complete:
            return
        self._gone = True
        self._exchange.leave()
        self._task.cancel()


# --- the response


async def send_events(response: Response, path: str, send: Send, running: RunningRequests) -> None:
    """Send a stream of events; a stream that breaks or is cut off ends with an error event."""
    started = False
    alive: _KeepingAlive | None = None
    try:
        with running.cuttable():
            await send(_head(response))
            started = True
            if isinstance(response, TranslatedStream):
                alive = _KeepingAlive(send, response)
                send = alive.send
            async for chunk in whole_events(response.chunks()):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except ApiError as error:
        if not started:
            await send_error(send, error, path)
            return
        log.warning("a stream of %s ends with an error: %s", path, error.message)
        await send({"type": "http.response.body", "body": error_event(path, error), "more_body": True})
    finally:
        if alive is not None:
            alive.close()
    await send({"type": "http.response.body", "body": b""})


async def send_body(response: Response, path: str, send: Send, running: RunningRequests) -> None:
    """Send a body that is not an event stream.

    The head is sent with the first bytes: if the engine breaks before them, the client gets an error object.
    """
    if isinstance(response, BytesResponse):
        await send(_head(response))
        await send({"type": "http.response.body", "body": response.body})
        return
    started = False
    try:
        with running.cuttable():
            async for chunk in response.chunks():
                if not started:
                    await send(_head(response))
                    started = True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except (EngineBroken, Stopping) as error:
        # after the head the server cuts the connection: a short body must not look complete
        if not started:
            await send_error(send, error, path)
        elif not isinstance(error, Stopping):
            raise
        return
    if not started:
        await send(_head(response))
    await send({"type": "http.response.body", "body": b""})


def _head(response: Response) -> Message:
    return {"type": "http.response.start", "status": response.status, "headers": response.headers}


class _KeepingAlive:
    """Sends an event whenever a stream was silent for a while. A silent stream costs one timer, no task."""

    def __init__(self, send: Send, stream: TranslatedStream) -> None:
        self._send = send
        self._message = {"type": "http.response.body", "body": stream.keep_alive, "more_body": True}
        self._silence_s = stream.silence_s
        self._sent = time.monotonic()
        self._sending = False
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._silence_s, self._check)

    async def send(self, message: Message) -> None:
        """Send what the stream itself sends."""
        self._sending = True
        await self._send(message)
        self._sending = False
        self._sent = time.monotonic()

    def close(self) -> None:
        """Send nothing more."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _check(self) -> None:
        left = self._sent + self._silence_s - time.monotonic()
        if left <= 0:
            # a client that does not read gets nothing more
            if not self._sending and (self._task is None or self._task.done()):
                self._task = self._loop.create_task(self._keep_alive())
            left = self._silence_s
        self._timer = self._loop.call_later(left, self._check)

    async def _keep_alive(self) -> None:
        await self._send(self._message)
        self._sent = time.monotonic()
