"""Send exact prompts to engines whose chat route does not accept ids: render, generate, derender.

vLLM's scale-out routes (`--enable-scale-out`) expose the steps of a chat completion: `/render` resolves
sampling parameters and grammar, `/inference/v1/generate` samples after a prompt of ids, `/derender` parses
tool calls and reasoning. The proxy puts the exact ids into the generate request. This costs two more round
trips than the chat route, and a stream begins when the completion is there, so it is used only if the chat
route does not accept ids.

Responses are converted to those of the chat route (see `tokenproxy.engine.derender`). Requests that these
routes cannot serve exactly are refused.
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import NULL, join, raw, raw_value, read
from tokenproxy.base.http import BytesResponse, Request, Response
from tokenproxy.base.types import Fields
from tokenproxy.engine.derender import (
    DERENDER_PATH,
    GENERATE_PATH,
    Derender,
    parse_response,
    read_response_field,
)
from tokenproxy.engine.protocol import Engine
from tokenproxy.engine.token_in import TokenRequest, rename_errors

__all__ = ["DERENDER_PATH", "GENERATE_PATH", "RENDER_PATH", "GenerateTokenIn"]

RENDER_PATH = "/v1/chat/completions/render"
_PLACEHOLDER_MESSAGES = msgspec.Raw(b'[{"role":"user","content":"."}]')
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


class GenerateTokenIn:
    """Exact prompts by vLLM's render, generate and derender routes."""

    name: ClassVar[str] = "generate"

    def supports(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        """See `TokenIn.supports`: False with stop strings or log-probabilities of chosen ids."""
        return _unsupported_field(fields) is None

    async def complete(self, engine: Engine, request: TokenRequest) -> Response:
        """See `TokenIn.complete`."""
        unsupported = _unsupported_field(request.fields)
        if unsupported is not None:
            raise BadRequest(_UNSUPPORTED[unsupported], param=unsupported)
        streamed = ("stream", "stream_options")
        chat = {name: value for name, value in request.fields.items() if name not in streamed}
        if request.images:
            chat["messages"] = _PLACEHOLDER_MESSAGES  # derender needs no images
        chat.setdefault("messages", _PLACEHOLDER_MESSAGES)
        response = await _post(engine, RENDER_PATH, {**chat, "messages": _PLACEHOLDER_MESSAGES}, request)
        if response.status >= 400:
            return response
        rendered = parse_response(response.body, RENDER_PATH)
        sampling = read_response_field(rendered, "sampling_params", Fields, RENDER_PATH) or {}
        response = await _post(engine, GENERATE_PATH, _generate_fields(rendered, sampling, request), request)
        if response.status >= 400:
            return response
        return await Derender(engine, request, chat, sampling).response(response)


async def _post(engine: Engine, path: str, fields: Fields, request: TokenRequest) -> BytesResponse:
    """The whole response of a route. An error names the client's field."""
    call = Request("POST", path, request.headers, join(fields), repeatable=True)
    response = await rename_errors(await engine.send(call), request.field)
    try:
        return BytesResponse(response.status, response.headers, await response.read())
    finally:
        await response.aclose()


def _generate_fields(rendered: Fields, sampling: Fields, request: TokenRequest) -> Fields:
    """The generate request: the parameters that render resolved, and the exact prompt."""
    resolved = {
        "sampling_params": msgspec.Raw(join({"max_tokens": _DEFAULT_MAX_TOKENS, **sampling})),
        "token_ids": msgspec.Raw(request.prompt_ids),
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
    return {**rendered, **resolved}


def _unsupported_field(fields: Mapping[str, msgspec.Raw]) -> str | None:
    """The first field of the request that cannot be served exactly; None if there is none."""
    return next((name for name in _UNSUPPORTED if raw_value(fields, name) not in (None, b"[]", b'""')), None)
