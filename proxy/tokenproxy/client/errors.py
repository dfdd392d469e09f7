"""The errors of a client.

ProxyError
├── NoResponse                the proxy could not be reached, or the connection broke
├── UnreadableResponse        the response is not what this version of the client expects
└── ErrorResponse             the proxy responded with an error object
    ├── InvalidRequest        400, 413 and others below 500; `param` names the field
    ├── KeyRefused            401
    ├── AccessDenied          403
    ├── UnknownResource       404
    ├── TooManyRequests       429  the same request may succeed after `retry_after_s`
    ├── TemporaryFailure      503  the same request may succeed after `retry_after_s`
    └── ServerFailure         500, 501, 502, 504
"""

import httpx
import msgspec


class ProxyError(Exception):
    """Base of all errors of a client."""


class NoResponse(ProxyError):
    """The proxy could not be reached, or the connection broke: it may have served the request."""


class UnreadableResponse(ProxyError):
    """The response is not what this version of the client expects."""


class ErrorResponse(ProxyError):
    """The proxy responded with an error object."""

    def __init__(
        self,
        message: str,
        status: int,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """The fields of the error object, and of the response that held it."""
        super().__init__(message)
        self.message = message
        self.status = status
        """The status of the response."""
        self.param = param
        """The field that is wrong."""
        self.code = code
        """The reason as one word; docs/errors.md lists them."""
        self.retry_after_s = retry_after_s
        """Seconds to wait before the same request; None if the response names none."""


class InvalidRequest(ErrorResponse):
    """The request is invalid; `param` names the field."""


class KeyRefused(ErrorResponse):
    """The API key is missing, or was refused."""


class AccessDenied(ErrorResponse):
    """The API key lacks a scope."""


class UnknownResource(ErrorResponse):
    """There is no such session, consumer, model or route."""


class TooManyRequests(ErrorResponse):
    """A queue of the proxy or the engine is full."""


class TemporaryFailure(ErrorResponse):
    """The store or all engines do not respond, or the proxy stops."""


class ServerFailure(ErrorResponse):
    """The proxy or the engine failed."""


_BY_STATUS: dict[int, type[ErrorResponse]] = {
    401: KeyRefused,
    403: AccessDenied,
    404: UnknownResource,
    429: TooManyRequests,
    503: TemporaryFailure,
}


class _ErrorObject(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorObject


def error_of(response: httpx.Response) -> ErrorResponse:
    """The error of a response whose status is 400 or above, its body read."""
    try:
        found = msgspec.json.decode(response.content, type=_ErrorBody).error
    except msgspec.DecodeError:  # a server between the client and the proxy
        found = _ErrorObject(response.text[:500])
    status = response.status_code
    kind = _BY_STATUS.get(status, InvalidRequest if status < 500 else ServerFailure)
    return kind(
        found.message or f"the proxy responded with status {status}",
        status,
        param=found.param,
        code=found.code if isinstance(found.code, str) else None,
        retry_after_s=_seconds(response.headers.get("retry-after", "")),
    )


def _seconds(text: str) -> float | None:
    try:
        return max(0.0, float(text))
    except ValueError:
        return None
