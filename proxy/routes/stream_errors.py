"""The error event that ends a broken stream, in the wire format of its route."""

import msgspec

from proxy.errors import ApiError


def error_event(path: str, error: ApiError) -> bytes:
    """The last event of a stream that cannot be completed.

    OpenAI's chat and completion streams carry it as plain data, which its SDKs raise as APIError; the
    responses and Anthropic formats name their events.
    """
    route = path.partition("?")[0]
    if route.endswith("/messages"):
        detail = {"type": "api_error", "message": error.message}
        return b"event: error\ndata: " + msgspec.json.encode({"type": "error", "error": detail}) + b"\n\n"
    if route.endswith("/responses"):
        event = {"type": "error", "code": error.kind, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return b"data: " + error.body() + b"\n\n"
