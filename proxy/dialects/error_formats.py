"""Errors in the wire format of a route: OpenAI's on most, Anthropic's on `/v1/messages`.

OpenAI     {"error": {"message", "type", "param", "code"}}
Anthropic  {"type": "error", "error": {"type", "message"}}
"""

from collections.abc import Mapping

import msgspec

from proxy.errors import ApiError

_ANTHROPIC_KINDS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's name for an error by its HTTP status; `api_error` for every other status."""


def is_anthropic(path: str) -> bool:
    """Whether the clients of a route are Anthropic's; `path` may have a query string and a prefix."""
    route = path.partition("?")[0].rstrip("/")
    return route.endswith(("/messages", "/messages/count_tokens"))


def anthropic_error(status: int, message: str) -> bytes:
    """An Anthropic error object as JSON."""
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def error_body(path: str, error: ApiError) -> bytes:
    """The body of a response that is an error."""
    return anthropic_error(error.status, error.message) if is_anthropic(path) else error.body()


def error_event(path: str, error: ApiError) -> bytes:
    """The last event of a stream that cannot be completed.

    OpenAI's chat and completion streams carry it as plain data, which its SDKs raise as APIError; the
    responses and Anthropic formats name their events.
    """
    if is_anthropic(path):
        return b"event: error\ndata: " + anthropic_error(error.status, error.message) + b"\n\n"
    if path.partition("?")[0].rstrip("/").endswith("/responses"):
        event = {"type": "error", "code": error.kind, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return b"data: " + error.body() + b"\n\n"
