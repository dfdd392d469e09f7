"""Send exact prompts to engines whose chat route does not accept ids: render, generate, derender.

vLLM's scale-out routes (`--enable-scale-out`) expose the steps of a chat completion: `/render` resolves
sampling parameters and grammar, `/inference/v1/generate` samples after a prompt of ids, `/derender` parses
tool calls and reasoning. The proxy puts the exact ids into the generate request. This costs two more round
trips than the chat route, and one for every chunk of a stream, so it is used only if the chat route does not
accept ids.

Responses are converted to those of the chat route (see `tokenproxy.engine.derender`). Requests that these
routes cannot serve exactly are refused.
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import NULL, join, raw, raw_value, read
from tokenproxy.base.http import BytesResponse, Request, Response, StreamResponse
from tokenproxy.base.types import Fields
from tokenproxy.engine.derender import (
    DERENDER_PATH,
    GENERATE_PATH,
    Derender,
    parse_response,
    read_response_field,
    uncompressed_headers,
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
        chat = dict(request.fields)
        if request.images:
            chat["messages"] = _PLACEHOLDER_MESSAGES  # derender reads them for each chunk: no images there
        chat.setdefault("messages", _PLACEHOLDER_MESSAGES)
        stream = read(request.fields, "stream", bool)
        rendered = await self._render(engine, chat, request)
        if isinstance(rendered, BytesResponse):
            return rendered
        sampling = read_response_field(rendered, "sampling_params", Fields, RENDER_PATH) or {}
        derender = Derender(engine, request, chat, sampling)
        if stream and request.sampled:
            request.check(await derender.begin(request.sampled))
        body = join(_generate_fields(rendered, sampling, request))
        response = await engine.send(
            Request("POST", GENERATE_PATH, uncompressed_headers(request.headers), body, True)
        )
        if response.status >= 400:
            return await rename_errors(response, request.field)
        if stream:
            headers = [pair for pair in response.headers if pair[0] != b"content-length"]
            return StreamResponse(200, headers, derender.stream(response), response)
        try:
            content = await response.read()
        finally:
            await response.aclose()
        return await derender.whole(content, response.headers)

    async def _render(self, engine: Engine, chat: Fields, request: TokenRequest) -> Fields | BytesResponse:
        """Send the render request; returns the fields of its response, or the error response."""
        body = join({**chat, "messages": _PLACEHOLDER_MESSAGES})
        response = await engine.send(
            Request("POST", RENDER_PATH, uncompressed_headers(request.headers), body, True)
        )
        response = await rename_errors(response, request.field)
        try:
            content = await response.read()
        finally:
            await response.aclose()
        if response.status >= 400:
            return BytesResponse(response.status, response.headers, content)
        return parse_response(content, RENDER_PATH)


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
    return {**rendered, **resolved}


def _unsupported_field(fields: Mapping[str, msgspec.Raw]) -> str | None:
    """The first field of the request that cannot be served exactly; None if there is none."""
    return next((name for name in _UNSUPPORTED if raw_value(fields, name) not in (None, b"[]", b'""')), None)
