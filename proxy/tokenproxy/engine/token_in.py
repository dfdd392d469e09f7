"""The ways ("spellings") to send an engine the exact prompt of a chat completion, one class each.

Which one works depends on the version of vLLM and on its flags. `tokenproxy.engine.discovery` tries them on
the server instead of comparing version numbers.
"""

import re
from collections.abc import Mapping
from typing import ClassVar, Protocol

import msgspec

from tokenproxy.base.errors import BadRequest, error_body
from tokenproxy.base.evidence import ASKED
from tokenproxy.base.fields import NULL, join, raw, raw_value, read
from tokenproxy.base.http import (
    JSON_HEADERS,
    BytesResponse,
    Request,
    Response,
    StreamResponse,
    read_and_close,
)
from tokenproxy.base.types import Fields
from tokenproxy.engine.derender import (
    GENERATE_PATH,
    Derender,
    error_headers,
    parse_response,
    read_response_field,
)
from tokenproxy.engine.protocol import NO_ERROR_OBJECT, Engine, TokenRequest, problem_of

CHAT_PATH = "/v1/chat/completions"
RENDER_PATH = "/v1/chat/completions/render"
_PLACEHOLDER_MESSAGES = msgspec.Raw(b'[{"role":"user","content":""}]')
"""Sent if the client gave no messages: the chat route requires some, but with ids it does not render them."""
_RENDERED_MESSAGES = msgspec.Raw(b'[{"role":"user","content":"."}]')
"""Messages for the render request, which only resolves the parameters; the rendered ids are discarded."""
_DEFAULT_MAX_TOKENS = msgspec.Raw(b"16")
"""vLLM's default `max_tokens`. render omits it if it is the default; generate, without it, has no limit."""
_UNSUPPORTED = {
    "stop": "`stop` strings need an engine whose chat route takes `kv_transfer_params.prompt_token_ids`; "
    "use `stop_token_ids`, or upgrade vLLM",
    "logprob_token_ids": "`logprob_token_ids` needs an engine whose chat route takes "
    "`kv_transfer_params.prompt_token_ids`; use `top_logprobs`, or upgrade vLLM",
}
"""Request fields that cannot be served exactly, with the error message: derender shows the text after a stop
string again, and generate returns no log-probabilities of chosen ids."""
_ID_PARAMS = ("kv_transfer_params.prompt_token_ids", "token_ids", "prompt_token_ids")
_ID_SPELLINGS = ("kv_transfer_params['prompt_token_ids']", *_ID_PARAMS)
_PARAMETER_SUFFIX = re.compile(r" \(parameter=[\w.]+(, value=[^)]*)?\)$")


class TokenIn(Protocol):
    """One way to send an engine an exact prompt."""

    name: ClassVar[str]

    def supports(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        """Whether a chat completion with these fields can be served exactly."""
        ...

    async def complete(self, engine: Engine, request: TokenRequest) -> Response:
        """Run the completion; returns a chat completion, its stream of chunks, or an error response.

        Raises:
            BadRequest: a field of the request cannot be served exactly; see `supports`.
        """
        ...


class ChatTokenIn:
    """vLLM's chat route, with the ids in `kv_transfer_params.prompt_token_ids` (vllm#48145).

    The engine skips rendering but still parses tool calls and reasoning, so its responses need no change.
    """

    name: ClassVar[str] = "chat"

    def supports(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        """See `TokenIn.supports`: always True."""
        return True

    async def complete(self, engine: Engine, request: TokenRequest) -> Response:
        """See `TokenIn.complete`."""
        body = chat_body(request)
        chat_request = Request("POST", CHAT_PATH, request.headers, body, repeatable=True)
        return await rename_errors(await engine.send(chat_request), request.field)


def chat_body(request: TokenRequest) -> bytes:
    """The chat request with the ids in `kv_transfer_params`, next to the client's transfer parameters."""
    transfer = read(request.fields, "kv_transfer_params", Fields) or {}
    transfer["prompt_token_ids"] = msgspec.Raw(request.begun)
    messages = request.fields.get("messages", _PLACEHOLDER_MESSAGES)
    return msgspec.json.encode({**request.fields, "messages": messages, "kv_transfer_params": transfer})


class GenerateTokenIn:
    """Exact prompts for engines whose chat route does not accept ids: render, generate, derender.

    vLLM's scale-out routes (`--enable-scale-out`) expose the steps of a chat completion: `/render` resolves
    sampling parameters and grammar, `/inference/v1/generate` samples after a prompt of ids, `/derender`
    parses tool calls and reasoning. The proxy puts the exact ids into the generate request. This costs two
    more round trips than the chat route, and one for every chunk of a stream. Responses are converted to
    those of the chat route; requests that these routes cannot serve exactly are refused.
    """

    name: ClassVar[str] = "generate"

    def supports(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        """See `TokenIn.supports`: False with stop strings or log-probabilities of chosen ids."""
        return _unsupported_field(fields) is None

    async def complete(self, engine: Engine, request: TokenRequest) -> Response:
        """See `TokenIn.complete`."""
        unsupported = _unsupported_field(request.fields)
        if unsupported is not None:
            raise BadRequest(_UNSUPPORTED[unsupported], param=unsupported)
        chat = dict(request.fields)
        if request.images:
            chat["messages"] = _RENDERED_MESSAGES  # derender reads them for each chunk: no images there
        chat.setdefault("messages", _RENDERED_MESSAGES)
        stream = read(request.fields, "stream", bool)
        body = join({**chat, "messages": _RENDERED_MESSAGES})
        call = Request("POST", RENDER_PATH, request.headers, body, repeatable=True)
        response = await rename_errors(await engine.send(call), request.field)
        if response.status >= 400:
            return response
        rendered = parse_response(await read_and_close(response), RENDER_PATH)
        sampling = read_response_field(rendered, "sampling_params", Fields, RENDER_PATH) or {}
        derender = Derender(engine, request, chat, sampling)
        if stream and request.sampled:
            request.check(await derender.begin(request.sampled))
        body = join(_generate_fields(rendered, sampling, request))
        call = Request("POST", GENERATE_PATH, request.headers, body, repeatable=True)
        response = await rename_errors(await engine.send(call), request.field)
        if response.status >= 400:
            return response
        if stream:
            headers = [pair for pair in response.headers if pair[0] != b"content-length"]
            return StreamResponse(200, headers, derender.stream(response), response)
        return await derender.whole(await read_and_close(response), response.headers)


def _generate_fields(rendered: Fields, sampling: Fields, request: TokenRequest) -> Fields:
    """The generate request: the parameters that render resolved, and the exact prompt."""
    resolved = {
        "sampling_params": msgspec.Raw(join({"max_tokens": _DEFAULT_MAX_TOKENS, **sampling})),
        "token_ids": msgspec.Raw(request.begun),
        # render resolved it from the placeholder messages; null makes the engine decide by the exact prompt
        "reasoning_ended": msgspec.Raw(NULL),
    }
    if raw_value(sampling, "logprobs") is not None and not read(
        request.fields, "return_tokens_as_token_ids", bool
    ):
        resolved["output_mode"] = raw("text")  # log-probabilities then hold the text of their tokens
    if request.images:
        resolved["token_ids"] = msgspec.Raw(request.single_ids)
        resolved["content_parts"] = raw([{"type": "image_url", "url": image.url} for image in request.images])
        resolved["return_token_ids"] = msgspec.Raw(b"true")  # the prompt as the engine expanded it
    asks = {fact.asked_by for fact in ASKED} & request.fields.keys()
    return {**rendered, **resolved, **{name: request.fields[name] for name in asks}}


def _unsupported_field(fields: Mapping[str, msgspec.Raw]) -> str | None:
    """The first field of the request that cannot be served exactly; None if there is none."""
    return next((name for name in _UNSUPPORTED if raw_value(fields, name) not in (None, b"[]", b'""')), None)


async def rename_errors(response: Response, field: str) -> Response:
    """Return the response. An error about the ids names the client's field instead of the engine's."""
    if response.status < 400:
        return response
    renamed = rename_param(await read_and_close(response), response.status, field)
    return BytesResponse(response.status, error_headers(response.headers), renamed)


def rename_param(body: bytes, status: int, field: str) -> bytes:
    """Rewrite an engine's error object so that it names the client's field.

    With `field="tokens"`, the message "token_ids must not be odd" becomes "tokens must not be odd", `param`
    becomes "tokens". A body that is not an error object becomes the message of one.
    """
    problem = problem_of(body)
    if not problem.is_object:
        text = f"the engine returned status {status}: {problem.message[:500]}"
        return error_body(text, NO_ERROR_OBJECT, None, status)
    param = problem.param and problem.param.removeprefix("body.")
    message = _PARAMETER_SUFFIX.sub("", problem.message)
    if param in _ID_PARAMS:
        for name in _ID_SPELLINGS:
            message = message.replace(name, field)
        param = field
    elif "maximum model length" in message:
        # clients look for the chat route's "maximum context length"; the generate route words it differently
        message, param = f"the prompt exceeds the model's maximum context length: {message}", field
    elif param in (None, "input_tokens"):
        param = _param_from(message, status, field)
    return error_body(message, problem.type or "BadRequestError", param, status)


def _param_from(message: str, status: int, field: str) -> str | None:
    """The field that an error message is about, if the engine named none."""
    if "context length" in message or "out of vocabulary" in message or "prompt contains" in message:
        return field
    if status == 404 and "model" in message:
        return "model"
    return None


def json_request(path: str, value: object) -> Request:
    """A POST request with a JSON body that the proxy sends on its own behalf, not for a client."""
    return Request("POST", path, list(JSON_HEADERS), bytes(raw(value)), repeatable=True)
