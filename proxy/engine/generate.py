"""Exact prompts for engines whose chat route takes no ids: generate, then derender.

vLLM's scale-out routes (`--enable-scale-out`) do the steps of a chat completion one by one: `/render`
resolves sampling parameters and grammar, `/inference/v1/generate` runs on ids, `/derender` parses tools and
reasoning. The proxy puts the exact ids between the first and the second step. It costs two more round
trips, and in a stream one for every chunk, so it is the second choice.

Answers are made to look like the chat route's (see `proxy.engine.derender`). What it cannot do is refused.
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from proxy.engine.derender import DERENDER_PATH, GENERATE_PATH, Derender, from_engine, json_headers, of_engine
from proxy.engine.protocol import Engine
from proxy.engine.token_in import TokenRequest, named_errors
from proxy.errors import BadRequest
from proxy.fields import NULL, given, join, raw, read
from proxy.http import BytesResponse, Request, Response, StreamResponse
from proxy.types import Fields

__all__ = ["DERENDER_PATH", "GENERATE_PATH", "RENDER_PATH", "GenerateTokenIn"]

RENDER_PATH = "/v1/chat/completions/render"
_STAND_IN = msgspec.Raw(b'[{"role":"user","content":"."}]')
"""Rendered only to resolve the parameters; its ids are thrown away."""
_UNSAID_LIMIT = msgspec.Raw(b"16")
"""render leaves out a `max_tokens` that is vLLM's own default, and generate would then know no limit."""
_REFUSED = {
    "stop": "`stop` strings need an engine whose chat route takes `kv_transfer_params.prompt_token_ids`; "
    "use `stop_token_ids`, or upgrade vLLM",
    "logprob_token_ids": "`logprob_token_ids` needs an engine whose chat route takes "
    "`kv_transfer_params.prompt_token_ids`; use `top_logprobs`, or upgrade vLLM",
}
"""Fields that this spelling cannot keep: derender decodes the text behind stop strings again, and generate
answers no log-probabilities of chosen ids."""


class GenerateTokenIn:
    """vLLM's generate route between its render and derender routes."""

    name: ClassVar[str] = "generate"

    def takes(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        """See `TokenIn.takes`: no stop strings, and no log-probabilities of chosen ids."""
        return _refused(fields) is None

    async def complete(self, engine: Engine, request: TokenRequest) -> Response:
        """See `TokenIn.complete`."""
        refused = _refused(request.fields)
        if refused is not None:
            raise BadRequest(_REFUSED[refused], param=refused)
        chat = dict(request.fields)
        chat.setdefault("messages", _STAND_IN)
        stream = read(request.fields, "stream", bool)
        rendered = await self._render(engine, chat, request)
        if isinstance(rendered, BytesResponse):
            return rendered
        sampling = of_engine(rendered, "sampling_params", Fields, RENDER_PATH) or {}
        derender = Derender(engine, request, chat, sampling)
        body = join(_to_generate(rendered, sampling, request))
        answer = await engine.send(Request("POST", GENERATE_PATH, json_headers(request.headers), body, True))
        if answer.status >= 400:
            return await named_errors(answer, request.field)
        if stream:
            headers = [pair for pair in answer.headers if pair[0] != b"content-length"]
            return StreamResponse(200, headers, derender.stream(answer), answer)
        try:
            content = await answer.read()
        finally:
            await answer.aclose()
        return await derender.whole(content, answer.headers)

    async def _render(self, engine: Engine, chat: Fields, request: TokenRequest) -> Fields | BytesResponse:
        body = join({**chat, "messages": _STAND_IN})
        answer = await engine.send(Request("POST", RENDER_PATH, json_headers(request.headers), body, True))
        answer = await named_errors(answer, request.field)
        try:
            content = await answer.read()
        finally:
            await answer.aclose()
        if answer.status >= 400:
            return BytesResponse(answer.status, answer.headers, content)
        return from_engine(content, RENDER_PATH)


def _to_generate(rendered: Fields, sampling: Fields, request: TokenRequest) -> Fields:
    """What render resolved, for the real prompt."""
    resolved = {
        "sampling_params": msgspec.Raw(join({"max_tokens": _UNSAID_LIMIT, **sampling})),
        "token_ids": msgspec.Raw(request.prompt_ids),
        # resolved from the stand-in prompt; null makes the engine look at the real one
        "reasoning_ended": msgspec.Raw(NULL),
    }
    if given(sampling, "logprobs") is not None and not read(
        request.fields, "return_tokens_as_token_ids", bool
    ):
        resolved["output_mode"] = raw("text")  # so that log-probabilities come with the text of their tokens
    return {**rendered, **resolved}


def _refused(fields: Mapping[str, msgspec.Raw]) -> str | None:
    """The first field that this spelling cannot keep."""
    return next((name for name in _REFUSED if given(fields, name) not in (None, b"[]", b'""')), None)
