"""Trace context on a real engine."""

import secrets
from pathlib import Path

import httpx
import pytest

from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, run_proxy, start_engine, wait_ready
from tests.campaign.real_vllm.plain import CHAT, user
from tests.support.otlp import ReceivedSpan, otlp_receiver
from tests.support.utils import wait_until


@pytest.mark.timeout(START_TIMEOUT_S + 120)
def test_a_trace_from_the_client_through_proxy_and_plugin_to_the_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy in front of an engine that has the plugin: each step continues the one before."""
    trace, client_span = secrets.token_hex(16), secrets.token_hex(8)
    environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": "inside"}
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with otlp_receiver() as receiver:
        flags = ("--otlp-traces-endpoint", f"{receiver.url}/v1/traces")
        with start_engine(model, tmp_path / "vllm.log", *flags, environment=environment) as engine:
            engine.wait_ready(START_TIMEOUT_S)
            wait_ready(engine.url)
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
            with run_proxy(engine.url, "--store", "memory:") as url:
                body = {"messages": [user("Hi")], "max_tokens": 2, "model": "smollm2"}
                context = {"traceparent": f"00-{trace}-{client_span}-01"}
                assert httpx.post(url + CHAT, json=body, headers=context, timeout=120).status_code == 200
                wait_until(lambda: len(receiver.of_trace(trace)) >= 9, 60)
    spans = receiver.of_trace(trace)
    by_id = {span.span_id: span for span in spans}

    def before(span: ReceivedSpan) -> ReceivedSpan:
        return by_id[span.parent]

    [front, inside] = (
        next(each for each in spans if (each.name, each.service) == (f"POST {CHAT}", service))
        for service in ("tokenproxy", "inside")
    )
    assert front.parent == client_span
    assert (before(inside).kind, before(before(inside))) == ("CLIENT", front)
    [engine_span] = [span for span in spans if span.name == "llm_request"]
    assert (before(engine_span).name, before(before(engine_span))) == ("chat smollm2", inside)
    assert front.attributes["gen_ai.usage.output_tokens"] == 2
