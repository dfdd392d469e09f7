"""When traces are on, and the names of their attributes."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, url_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes

from proxy.monitoring.tracing import make_tracing

_ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
_GRPC = "opentelemetry.exporter.otlp.proto.grpc"


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


def test_the_names_are_those_of_the_conventions() -> None:
    conventional = {
        value
        for module in (gen_ai_attributes, url_attributes, error_attributes, http_attributes)
        for value in vars(module).values()
        if isinstance(value, str)
    }
    sources = "".join(path.read_text() for path in (Path(__file__).parents[3] / "proxy").glob("**/*.py"))
    used = set(re.findall(r'"((?:gen_ai|http\.(?:request|response|route)|url|error)\.[a-z_.]+)"', sources))
    assert "gen_ai.request.model" in used
    messages_of_asgi = {"http.response.start", "http.response.body"}
    assert used - conventional == messages_of_asgi
