"""The errors that the proxy returns as error objects, with their status.

    ApiError
    ├── BadRequest         400  the request is invalid; `param` names the field
    ├── Unauthorized       401  the API key is missing, or was refused
    ├── NotFound           404  no such model, session or route
    ├── BodyTooLarge       413  the request body is over the limit
    ├── Unsupported        501  no engine supports the request; the message names what to upgrade or enable
    ├── EngineBroken       502  the engine closed the connection or returned a malformed response
    ├── EngineUnavailable  503  no engine responds; sent with Retry-After
    ├── NotReady           503  the proxy itself still prepares something; sent with Retry-After
    └── EngineTimeout      504  the engine did not accept a connection in time

The wire format is OpenAI's: `{"error": {"message", "type", "param", "code"}}`.
"""

import msgspec


class ApiError(Exception):
    """Base of all errors that are returned to the client as an error object."""

    status = 500
    kind = "InternalServerError"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The error object as JSON."""
        return error_body(self.message, self.kind, self.param, self.code or self.status)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response's headers: content type, and Retry-After if set."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after is not None:
            headers.append((b"retry-after", str(self.retry_after).encode()))
        return headers


class BadRequest(ApiError):
    """The request is invalid; `param` names the field."""

    status = 400
    kind = "BadRequestError"


class Unauthorized(ApiError):
    """The API key is missing, or was refused."""

    status = 401
    kind = "AuthenticationError"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response's headers, with the authentication scheme that the client should use."""
        return [*super().headers(), (b"www-authenticate", b"Bearer")]


class NotFound(ApiError):
    """No such model, session or route."""

    status = 404
    kind = "NotFoundError"


class BodyTooLarge(ApiError):
    """The request body is over the limit."""

    status = 413
    kind = "RequestEntityTooLargeError"


class Unsupported(ApiError):
    """No engine supports the request; the message names what to upgrade or enable."""

    status = 501
    kind = "NotImplementedError"


class EngineBroken(ApiError):
    """The engine closed the connection or returned a malformed response."""

    status = 502
    kind = "BadGatewayError"


class EngineUnavailable(ApiError):
    """No engine responds."""

    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self, message: str, *, retry_after: int = 2) -> None:
        super().__init__(message, retry_after=retry_after)


class NotReady(ApiError):
    """The proxy itself still prepares something that the request needs."""

    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code, retry_after=2)


class EngineTimeout(ApiError):
    """The engine did not accept a connection in time."""

    status = 504
    kind = "GatewayTimeoutError"


def error_body(message: str, kind: str, param: str | None, code: str | int) -> bytes:
    """An OpenAI error object as JSON."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
