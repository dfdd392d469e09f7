"""A wire format of a turn: a parser from an HTTP request to a `ChatRequest`."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from proxy.dialects.prompt_fields import template_kwargs
from proxy.errors import BadRequest
from proxy.fields import given, raw, read
from proxy.history.vocabulary import Reason
from proxy.http import Request
from proxy.turn.engine_request import flag, stream_options
from proxy.turn.request import ChatRequest, Rendering, RetrySigns, SessionRef
from proxy.turn.visible import Visible
from proxy.types import Fields, Headers

_OPTIONS = ("tool_choice", "response_format", "structured_outputs", "mm_processor_kwargs", "media_io_kwargs")
"""Fields that an engine's rendering may print or use, next to messages, tools and template arguments."""
_SPECIAL = ("echo", "continue_final_message", "add_special_tokens", "return_prompt_text", "use_beam_search")
"""Fields that ask for another rendering, or for something that ids cannot give."""
_IDEMPOTENCY_KEY, _RETRY_COUNT = b"idempotency-key", b"x-stainless-retry-count"


@dataclass(frozen=True, slots=True)
class SessionFields:
    """The session of a request, and the fields that it sets."""

    ref: SessionRef
    defaults: Fields = field(default_factory=dict)
    """Apply where the request does not set them."""
    overrides: Fields = field(default_factory=dict)
    """Apply whatever the request sets."""


class Dialect(Protocol):
    """One wire format of a turn."""

    path: ClassVar[str]
    summary: ClassVar[str]
    openapi: ClassVar[dict[str, Any]]

    def parse(self, request: Request, session: SessionFields | None, *, record: bool) -> ChatRequest:
        """The request, read once.

        Args:
            session: the session that it names.
            record: whether turns of requests that carry ids are recorded.

        Raises:
            BadRequest: a field cannot be read; `param` names it.
        """
        ...


def visible_of(fields: Fields) -> Visible:
    """What the client wants to see of what is recorded."""
    options = stream_options(fields)
    usage = flag(options, "include_usage")
    running = usage and flag(options, "continuous_usage_stats")
    reasoning = given(fields, "include_reasoning") not in (b"false", b"0")
    ids, logprobs = flag(fields, "return_token_ids"), flag(fields, "logprobs")
    return Visible(ids and reasoning, logprobs and reasoning, usage, running, reasoning)


def apply_session(fields: Fields, session: SessionFields | None) -> None:
    """Fill in the session's defaults where the request sets nothing, and its overrides in any case."""
    if session is None:
        return
    for name, value in session.defaults.items():
        if given(fields, name) is None:
            fields[name] = value
    fields.update(session.overrides)


def chat_request(
    request: Request,
    fields: Fields,
    session: SessionFields | None,
    visible: Visible,
    **more: Any,
) -> ChatRequest:
    """The `ChatRequest` of a request in vLLM's chat format.

    Args:
        fields: the chat completion, with the session's fields applied.
        more: what the dialect knows better: fields of `ChatRequest`.
    """
    special, rendering, model = _special(fields), Rendering(), None
    try:
        rendering, model = _rendering(fields), read(fields, "model", str)
    except BadRequest:
        special = special or Reason.SPECIAL_REQUEST  # the engine refuses it, in its own words
    parsed: dict[str, Any] = {
        "fields": fields,
        "headers": request.headers,
        "messages": given(fields, "messages") or b"",
        "rendering": rendering,
        "model": model,
        "tenant": request.tenant,
        "session": session.ref if session else None,
        "visible": visible,
        "retry": _retry_signs(request),
        "stream": flag(fields, "stream"),
        "choices": max(1, int(_number(fields, "n") or 1)),
        "temperature": _number(fields, "temperature"),
        "special": special or "",
        # without a generation prompt what was sampled is no turn in the template's eyes
        "findable": special is None and rendering.add_generation_prompt,
    }
    return ChatRequest(**{**parsed, **more})


def _rendering(fields: Fields) -> Rendering:
    """What shapes the rendering. Raises BadRequest for a field of another type than it should have."""
    kwargs = template_kwargs(fields)
    if (template := read(fields, "chat_template", str)) is not None:
        kwargs["chat_template"] = template
    return Rendering(
        given(fields, "tools") or b"",
        bytes(raw(kwargs)) if kwargs else b"",
        {name: value for name in _OPTIONS if (value := given(fields, name)) is not None},
        read(fields, "add_generation_prompt", bool) is not False,
    )


def _special(fields: Fields) -> Reason | None:
    """Why the engine must render the request whatever was recorded, as far as its fields tell."""
    if given(fields, "chat_template") is not None:
        return Reason.CUSTOM_TEMPLATE
    try:
        if "prompt_token_ids" in (read(fields, "kv_transfer_params", Fields) or {}):
            return Reason.IDS_GIVEN
    except BadRequest:
        return Reason.SPECIAL_REQUEST
    special = any(flag(fields, name) for name in _SPECIAL)
    special = special or given(fields, "truncate_prompt_tokens") is not None
    return Reason.SPECIAL_REQUEST if special else None


def _number(fields: Fields, name: str) -> float | None:
    """A number of a request; None for what is no number, which the engine refuses."""
    try:
        return read(fields, name, float)
    except BadRequest:
        return None


def _retry_signs(request: Request) -> RetrySigns:
    return RetrySigns(
        header(request.headers, _IDEMPOTENCY_KEY),
        header(request.headers, _RETRY_COUNT),
        request.path.partition("?")[0],
        request.body,
    )


def header(headers: Headers, name: bytes) -> bytes:
    """The value of a header; empty if it is missing."""
    return next((value for key, value in headers if key == name), b"")
