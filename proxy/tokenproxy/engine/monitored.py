"""Observes the calls of an engine: the time that requests wait for it, its load, a span for each call."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from tokenproxy.base.http import Request, Response
from tokenproxy.monitoring.exchange import Exchange, running_exchange
from tokenproxy.monitoring.metrics import InFlight, Metrics
from tokenproxy.monitoring.tracing import Span, Value

if TYPE_CHECKING:
    from tokenproxy.engine.http import HttpEngine
    from tokenproxy.engine.inprocess import InProcessEngine

_SAMPLING = frozenset({"/v1/chat/completions", "/inference/v1/generate"})
"""Routes of the engine that sample; others only prepare a request or read a response."""


class Call:
    """One call of an engine for a client's request, from its beginning until its response is closed."""

    def __init__(self, exchange: Exchange, in_flight: InFlight, span: Span) -> None:
        """Count the call in `in_flight`."""
        self._exchange = exchange
        self._in_flight: InFlight | None = in_flight
        self._span = span
        in_flight.inc()

    def waited(self, seconds: float) -> None:
        """Add a wait for the engine."""
        self._exchange.waited_s += seconds

    def end(self, error: BaseException | None = None) -> None:
        """End the observation of the call. A second time does nothing."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.dec()
            # without recording, the span is the request's own, which ends with the request
            if self._span.recording:
                self._span.end(error)


class MonitoredEngine:
    """Observes an engine's calls for clients' requests. The proxy's own requests are only passed on."""

    def __init__(self, engine: "HttpEngine | InProcessEngine", metrics: Metrics) -> None:
        self.name = engine.name
        self._engine = engine
        self._in_flight = metrics.replica_in_flight(engine.name)

    async def send(self, request: Request) -> Response:
        """See `Engine.send`. The response reports its waits and its end to its call."""
        exchange = running_exchange()
        if exchange is None:
            return await self._engine.send(request)
        span = self._span(exchange, request)
        if span.recording:
            request = replace(request, headers=span.inject(request.headers))
        call, began = Call(exchange, self._in_flight, span), perf_counter()
        try:
            response = await self._engine.send(request)
        except BaseException as error:  # cancellation too: the call is no longer in flight
            call.end(error)
            raise
        finally:
            call.waited(perf_counter() - began)
        if span.recording:
            span.set({"http.response.status_code": response.status})
            if response.status >= 500:
                span.fail(f"the engine answered {response.status}")
        response.call = call
        return response

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
