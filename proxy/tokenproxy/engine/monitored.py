"""Observes the calls of an engine: the time that requests wait for it, its load, a span for each call."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from time import perf_counter

from tokenproxy.base.errors import ApiError
from tokenproxy.base.http import Request, Response
from tokenproxy.engine.protocol import Engine
from tokenproxy.monitoring.exchange import Exchange, running_exchange
from tokenproxy.monitoring.metrics import InFlight, Metrics
from tokenproxy.monitoring.spans import Span, Value

_SAMPLING = frozenset({"/v1/chat/completions", "/inference/v1/generate"})
"""Routes of the engine that sample; others only prepare a request or read a response."""


class MonitoredEngine:
    """Observes an engine's calls for clients' requests. The proxy's own requests are only passed on."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self.name = engine.name
        self._engine = engine
        self._in_flight = metrics.replica_in_flight(engine.name)

    async def send(self, request: Request) -> Response:
        """See `Engine.send`."""
        exchange = running_exchange()
        if exchange is None:
            return await self._engine.send(request)
        span = self._span(exchange, request)
        if span.recording:
            request = replace(request, headers=span.inject(request.headers))
        self._in_flight.inc()
        began = perf_counter()
        try:
            response = await self._engine.send(request)
        except BaseException as error:  # cancellation too: the call is no longer in flight
            self._in_flight.dec()
            _end_span(span, error)
            raise
        finally:
            exchange.waited_s += perf_counter() - began
        if span.recording:
            span.set({"http.response.status_code": response.status})
            if response.status >= 500:
                span.fail(f"the engine answered {response.status}")
        return MonitoredResponse(response, exchange, self._in_flight, span)

    def verify(self, verify: Callable[[], Awaitable[None]] | None) -> None:
        """See `Engine.verify`."""
        self._engine.verify(verify)

    async def aclose(self) -> None:
        """See `Engine.aclose`."""
        await self._engine.aclose()

    def _span(self, exchange: Exchange, request: Request) -> Span:
        parent = exchange.span
        if not parent.recording:
            return parent
        path = request.path.partition("?")[0]
        attributes: dict[str, Value | None] = {
            "http.request.method": request.method,
            "url.path": path,
            "tokenproxy.replica": self.name,
        }
        if path not in _SAMPLING or not exchange.engine_attributes:
            return parent.child(f"{request.method} {path}", attributes, client=True)
        # the name of a sampling call in OpenTelemetry's conventions for generative AI
        model = exchange.engine_attributes.get("gen_ai.request.model") or ""
        attributes.update(exchange.engine_attributes)
        return parent.child(f"chat {model}".rstrip(), attributes, client=True)


class MonitoredResponse:
    """The response to a call, which ends with `aclose`."""

    def __init__(self, response: Response, exchange: Exchange, in_flight: InFlight, span: Span) -> None:
        """`in_flight` counts the call until it ends."""
        self.status = response.status
        self.headers = response.headers
        self._response = response
        self._exchange = exchange
        self._in_flight: InFlight | None = in_flight
        self._span = span

    async def chunks(self) -> AsyncIterator[bytes]:
        """See `Response.chunks`."""
        began = perf_counter()
        try:
            async for chunk in self._response.chunks():
                self._exchange.waited_s += perf_counter() - began
                yield chunk
                began = perf_counter()
        except ApiError as error:
            self._end(error)
            raise
        self._exchange.waited_s += perf_counter() - began

    async def read(self) -> bytes:
        """See `Response.read`."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """See `Response.aclose`."""
        try:
            await self._response.aclose()
        finally:
            self._end()

    def _end(self, error: ApiError | None = None) -> None:
        """End the observation of the call. A second time does nothing."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.dec()
            _end_span(self._span, error)


def _end_span(span: Span, error: BaseException | None) -> None:
    # without recording, this is the request's own span, which ends with the request
    if span.recording:
        span.end(error)
