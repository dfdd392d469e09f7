"""Traces of a real proxy, received by a real OTLP/HTTP endpoint."""

import json
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, url_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes

from proxy.monitoring.tracing import make_tracing
from tests.support.fake_vllm import FakeVllm, Reply, Variant
from tests.support.otlp import ReceivedSpan, Receiver, otlp_receiver
from tests.support.talk import CHAT, Talk, user
from tests.support.tiny_model import END, TinyModel
from tests.support.utils import Pair, run_proxy, send_and_keep, wait_until

_TOKENS = "/v1/chat/completions/tokens"
_HI = {"messages": [{"role": "user", "content": "Hi"}], "model": "tiny", "temperature": 0.5, "max_tokens": 9}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver, named in OpenTelemetry's own variables."""
    with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=rollouts")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield receiver


@dataclass
class Traced:
    """A proxy that sends traces."""

    pair: Pair
    receiver: Receiver

    def send(self, path: str, body: object, headers: dict[str, str] | None = None) -> "Trace":
        """Send a request as part of a trace that the client began."""
        trace, parent = secrets.token_hex(16), secrets.token_hex(8)
        context = {"traceparent": f"00-{trace}-{parent}-01", "tracestate": "vendor=7"}
        answer = self.pair.client.post(path, json=body, headers={**context, **(headers or {})})
        return Trace(answer, parent, self.wait(trace))

    def wait(self, trace: str) -> list[ReceivedSpan]:
        """The spans of a trace, once that of the request is there: it ends last."""
        wait_until(lambda: any(span.kind == "SERVER" for span in self.receiver.of_trace(trace)))
        return self.receiver.of_trace(trace)


@dataclass
class Trace:
    """The spans of one request."""

    answer: httpx.Response
    parent: str
    """The client's span."""
    spans: list[ReceivedSpan]

    def named(self, name: str) -> ReceivedSpan:
        """The only span of a name."""
        [span] = [span for span in self.spans if span.name == name]
        return span


@pytest.fixture(params=[Variant.CHAT, Variant.SCALE_OUT], ids=str)
def traced(request: pytest.FixtureRequest, endpoint: Receiver, tiny_model: TinyModel) -> Iterator[Traced]:
    with FakeVllm(tiny_model, request.param) as fake, run_proxy([fake], store="memory:") as client:
        yield Traced(Pair(fake, client), endpoint)


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_from_the_client_to_the_engine(traced: Traced, stream: bool) -> None:
    trace = traced.send(CHAT, {**_HI, "stream": stream}, {"x-request-id": "mine", "x-session-id": "s"})
    request = trace.named(f"POST {CHAT}")
    assert (request.parent, request.kind, request.service) == (trace.parent, "SERVER", "tokenproxy")
    expected = {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "tokenproxy.request.id": "mine",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.conversation.id": "s",
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert {name: request.attributes.get(name) for name in expected} == expected
    assert request.attributes["gen_ai.usage.input_tokens"] > 0
    plan, call, record = trace.named("plan"), trace.named("chat tiny"), trace.named("record")
    assert {plan.parent, call.parent, record.parent} == {request.span_id}
    assert (plan.kind, call.kind, record.kind) == ("INTERNAL", "CLIENT", "INTERNAL")
    assert plan.attributes["tokenproxy.prompt.source"] == "rendered"
    assert plan.attributes["tokenproxy.prompt.reason"] == "first_turn"
    assert call.attributes["gen_ai.provider.name"] == "vllm"
    assert call.attributes["tokenproxy.replica"] == traced.pair.fake.url
    order = [request.start_ns, plan.start_ns, plan.end_ns, call.start_ns, record.start_ns, request.end_ns]
    assert order == sorted(order)
    assert {span.status for span in trace.spans} == {"UNSET"}


def test_the_engine_continues_the_trace(traced: Traced) -> None:
    trace = traced.send(CHAT, _HI)
    sent = traced.pair.fake.last()
    call = trace.named("chat tiny")
    assert sent.header("traceparent") == f"00-{call.trace_id}-{call.span_id}-01".encode()
    assert sent.header("tracestate") == b"vendor=7"
    assert len([name for name, _ in sent.headers if name.lower() == b"traceparent"]) == 1


def test_a_plan_that_reuses_ids(traced: Traced, tiny_model: TinyModel) -> None:
    messages = [user("Hi"), {"role": "assistant", "content": "hi"}, user("And?")]
    traced.send(CHAT, {**_HI, "messages": messages[:1]})
    plan = traced.send(CHAT, {**_HI, "messages": messages}).named("plan").attributes
    assert plan["tokenproxy.prompt.source"] == "extended"
    assert plan["tokenproxy.prompt.reused"] > 0 and plan["tokenproxy.prompt.appended"] > 0
    assert "tokenproxy.prompt.reason" not in plan


def test_trace_starts_if_the_client_has_none(traced: Traced) -> None:
    traced.pair.client.post(CHAT, json=_HI)
    sent = traced.pair.fake.last().header("traceparent")
    assert sent is not None
    [request] = [span for span in traced.wait(sent.decode().split("-")[1]) if span.kind == "SERVER"]
    assert request.parent == ""


def test_errors(traced: Traced) -> None:
    traced.pair.fake.replies.append(Reply(break_at=0, how="head"))
    broken = traced.send(CHAT, {"messages": [user("broken")]})
    request = next(span for span in broken.spans if span.kind == "SERVER")
    call = next(span for span in broken.spans if span.kind == "CLIENT")
    assert (request.status, request.attributes["http.response.status_code"]) == ("ERROR", 502)
    assert (call.status, call.attributes["error.type"]) == ("ERROR", "EngineBroken")
    refused = traced.send(_TOKENS, {"prompt_ids": "none"})
    request = next(span for span in refused.spans if span.kind == "SERVER")
    assert (request.status, request.attributes["http.response.status_code"]) == ("UNSET", 400)


def test_a_client_that_leaves(traced: Traced) -> None:
    traced.pair.fake.replies.append(Reply(ids=(74, 71, END), hold_at=2))
    body = json.dumps({**_HI, "stream": True}).encode()
    with send_and_keep(traced.pair.client.base_url, CHAT, body) as connection:
        assert connection.recv(1)
        wait_until(lambda: traced.pair.fake.running)
    sent = traced.pair.fake.last().header("traceparent")
    assert sent is not None
    spans = traced.wait(sent.decode().split("-")[1])
    [request] = [span for span in spans if span.kind == "SERVER"]
    assert request.attributes["tokenproxy.client_left"] is True


def test_a_client_that_does_not_want_to_be_sampled(traced: Traced) -> None:
    trace = secrets.token_hex(16)
    traced.pair.client.post(CHAT, json=_HI, headers={"traceparent": f"00-{trace}-{secrets.token_hex(8)}-00"})
    sent = traced.pair.fake.last().header("traceparent")
    assert sent is not None and sent.startswith(f"00-{trace}-".encode()) and sent.endswith(b"-00")
    traced.send(CHAT, _HI)  # sent after it, and arrived
    assert traced.receiver.of_trace(trace) == []


def test_how_they_arrive(traced: Traced) -> None:
    traced.send(CHAT, _HI)
    receiver = traced.receiver
    assert receiver.paths == {"/v1/traces"}
    assert receiver.content_types == {"application/x-protobuf"}
    assert all(headers.get("x-team") == "rollouts" for headers in receiver.headers)


def test_remaining_spans_are_sent_at_the_end(
    endpoint: Receiver, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "team-a")
    with FakeVllm(tiny_model) as fake:
        with run_proxy([fake], store="memory:") as client:
            client.post(CHAT, json=_HI)
            assert not endpoint.spans
        wait_until(lambda: endpoint.spans)
    assert {span.service for span in endpoint.spans} == {"team-a"}


def test_an_endpoint_that_does_not_respond_costs_no_request(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with FakeVllm(tiny_model) as fake, run_proxy([fake], store="memory:") as client:
        assert [client.post(CHAT, json=_HI).status_code for _ in range(3)] == [200] * 3


def test_engine_gets_the_clients_trace_without_an_endpoint(talk: Callable[..., Talk], fake: FakeVllm) -> None:
    context = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
    conversation = talk(headers={"traceparent": context})
    conversation.ask()
    assert fake.last().header("traceparent") == context.encode()


_ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {**_ENDPOINT, "OTEL_SDK_DISABLED": "true"},
        {**_ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_off(environment: dict[str, str]) -> None:
    assert make_tracing(environment) is None


def test_off_without_the_extra(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert make_tracing(_ENDPOINT) is None
    assert "pip install 'tokenproxy[otel]'" in caplog.text


def test_off_with_a_protocol_that_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    assert make_tracing({**_ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "pigeon"}) is None
    assert "pigeon" in caplog.text and "http/protobuf" in caplog.text


def test_off_without_the_exporter_for_grpc(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc", None)
    assert make_tracing({**_ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}) is None
    assert "opentelemetry-exporter-otlp-proto-grpc" in caplog.text


def test_the_provider_of_the_process_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
