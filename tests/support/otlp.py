"""A real OTLP/HTTP receiver: it accepts what an OpenTelemetry collector accepts, and keeps the spans."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it arrived; ids in hexadecimal digits."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    status: str
    service: str


@dataclass
class Receiver:
    """What arrived at an endpoint."""

    url: str
    spans: list[ReceivedSpan] = field(default_factory=list)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Path, content type and the header `x-team` of each request."""

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of a trace in the order of their start."""
        return sorted((s for s in self.spans if s.trace_id == trace_id), key=lambda span: span.start_ns)


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """Listen on a free port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.requests.append((self.path, self.headers["content-type"], self.headers["x-team"]))
            receiver.spans += _spans(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")  # an empty ExportTraceServiceResponse
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def _spans(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    span.name,
                    span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _attributes(span.attributes),
                    span.status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
                    service,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    inner = getattr(value, kind)
    return [_value(each) for each in inner.values] if kind == "array_value" else inner
