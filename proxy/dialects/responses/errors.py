"""Errors of responses: the codes by which clients decide what to do next."""

import re
from collections.abc import Mapping
from http import HTTPStatus

from proxy.errors import (
    ApiError,
    BadRequest,
    BodyTooLarge,
    EngineBroken,
    EngineTimeout,
    Forbidden,
    NotFound,
    Overloaded,
    Unauthorized,
    Unavailable,
    error_body,
)

CONTEXT = "context_length_exceeded"
_TOO_LONG = re.compile("maximum context length|longer than the maximum model length")
"""Matches what vLLM says of a prompt that does not fit."""
_KINDS: Mapping[int, str] = {
    error.status: error.kind
    for error in (
        BadRequest, Unauthorized, Forbidden, NotFound, BodyTooLarge, Overloaded, EngineBroken, Unavailable,
        EngineTimeout,
    )
}  # fmt: skip


def exceeds_context(status: int, message: str, code: str | None) -> bool:
    """Whether an error of the engine is a prompt that is longer than the model's context."""
    return status == HTTPStatus.BAD_REQUEST and (code == CONTEXT or bool(_TOO_LONG.search(message)))


def failure(status: int, message: str, code: str | None) -> dict[str, str]:
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


def engine_error(status: int, message: str, code: str | None) -> bytes:
    """OpenAI's error object for an error of the engine."""
    if exceeds_context(status, message, code):
        code = CONTEXT
    kind = _KINDS.get(status, BadRequest.kind if status < 500 else ApiError.kind)
    return error_body(message, kind, "input" if code == CONTEXT else None, code or status)
