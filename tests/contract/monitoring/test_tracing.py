"""Traces of a real proxy, received by a real OTLP/HTTP endpoint."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.otlp import ReceivedSpan, Receiver, otlp_receiver
from tests.support.talk import CHAT
from tests.support.utils import run_proxy, wait_until

_PARENT = "00f067aa0ba902b7"
"""The client's span."""
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

    fake: FakeVllm
    client: httpx.Client
    receiver: Receiver

    def send(self, body: object, **headers: str) -> list[ReceivedSpan]:
        """Send a request as part of a trace that the client began."""
        trace = secrets.token_hex(16)
        context = {"traceparent": f"00-{trace}-{_PARENT}-01", "tracestate": "vendor=7"}
        self.client.post(CHAT, json=body, headers={**context, **headers})
        return self.wait(trace)

    def wait(self, trace: str) -> list[ReceivedSpan]:
        """The spans of a trace, once that of the request is there: it ends last."""
        wait_until(lambda: any(span.kind == "SERVER" for span in self.receiver.of_trace(trace)))
        return self.receiver.of_trace(trace)


def _named(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    """The only span of a name or kind."""
    [span] = [span for span in spans if name in (span.name, span.kind)]
    return span


@pytest.fixture
def traced(endpoint: Receiver, mortal: FakeVllm) -> Iterator[Traced]:
    with run_proxy([mortal], store="memory:") as client:
        yield Traced(mortal, client, endpoint)


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_from_the_client_to_the_engine(traced: Traced, stream: bool) -> None:
    trace = traced.send({**_HI, "stream": stream}, **{"x-request-id": "mine", "x-session-id": "s"})
    request = _named(trace, f"POST {CHAT}")
    assert (request.parent, request.kind, request.service) == (_PARENT, "SERVER", "tokenproxy")
    expected = {
        **{"http.request.method": "POST", "http.route": CHAT, "http.response.status_code": 200},
        **{"tokenproxy.request.id": "mine", "gen_ai.conversation.id": "s", "gen_ai.operation.name": "chat"},
        **{"gen_ai.request.model": "tiny", "gen_ai.request.temperature": 0.5, "gen_ai.request.max_tokens": 9},
        **{"gen_ai.usage.output_tokens": 3, "gen_ai.response.finish_reasons": ["stop"]},
    }
    assert {name: request.attributes.get(name) for name in expected} == expected
    assert request.attributes["gen_ai.usage.input_tokens"] > 0
    plan, call, record = (_named(trace, name) for name in ("plan", "chat tiny", "record"))
    assert {plan.parent, call.parent, record.parent} == {request.span_id}
    assert (plan.kind, call.kind, record.kind) == ("INTERNAL", "CLIENT", "INTERNAL")
    assert plan.attributes["tokenproxy.prompt.source"] == "rendered"
    assert plan.attributes["tokenproxy.prompt.reason"] == "first_turn"
    assert call.attributes["gen_ai.provider.name"] == "vllm"
    assert call.attributes["tokenproxy.replica"] == traced.fake.url
    order = [request.start_ns, plan.start_ns, plan.end_ns, call.start_ns, record.start_ns, request.end_ns]
    assert order == sorted(order)
    assert {span.status for span in trace} == {"UNSET"}
    # the engine continues the trace
    sent = traced.fake.last()
    assert sent.header("traceparent") == f"00-{call.trace_id}-{call.span_id}-01".encode()
    assert sent.header("tracestate") == b"vendor=7"
    assert len([name for name, _ in sent.headers if name.lower() == b"traceparent"]) == 1
    assert set(traced.receiver.requests) == {("/v1/traces", "application/x-protobuf", "rollouts")}


def test_a_text_completion(traced: Traced) -> None:
    trace = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace}-{_PARENT}-01"}
    traced.client.post("/v1/completions", json={"model": "tiny", "prompt": "Hi"}, headers=headers)
    call = _named(traced.wait(trace), "text_completion tiny")
    assert call.attributes["gen_ai.operation.name"] == "text_completion"


def test_a_trace_that_the_client_did_not_begin_or_does_not_want(traced: Traced) -> None:
    unwanted = secrets.token_hex(16)
    sent = []
    for headers in ({"traceparent": f"00-{unwanted}-{_PARENT}-00"}, {}):
        traced.client.post(CHAT, json=_HI, headers=headers)
        sent.append((traced.fake.last().header("traceparent") or b"").decode())
    assert sent[0].startswith(f"00-{unwanted}-") and sent[0].endswith("-00")
    assert _named(traced.wait(sent[1].split("-")[1]), "SERVER").parent == ""
    assert traced.receiver.of_trace(unwanted) == []  # it was sent before, and would have arrived


def test_errors(traced: Traced) -> None:
    traced.fake.replies.append(Reply(break_at=0, how="head"))
    broken = traced.send(_HI)
    request, call = _named(broken, "SERVER"), next(span for span in broken if span.kind == "CLIENT")
    assert (request.status, request.attributes["http.response.status_code"]) == ("ERROR", 502)
    assert (call.status, call.attributes["error.type"]) == ("ERROR", "EngineBroken")


def test_remaining_spans_are_sent_at_the_end(
    endpoint: Receiver, mortal: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "team-a")
    with run_proxy([mortal], store="memory:") as client:
        client.post(CHAT, json=_HI)
        assert not endpoint.spans
    wait_until(lambda: endpoint.spans)
    assert {span.service for span in endpoint.spans} == {"team-a"}
