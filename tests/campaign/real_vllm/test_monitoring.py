"""Trace context on a real engine."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, run_proxy, start_engine, wait_ready
from tests.support.otlp import ReceivedSpan, Receiver, otlp_receiver
from tests.support.talk import CHAT, user
from tests.support.utils import wait_until


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """Where the proxy and the engine send their traces."""
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def traced(
    model: Path, receiver: Receiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """An engine with the plugin that sends traces."""
    environment = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_SERVICE_NAME": "inside",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    flags = ("--otlp-traces-endpoint", f"{receiver.url}/v1/traces")
    log = tmp_path_factory.mktemp("traced") / "vllm.log"
    with start_engine(model, log, *flags, environment=environment) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        wait_ready(engine.url)
        yield engine


@pytest.mark.timeout(START_TIMEOUT_S + 120)
def test_a_trace_from_the_client_through_proxy_and_plugin_to_the_engine(
    traced: EngineProcess, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy in front of an engine that has the plugin: each step continues the one before."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    trace, client_span = secrets.token_hex(16), secrets.token_hex(8)
    context = {"traceparent": f"00-{trace}-{client_span}-01"}
    with run_proxy(traced.url, "--store", "memory:") as url:
        body = {"messages": [user("Hi")], "max_tokens": 2, "model": "smollm2"}
        assert httpx.post(f"{url}{CHAT}", json=body, headers=context, timeout=120).status_code == 200
        spans = _wait(receiver, trace)
    front, inside = (
        [
            span
            for span in spans
            if span.kind == "SERVER" and span.service == service and span.name == f"POST {CHAT}"
        ]
        for service in ("tokenproxy", "inside")
    )
    assert [span.parent for span in front] == [client_span]
    assert [_named(spans, span.parent).kind for span in inside] == ["CLIENT"]
    assert _named(spans, _named(spans, inside[0].parent).parent) == front[0]
    [engine] = [span for span in spans if span.name == "llm_request"]
    assert _named(spans, engine.parent).name == "chat smollm2"
    assert _named(spans, _named(spans, engine.parent).parent) == inside[0]
    assert front[0].attributes["gen_ai.usage.output_tokens"] == 2


def _named(spans: list[ReceivedSpan], identity: str) -> ReceivedSpan:
    [span] = [span for span in spans if span.span_id == identity]
    return span


def _wait(receiver: Receiver, trace: str) -> list[ReceivedSpan]:
    def names() -> set[str]:
        return {span.name for span in receiver.of_trace(trace)}

    wait_until(lambda: {"llm_request", f"POST {CHAT}"} <= names() and len(receiver.of_trace(trace)) >= 9, 60)
    return receiver.of_trace(trace)
