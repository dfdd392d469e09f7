"""Observes every request of an application, as a plain ASGI middleware.

In front of vLLM it is the outermost middleware, so that it also observes requests that others refuse. Inside
vLLM, where the application is vLLM's, each endpoint of the proxy has its own.
"""

import asyncio
import logging
import os
import re
from dataclasses import dataclass
from time import perf_counter

from tokenproxy.base.error_formats import is_anthropic, send_error
from tokenproxy.base.errors import ApiError
from tokenproxy.base.types import ASGIApp, Headers, Message, Receive, Scope, Send
from tokenproxy.monitoring.exchange import CLIENT_LEFT, Exchange, run_exchange
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.monitoring.spans import NO_SPAN
from tokenproxy.monitoring.tracing import Tracing

log = logging.getLogger("tokenproxy")
access_log = logging.getLogger("tokenproxy.access")
"""A line for each request, at level debug."""

_UNEXPECTED = "an unexpected error in the proxy; its log has the details"
EXCHANGE_KEY = "tokenproxy.exchange"
"""Where the ASGI scope of a request holds its exchange."""
HEADER = b"x-request-id"
LONGEST = 128
"""Characters of an id that is taken from a client."""

# An id appears in logs, headers and the ids of the engine's responses: no character must need quoting
_HARMLESS = re.compile(rb"[A-Za-z0-9._:@=+/~-]{1,%d}" % LONGEST)


@dataclass(slots=True)
class Observer:
    """The metrics, traces and access log of one application."""

    metrics: Metrics
    tracing: Tracing | None = None

    async def aclose(self) -> None:
        """Send the spans that were not sent yet."""
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def begin(self, scope: Scope) -> Exchange:
        """Create the exchange of a request, and put its id into the request's headers."""
        identity = request_id(scope["headers"])
        span = NO_SPAN
        if self.tracing is not None:
            span = self.tracing.request_span(scope["method"], _path(scope), scope["headers"])
        scope["headers"] = with_request_id(scope["headers"], identity)
        return Exchange(identity, self.metrics, span, noting=access_log.isEnabledFor(logging.DEBUG))

    def end(self, exchange: Exchange, scope: Scope) -> None:
        """Report a completed request."""
        duration = perf_counter() - exchange.began
        added = max(0.0, duration - exchange.waited_s)
        status = exchange.status or CLIENT_LEFT
        self.metrics.requests(exchange.route, status).inc()
        metrics = self.metrics.of_route(exchange.route)
        if exchange.client_left:
            metrics.disconnects.inc()
        if exchange.observed:
            metrics.duration.observe(duration)
            metrics.added.observe(added)
            if exchange.first_byte:
                metrics.first_byte.observe(exchange.first_byte - exchange.began)
            if exchange.noting:
                self._log(exchange, scope, status, duration, added)
        if exchange.span.recording:
            if status >= 500:
                exchange.span.fail(f"answered {status}")
            # the route's template, because each client's path would be another name
            exchange.span.rename(f"{scope['method']} {exchange.route}")
            exchange.span.set(
                {
                    "http.route": exchange.route,
                    "http.response.status_code": status,
                    "tokenproxy.request.id": exchange.id,
                    "tokenproxy.added_s": added,
                    "tokenproxy.client_left": exchange.client_left,
                }
            )

    def _log(self, exchange: Exchange, scope: Scope, status: int, duration: float, added: float) -> None:
        client = scope.get("client")
        fields = {
            "client": client[0] if client else "-",
            "method": scope["method"],
            "path": _path(scope),
            "status": status,
            "duration_ms": round(duration * 1e3, 3),
            "added_ms": round(added * 1e3, 3),
            **exchange.notes,
        }
        if exchange.client_left:
            fields["client_left"] = True
        access_log.debug(
            "%s %s %d", scope["method"], fields["path"], status,
            extra={"fields": fields, "request_id": exchange.id},
        )  # fmt: skip


class Monitor:
    """Serves requests with an application and observes them, unless they are observed already."""

    def __init__(self, app: ASGIApp, observer: Observer) -> None:
        self._app = app
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or EXCHANGE_KEY in scope:
            await self._app(scope, receive, send)
            return
        exchange = scope[EXCHANGE_KEY] = self._observer.begin(scope)
        wire = _Wire(exchange, receive, send, anthropic=is_anthropic(scope["path"]))
        run_exchange(exchange)
        with exchange.span:
            try:
                await self._app(scope, wire.receive, wire.send)
            except Exception:
                # the boundary of a request: a defect of the proxy becomes an error object
                if exchange.status:
                    raise  # the server then cuts the connection: a short body must not look complete
                log.exception("an unexpected error in %s %s", scope["method"], _path(scope))
                await send_error(wire.send, ApiError(_UNEXPECTED), scope["path"])
            finally:
                self._observer.end(exchange, scope)


class _Wire:
    """Times the messages of one request in both directions, and adds the request's id to the response."""

    __slots__ = ("_anthropic", "_body_read", "_exchange", "_receive", "_send")

    def __init__(self, exchange: Exchange, receive: Receive, send: Send, *, anthropic: bool) -> None:
        """`anthropic`: whether the client is one of Anthropic's, which reads the id in `request-id`."""
        self._anthropic = anthropic
        self._exchange = exchange
        self._receive = receive
        self._send = send
        self._body_read = False

    async def receive(self) -> Message:
        """The next message of the client. Waiting for its body is not time that the proxy adds."""
        if self._body_read:
            return await self._receive()
        began = perf_counter()
        message = await self._receive()
        self._exchange.waited_s += perf_counter() - began
        self._body_read = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a message to the client. Waiting for the client is not time that the proxy adds."""
        exchange = self._exchange
        began = perf_counter()
        if not exchange.status:
            exchange.status = message["status"]
            headers = with_request_id(message.get("headers", []), exchange.id)
            if self._anthropic:
                headers.append((b"request-id", exchange.id.encode("ascii")))
            message = {**message, "headers": headers}
        else:
            if not exchange.first_byte and message.get("body"):
                exchange.first_byte = began
            exchange.complete = not message.get("more_body", False)
        await self._send(message)
        exchange.waited_s += perf_counter() - began


def _path(scope: Scope) -> str:
    """The path as the client sent it, percent-encoded; without the query, which may hold a key."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode("unicode_escape")
    return raw.partition(b"?")[0].decode("latin-1")


def request_id(headers: Headers) -> str:
    """The id in `X-Request-ID`; if it is missing or unusable, a new one of 32 hexadecimal digits."""
    for name, value in headers:
        if name == HEADER and _HARMLESS.fullmatch(value):
            return value.decode("ascii")
    return os.urandom(16).hex()


def with_request_id(headers: Headers, identity: str) -> Headers:
    """Replace the request id in the headers."""
    kept = [pair for pair in headers if pair[0] != HEADER]
    kept.append((HEADER, identity.encode("ascii")))
    return kept
