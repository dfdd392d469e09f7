"""A wire format of a turn: a parser from an HTTP request to a `ChatRequest`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.evidence import ASKED
from tokenproxy.base.fields import flag, raw, raw_value, read, stream_options
from tokenproxy.base.http import Request, header
from tokenproxy.base.request import (
    ChatRequest,
    EchoPolicy,
    EngineRoute,
    Rendering,
    RetrySigns,
    SessionRef,
    ThinkingPolicy,
    Visible,
)
from tokenproxy.base.types import Fields
from tokenproxy.formats.prompt_fields import template_kwargs
from tokenproxy.formats.translated import Translation
from tokenproxy.record.vocabulary import Reason
from tokenproxy.turn.required_prefix import asks_on_messages

_EVIDENCE = frozenset({"return_token_ids", "logprobs", "include_reasoning", "stream_options"}) | {
    fact.asked_by for fact in ASKED
}
"""Fields that request more or less than the text."""
_OPTIONS = ("tool_choice", "response_format", "structured_outputs", "mm_processor_kwargs", "media_io_kwargs")
"""Fields that an engine's rendering may print or use, besides messages, tools and template arguments."""
_RENDERED = frozenset((*_OPTIONS, "tools", "chat_template", "chat_template_kwargs", "documents")) | {
    *("reasoning_effort", "add_generation_prompt")
}
"""Fields of which a `Rendering` is made."""
_SPECIAL_FLAGS = frozenset(
    {"echo", "continue_final_message", "add_special_tokens", "return_prompt_text", "use_beam_search"}
)
"""Fields that change the rendering, or that a prompt of ids cannot serve."""
_SPECIAL = _SPECIAL_FLAGS | {"chat_template", "kv_transfer_params", "truncate_prompt_tokens"}
_IDEMPOTENCY_KEY, _RETRY_COUNT = b"idempotency-key", b"x-stainless-retry-count"
_TEXT = Visible(ids=False, logprobs=False, hidden=tuple([fact.name for fact in ASKED]))
"""What a request without any of `_EVIDENCE` gets."""

Schema = dict[str, Any]
P = TypeVar("P", ThinkingPolicy, EchoPolicy)

IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
"""Token ids."""


@dataclass(frozen=True, slots=True)
class NamedSession:
    """The session of a request, and the fields that it sets."""

    ref: SessionRef
    defaults: Fields = field(default_factory=dict)
    """Used for fields that the request does not set."""
    overrides: Fields = field(default_factory=dict)
    """Replace the fields of the request."""
    policy: Fields = field(default_factory=dict)
    """Sampling parameters of a policy that is only noted."""
    limit: str = ""
    """See `SessionLimits.reached`."""
    finished: bool = False
    """Whether it is in the feed of finished rollouts."""

    def off_policy(self, sampling: Fields) -> tuple[str, ...]:
        """The parameters of the policy that a request does not set, or sets to another value."""
        return tuple(name for name in self.policy if number(sampling, name) != number(self.policy, name))


class Format(Protocol):
    """One wire format of a turn."""

    path: str = ""
    summary: str = ""
    openapi: Mapping[str, Any] = {}

    def parse(self, request: Request, session: NamedSession | None) -> ChatRequest:
        """Parse the request, once.

        Args:
            session: the session that the request names.

        Raises:
            BadRequest: a field cannot be read; `param` names it.
        """
        ...

    def translation(self, request: ChatRequest) -> Translation | None:
        """What writes the response to a request; None if clients get the engine's own format."""
        return None


def visible_of(
    fields: Fields, *, logprobs: bool | None = None, route: EngineRoute = EngineRoute.CHAT
) -> Visible:
    """The recorded fields that the client requested.

    Args:
        logprobs: whether it requested log-probabilities, where a field other than `logprobs` tells.
        route: of the engine.
    """
    if logprobs is None and _EVIDENCE.isdisjoint(fields):
        return _TEXT
    options = stream_options(fields)
    usage = flag(options, "include_usage")
    running = usage and flag(options, "continuous_usage_stats")
    reasoning = raw_value(fields, "include_reasoning") not in (b"false", b"0")
    ids = flag(fields, "return_token_ids")
    logprobs = flag(fields, "logprobs") if logprobs is None else logprobs
    on_messages = logprobs and reasoning and asks_on_messages(fields)
    unasked = [fact for fact in ASKED if not (route in fact.unasked or flag(fields, fact.asked_by))]
    hidden = tuple([fact.name for fact in unasked])
    return Visible(ids and reasoning, logprobs and reasoning, usage, running, reasoning, on_messages, hidden)


def apply_session(fields: Fields, session: NamedSession | None) -> None:
    """Add the session's defaults where the request sets nothing, and always its overrides."""
    if session is None:
        return
    for name, value in session.defaults.items():
        if raw_value(fields, name) is None:
            fields[name] = value
    fields.update(session.overrides)
    if "max_completion_tokens" in session.overrides:
        fields["max_tokens"] = session.overrides["max_completion_tokens"]  # the name of other routes
    elif "max_tokens" in session.overrides:
        fields.pop("max_completion_tokens", None)  # vLLM would prefer it


def chat_request(
    request: Request,
    fields: Fields,
    session: NamedSession | None,
    visible: Visible,
    **more: Any,
) -> ChatRequest:
    """The `ChatRequest` of a request in vLLM's chat format.

    Args:
        fields: the chat completion, with the session's fields applied.
        more: fields of `ChatRequest` that the format sets itself.
    """
    thinking = _take_policy(fields, "thinking_policy", ThinkingPolicy)
    echo = _take_policy(fields, "echo_policy", EchoPolicy)
    special = None if _SPECIAL.isdisjoint(fields) else _special(fields)
    beams = special is not None and flag(fields, "use_beam_search")  # these ids are not sampled
    rendering, model = Rendering(), None
    try:
        if not _RENDERED.isdisjoint(fields):
            rendering = _rendering(fields)
        model = read(fields, "model", str)
    except BadRequest:
        special = special or Reason.SPECIAL_REQUEST  # the engine refuses it with its own message
    parsed = {
        **shared_fields(request, fields, session, fields),
        "messages": raw_value(fields, "messages") or b"",
        "rendering": rendering,
        "model": model,
        "visible": visible,
        "special": special or "",
        "thinking": thinking,
        "echo_policy": echo,
        # without a generation prompt, the template does not render the sampled text as a turn
        "record": not beams,
        "findable": special is None and rendering.add_generation_prompt,
        "prefill": special is Reason.SPECIAL_REQUEST and _only_continues(fields, rendering),
        **more,
    }
    return ChatRequest(**parsed)


def shared_fields(
    request: Request, fields: Fields, session: NamedSession | None, sampling: Fields
) -> dict[str, Any]:
    """The fields of a `ChatRequest` that do not depend on the wire format.

    Args:
        sampling: the fields that hold the sampling parameters.
    """
    start = number(sampling, "routed_experts_prompt_start") or 0
    return {
        "fields": fields,
        "headers": request.headers,
        "tenant": request.tenant,
        "must_record": request.turns_only,
        "session": session.ref if session else None,
        "retry": RetrySigns(
            header(request.headers, _IDEMPOTENCY_KEY),
            header(request.headers, _RETRY_COUNT),
            request.path.partition("?")[0],
            request.body,
        ),
        "stream": flag(fields, "stream"),
        "choices": max(1, int(number(sampling, "n") or 1)),
        "temperature": number(sampling, "temperature"),
        "off_policy": session.off_policy(sampling) if session and session.policy else (),
        "session_limit": session.limit if session else "",
        "after_finish": session is not None and session.finished,
        # the engine refuses other values
        "routed_experts_start": int(start) if 0 <= start < 2**31 else 0,
    }


def _take_policy(fields: Fields, name: str, values: type[P]) -> P | None:
    """Remove a field of the proxy's own from a request. Raises BadRequest."""
    if name not in fields:
        return None
    policy = read(fields, name, str)
    del fields[name]
    if policy is not None and policy not in set(values):
        raise BadRequest.of(name, f"must be {' or '.join(f'`{value}`' for value in values)}")
    return values(policy) if policy is not None else None


def _rendering(fields: Fields) -> Rendering:
    """The fields that change the rendering. Raises BadRequest for a field with a wrong type."""
    kwargs = template_kwargs(fields)
    if (template := read(fields, "chat_template", str)) is not None:
        kwargs["chat_template"] = template
    options = {name: value for name in _OPTIONS if (value := raw_value(fields, name)) is not None}
    generates = read(fields, "add_generation_prompt", bool) is not False
    tools = raw_value(fields, "tools") or b""
    return Rendering(tools, bytes(raw(kwargs)) if kwargs else b"", options, generates)


def _special(fields: Fields) -> Reason | None:
    """The reason in the request's fields why the engine must render it; None if there is none."""
    if raw_value(fields, "chat_template") is not None:
        return Reason.CUSTOM_TEMPLATE
    try:
        if "prompt_token_ids" in (read(fields, "kv_transfer_params", Fields) or {}):
            return Reason.IDS_GIVEN
    except BadRequest:
        return Reason.SPECIAL_REQUEST
    special = (
        any(flag(fields, name) for name in _SPECIAL_FLAGS)
        or raw_value(fields, "truncate_prompt_tokens") is not None
    )
    return Reason.SPECIAL_REQUEST if special else None


def _only_continues(fields: Fields, rendering: Rendering) -> bool:
    """Whether `continue_final_message` is all that is special in a request, so that the engine takes it."""
    others = fields.keys() & _SPECIAL - {"continue_final_message"}
    return not (
        rendering.add_generation_prompt or any(raw_value(fields, name) is not None for name in others)
    )


def number(fields: Fields, name: str) -> float | None:
    """A number in a request; None if the value is not a number, which the engine refuses."""
    if name not in fields:
        return None
    try:
        return read(fields, name, float)
    except BadRequest:
        return None


def request_body(description: str, properties: Schema) -> Schema:
    """A required body: an object with some of its fields.

    Args:
        description: what the other fields are.
    """
    schema = {"type": "object", "description": description, "properties": properties}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
