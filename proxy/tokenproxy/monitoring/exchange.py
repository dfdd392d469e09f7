"""Observes each request: its id, times, span and the fields of its log line, in metrics, traces and the log.

`Monitor` is a plain ASGI middleware. In front of vLLM it is the outermost one, so that it also observes
requests that others refuse. Inside vLLM, where the application is vLLM's, each endpoint of the proxy has its
own. The exchange of the running request is in a context variable, so that no function has to pass it on.
Tasks that a request starts share it.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter

from tokenproxy.base.errors import ApiError, is_anthropic, send_error
from tokenproxy.base.types import ASGIApp, Headers, Message, Receive, Scope, Send
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.monitoring.tracing import NO_SPAN, Span, Tracing, Value

log = logging.getLogger("tokenproxy")
access_log = logging.getLogger("tokenproxy.access")
"""A line for each request, at level debug."""

UNROUTED = "none"
"""The route of a request that was refused before routing."""
CLIENT_LEFT = 499
"""The status that counts for a request whose client left before the response began; nginx uses it too."""
EXCHANGE_KEY = "tokenproxy.exchange"
"""Where the ASGI scope of a request holds its exchange."""
HEADER = b"x-request-id"
LONGEST = 128
"""Characters of an id that is taken from a client."""
_UNEXPECTED = "an unexpected error in the proxy; its log has the details"

# An id appears in logs, headers and the ids of the engine's responses: no character must need quoting
_HARMLESS = re.compile(rb"[A-Za-z0-9._:@=+/~-]{1,%d}" % LONGEST)

_running: ContextVar["Exchange | None"] = ContextVar("tokenproxy_exchange", default=None)


class Exchange:
    """One request and its response. It times the messages between client and application."""

    __slots__ = (
        "__weakref__", "_body_read", "_receive", "_scope", "_send", "began", "client_left", "complete",
        "engine_attributes", "first_byte", "id", "metrics", "notes", "noting", "observed", "route", "span",
        "status", "waited_s",
    )  # fmt: skip

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, metrics: Metrics, span: Span = NO_SPAN
    ) -> None:
        """Begin to observe the request of this task, and put its id into its headers."""
        for name, value in scope["headers"]:
            if name == HEADER and _HARMLESS.fullmatch(value):
                self.id = value.decode("ascii")
                break
        else:  # a missing or unusable id is replaced
            self.id = os.urandom(16).hex()
        scope["headers"] = with_request_id(scope["headers"], self.id)
        self.metrics = metrics
        self.span = span
        self.noting = access_log.isEnabledFor(logging.DEBUG)
        """Whether the access log, which reads `notes`, is on."""
        self.route = UNROUTED
        self.observed = True
        """False for health checks and scrapes: they are counted, and their times are not observed."""
        self.status = 0
        """0 until the response starts."""
        self.complete = False
        """Whether the end of the response was handed to the server."""
        self.client_left = False
        self.began = perf_counter()
        self.first_byte = 0.0
        """When the first byte of the body was sent, on the clock of `began`; 0 if there was none."""
        self.waited_s = 0.0
        """Seconds in which the request waited for an engine, for the client or in a queue. The code that
        waits adds them."""
        self.engine_attributes: Mapping[str, Value | None] = {}
        """Attributes of the spans of its calls of an engine."""
        self.notes: dict[str, Value] = {}
        """Further fields of the request's line in the access log."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body_read = False
        _running.set(self)

    async def receive(self) -> Message:
        """The next message of the client. Waiting for its body is not time that the proxy adds."""
        if self._body_read:
            return await self._receive()
        began = perf_counter()
        message = await self._receive()
        self.waited_s += perf_counter() - began
        self._body_read = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a message to the client, with the request's id. Waiting for the client is not time that the
        proxy adds."""
        began = perf_counter()
        if not self.status:
            self.status = message["status"]
            headers = with_request_id(message.get("headers", []), self.id)
            if is_anthropic(self._scope["path"]):  # its clients read another name
                headers.append((b"request-id", self.id.encode("ascii")))
            message = {**message, "headers": headers}
        else:
            if not self.first_byte and message.get("body"):
                self.first_byte = began
            self.complete = not message.get("more_body", False)
        await self._send(message)
        self.waited_s += perf_counter() - began

    def leave(self) -> None:
        """Take note that the client disconnected. After the end of the response that does not count."""
        self.client_left = not self.complete

    def note(self, attributes: Mapping[str, Value | None]) -> None:
        """Add fields to the request's line in the access log."""
        self.notes.update({name: value for name, value in attributes.items() if value is not None})

    def end(self) -> None:
        """Report the completed request."""
        duration = perf_counter() - self.began
        added = max(0.0, duration - self.waited_s)
        status = self.status or CLIENT_LEFT
        self.metrics.requests(self.route, status).inc()
        metrics = self.metrics.of_route(self.route)
        if self.client_left:
            metrics.disconnects.inc()
        if self.observed:
            metrics.duration.observe(duration)
            metrics.added.observe(added)
            if self.first_byte:
                metrics.first_byte.observe(self.first_byte - self.began)
            if self.noting:
                self._log(status, duration, added)
        if self.span.recording:
            if status >= 500:
                self.span.fail(f"answered {status}")
            # the route's template, because each client's path would be another name
            self.span.rename(f"{self._scope['method']} {self.route}")
            self.span.set(
                {
                    "http.route": self.route,
                    "http.response.status_code": status,
                    "tokenproxy.request.id": self.id,
                    "tokenproxy.added_s": added,
                    "tokenproxy.client_left": self.client_left,
                }
            )

    def _log(self, status: int, duration: float, added: float) -> None:
        client, method, path = self._scope.get("client"), self._scope["method"], _path(self._scope)
        fields = {
            "client": client[0] if client else "-",
            "method": method,
            "path": path,
            "status": status,
            "duration_ms": round(duration * 1e3, 3),
            "added_ms": round(added * 1e3, 3),
            **self.notes,
        }
        if self.client_left:
            fields["client_left"] = True
        extra = {"fields": fields, "request_id": self.id}
        access_log.debug("%s %s %d", method, path, status, extra=extra)


running_exchange: Callable[[], Exchange | None] = _running.get
"""Returns the exchange of the request that this task serves; None outside of a request."""


def span(name: str, attributes: Mapping[str, Value | None]) -> Span:
    """A span for a step of the running request, to use in a `with`; does nothing if nothing is traced."""
    exchange = _running.get()
    if exchange is None or not exchange.span.recording:
        return NO_SPAN
    return exchange.span.child(name, attributes)


@contextmanager
def waiting() -> Iterator[None]:
    """Time a wait that the running request asked for. It is not time that the proxy adds."""
    began = perf_counter()
    try:
        yield
    finally:
        if (exchange := _running.get()) is not None:
            exchange.waited_s += perf_counter() - began


@contextmanager
def queued(*, for_room: bool = False) -> Iterator[None]:
    """Count the running request as waiting for a replica. The wait is not time that the proxy adds."""
    exchange = _running.get()
    with waiting(), exchange.metrics.queue(for_room=for_room) if exchange is not None else nullcontext():
        yield


@dataclass(slots=True)
class Observer:
    """The metrics, traces and access log of one application."""

    metrics: Metrics
    tracing: Tracing | None = None

    async def aclose(self) -> None:
        """Send the spans that were not sent yet."""
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


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
        span, tracing = NO_SPAN, self._observer.tracing
        if tracing is not None:
            span = tracing.request_span(scope["method"], _path(scope), scope["headers"])
        exchange = scope[EXCHANGE_KEY] = Exchange(scope, receive, send, self._observer.metrics, span)
        with span:
            try:
                await self._app(scope, exchange.receive, exchange.send)
            except Exception:
                # the boundary of a request: a defect of the proxy becomes an error object
                if exchange.status:
                    raise  # the server then cuts the connection: a short body must not look complete
                log.exception("an unexpected error in %s %s", scope["method"], _path(scope))
                await send_error(exchange.send, ApiError(_UNEXPECTED), scope["path"])
            finally:
                exchange.end()
                del scope[EXCHANGE_KEY]  # it holds the scope: without a circle both are freed at once


def _path(scope: Scope) -> str:
    """The path as the client sent it, percent-encoded; without the query, which may hold a key."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode("unicode_escape")
    return raw.partition(b"?")[0].decode("latin-1")


def with_request_id(headers: Headers, identity: str) -> Headers:
    """Replace the request id in the headers."""
    kept = [pair for pair in headers if pair[0] != HEADER]
    kept.append((HEADER, identity.encode("ascii")))
    return kept
