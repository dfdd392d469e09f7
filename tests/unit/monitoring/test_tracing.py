"""When traces are on, and the names of their attributes."""

import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tokenproxy.monitoring.tracing import make_tracing

_ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
_GRPC = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"


@pytest.mark.parametrize(
    ("environment", "missing", "logged"),
    [
        ({}, "", ""),
        ({**_ENDPOINT, "OTEL_SDK_DISABLED": "true"}, "", ""),
        (_ENDPOINT, "opentelemetry", "pip install 'tokenproxy[otel]'"),
        ({**_ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "pigeon"}, "", "pigeon"),
        ({**_ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, _GRPC, "exporter-otlp-proto-grpc"),
    ],
)
def test_off(
    environment: dict[str, str], missing: str, logged: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    assert make_tracing(environment) is None
    assert logged in caplog.text and bool(logged) == bool(caplog.text)


def test_the_provider_of_the_process_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM with --otlp-traces-endpoint has one: its spans and ours go the same way."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    tracing = make_tracing(_ENDPOINT)
    assert tracing is not None
    tracing.request_span("GET", "/x", []).end()
    tracing.close()  # leaves it open
    tracing.request_span("GET", "/y", []).end()
    assert len(exporter.get_finished_spans()) == 2
