"""How an engine takes the exact prompt of a chat completion: one class per spelling.

The spelling depends on the version of vLLM and on its flags. It is found out by asking
the server (`proxy.engine.discovery`), never by comparing version numbers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import msgspec

from proxy.engine.protocol import Engine
from proxy.errors import error_body
from proxy.fields import join, raw, read
from proxy.http import JSON_HEADERS, BytesResponse, Request, Response
from proxy.types import Fields, Headers

CHAT_PATH = "/v1/chat/completions"
_NO_MESSAGES = msgspec.Raw(b'[{"role":"user","content":""}]')
"""Stands where a request must have messages; they are not rendered when ids are given."""

_ID_PARAMS = ("kv_transfer_params.prompt_token_ids", "token_ids", "prompt_token_ids")
_ID_SPELLINGS = ("kv_transfer_params['prompt_token_ids']", *_ID_PARAMS)
_ENGINE_PARAMETER = re.compile(r" \(parameter=[\w.]+(, value=[^)]*)?\)$")


@dataclass(slots=True)
class TokenRequest:
    """A chat completion whose prompt is ids."""

    prompt_ids: bytes
    """The prompt as a JSON array of ids, checked."""
    fields: Fields
    """All other fields of the chat completion, as the client sent them."""
    headers: Headers
    field: str = "prompt_ids"
    """What the client called the ids: errors name it."""


class TokenIn(Protocol):
    """One way to hand an engine the exact prompt."""

    name: ClassVar[str]

    def takes(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        """Whether a chat completion with these fields can be run on ids."""
        ...

    async def complete(self, engine: Engine, request: TokenRequest) -> Response:
        """Run the completion. The answer is a chat completion or its stream of chunks.

        Raises:
            BadRequest: the request asks for something this spelling cannot do exactly.
        """
        ...


class ChatTokenIn:
    """vLLM's chat route, with the ids in `kv_transfer_params.prompt_token_ids` (vllm#48145).

    The engine skips rendering and still parses tools and reasoning, so answers pass through untouched.
    """

    name: ClassVar[str] = "chat"

    def takes(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        """See `TokenIn.takes`: everything."""
        return True

    async def complete(self, engine: Engine, request: TokenRequest) -> Response:
        """See `TokenIn.complete`."""
        body = chat_body(request)
        call = Request("POST", CHAT_PATH, request.headers, body, repeatable=True)
        return await named_errors(await engine.send(call), request.field)


def chat_body(request: TokenRequest) -> bytes:
    """The chat request that carries the ids, beside what else the client wants of the KV transfer."""
    fields = dict(request.fields)
    transfer = read(fields, "kv_transfer_params", Fields) or {}
    fields.setdefault("messages", _NO_MESSAGES)
    transfer["prompt_token_ids"] = msgspec.Raw(request.prompt_ids)
    fields["kv_transfer_params"] = msgspec.Raw(join(transfer))
    return join(fields)


async def named_errors(answer: Response, field: str) -> Response:
    """The answer, with the client's own name for the ids in an error that is about them."""
    if answer.status < 400:
        return answer
    try:
        body = await answer.read()
    finally:
        await answer.aclose()
    return BytesResponse(
        answer.status, error_headers(answer.headers), rename_param(body, answer.status, field)
    )


def error_headers(headers: Headers) -> Headers:
    """Headers that still hold after an error body was rewritten."""
    return [
        pair for pair in headers if pair[0] not in (b"content-length", b"content-encoding", b"content-type")
    ] + [(b"content-type", b"application/json")]


def rename_param(body: bytes, status: int, field: str) -> bytes:
    """An engine's error object with `param` set to what the client called the field at fault."""
    try:
        error = msgspec.json.decode(body)["error"]
        message = str(error["message"] or error) if isinstance(error, dict) else str(error)
        kind = error.get("type") or "BadRequestError" if isinstance(error, dict) else "BadRequestError"
        param = error.get("param") if isinstance(error, dict) else None
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        text = body.decode("utf-8", "replace")[:500]
        return error_body(f"the engine answered {status}: {text}", "BadGatewayError", None, status)
    param = param.removeprefix("body.") if isinstance(param, str) else None
    message = _ENGINE_PARAMETER.sub("", message)
    if param in _ID_PARAMS:
        for name in _ID_SPELLINGS:
            message = message.replace(name, field)
        param = field
    elif "maximum model length" in message:
        # the words that clients look for; the generate route has others than the chat route
        message, param = f"the prompt exceeds the model's maximum context length: {message}", field
    elif param in (None, "input_tokens"):
        param = _param_from(message, status, field)
    return error_body(message, kind, param, status)


def _param_from(message: str, status: int, field: str) -> str | None:
    if "context length" in message or "out of vocabulary" in message or "prompt contains" in message:
        return field
    if status == 404 and "model" in message:
        return "model"
    return None


def json_call(path: str, value: object) -> Request:
    """A JSON request of the proxy's own."""
    return Request("POST", path, list(JSON_HEADERS), bytes(raw(value)), repeatable=True)
