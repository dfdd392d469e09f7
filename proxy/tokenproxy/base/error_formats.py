"""Errors in the wire format of a route: OpenAI's on most, Anthropic's on `/v1/messages`.

OpenAI     {"error": {"message", "type", "param", "code"}}
Anthropic  {"type": "error", "error": {"type", "message"}}
"""

import re
from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from tokenproxy.base.errors import ApiError, BadRequest
from tokenproxy.base.errors import error_body as error_object
from tokenproxy.base.types import Headers, Send

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
_RETRIED: Mapping[int, bytes] = {429: b"true", 501: b"false", 503: b"true"}
"""Whether clients should send a request again, by the status of the error; others are left to them."""
_CONTEXT = re.compile(r"maximum (?:context|model) length (?:is|of) (\d+)")
_COUNT = re.compile(r"contains (?:at least )?(\d+) input tokens|prompt \(length (\d+)\)")
CONTEXT = "context_length_exceeded"
_TOO_LONG = re.compile("maximum context length|longer than the maximum model length")
"""Matches what vLLM says of a prompt that does not fit."""
_NO_MODEL = "The model `"


def is_anthropic(path: str) -> bool:
    """Whether the clients of a route are Anthropic's; `path` may have a query string and a prefix."""
    route = path.partition("?")[0].rstrip("/")
    return route.endswith(("/messages", "/messages/count_tokens"))


def anthropic_error(status: int, message: str, param: str | None = None) -> bytes:
    """An Anthropic error object as JSON, in the words that Anthropic's clients act on.

    Args:
        param: the field that is wrong; it is named in the message.
    """
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    message = _for_clients(status, message)
    if param is not None and param not in message:
        message = f"{param}: {message}"
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def _for_clients(status: int, message: str) -> str:
    """The message, after the words by which Claude Code recognises the error."""
    if status == 404 and message.startswith(_NO_MODEL):
        return f"model: {message}"
    context = _CONTEXT.search(message) if status == 400 else None
    if context is None:
        return message
    most, count = context[1], _COUNT.search(message)
    # an engine that refuses a text by its length has not counted its ids
    ids = (count[1] or count[2]) if count else str(int(most) + 1)
    return f"prompt is too long: {ids} tokens > {most} maximum. {message}"


def error_body(path: str, error: ApiError) -> bytes:
    """The body of a response that is an error."""
    if is_anthropic(path):
        return anthropic_error(error.status, error.message, error.param)
    return error.body()


def error_headers(path: str, error: ApiError) -> Headers:
    """The headers of a response that is an error."""
    headers = error.headers()
    if is_anthropic(path) and (again := _RETRIED.get(error.status)):
        headers.append((b"x-should-retry", again))
    return headers


async def send_error(send: Send, error: ApiError, path: str) -> None:
    """Send an error in the wire format of a path."""
    body = error_body(path, error)
    headers = [*error_headers(path, error), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_event(path: str, error: ApiError) -> bytes:
    """The last event of a stream that cannot be completed.

    OpenAI's chat and completion streams carry it as plain data, which its SDKs raise as APIError; the
    responses and Anthropic formats name their events.
    """
    if is_anthropic(path):
        return b"event: error\ndata: " + error_body(path, error) + b"\n\n"
    if path.partition("?")[0].rstrip("/").endswith("/responses"):
        event = {"type": "error", "code": error.kind, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return b"data: " + error.body() + b"\n\n"


# --- an engine's errors on `/v1/responses`, with the codes by which clients decide what to do next


def exceeds_context(status: int, message: str, code: str | None) -> bool:
    """Whether an error of the engine is a prompt that is longer than the model's context."""
    return status == HTTPStatus.BAD_REQUEST and (code == CONTEXT or bool(_TOO_LONG.search(message)))


def response_failure(status: int, message: str, code: str | None) -> dict[str, str]:
    """The `error` of a failed response."""
    if exceeds_context(status, message, code):
        code = CONTEXT
    elif status == HTTPStatus.TOO_MANY_REQUESTS:
        code = code if code == "insufficient_quota" else "rate_limit_exceeded"
    elif 400 <= status < 500:
        code = "invalid_prompt"
    else:
        code = "server_error"
    return {"code": code, "message": message}


def openai_error(status: int, message: str, code: str | None) -> bytes:
    """OpenAI's error object for an error of the engine."""
    if exceeds_context(status, message, code):
        code = CONTEXT
    kinds = {error.status: error.kind for error in ApiError.__subclasses__()}
    kind = kinds.get(status, BadRequest.kind if status < 500 else ApiError.kind)
    return error_object(message, kind, "input" if code == CONTEXT else None, code or status)
