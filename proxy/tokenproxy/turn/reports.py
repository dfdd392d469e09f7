"""Reports of a turn's prompt: headers, metrics, attributes of spans, fields of the access log."""

from tokenproxy.base.fields import raw_value
from tokenproxy.base.http import Response
from tokenproxy.base.request import ChatRequest, EngineRoute
from tokenproxy.monitoring.exchange import running_exchange
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.monitoring.tracing import Span, Value
from tokenproxy.record.plan import PromptPlan
from tokenproxy.record.vocabulary import Reason, Source


def describe(planning: Span, request: ChatRequest, plan: PromptPlan) -> None:
    """Add the plan to the span of planning, and the requested parameters to those of the request, with
    OpenTelemetry's names for generative AI."""
    if planning.recording:
        attributes = {f"tokenproxy.prompt.{name}": value for name, value in _described(plan).items()}
        planning.set({**attributes, "tokenproxy.prompt.candidates": plan.match.candidates})
    exchange = running_exchange()
    if exchange is None or not exchange.span.recording:
        return
    max_tokens = raw_value(request.fields, "max_completion_tokens") or raw_value(request.fields, "max_tokens")
    exchange.engine_attributes = {
        "gen_ai.operation.name": ("chat" if request.engine_route is EngineRoute.CHAT else "text_completion"),
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": request.model or plan.scope.model,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.max_tokens": int(max_tokens) if max_tokens and max_tokens.isdigit() else None,
        "gen_ai.request.choice.count": request.choices if request.choices > 1 else None,
        "gen_ai.request.stream": request.stream,
        "gen_ai.conversation.id": plan.session.name if plan.rollout is not None else None,
    }
    exchange.span.set(exchange.engine_attributes)


def _described(plan: PromptPlan) -> dict[str, Value | None]:
    has_ids = plan.source is not Source.RENDERED
    return {
        "source": str(plan.source),
        "reason": str(plan.reason) if plan.reason else None,
        "session": plan.session.name if plan.rollout is not None else None,
        "turn": plan.turn_id if plan.conversation is not None else None,
        "reused": sum(prompt.reused for prompt in plan.prompts) if has_ids else None,
        "appended": plan.appended if has_ids else None,
    }


def report(plan: PromptPlan, response: Response, metrics: Metrics) -> None:
    """Count the prompts of a request and note them for the access log; report them in a successful response.

    Its headers tell where the prompts came from, and where their turns are recorded.
    """
    for prompt in plan.prompts:
        metrics.prompts(prompt.source, prompt.reason or "none").inc()
        if prompt.reason == Reason.AMBIGUOUS:
            metrics.ambiguous.inc()
        if prompt.source is not Source.RENDERED:
            counter = metrics.reused_ids if prompt.source is Source.EXTENDED else metrics.given_ids
            counter.inc(prompt.reused)
            metrics.appended_ids.inc(prompt.appended)
    exchange, described = running_exchange(), _described(plan)
    if exchange is not None and exchange.noting:
        exchange.note(described)
    if response.status >= 400:
        return
    candidates = plan.match.candidates
    headers = {
        b"x-prompt-source": described["source"],
        b"x-prompt-reused": described["reused"] or 0,
        b"x-prompt-appended": described["appended"],
        b"x-prompt-reason": described["reason"],
        b"x-prompt-candidates": candidates if candidates > 1 else None,
        b"x-session-id": described["session"],
        b"x-turn-id": described["turn"],
    }
    # an engine that is a tokenproxy itself has set these headers for its own prompt
    response.headers = [pair for pair in response.headers if pair[0] not in headers]
    response.headers += [(name, str(value).encode()) for name, value in headers.items() if value is not None]
