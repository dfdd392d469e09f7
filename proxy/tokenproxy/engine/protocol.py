"""The protocol of an engine, over a socket or in the same process, and how it is called.

Calls for clients' requests are observed: the time that they wait for the engine, its load, a span for each.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import msgspec

from chat_tokenizer import ids
from tokenproxy.base.errors import EngineBroken
from tokenproxy.base.http import Request, Response, read_and_close
from tokenproxy.base.images import Image
from tokenproxy.base.request import EngineRoute
from tokenproxy.base.types import Fields, Headers
from tokenproxy.monitoring.exchange import Exchange, running_exchange
from tokenproxy.monitoring.metrics import InFlight, Metrics
from tokenproxy.monitoring.tracing import Span, Value

NO_ERROR_OBJECT = "BadGatewayError"
"""The type of an error whose body is no error object."""
_TELLS_NOTHING = frozenset({429, 502, 503, 504})
_SAMPLING = frozenset(EngineRoute)


class Engine(Protocol):
    """One vLLM."""

    @property
    def name(self) -> str:
        """The engine's URL, or another name for it, in log and error messages."""
        ...

    async def send(self, request: Request) -> Response:
        """Send a request and wait for the head of the response.

        Raises:
            EngineUnavailable: nothing listens at its address; the request was not received.
            EngineBroken: the connection broke before a response arrived.
            EngineTimeout: connecting took too long.
        """
        ...

    def verify(self, verify: Callable[[], Awaitable[None]] | None) -> None:
        """Set the callback before a request over a new connection; it raises to stop the request.

        An engine that was restarted may serve another model. An engine in the same process ignores it.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


@dataclass(slots=True)
class TokenRequest:
    """A chat completion whose prompt is ids."""

    prompt_ids: bytes
    """The prompt as a validated JSON array of ids, for example `b"[1, 74, 75]"`."""
    fields: Fields
    """All other fields of the chat completion, as the client sent them."""
    headers: Headers
    """Without `accept-encoding`: responses are parsed."""
    field: str = "prompt_ids"
    """The client's name for the field with the ids; error messages use it."""
    single_ids: bytes = b""
    """The prompt with a single placeholder for each image; empty if it has no images."""
    images: Sequence[Image] = ()
    """The images of the prompt, in its order. Only the generate route takes them."""
    sampled: Sequence[int] = ()
    """Ids that were sampled after the prompt by an engine that broke off; this one goes on after them."""
    check: Callable[[Mapping[str, Any]], None] = lambda parsed: None
    """Gets the delta that an engine makes of `sampled`; raises EngineBroken if nothing may follow it."""

    @property
    def begun(self) -> bytes:
        """The prompt and what was sampled after it, as a JSON array."""
        return ids.concatenate(self.prompt_ids, ids.dump(self.sampled)) if self.sampled else self.prompt_ids


@dataclass(frozen=True, slots=True)
class EngineWithCredential:
    """An engine to which the proxy's own requests are sent with a credential."""

    engine: Engine
    credential: tuple[bytes, bytes]
    """Header name and value."""

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.engine.name

    async def send(self, request: Request) -> Response:
        """See `Engine.send`."""
        return await self.engine.send(replace(request, headers=[*request.headers, self.credential]))

    def verify(self, verify: Callable[[], Awaitable[None]] | None) -> None:
        """See `Engine.verify`."""
        self.engine.verify(verify)

    async def aclose(self) -> None:
        """Does nothing: the owner of the wrapped engine closes it."""


@dataclass(slots=True)
class Call:
    """One call of an engine for a client's request, from its beginning until its response is closed."""

    exchange: Exchange
    """Counts the waits for the engine."""
    in_flight: InFlight | None
    """Counts the call; None after its end."""
    span: Span

    def end(self, error: BaseException | None = None) -> None:
        """End the observation of the call. A second time does nothing."""
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is not None:
            in_flight.dec()
            # without recording, the span is the request's own, which ends with the request
            if self.span.recording:
                self.span.end(error)


class _ObservedResponse(Response, Protocol):
    call: Call | None
    """Is told when the response waits for the engine, and when it ends."""


class _ObservableEngine(Engine, Protocol):
    async def send(self, request: Request) -> _ObservedResponse: ...


class MonitoredEngine:
    """Observes an engine's calls for clients' requests. The proxy's own requests are only passed on."""

    def __init__(self, engine: _ObservableEngine, metrics: Metrics) -> None:
        self.name = engine.name
        self._engine = engine
        self._in_flight = metrics.replica_in_flight(engine.name)

    async def send(self, request: Request) -> Response:
        """See `Engine.send`. The response reports its waits and its end to its call."""
        exchange = running_exchange()
        if exchange is None:
            return await self._engine.send(request)
        span = exchange.span
        if span.recording:
            span = self._child(span, exchange, request)
            request = replace(request, headers=span.inject(request.headers))
        call, began = Call(exchange, self._in_flight, span), perf_counter()
        self._in_flight.inc()
        try:
            response = await self._engine.send(request)
        except BaseException as error:  # cancellation too: the call is no longer in flight
            call.end(error)
            raise
        finally:
            exchange.waited_s += perf_counter() - began
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

    def _child(self, parent: Span, exchange: Exchange, request: Request) -> Span:
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
        operation = exchange.engine_attributes["gen_ai.operation.name"]
        attributes.update(exchange.engine_attributes)
        return parent.child(f"{operation} {model}".rstrip(), attributes, client=True)


async def fetch(engine: Engine, request: Request) -> tuple[int, bytes]:
    """Send a request; returns the status and body of the response.

    Raises:
        ApiError: the engine does not respond.
    """
    response = await engine.send(request)
    return response.status, await read_and_close(response)


async def examine(engine: Engine, request: Request) -> tuple[int, bytes]:
    """Send a request that finds out what an engine supports; returns the status and body of the response.

    Raises:
        EngineBroken: the status does not tell it, for example because the engine is busy.
        ApiError: the engine does not respond.
    """
    status, body = await fetch(engine, request)
    if status in _TELLS_NOTHING:
        raise EngineBroken(f"{engine.name} returned status {status} for {request.path}; retrying later")
    return status, body


class Problem(msgspec.Struct):
    """An error of an engine."""

    message: str = ""
    code: int | str | None = None
    type: str | None = None
    param: str | None = None
    is_object: bool = True
    """Whether the engine returned an error object."""

    @property
    def name(self) -> str | None:
        """The code, if it is a word and not a status."""
        return self.code if isinstance(self.code, str) else None


class _Refused(msgspec.Struct):
    error: dict[str, Any] | str


_decode_refused = msgspec.json.Decoder(_Refused).decode


def problem_of(body: bytes) -> Problem:
    """The error in an engine's response, or in the data of an event; another text is its message.

    Fields of an unknown shape are left out.
    """
    try:
        error = _decode_refused(body).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        text = body.decode("utf-8", "replace") or "the engine returned an error without a message"
        return Problem(text, type=NO_ERROR_OBJECT, is_object=False)
    if isinstance(error, str):
        return Problem(error)
    code = error.get("code")
    message, kind, param = (
        value if isinstance(value := error.get(name), str) else None for name in ("message", "type", "param")
    )
    return Problem(message or "", code if isinstance(code, int | str) else None, kind, param)


def error_text(body: bytes) -> str:
    """The message of an engine's error. At most 300 characters."""
    return problem_of(body).message[:300]
