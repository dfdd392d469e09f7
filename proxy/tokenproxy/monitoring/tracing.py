"""The spans of a request as the traced code sees them, and their implementation with OpenTelemetry.

Nothing is imported and nothing costs time unless an OTLP endpoint is set in OpenTelemetry's own variables.
Spans are created here, not by the instrumentation packages for ASGI and HTTP clients: those create a span for
every chunk of a stream, cannot be added to vLLM's application by a plugin, and have no data about a prompt's
plan.
"""

import importlib
import logging
import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tokenproxy import __version__
from tokenproxy.base.errors import ApiError
from tokenproxy.base.types import Headers

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("tokenproxy")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SERVICE = "tokenproxy"

Value = str | int | float | bool | list[str]
"""The value of an attribute. None is left out."""


class Span:
    """One step of a request. Leaving its `with` block ends it; an exception marks it as failed.

    This one is used where nothing is traced, and does nothing. It has no state, so one serves all requests.
    """

    __slots__ = ()

    recording = False
    """Whether attributes are recorded; if not, skip computing them."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty if there is no trace."""
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def set(self, attributes: Mapping[str, Value | None]) -> None:
        """Set attributes."""

    def rename(self, name: str) -> None:
        """Rename the span."""

    def child(self, name: str, attributes: Mapping[str, Value | None], *, client: bool = False) -> "Span":
        """Start a child span.

        Args:
            client: whether the step is a request to another service.
        """
        return self

    def inject(self, headers: Headers) -> Headers:
        """The headers with the trace context (`traceparent`) of this span; here that of the client."""
        return headers

    def fail(self, problem: str) -> None:
        """Mark the step as failed."""

    def end(self, error: BaseException | None = None) -> None:
        """End the span; for spans without a `with` block."""


NO_SPAN = Span()


def make_tracing(environment: Mapping[str, str] = os.environ) -> "Tracing | None":
    """Create the tracing that OpenTelemetry's variables configure; None if they configure none.

    Inside vLLM with `--otlp-traces-endpoint`, the process already has a tracer provider: spans go to it, and
    so to vLLM's endpoint. Otherwise this creates a separate provider and does not change the process's.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("", "otlp"):
        return None
    if not any(environment.get(name) for name in _ENDPOINTS):
        return None
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ModuleNotFoundError as error:
        log.warning("no traces are sent (%s): pip install 'tokenproxy[otel]'", error)
        return None
    existing = trace.get_tracer_provider()
    if isinstance(existing, TracerProvider):
        return Tracing(existing, owned=False)
    provider = _make_provider(environment)
    return Tracing(provider, owned=True) if provider is not None else None


def _make_provider(environment: Mapping[str, str]) -> "TracerProvider | None":
    """A provider that exports in batches, configured by OpenTelemetry's variables; None if it cannot."""
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    protocol = next((value for name in _PROTOCOLS if (value := environment.get(name))), "http/protobuf")
    kind = protocol.removesuffix("/protobuf")
    if protocol not in ("grpc", "http/protobuf"):
        log.warning("no traces are sent: unknown OTLP protocol %r: set http/protobuf or grpc", protocol)
        return None
    try:
        module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter")
    except ModuleNotFoundError as error:
        log.warning("no traces are sent (%s): pip install opentelemetry-exporter-otlp-proto-%s", error, kind)
        return None
    exporter = module.OTLPSpanExporter()
    own = {SERVICE_NAME: environment.get("OTEL_SERVICE_NAME") or _SERVICE, SERVICE_VERSION: __version__}
    provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Tracing:
    """Creates the spans of one application with a tracer provider."""

    def __init__(self, provider: "TracerProvider", *, owned: bool) -> None:
        from opentelemetry import propagate

        self._provider = provider
        self._owned = owned
        self._extract = propagate.extract
        self._tracer = provider.get_tracer(_SERVICE, __version__)

    def request_span(self, method: str, path: str, headers: Headers) -> Span:
        """The span of a request, which continues the trace context in its headers."""
        from opentelemetry.trace import SpanKind

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        span = self._tracer.start_span(
            method,
            context=self._extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": path},
        )
        return _OpenTelemetrySpan(self._tracer, span)

    def close(self) -> None:
        """Send the remaining spans; vLLM does so itself. It may block for seconds: call it on a thread."""
        if self._owned:
            self._provider.shutdown()


class _OpenTelemetrySpan(Span):
    """See `Span`."""

    __slots__ = ("_span", "_tracer")

    recording = True
    """Always: the engine gets the trace context even if the sampler dropped the trace."""

    def __init__(self, tracer: "trace.Tracer", span: "trace.Span") -> None:
        self._tracer = tracer
        self._span = span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)

    def set(self, attributes: Mapping[str, Value | None]) -> None:
        """See `Span.set`."""
        if not self._span.is_recording():
            return  # the request has ended: the turn of a client that left is recorded later
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def rename(self, name: str) -> None:
        """See `Span.rename`."""
        self._span.update_name(name)

    def child(self, name: str, attributes: Mapping[str, Value | None], *, client: bool = False) -> Span:
        """See `Span.child`."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        # The parent is named, not taken from OpenTelemetry's own context: requests share tasks with others
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(self._span),
            kind=SpanKind.CLIENT if client else SpanKind.INTERNAL,
        )
        made = _OpenTelemetrySpan(self._tracer, span)
        made.set(attributes)
        return made

    def inject(self, headers: Headers) -> Headers:
        """See `Span.inject`."""
        from opentelemetry import propagate
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        propagate.inject(carrier, set_span_in_context(self._span))
        own = {name.lower().encode("latin-1"): value.encode("latin-1") for name, value in carrier.items()}
        return [pair for pair in headers if pair[0] not in own] + list(own.items())

    def fail(self, problem: str) -> None:
        """See `Span.fail`."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, problem))

    def end(self, error: BaseException | None = None) -> None:
        """See `Span.end`."""
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            # The message of any other error may quote what a client sent
            self.fail(error.message if isinstance(error, ApiError) else type(error).__name__)
        self._span.end()

    @property
    def trace_id(self) -> str:
        """See `Span.trace_id`."""
        return f"{self._span.get_span_context().trace_id:032x}"
