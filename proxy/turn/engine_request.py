"""The chat completion that an engine is sent: the client's, and what is asked for the record."""

import msgspec

from proxy.errors import BadRequest
from proxy.fields import given, join, read
from proxy.turn.request import ChatRequest
from proxy.types import Fields

_TRUE = msgspec.Raw(b"true")


def request_for_engine(request: ChatRequest, *, evidence: bool, logprobs: bool) -> Fields:
    """The fields of the chat completion.

    Args:
        evidence: whether to ask for ids and usage, and `logprobs`, to record them.
        logprobs: whether log-probabilities are recorded, whatever the client wants.
    """
    fields = dict(request.fields)
    if not evidence:
        return fields
    fields["return_token_ids"] = _TRUE
    if logprobs and given(fields, "top_logprobs") in (None, b"0"):
        fields["logprobs"] = _TRUE
    if not request.visible.reasoning and not _constrained(fields):
        fields["include_reasoning"] = _TRUE  # vLLM hides ids with it; the redactor hides it instead
    if request.stream:
        usage = {"include_usage": _TRUE, "continuous_usage_stats": _TRUE}
        fields["stream_options"] = msgspec.Raw(join({**stream_options(fields), **usage}))
    return fields


def stream_options(fields: Fields) -> Fields:
    """What a stream is to hold; empty for what is no object, which the engine refuses."""
    try:
        return read(fields, "stream_options", Fields) or {}
    except BadRequest:
        return {}


def flag(fields: Fields, name: str) -> bool:
    """Whether a field is set to something that an engine takes for true."""
    return given(fields, name) not in (None, b"false", b"0")


def _constrained(fields: Fields) -> bool:
    """Whether a grammar shapes the completion: `include_reasoning` then tells vLLM when it begins."""
    names = ("response_format", "structured_outputs")
    free = (None, b'"none"', b'"auto"')
    return any(given(fields, name) for name in names) or given(fields, "tool_choice") not in free
