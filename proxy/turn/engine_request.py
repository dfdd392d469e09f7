"""The request for the engine: the client's fields, and those that request the evidence to record."""

import msgspec

from proxy.errors import BadRequest
from proxy.fields import join, raw_value, read
from proxy.turn.request import ChatRequest, EngineRoute
from proxy.types import Fields

_TRUE = msgspec.Raw(b"true")
_NO_ALTERNATIVES = msgspec.Raw(b"0")
"""The number of alternatives with which the log-probabilities of sampled ids are requested."""


def request_for_engine(request: ChatRequest, *, evidence: bool) -> Fields:
    """The fields of the request.

    Args:
        evidence: whether to request ids, usage and log-probabilities, to record them.
    """
    fields = dict(request.fields)
    if not evidence:
        return fields
    fields["return_token_ids"] = _TRUE
    match request.engine_route:
        case EngineRoute.CHAT:
            if raw_value(fields, "top_logprobs") in (None, b"0"):
                fields["logprobs"] = _TRUE
            if not request.visible.reasoning and not _constrained(fields):
                # else vLLM hides ids too; the redactor removes the reasoning
                fields["include_reasoning"] = _TRUE
        case EngineRoute.COMPLETIONS:
            if raw_value(fields, "logprobs") is None:
                fields["logprobs"] = _NO_ALTERNATIVES
        case EngineRoute.GENERATE:
            sampling = read(fields, "sampling_params", Fields)
            if sampling is not None and raw_value(sampling, "logprobs") is None:
                sampling["logprobs"] = _NO_ALTERNATIVES
                fields["sampling_params"] = msgspec.Raw(join(sampling))
    if request.stream:
        usage = {"include_usage": _TRUE, "continuous_usage_stats": _TRUE}
        fields["stream_options"] = msgspec.Raw(join({**stream_options(fields), **usage}))
    return fields


def stream_options(fields: Fields) -> Fields:
    """The stream options of a request; empty if they are not an object, which the engine refuses."""
    try:
        return read(fields, "stream_options", Fields) or {}
    except BadRequest:
        return {}


def flag(fields: Fields, name: str) -> bool:
    """Whether a field has a value that an engine reads as true."""
    return raw_value(fields, name) not in (None, b"false", b"0")


def _constrained(fields: Fields) -> bool:
    """Whether a grammar constrains the completion; vLLM then reads `include_reasoning` to apply it."""
    names = ("response_format", "structured_outputs")
    free = (None, b'"none"', b'"auto"')
    return any(raw_value(fields, name) for name in names) or raw_value(fields, "tool_choice") not in free
