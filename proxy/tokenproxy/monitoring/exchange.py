"""The observations of one request while it is served: its id, times, span and the fields of its log line.

The exchange of the running request is in a context variable, so that no function has to pass it on. Tasks
that a request starts share it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from time import perf_counter

from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.monitoring.spans import NO_SPAN, Span, Value

UNROUTED = "none"
"""The route of a request that was refused before routing."""
CLIENT_LEFT = 499
"""The status that counts for a request whose client left before the response began; nginx uses it too."""


class Exchange:
    """One request and its response."""

    __slots__ = (
        "began", "client_left", "complete", "engine_attributes", "first_byte", "id",
        "metrics", "notes", "noting", "observed", "route", "span", "status", "waited_s",
    )  # fmt: skip

    def __init__(
        self, identity: str, metrics: Metrics, span: Span = NO_SPAN, *, noting: bool = False
    ) -> None:
        self.id = identity
        self.metrics = metrics
        self.span = span
        self.noting = noting
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

    def leave(self) -> None:
        """Take note that the client disconnected. After the end of the response that does not count."""
        self.client_left = not self.complete

    def note(self, attributes: Mapping[str, Value | None]) -> None:
        """Add fields to the request's line in the access log."""
        self.notes.update({name: value for name, value in attributes.items() if value is not None})


_running: ContextVar[Exchange | None] = ContextVar("tokenproxy_exchange", default=None)


def running_exchange() -> Exchange | None:
    """The exchange of the request that this task serves; None outside of a request."""
    return _running.get()


def run_exchange(exchange: Exchange) -> None:
    """Make an exchange the running one, in this task and in the tasks that it starts from now on."""
    _running.set(exchange)


def span(name: str, attributes: Mapping[str, Value | None]) -> Span:
    """A span for a step of the running request, to use in a `with`; does nothing if nothing is traced."""
    exchange = _running.get()
    return NO_SPAN if exchange is None else exchange.span.child(name, attributes)


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
