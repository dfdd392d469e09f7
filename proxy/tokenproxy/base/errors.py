"""The errors that the proxy returns as error objects, with their status.

    ApiError
    ├── BadRequest         400  the request is invalid; `param` names the field
    │   └── UnreadBody     400  the server read no body, and takes what follows for the next request
    ├── Unauthorized       401  the API key is missing, or was refused
    ├── Forbidden          403  the API key lacks a scope, or the route needs a key and none is set
    ├── NotFound           404  no such model, session or route
    ├── Conflict           409  the request creates what exists already
    ├── BodyTimeout        408  the request body did not arrive in time
    ├── BodyTooLarge       413  the request body is over the limit
    ├── BodyEncoded        415  the request body is compressed
    ├── Overloaded         429  a queue is full, or the request waited too long; sent with Retry-After
    ├── HeadTooLarge       431  the request line and headers are over the limit
    ├── Unsupported        501  no engine supports the request; the message names what to upgrade or enable
    ├── EngineBroken       502  the engine closed the connection or returned a malformed response
    ├── CannotGoOn         502  a turn whose engine broke off cannot go on from the ids sampled so far
    ├── Unavailable        503  the same request may succeed later; sent with Retry-After
    │   ├── EngineUnavailable  503  no engine responds
    │   │   └── RendererUnavailable  503  no engine renders the messages
    │   ├── NotReady           503  the proxy still prepares something that the request needs
    │   ├── OutOfSockets       503  this process has no file descriptor or port left
    │   └── Stopping           503  the proxy stops before the request is complete
    └── EngineTimeout      504  the engine did not respond in time

`UsageError` is not one of them: it ends a command with exit code 2.

They are sent in the wire format of the route: OpenAI's on most, Anthropic's on `/v1/messages`.

    OpenAI     {"error": {"message", "type", "param", "code"}}
    Anthropic  {"type": "error", "error": {"type", "message"}}
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Self

import msgspec

from tokenproxy.base.types import Send

_MESSAGE_CHARACTERS = 4000
_PARAM_CHARACTERS = 200


class UsageError(Exception):
    """A command cannot run with these flags and settings; the message says what to do instead."""


def no_such(kind: str, name: str, names: Iterable[str]) -> str:
    """The end of the sentence about a setting or flag that does not exist, with the nearest that does."""
    nearest = get_close_matches(name, names, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "`--help` and docs/settings.md list them"
    return f"there is no such {kind}; {hint}"


class ApiError(Exception):
    """Base of all errors that are returned to the client as an error object."""

    status = 500
    kind = "InternalServerError"
    retry_after_s: int | None = None
    """Seconds in Retry-After, unless the constructor gets others; None for no such header."""
    closes = False
    """Whether the connection closes after the response, because the rest of the request is not read."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        self.message = shortened(message, _MESSAGE_CHARACTERS)
        super().__init__(self.message)
        self.param = None if param is None else shortened(param, _PARAM_CHARACTERS)
        self.code = code
        self.retry_after = self.retry_after_s if retry_after is None else retry_after

    def body(self) -> bytes:
        """The error object as JSON."""
        return error_body(self.message, self.kind, self.param, self.code or self.status)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response's headers: content type, Retry-After if set, and the end of the connection."""
        headers = [(b"content-type", b"application/json")]
        if self.closes:
            headers.append((b"connection", b"close"))
        if self.retry_after is not None:
            headers.append((b"retry-after", str(self.retry_after).encode()))
        return headers


class BadRequest(ApiError):
    """The request is invalid; `param` names the field."""

    status = 400
    kind = "BadRequestError"

    @classmethod
    def of(cls, field: str, problem: str) -> Self:
        """The error of one field, whose name begins the message: `` `limit` must be a number ``."""
        return cls(f"`{field}` {problem}", param=field)


class UnreadBody(BadRequest):
    """The server read no body of the request, and takes what follows for the next request."""

    closes = True


class Unauthorized(ApiError):
    """The API key is missing, or was refused."""

    status = 401
    kind = "AuthenticationError"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response's headers, with the authentication scheme that the client should use."""
        return [*super().headers(), (b"www-authenticate", b"Bearer")]


class Forbidden(ApiError):
    """The API key lacks a scope, or the route needs a key and none is set."""

    status = 403
    kind = "PermissionDeniedError"


class NotFound(ApiError):
    """No such model, session or route."""

    status = 404
    kind = "NotFoundError"


class Conflict(ApiError):
    """The request creates what exists already; `param` names the field that names it."""

    status = 409
    kind = "ConflictError"


class BodyTimeout(ApiError):
    """The request body did not arrive in time."""

    status = 408
    kind = "RequestTimeoutError"
    closes = True


class BodyTooLarge(ApiError):
    """The request body is over the limit."""

    status = 413
    kind = "RequestEntityTooLargeError"


class BodyEncoded(ApiError):
    """The request body is compressed."""

    status = 415
    kind = "UnsupportedMediaTypeError"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response's headers, with the content codings that a request may have."""
        return [*super().headers(), (b"accept-encoding", b"identity")]


class Overloaded(ApiError):
    """A queue is full, or the request waited in it too long; the same request may succeed later."""

    status = 429
    kind = "RateLimitError"


class HeadTooLarge(ApiError):
    """The request line and headers are over the limit."""

    status = 431
    kind = "RequestHeaderFieldsTooLargeError"


class Unsupported(ApiError):
    """No engine supports the request; the message names what to upgrade or enable."""

    status = 501
    kind = "NotImplementedError"


class EngineBroken(ApiError):
    """The engine closed the connection or returned a malformed response."""

    status = 502
    kind = "BadGatewayError"


class CannotGoOn(ApiError):
    """A turn whose engine broke off cannot go on exactly; no engine is to blame for that."""

    status = 502
    kind = "BadGatewayError"


class Unavailable(ApiError):
    """Base of the errors after which the client may send the same request again; sent with Retry-After."""

    status = 503
    kind = "ServiceUnavailableError"
    retry_after_s = 2


class EngineUnavailable(Unavailable):
    """No engine responds."""


class RendererUnavailable(EngineUnavailable):
    """An engine renders the messages of this model, and none responded in time."""


class NotReady(Unavailable):
    """The proxy still prepares something that the request needs."""


class OutOfSockets(Unavailable):
    """This process has no file descriptor or port left for a connection to an engine."""

    retry_after_s = 1


class Stopping(Unavailable):
    """The proxy stops before the request is complete."""


class EngineTimeout(ApiError):
    """The engine did not respond in time."""

    status = 504
    kind = "GatewayTimeoutError"

    def __init__(self, message: str, *, received: bool = False) -> None:
        """`received`: whether the engine may have received the request."""
        super().__init__(message)
        self.received = received


def shortened(text: str, most: int) -> str:
    """The start and the end of a text, about `most` characters. A client's own name may be megabytes."""
    return text if len(text) <= most else f"{text[: most * 3 // 4]} ... {text[-most // 4 :]}"


def error_body(message: str, kind: str, param: str | None, code: str | int) -> bytes:
    """An OpenAI error object as JSON."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


# --- in the wire format of a route

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


async def send_error(send: Send, error: ApiError, path: str) -> None:
    """Send an error in the wire format of a path."""
    body, headers = error.body(), error.headers()
    if is_anthropic(path):
        body = anthropic_error(error.status, error.message, error.param)
        if again := _RETRIED.get(error.status):
            headers.append((b"x-should-retry", again))
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_event(path: str, error: ApiError) -> bytes:
    """The last event of a stream that cannot be completed.

    OpenAI's chat and completion streams carry it as plain data, which its SDKs raise as APIError; the
    responses and Anthropic formats name their events.
    """
    if is_anthropic(path):
        return b"event: error\ndata: " + anthropic_error(error.status, error.message, error.param) + b"\n\n"
    if path.partition("?")[0].rstrip("/").endswith("/responses"):
        event = {"type": "error", "code": error.kind, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return b"data: " + error.body() + b"\n\n"
