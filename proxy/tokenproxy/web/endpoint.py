"""Connects ASGI to a route: bodies, credentials, broken streams, clients that leave.

A request is served by one task. A second task listens for the client's disconnect and cancels the first,
which closes the engine's response, so that vLLM aborts.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Self
from urllib.parse import unquote

from tokenproxy.base.errors import (
    ApiError,
    BodyEncoded,
    BodyTimeout,
    BodyTooLarge,
    EngineBroken,
    EngineTimeout,
    EngineUnavailable,
    Forbidden,
    Stopping,
    UnreadBody,
    error_event,
    send_error,
)
from tokenproxy.base.http import Request, Response, is_event_stream
from tokenproxy.base.types import Headers, Receive, Scope, Send
from tokenproxy.monitoring.exchange import EXCHANGE_KEY, Exchange
from tokenproxy.record.session_keys import SessionKey
from tokenproxy.record.store import StoreError
from tokenproxy.record.store_time import StoreTime, within
from tokenproxy.turn.services import RunningRequests, Services
from tokenproxy.web.base import Route, StoreRoute
from tokenproxy.web.credentials import TENANT_KEY, TenantOf, recorded_tenant, tenant_in_scope
from tokenproxy.web.gate import check_page, is_loopback
from tokenproxy.web.keys import SCOPES_KEY, SESSION_KEY, KeyScope
from tokenproxy.web.paths import check_path, raw_path
from tokenproxy.web.response import send_response

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
        self._needed = {method: route.needed_scope(method, route.path) for method in route.methods}
        """The scopes for requests of this path, by method."""
        self._services = services
        self._tenant_of = tenant_of if route.needs_tenant else tenant_in_scope
        self._inside_vllm = inside_vllm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange: Exchange = scope[EXCHANGE_KEY]
        exchange.route, exchange.observed = self._label, self.route.observed
        with exchange.metrics.in_flight if exchange.observed else nullcontext():
            try:
                services = self._services(scope)
            except ApiError as error:
                await send_error(send, error, scope["path"])
                return
            with StoreTime(self.route.store_seconds or services.settings.store_timeout_s):
                await self._serve(scope, receive, send, services)

    async def _read(self, scope: Scope, receive: Receive, services: Services) -> Request:
        """The request, once its client may send it. Raises ApiError or ClientGone."""
        path = self._path or raw_path(scope)
        if self._inside_vllm:
            check_path(scope)
        else:
            method = scope["method"]
            needed = self._needed[method] if self._path else self.route.needed_scope(method, unquote(path))
            if needed is not None and needed not in scope.get(SCOPES_KEY, ()):
                raise _lacks(scope, needed)
        # Before the body is read: a client without a valid credential must not fill the memory
        try:
            tenant = await self._tenant_of(scope)
        except (EngineUnavailable, EngineTimeout, EngineBroken):
            recorded = await self._recorded_tenant(scope, services)
            if recorded is None:
                raise
            tenant = recorded
        if not self.route.catches_all:
            _check_encoding(scope)
        settings = services.settings
        # in front of vLLM a middleware does; which pages may use its own routes, vLLM's settings tell
        if self._inside_vllm and not tenant and isinstance(self.route, StoreRoute):
            check_page(dict(scope["headers"]), [origin.encode() for origin in settings.cors_origins])
        query: bytes = scope.get("query_string", b"")
        limit = min(settings.body_limit_bytes, self.route.body_limit_bytes or settings.body_limit_bytes)
        body = await read_body(scope, receive, limit, BODY_TIMEOUT_S)
        granted: SessionKey | None = scope.get(SESSION_KEY)
        if granted is not None and services.session_keys is not None:
            services.session_keys.check(granted)  # the session may have ended while the body arrived
        return Request(
            scope["method"],
            f"{path}?{query.decode('latin-1')}" if query else path,
            list(scope["headers"]),
            body,
            tenant=tenant,
            may_read=self._inside_vllm or KeyScope.READ in scope.get(SCOPES_KEY, ()),
            key_session=granted.session if granted is not None else "",
            turns_only=not self._inside_vllm and KeyScope.INFERENCE not in scope.get(SCOPES_KEY, ()),
            parameters=scope.get("path_params", {}),
        )

    async def _recorded_tenant(self, scope: Scope, services: Services) -> str | None:
        """The tenant of a request whose credential no engine verifies, if it may reach what is recorded."""
        if self._inside_vllm or not isinstance(self.route, StoreRoute):
            return None
        trusted = is_loopback(services.settings.host)
        with StoreTime(services.settings.store_timeout_s), suppress(StoreError):
            return await recorded_tenant(scope["headers"], services.store, trusted=trusted)
        return None

    async def _serve(self, scope: Scope, receive: Receive, send: Send, services: Services) -> None:
        exchange: Exchange = scope[EXCHANGE_KEY]
        response: Response | None = None
        try:
            with Interruptible(services.running) as block:
                request = await self._read(scope, receive, services)
                block.watch(exchange)
                response = await self.route.answer(request, services)
                await send_response(response, send)
        except ClientGone:
            exchange.leave()
        except (ApiError, StoreError) as error:
            if not await _told(error, response, exchange, scope, send):
                raise  # the server then cuts the connection: a short body must not look complete
        finally:
            if response is not None:
                await response.aclose()


async def _told(
    caught: ApiError | StoreError, response: Response | None, exchange: Exchange, scope: Scope, send: Send
) -> bool:
    """Whether a client could be told of an error, or knows of it.

    A function of its own, because an error that a variable of its own traceback names keeps the request's
    body in memory until garbage is collected.
    """
    problem = f"the store does not respond, try again later: {caught}"
    error = EngineUnavailable(problem) if isinstance(caught, StoreError) else caught
    if not exchange.status:
        await send_error(send, error, scope["path"])
        return True
    if response is not None and is_event_stream(response.headers):
        log.warning("a stream of %s ends with an error: %s", scope["path"], error.message)
        await send({"type": "http.response.body", "body": error_event(scope["path"], error)})
        return True
    return isinstance(error, Stopping)


def _check_encoding(scope: Scope) -> None:
    """Raise BodyEncoded for a body that is not sent as it is."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            coding = value.decode("latin-1")
            raise BodyEncoded(
                f"the request body has the `Content-Encoding` {coding}: send it without one",
                param="Content-Encoding",
            )


def _lacks(scope: Scope, needed: KeyScope) -> Forbidden:
    """The error of a request whose client lacks a scope."""
    request = f"{scope['method']} {scope['path']}"
    if TENANT_KEY in scope:
        held = ", ".join(sorted(scope.get(SCOPES_KEY, ())))
        return Forbidden(
            f"{request} needs an API key with the scope `{needed}`; this one has {held}. "
            "Keys with it are in `admin_key`, or in `api_key_file` with that scope",
            code="insufficient_scope",
        )
    return Forbidden(
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
        UnreadBody: the server ended the request at its head because of its `Upgrade` header.
        BodyTooLarge: its announced or its actual size is over the limit.
        BodyTimeout: it was too slow.
        ClientGone: the client left before it was complete.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
        if name == b"upgrade":  # our own server drops it; vLLM's and Ray Serve's do not
            _check_upgrade(scope["headers"])
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


def _check_upgrade(headers: Headers) -> None:
    """uvicorn reads no body after an `Upgrade` header that `Connection` names. Raises UnreadBody."""
    values = dict(headers)
    body = values.get(b"content-length", b"0").strip(b"0") or b"transfer-encoding" in values
    if body and b"upgrade" in values.get(b"connection", b"").lower():
        problem = "the body of a request with an `Upgrade` header cannot be read here"
        raise UnreadBody(
            f"{problem}: leave the header out (for h2c, make the client speak HTTP 1 only)", param="upgrade"
        )


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the request body is over the limit of {limit} bytes (`body_limit_bytes`, or that of the route)",
        param="body",
    )


class Interruptible:
    """A block that ends early: when the process stops, and when the client of its request leaves.

    It works as `asyncio.timeout` does: the task is cancelled, so that everything inside cleans up. After
    `RunningRequests.cut` the cancellation becomes `Stopping` at the end of the block, which is also raised at
    once by a block that begins later. For a client that left before the response was complete, the
    cancellation ends there. A request that is served within `WATCH_AFTER_S` costs no task.
    """

    __slots__ = ("_before", "_gone", "_running", "_start", "_task", "_watcher")

    def __init__(self, running: RunningRequests) -> None:
        self._running = running
        self._gone = False
        self._start: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        if self._running.is_cut:
            raise _stopping()
        task = asyncio.current_task()
        assert task is not None
        self._task, self._before = task, task.cancelling()
        self._running.blocks[self] = task
        return self

    def watch(self, exchange: Exchange) -> None:
        """End the block if the client leaves from now on. Its request must be read."""

        def start() -> None:
            self._watcher = asyncio.create_task(self._watch(exchange))

        self._start = asyncio.get_running_loop().call_later(WATCH_AFTER_S, start)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if self._start is not None:
            self._start.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        is_cut = self._running.blocks.pop(self, None) is None
        if not is_cut and not self._gone:
            return False
        for _ in range(is_cut + self._gone):
            self._task.uncancel()
        # a task that is cancelled for another reason too stays cancelled
        if kind is not asyncio.CancelledError or self._task.cancelling() > self._before:
            return False
        if self._gone:
            return True
        raise _stopping() from error

    async def _watch(self, exchange: Exchange) -> None:
        while (await exchange.receive())["type"] != "http.disconnect":
            pass
        # servers report the end of a complete response as a disconnect too; the clean-up after it must finish
        if exchange.complete:
            return
        self._gone = True
        exchange.leave()
        self._task.cancel()


def _stopping() -> Stopping:
    problem = "the proxy stopped before the response was complete: send the request again"
    return Stopping(problem, code="stopping")
